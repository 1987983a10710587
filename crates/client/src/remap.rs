//! What transparent re-mapping asks of the router, and its bookkeeping: which pages regions touch, which were placed.
//!
//! Moving the pages needs unsafe code, which stands with the drop-in.
use crate::lock;
use crate::session::{Session, exchange_bytes};
use freeflow_protocol::encode;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::monotonic_ns;
use freeflow_verbs::VerbsError;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

impl Session {
    /// A new segment of at least `bytes`.
    pub fn create_segment(&self, bytes: u64) -> Result<(Handle, u64, OwnedFd), VerbsError> {
        self.segment_of(&Request::CreateSegment { length: bytes })
    }

    /// Once more the descriptor of a segment.
    pub fn reopen_segment(&self, segment: Handle) -> Result<OwnedFd, VerbsError> {
        self.segment_of(&Request::ReopenSegment { segment }).map(|(_, _, descriptor)| descriptor)
    }

    fn segment_of(&self, request: &Request) -> Result<(Handle, u64, OwnedFd), VerbsError> {
        let (reply, mut descriptors) = self.call(request)?;
        match (reply, descriptors.pop()) {
            (Reply::Segment { segment, length }, Some(descriptor)) => Ok((segment, length, descriptor)),
            _ => Err(self.nonsense()),
        }
    }

    pub fn destroy_segment(&self, segment: Handle) -> Result<(), VerbsError> {
        self.destroy(&Request::DestroySegment { segment })
    }

    /// Tells the router that pages of a segment lie at `place` too.
    pub fn map_part(&self, segment: Handle, offset: u64, place: Range<u64>) -> Result<(), VerbsError> {
        self.command(&Request::MapPart { segment, offset, address: place.start, length: place.end - place.start })
    }

    /// On return the router uses no parts of segments in this range any more.
    pub fn unmap_part(&self, place: Range<u64>) -> Result<(), VerbsError> {
        self.destroy(&Request::UnmapPart { address: place.start, length: place.end - place.start })
    }

    /// Runs `body` while all threads of this process but the calling one, `thread`, stand still. It is told when the router
    /// was asked, nanoseconds of CLOCK_MONOTONIC: a second later the threads run in any case. `quiet`: the router's own accesses by
    /// address stand still too.
    ///
    /// `body` must not allocate, and take no lock that another thread could hold. No control call of another thread is
    /// under way meanwhile.
    ///
    /// # Errors
    /// `body` did not run: the threads can't be held (NotPermitted, TimedOut), nor the router's accesses (Busy), or the router is
    /// gone (DeviceFatal).
    pub fn with_threads_held(&self, thread: u32, quiet: bool, body: &mut dyn FnMut(u64)) -> Result<(), VerbsError> {
        self.live()?;
        let hold = encode(&Request::HoldThreads { thread, quiet });
        let release = encode(&Request::ReleaseThreads);
        let mut buffer = lock(&self.control);
        let asked_ns = monotonic_ns();
        let held = match exchange_bytes(&self.socket, &mut buffer, &hold) {
            Ok((Reply::Done, _)) => Ok(()),
            Ok((Reply::Failed(error), _)) => return Err(error),
            // Without an answer nobody knows whether they are held.
            _ => Err(VerbsError::DeviceFatal),
        };
        if held.is_ok() {
            body(asked_ns);
        }
        if held.is_err() || exchange_bytes(&self.socket, &mut buffer, &release).is_err() {
            self.mark_dead();
        }
        held
    }
}

/// How many regions touch each page, by address.
#[derive(Debug, Default)]
pub struct TouchCounts {
    /// From each key to the next one so many; before the first, none.
    steps: BTreeMap<u64, u32>,
}

impl TouchCounts {
    fn at(&self, address: u64) -> u32 {
        self.steps.range(..=address).next_back().map_or(0, |(_, &count)| count)
    }

    pub fn add(&mut self, range: Range<u64>) {
        self.change(range, |count| count.saturating_add(1));
    }

    pub fn remove(&mut self, range: Range<u64>) {
        self.change(range, |count| count.saturating_sub(1));
    }

    fn change(&mut self, range: Range<u64>, change: impl Fn(u32) -> u32) {
        if range.is_empty() {
            return;
        }
        for edge in [range.start, range.end] {
            let count = self.at(edge);
            self.steps.insert(edge, count);
        }
        for (_, count) in self.steps.range_mut(range.clone()) {
            *count = change(*count);
        }
        for edge in [range.start, range.end] {
            let before = self.steps.range(..edge).next_back().map_or(0, |(_, &count)| count);
            if self.steps.get(&edge) == Some(&before) {
                self.steps.remove(&edge);
            }
        }
    }

