//! Bookkeeping of address ranges: how many regions touch each page, and which ranges lie where.
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) const PAGE_BYTES: u64 = 4096;

/// The pages that a region touches.
pub(crate) fn touched_pages(start: u64, length: u64) -> Range<u64> {
    let end = start.saturating_add(length).saturating_add(PAGE_BYTES - 1);
    start & !(PAGE_BYTES - 1)..if length == 0 { start & !(PAGE_BYTES - 1) } else { end & !(PAGE_BYTES - 1) }
}

/// The pages that are wholly inside a region.
fn whole_pages(start: u64, length: u64) -> Range<u64> {
    let first = start.saturating_add(PAGE_BYTES - 1) & !(PAGE_BYTES - 1);
    first..(start.saturating_add(length) & !(PAGE_BYTES - 1)).max(first)
}

/// The memory of one region of the program. The order is that of the owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RegionSpan {
    /// The number of the context that the region is registered in.
    pub owner: usize,
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Its pages are where the program has them, whatever it does with them: it moves none.
    pub is_on_demand: bool,
}

impl RegionSpan {
    pub(crate) fn touched_pages(&self) -> Range<u64> {
        touched_pages(self.start, self.length)
    }

    pub(crate) fn whole_pages(&self) -> Range<u64> {
        whole_pages(self.start, self.length)
    }
}

/// An ordinary region.
#[cfg(test)]
pub(crate) fn span(owner: usize, start: u64, length: u64) -> RegionSpan {
    RegionSpan { owner, start, length, is_on_demand: false }
}

/// `range` without `hole`.
pub(crate) fn without(range: Range<u64>, hole: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let before = range.start..range.end.min(hole.start);
    let after = range.start.max(hole.end)..range.end;
    [before, after].into_iter().filter(|piece| piece.start < piece.end)
}

/// The same addresses in ranges apart from each other, by address.
pub(crate) fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// How many regions touch each page, by address.
#[derive(Debug, Default)]
pub(crate) struct TouchCounts {
    /// From each key to the next one this count; before the first, zero.
    edges: BTreeMap<u64, u32>,
}

impl TouchCounts {
    fn at(&self, address: u64) -> u32 {
        self.edges.range(..=address).next_back().map_or(0, |(_, &count)| count)
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
            self.edges.insert(edge, count);
        }
        for (_, count) in self.edges.range_mut(range.clone()) {
            *count = change(*count);
        }
        for edge in [range.start, range.end] {
            let before = self.edges.range(..edge).next_back().map_or(0, |(_, &count)| count);
            if self.edges.get(&edge) == Some(&before) {
                self.edges.remove(&edge);
            }
        }
    }

    /// The parts of a range that nothing touches.
    pub fn untouched(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut from = range.start;
        while from < range.end {
            let next = self.edges.range(from + 1..).next().map_or(range.end, |(&next, _)| next.min(range.end));
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

/// Disjoint ranges, each with a number. Neighbours with the same number are one.
#[derive(Debug, Default)]
pub(crate) struct NumberedRanges {
    by_start: BTreeMap<u64, (u64, u32)>,
}

impl NumberedRanges {
    pub fn len(&self) -> usize {
        self.by_start.len()
    }

    #[cfg(test)]
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

    /// Taken parts of a range, each with its number.
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
    fn pages_of_a_region() {
        assert_eq!(touched_pages(0x1001, 0xffe), 0x1000..0x2000);
        assert_eq!(touched_pages(0x1001, 0x1000), 0x1000..0x3000);
        assert_eq!(touched_pages(0x1001, 0), 0x1000..0x1000);
        assert!(whole_pages(0x1001, 0xfff).is_empty());
        assert!(whole_pages(0x1001, 0x1ffe).is_empty());
        assert_eq!(whole_pages(0x1001, 0x1fff), 0x2000..0x3000);
        assert_eq!(whole_pages(0x1000, 0x2000), 0x1000..0x3000);
        assert!(whole_pages(0x1000, 0).is_empty());
        assert!(whole_pages(u64::MAX - 5, 5).is_empty());
    }

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
        assert!(counts.edges.is_empty());
        counts.add(5..5);
        assert!(counts.edges.is_empty());
    }

    #[test]
    fn neighbours_are_one_range() {
        let mut ranges = NumberedRanges::default();
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
        assert!(counts.edges.is_empty());
    }
}
