//! Counts of the slow path: how often memory was reached by it, how many bytes, and why.
//!
//! The router knows the circumstances. The kind of memory only its process can tell, which does so on
//! its stderr.

/// Why memory was reached by the slow path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlowPathReason {
    /// It is used too little, or too short a time, to be worth it.
    NotSharedYet,
    /// Its process was asked to share it, and has not, or not for long.
    NotShared,
    OnDemand,
    NoCommands,
    TakenBack,
    /// It is shared, and its pages have to be brought.
    Missing,
}

impl SlowPathReason {
    pub const ALL: [Self; 6] =
        [Self::NotSharedYet, Self::NotShared, Self::OnDemand, Self::NoCommands, Self::TakenBack, Self::Missing];

    pub const fn text(self) -> &'static str {
        match self {
            Self::NotSharedYet => "not shared yet",
            Self::NotShared => "not shared when asked",
            Self::OnDemand => "registered on demand",
            Self::NoCommands => "its process takes no commands",
            Self::TakenBack => "memory was taken back",
            Self::Missing => "pages of shared memory were missing",
        }
    }
}

/// Accesses, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlowPathAmount {
    pub accesses: u64,
    pub bytes: u64,
}

impl SlowPathAmount {
    fn add(&mut self, bytes: u64) {
        self.accesses += 1;
        self.bytes += bytes;
    }
}

/// Of a vNIC's memory, by reason.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlowPathCounts([SlowPathAmount; SlowPathReason::ALL.len()]);

impl SlowPathCounts {
    pub(crate) fn add(&mut self, reason: SlowPathReason, bytes: u64) {
        self.0[reason as usize].add(bytes);
    }

    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|amount| amount.bytes).sum()
    }

    pub fn by_reason(&self) -> impl Iterator<Item = (SlowPathReason, SlowPathAmount)> {
        SlowPathReason::ALL.into_iter().zip(self.0)
    }
}

/// Of a QP's requests, at either end; and the reason of the last access.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpSlowPath {
    pub amount: SlowPathAmount,
    pub reason: Option<SlowPathReason>,
}

impl QpSlowPath {
    pub(crate) fn add(&mut self, reason: SlowPathReason, bytes: u64) {
        self.amount.add(bytes);
        self.reason = Some(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_place_and_words_of_its_own() {
        let mut counts = SlowPathCounts::default();
        for (at, reason) in SlowPathReason::ALL.into_iter().enumerate() {
            (0..=at).for_each(|_| counts.add(reason, 10));
        }
        let found: Vec<u64> = counts.by_reason().map(|(_, amount)| amount.accesses).collect();
        assert_eq!((found, counts.bytes()), (vec![1, 2, 3, 4, 5, 6], 210));
        let mut words = SlowPathReason::ALL.map(SlowPathReason::text).to_vec();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), SlowPathReason::ALL.len());
    }
}
