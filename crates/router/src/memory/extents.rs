//! Which addresses memory regions lie over, however many there are and however they overlap.
//!
//! A range is touched by the regions that begin before its end, less those that end before its start: two counts in two
//! sorted lists. Lists are kept in short chunks, so that a change moves little.
use std::ops::Range;

const CHUNK_COUNT_MAX: usize = 1024;

/// A sorted list of numbers, equal ones too.
#[derive(Default)]
struct Sorted {
    /// None is empty; ascending, also from one to the next.
    chunks: Vec<Vec<u64>>,
}

impl Sorted {
    fn insert(&mut self, value: u64) {
        let at = self.chunks.partition_point(|chunk| chunk.last().is_some_and(|&last| last < value));
        let at = at.min(self.chunks.len().saturating_sub(1));
        let Some(chunk) = self.chunks.get_mut(at) else { return self.chunks.push(vec![value]) };
        chunk.insert(chunk.partition_point(|&other| other < value), value);
        if chunk.len() > CHUNK_COUNT_MAX {
            let upper = chunk.split_off(CHUNK_COUNT_MAX / 2);
            self.chunks.insert(at + 1, upper);
        }
    }

    fn remove(&mut self, value: u64) {
        let at = self.chunks.partition_point(|chunk| chunk.last().is_some_and(|&last| last < value));
        let Some(chunk) = self.chunks.get_mut(at) else { return };
        if let Ok(place) = chunk.binary_search(&value) {
            chunk.remove(place);
        }
        if chunk.is_empty() {
            self.chunks.remove(at);
        }
    }

    fn count_below(&self, value: u64) -> usize {
        let at = self.chunks.partition_point(|chunk| chunk.last().is_some_and(|&last| last < value));
        let before: usize = self.chunks[..at].iter().map(Vec::len).sum();
        before + self.chunks.get(at).map_or(0, |chunk| chunk.partition_point(|&other| other < value))
    }
}

/// The ranges of all memory regions of a process.
#[derive(Default)]
pub struct Extents {
    starts: Sorted,
    /// The last address of each.
    lasts: Sorted,
}

impl Extents {
    /// `range` is not empty.
    pub fn insert(&mut self, range: &Range<u64>) {
        self.starts.insert(range.start);
        self.lasts.insert(range.end - 1);
    }

    /// One that was inserted.
    pub fn remove(&mut self, range: &Range<u64>) {
        self.starts.remove(range.start);
        self.lasts.remove(range.end - 1);
    }

    pub fn touch(&self, range: &Range<u64>) -> bool {
        range.start < range.end && self.starts.count_below(range.end) > self.lasts.count_below(range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_looking_at_each() {
        let mut random = 0x1234_5678_9abc_def1_u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let (mut extents, mut all) = (Extents::default(), Vec::new());
        for round in 0..20_000 {
            let start = next(10_000);
            let range = start..start + 1 + next(if round % 100 == 0 { 2_000 } else { 3 });
            if round % 3 == 2 {
                let gone: Range<u64> = all.swap_remove(next(all.len() as u64) as usize);
                extents.remove(&gone);
            } else {
                extents.insert(&range);
                all.push(range);
            }
            if round % 50 == 0 {
                let start = next(20_000);
                let asked = start..start + next(4);
                let touched = all.iter().any(|one| one.start < asked.end && one.end > asked.start && !asked.is_empty());
                assert_eq!(extents.touch(&asked), touched, "{asked:?}");
            }
        }
        for gone in &all {
            extents.remove(gone);
        }
        assert!(extents.starts.chunks.is_empty() && extents.lasts.chunks.is_empty());
    }
}
