//! Places in a queue that senders share who don't trust each other.
//!
//! Invariant: a sender gets no more places than are left. So one that floods has half of them, n
//! that do leave 1/(n+1), and who has little to send finds room; what is lost are messages of those
//! that send too many.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// With fewer senders than this none is forgotten.
const SENDERS_KEPT: usize = 256;

pub struct Shares<K> {
    count_max: usize,
    taken: Arc<AtomicUsize>,
    of_sender: BTreeMap<K, Arc<AtomicUsize>>,
    /// With so many senders those are forgotten that have nothing.
    forget_at: usize,
}

/// One place, given back when it is dropped, by whatever thread.
#[derive(Debug)]
pub struct Ticket {
    taken: Arc<AtomicUsize>,
    of_sender: Arc<AtomicUsize>,
}

impl<K: Ord> Shares<K> {
    pub fn new(count_max: usize) -> Self {
        Self { count_max, taken: Arc::default(), of_sender: BTreeMap::new(), forget_at: SENDERS_KEPT }
    }

    /// `None`: this sender has too many.
    pub fn take(&mut self, sender: K) -> Option<Ticket> {
        if self.of_sender.len() >= self.forget_at {
            self.of_sender.retain(|_, count| count.load(Relaxed) > 0);
            self.forget_at = (2 * self.of_sender.len()).max(SENDERS_KEPT);
        }
        let of_sender = self.of_sender.entry(sender).or_default();
        if of_sender.load(Relaxed) >= self.count_max.saturating_sub(self.taken.load(Relaxed)) {
            return None;
        }
        // Only this side adds, so the counts are at most too large for a moment.
        self.taken.fetch_add(1, Relaxed);
        of_sender.fetch_add(1, Relaxed);
        Some(Ticket { taken: self.taken.clone(), of_sender: of_sender.clone() })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.of_sender.fetch_sub(1, Relaxed);
        self.taken.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_leaves_places_for_others() {
        let mut shares = Shares::new(100);
        let flood: Vec<Ticket> = (0..1000).map_while(|_| shares.take(1)).collect();
        assert_eq!(flood.len(), 50);
        let second: Vec<Ticket> = (0..1000).map_while(|_| shares.take(2)).collect();
        assert_eq!(second.len(), 25);
        assert!(shares.take(3).is_some());
        assert!(shares.take(1).is_none(), "until its own are given back");
        drop(flood);
        assert!(shares.take(1).is_some());
    }

    #[test]
    fn senders_that_have_nothing_are_forgotten() {
        let mut shares = Shares::new(10);
        let kept = shares.take(0);
        for sender in 1..10 * SENDERS_KEPT {
            drop(shares.take(sender));
        }
        assert!(kept.is_some() && shares.of_sender.len() <= SENDERS_KEPT && shares.of_sender.contains_key(&0));
    }
}