    /// The parts of a range that nothing touches.
    pub fn untouched(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut from = range.start;
        while from < range.end {
            let next = self.steps.range(from + 1..).next().map_or(range.end, |(&next, _)| next.min(range.end));
            if self.at(from) == 0 {
                match found.last_mut() {
                    Some(last) if last.end == from => last.end = next,
                    _ => found.push(from..next),
                }
            }
            from = next;
        }
        found
    }
}

/// Where ranges were put: disjoint ranges, each with a number. Neighbours with the same number are one.
#[derive(Debug, Default)]
pub struct Ranges {
    by_start: BTreeMap<u64, (u64, u32)>,
}

impl Ranges {
    pub fn len(&self) -> usize {
        self.by_start.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (Range<u64>, u32)> {
        self.by_start.iter().map(|(&start, &(end, number))| (start..end, number))
    }

    /// The range must be free.
    pub fn insert(&mut self, range: Range<u64>, number: u32) {
        let (mut start, mut end) = (range.start, range.end);
        if let Some(&(after_end, after)) = self.by_start.get(&end)
            && after == number
        {
            self.by_start.remove(&end);
            end = after_end;
        }
        if let Some((&before_start, &(before_end, before))) = self.by_start.range(..start).next_back()
            && before_end == start
            && before == number
        {
            start = before_start;
        }
        self.by_start.insert(start, (end, number));
    }

    /// What of a range is taken, and with which number.
    pub fn within(&self, range: Range<u64>) -> Vec<(Range<u64>, u32)> {
        let first = self.by_start.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
        let rest = self.by_start.range(range.clone());
        first
            .into_iter()
            .chain(rest)
            .map(|(&start, &(end, number))| (start.max(range.start)..end.min(range.end), number))
            .filter(|(piece, _)| !piece.is_empty())
            .collect()
    }

    /// Frees a range.
    pub fn remove(&mut self, range: Range<u64>) {
        for (piece, number) in self.within(range) {
            let Some((&start, &(end, _))) = self.by_start.range(..=piece.start).next_back() else { continue };
            self.by_start.remove(&start);
            if start < piece.start {
                self.by_start.insert(start, (piece.start, number));
            }
            if end > piece.end {
                self.by_start.insert(piece.end, (end, number));
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]
mod tests {
    use super::*;

    #[test]
    fn touches_are_counted_by_page() {
        let mut counts = TouchCounts::default();
        counts.add(10..20);
        counts.add(15..30);
        counts.add(40..50);
        assert_eq!(counts.untouched(0..60), [0..10, 30..40, 50..60]);
        counts.remove(10..20);
        assert_eq!(counts.untouched(0..60), [0..15, 30..40, 50..60]);
        counts.remove(15..30);
        counts.add(30..40);
        assert_eq!(counts.untouched(0..45), [0..30]);
        counts.remove(30..40);
        counts.remove(40..50);
        assert!(counts.steps.is_empty());
        counts.add(5..5);
        assert!(counts.steps.is_empty());
    }

    #[test]
    fn neighbours_are_one_range() {
        let mut ranges = Ranges::default();
        ranges.insert(10..20, 1);
        ranges.insert(30..40, 1);
        ranges.insert(20..30, 1);
        ranges.insert(40..50, 2);
        assert_eq!(ranges.len(), 2);
        assert_eq!(ranges.within(15..45), [(15..40, 1), (40..45, 2)]);
        ranges.remove(12..14);
        ranges.remove(35..42);
        assert_eq!(ranges.within(0..100), [(10..12, 1), (14..35, 1), (42..50, 2)]);
        ranges.remove(0..100);
        assert!(ranges.is_empty());
    }

    #[test]
    fn many_small_regions_of_one_heap() {
        let mut counts = TouchCounts::default();
        let region = |i: u64| (i * 100 / 4096) * 4096..((i * 100 + 99) / 4096 + 1) * 4096;
        (0..100_000).for_each(|i| counts.add(region(i)));
        assert_eq!(counts.untouched(0..4096), []);
        (0..100_000).for_each(|i| counts.remove(region(i)));
        assert!(counts.steps.is_empty());
    }
}
