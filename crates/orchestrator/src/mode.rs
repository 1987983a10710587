//! Which way a host's router waits for work: the mode decision of FreeFlow's paper (section 3.3: a core that polls for those who need
//! its latency, none for those who don't).
//!
//! vNICs say what they need by the label [`LATENCY_CLASS_LABEL`]. The most demanding vNIC of a host decides, if the host can
//! afford it: *Fastpath* takes a processor for itself, and on a machine with few of them that would be taken from the very
//! programs that wait for it.
use crate::State;
use crate::objects::{AnyObject, HostMode, ObjectKind};
use alloc::format;
use alloc::string::String;

/// `low`, `normal` (also when it is absent) or `background`; others are refused.
pub const LATENCY_CLASS_LABEL: &str = "freeflow.io/latency-class";
/// Processors from which on one can be given away.
pub const FASTPATH_CPU_COUNT_MIN: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LatencyClass {
    Background,
    Normal,
    Low,
}

impl LatencyClass {
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::Background];

    /// What a label's value means; what is not known (older versions took it) is `Normal`.
    pub fn of(value: Option<&str>) -> Self {
        let known = Self::ALL.into_iter().find(|class| Some(class.name()) == value);
        known.unwrap_or(Self::Normal)
    }

    pub fn is_known(value: &str) -> bool {
        Self::ALL.iter().any(|class| class.name() == value)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

/// vNICs of a host by their class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub low: u32,
    pub normal: u32,
    pub background: u32,
}

impl Load {
    pub fn of(classes: impl IntoIterator<Item = LatencyClass>) -> Self {
        let mut load = Self::default();
        for class in classes {
            *match class {
                LatencyClass::Low => &mut load.low,
                LatencyClass::Normal => &mut load.normal,
                LatencyClass::Background => &mut load.background,
            } += 1;
        }
        load
    }

    /// Of the most demanding one; without any, `Normal`.
    pub fn class(&self) -> LatencyClass {
        match self {
            Self { low: 1.., .. } => LatencyClass::Low,
            Self { normal: 0, background: 1.., .. } => LatencyClass::Background,
            _ => LatencyClass::Normal,
        }
    }
}

/// How a host's router waits, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Never [`HostMode::Auto`].
    pub mode: HostMode,
    /// A sentence for people.
    pub reason: String,
}

pub fn decide(wanted: HostMode, load: Load, cpu_count: u32) -> Decision {
    let of_low = |count| if count == 1 { "1 vNIC is".into() } else { format!("{count} vNICs are") };
    let (mode, reason) = match (wanted, load.class()) {
        (HostMode::Fastpath | HostMode::Adaptive | HostMode::Lowcpu, _) => (wanted, "asked for".into()),
        (HostMode::Auto, LatencyClass::Low) if cpu_count >= FASTPATH_CPU_COUNT_MIN => {
            (HostMode::Fastpath, format!("{} of latency class low", of_low(load.low)))
        }
        (HostMode::Auto, LatencyClass::Low) => {
            let text = "but a machine of few processors has none to give away";
            let processors = format!("{cpu_count} here, {FASTPATH_CPU_COUNT_MIN} wanted");
            (HostMode::Adaptive, format!("{} of latency class low, {text} ({processors})", of_low(load.low)))
        }
        (HostMode::Auto, LatencyClass::Background) => {
            (HostMode::Lowcpu, format!("all vNICs ({}) are of latency class background", load.background))
        }
        (HostMode::Auto, LatencyClass::Normal) if load == Load::default() => {
            (HostMode::Adaptive, "no vNIC is here".into())
        }
        (HostMode::Auto, LatencyClass::Normal) => {
            (HostMode::Adaptive, format!("none of latency class low, and {} of class normal", of_low(load.normal)))
        }
    };
    Decision { mode, reason }
}

impl State {
    /// How the router of a host is to wait; `usual` is what it was started with.
    pub fn mode_of(&self, host: &str, usual: HostMode, cpu_count: u32) -> Decision {
        let asked = match self.object(ObjectKind::Host, host) {
            Some(AnyObject::Host(host)) => host.spec.mode,
            _ => None,
        };
        let wanted = asked.unwrap_or(usual);
        // Who knows what it wants needs no look at all vNICs.
        let load = if wanted == HostMode::Auto { self.load() } else { Load::default() };
        decide(wanted, load, cpu_count)
    }

    /// The latency classes of the vNICs here.
    pub fn load(&self) -> Load {
        let label = |vnic: &crate::VnicEntry| vnic.object.metadata.labels.get(LATENCY_CLASS_LABEL).cloned();
        Load::of(self.vnics().map(|vnic| LatencyClass::of(label(vnic).as_deref())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_demanding_vnic_decides() {
        use LatencyClass::{Background, Low, Normal};
        let auto = |classes: &[LatencyClass], cpus| {
            let decision = decide(HostMode::Auto, Load::of(classes.iter().copied()), cpus);
            assert!(!decision.reason.is_empty());
            decision.mode
        };
        assert_eq!(auto(&[], 8), HostMode::Adaptive);
        assert_eq!(auto(&[Background, Background], 8), HostMode::Lowcpu);
        assert_eq!(auto(&[Background, Normal], 8), HostMode::Adaptive);
        assert_eq!(auto(&[Background, Normal, Low], 4), HostMode::Fastpath);
        assert_eq!(auto(&[Background, Normal, Low], 3), HostMode::Adaptive);
        assert_eq!((LatencyClass::of(Some("Low")), LatencyClass::of(Some("low"))), (Normal, Low));
    }

    #[test]
    fn what_was_asked_for_holds() {
        for mode in [HostMode::Fastpath, HostMode::Adaptive, HostMode::Lowcpu] {
            let decision = decide(mode, Load { low: 1, ..Load::default() }, 2);
            assert_eq!((decision.mode, decision.reason.as_str()), (mode, "asked for"));
        }
    }
}
