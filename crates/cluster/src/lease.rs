//! Leases: a host that says nothing for long loses its blocks of addresses and its declared vNICs.
//!
//! A host's word in etcd names the time after which all that it has may be taken back, and its router stops its vNICs
//! when so much of that has passed since the host began to write its last word, by [`lease_time`]. A controller takes
//! them back when the whole time has passed since it saw that word, by its own clock, and on condition that the word
//! is still the last one. It saw the word after the host had begun to write it. So the host's vNICs have ended before,
//! whatever the clocks on the walls say, and however late anybody's news are. A host that speaks again in time has
//! forestalled every controller; one that comes late has to look at what it has still.
use std::time::Duration;

/// A host stops its vNICs so long before they may be taken back, at most: that takes it some time.
const MARGIN_MAX: Duration = Duration::from_secs(60);
/// The same of a short time: this part of it.
const MARGIN_PART: u32 = 4;
/// Clocks that count differ by this part at most.
const DRIFT_PART: u32 = 100;

/// How long a host may use its blocks after it has begun to write a word, if that arrives.
pub fn lease_time(reclaim_after: Duration) -> Duration {
    reclaim_after - MARGIN_MAX.min(reclaim_after / MARGIN_PART) - reclaim_after / DRIFT_PART
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_ends_before_anybody_takes_anything_back() {
        for (after_s, lease_ms) in [(20, 14_800), (60, 44_400), (240, 177_600), (3600, 3_504_000), (86_400, 85_476_000)]
        {
            assert_eq!(lease_time(Duration::from_secs(after_s)), Duration::from_millis(lease_ms), "{after_s}");
        }
    }
}
