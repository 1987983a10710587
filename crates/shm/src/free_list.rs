//! Ranges of bytes that are given out, first fit.
use std::collections::BTreeMap;

/// Which bytes are free and which are given out.
#[derive(Debug, Default)]
pub struct FreeList {
    /// Offset to length; no two touch.
    free: BTreeMap<usize, usize>,
    used: BTreeMap<usize, usize>,
}

impl FreeList {
    /// All of `0..bytes` is free.
    pub fn new(bytes: usize) -> Self {
        Self { free: BTreeMap::from([(0, bytes)]), used: BTreeMap::new() }
    }

    /// Gives out a range; its beginning.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let (&offset, &length) = self.free.iter().find(|&(_, &length)| length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        self.used.insert(offset, bytes);
        Some(offset)
    }

    /// Takes back what begins there. False: nothing that was given out does.
    pub fn give_back(&mut self, offset: usize) -> bool {
        let Some(mut length) = self.used.remove(&offset) else { return false };
        let mut start = offset;
        if let Some(after) = self.free.remove(&(offset + length)) {
            length += after;
        }
        if let Some((&before, &before_length)) = self.free.range(..offset).next_back()
            && before + before_length == offset
        {
            start = before;
            length += before_length;
        }
        self.free.insert(start, length);
        true
    }

    /// Nothing is given out.
    pub fn is_unused(&self) -> bool {
        self.used.is_empty()
    }

    /// Length of the range that was given out and begins there.
    pub fn length_of(&self, offset: usize) -> Option<usize> {
        self.used.get(&offset).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: usize = 4096;

    #[test]
    fn first_fit_and_merging() {
        let mut ranges = FreeList::new(4 * PAGE_BYTES);
        let a = ranges.take(PAGE_BYTES).unwrap();
        let b = ranges.take(2 * PAGE_BYTES).unwrap();
        let c = ranges.take(PAGE_BYTES).unwrap();
        assert_eq!((a, b, c), (0, PAGE_BYTES, 3 * PAGE_BYTES));
        assert_eq!(ranges.take(PAGE_BYTES), None);
        assert!(ranges.give_back(a));
        assert!(!ranges.give_back(a));
        assert!(ranges.give_back(c));
        assert_eq!(ranges.free.len(), 2);
        assert!(ranges.give_back(b));
        assert_eq!(ranges.free, BTreeMap::from([(0, 4 * PAGE_BYTES)]));
        assert!(ranges.is_unused());
    }
}
