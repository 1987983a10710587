//! Which way a host's router waits for work: the mode decision of FreeFlow's paper (section 3.3: a
//! core that polls for those who need its latency, none for those who don't).
//!
//! vNICs say what they need by the label [`LATENCY_CLASS_LABEL`]; those that are only declared, and
//! that no container has, need nothing: else a tenant could take a processor without running
//! anything. The most demanding vNIC of a host decides, if the host can afford it: *Fastpath* takes
//! a processor for itself, and on a machine with few of them that would be taken from the very
//! programs that wait for it.
use crate::State;
use crate::objects::{AnyObject, HostMode, ObjectKind};
use alloc::format;
use alloc::string::String;

/// `low`, `normal` (also when it is absent) or `background`; others are refused.
pub const LATENCY_CLASS_LABEL: &str = "freeflow.io/latency-class";
/// Processors from which on one can be given away.
pub const FASTPATH_CPU_COUNT_MIN: u32 = 4;

/// Latency that a vNIC's programs need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LatencyClass {
    /// Any: the processor is others'.
    Background,
    /// Usual.
    Normal,
    /// The lowest that the host can give.
    Low,
}

impl LatencyClass {
    /// All classes, the most demanding first.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::Background];

    /// Meaning of a label's value; an unknown one (older versions took it) is `Normal`.
    pub fn of(value: Option<&str>) -> Self {
        let known = Self::ALL.into_iter().find(|class| Some(class.name()) == value);
        known.unwrap_or(Self::Normal)
    }

    /// Whether a label may have this value.
    pub fn is_known(value: &str) -> bool {
        Self::ALL.iter().any(|class| class.name() == value)
    }

    /// The label's value.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

/// vNICs of a host that containers have, by their class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// vNICs of class `low`.
    pub low: u32,
    /// vNICs of class `normal`.
    pub normal: u32,
    /// vNICs of class `background`.
    pub background: u32,
}

impl Load {
    /// Counts classes.
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

/// The mode of a host that asks for `wanted`, with this load and `cpu_count` processors.
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
            (HostMode::Adaptive, "no container has a vNIC here".into())
        }
        (HostMode::Auto, LatencyClass::Normal) => {
            (HostMode::Adaptive, format!("none of latency class low, and {} of class normal", of_low(load.normal)))
        }
    };
    Decision { mode, reason }
}

impl State {
    /// How the router of a host is to wait; `usual` is what it was started with. `is_occupied`: see [`Self::load`].
    pub fn mode_of(&self, host: &str, usual: HostMode, cpu_count: u32, is_occupied: impl Fn(&str) -> bool) -> Decision {
        let asked = match self.object(ObjectKind::Host, host) {
            Some(AnyObject::Host(host)) => host.spec.mode,
            _ => None,
        };
        let wanted = asked.unwrap_or(usual);
        // A host with a mode of its own needs no look at all vNICs.
        let load = if wanted == HostMode::Auto { self.load(is_occupied) } else { Load::default() };
        decide(wanted, load, cpu_count)
    }

    /// The latency classes of the vNICs here that containers have: those that were made for one,
    /// and of the others those whose ids `is_occupied` accepts.
    pub fn load(&self, is_occupied: impl Fn(&str) -> bool) -> Load {
        let attached = self.vnics().filter(|vnic| vnic.is_of_container() || is_occupied(vnic.id()));
        Load::of(
            attached
                .map(|vnic| LatencyClass::of(vnic.object.metadata.labels.get(LATENCY_CLASS_LABEL).map(String::as_str))),
        )
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
    fn only_vnics_of_containers_count() {
        use crate::Command;
        use crate::objects::{API_VERSION, parse_object};
        use crate::store::Revision;
        let mut state = State::new();
        let mut run = |command: Command| {
            let plan = state.plan(&command).unwrap();
            state.adopt(&plan, Revision(state.revision().0 + 1));
            let load = |of: &str| state.load(|id| id == of);
            (load(""), load("idle"))
        };
        let pool = "10.0.0.0/24".parse().unwrap();
        run(Command::Begin { host: "h".into(), pool, range: None, bridge: "b".into() });
        let low = || [(LATENCY_CLASS_LABEL.into(), "low".into())].into_iter().collect();
        let idle = serde_json::json!({"apiVersion": API_VERSION, "kind": "Vnic", "spec": {"network": "default"},
            "metadata": {"name": "idle", "labels": {LATENCY_CLASS_LABEL: "low"}}});
        let one = Load { low: 1, ..Load::default() };
        let objects = [parse_object(&idle).unwrap()].into();
        assert_eq!(run(Command::Apply { objects }), (Load::default(), one), "it is only declared");
        let (id, title, network) = ("0123".into(), "container".into(), "default".into());
        let attached = run(Command::Attach { id, title, network, address: None, labels: low() });
        assert_eq!(attached, (one, Load { low: 2, ..one }));
        assert_eq!(run(Command::Detach { id: "0123".into() }), (Load::default(), one));
    }

    #[test]
    fn what_was_asked_for_holds() {
        for mode in [HostMode::Fastpath, HostMode::Adaptive, HostMode::Lowcpu] {
            let decision = decide(mode, Load { low: 1, ..Load::default() }, 2);
            assert_eq!((decision.mode, decision.reason.as_str()), (mode, "asked for"));
        }
    }
}
