//! Sharing revoked memory again. After a revocation (`revocation`) the slow path reaches those
//! pages, for whoever still has a right to them. When it has moved enough there, their process is
//! ordered to put them into a new segment.
//!
//! Invariant: the copies that this costs a process, of putting the pages in and of taking them back
//! once more, are no more than the bytes that the slow path has moved there since the revocation,
//! an access counting 4 KiB besides. So nobody makes others copy by coming and going.
//!
//! The command is advice. What comes of it is a `MapPart`, or nothing: then the next one costs twice as
//! much.
use freeflow_protocol::library::Handle;
use std::collections::BTreeMap;
use std::ops::Range;

/// Of one process. One more takes the place of the one with the least traffic: of those that nobody
/// uses there may be any number.
pub(crate) const WINDOW_COUNT_MAX: usize = 1024;
/// Cost of an access besides its bytes, as in the library: the way to a slow-path copier costs more
/// than copying so much.
pub(crate) const ACCESS_BYTES: u64 = 4096;
/// A segment is copied so often for a command: into it, and out again when it is revoked.
pub(crate) const COPY_COUNT: u64 = 2;
/// The least credit for a command: threads are frozen for it, however little there is to copy.
pub(crate) const NEEDED_BYTES_MIN: u64 = 16 << 20;
/// Bytes that a process may give for segments that were granted for reading: those can't be emptied
/// when they are left, because they are sealed, and live as long as a peer keeps them.
pub(crate) const READ_ONLY_BYTES_MAX: u64 = 256 << 20;

/// Addresses at which a segment was.
#[derive(Clone, Debug)]
struct Window {
    end: u64,
    segment: Handle,
    /// The process has private copies there.
    has_left: bool,
    is_read_only: bool,
    moved_bytes: u64,
    needed_bytes: u64,
}

/// Revoked memory of one process.
#[derive(Default)]
pub struct Lost {
    /// By start, disjoint.
    windows: BTreeMap<u64, Window>,
    /// Of segments that were granted for reading and whose pages were to be shared again.
    pub(crate) read_only_bytes: u64,
}

impl Lost {
    /// The segment is being revoked.
    pub fn begin(&mut self, segment: Handle, addresses: Range<u64>, is_read_only: bool) {
        self.drop_range(&addresses);
        while self.windows.len() >= WINDOW_COUNT_MAX
            && let Some(start) =
                self.windows.iter().min_by_key(|(_, window)| window.moved_bytes).map(|(&start, _)| start)
        {
            self.windows.remove(&start);
        }
        let needed_bytes = (addresses.end - addresses.start).saturating_mul(COPY_COUNT).max(NEEDED_BYTES_MIN);
        let end = addresses.end;
        let window = Window { end, segment, has_left: false, is_read_only, moved_bytes: 0, needed_bytes };
        self.windows.insert(addresses.start, window);
    }

    /// The process has carried out the command.
    pub fn note_left(&mut self, segment: Handle) {
        for window in self.windows.values_mut().filter(|window| window.segment == segment) {
            window.has_left = true;
        }
    }

    /// Something else is there from now on.
    pub fn drop_range(&mut self, addresses: &Range<u64>) {
        let before = self.windows.range(..addresses.start).next_back();
        let first = before.filter(|(_, window)| window.end > addresses.start).map(|(&start, _)| start);
        let rest = self.windows.range(addresses.clone()).map(|(&start, _)| start);
        let met: Vec<u64> = first.into_iter().chain(rest).collect();
        for start in met {
            let Some(window) = self.windows.remove(&start) else { continue };
            if start < addresses.start {
                self.windows.insert(start, Window { end: addresses.start, ..window.clone() });
            }
            if window.end > addresses.end {
                self.windows.insert(addresses.end, window);
            }
        }
    }

    pub fn has(&self, address: u64) -> bool {
        self.windows.range(..=address).next_back().is_some_and(|(_, window)| address < window.end)
    }

    /// The slow path moves bytes; the segment that is worth it now.
    pub(crate) fn note_moved(&mut self, address: u64, bytes: u64) -> Option<Handle> {
        let (start, window) = self.windows.range_mut(..=address).next_back()?;
        if window.end <= address {
            return None;
        }
        window.moved_bytes = window.moved_bytes.saturating_add(bytes).saturating_add(ACCESS_BYTES);
        if !window.has_left || window.moved_bytes < window.needed_bytes {
            return None;
        }
        let given = self.read_only_bytes.saturating_add(if window.is_read_only { window.end - start } else { 0 });
        if given > READ_ONLY_BYTES_MAX {
            return None;
        }
        self.read_only_bytes = given;
        window.moved_bytes = 0;
        window.needed_bytes = window.needed_bytes.saturating_mul(2);
        Some(window.segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn lost() -> Lost {
        let mut lost = Lost::default();
        lost.begin(7, MIB..2 * MIB, false);
        lost
    }

    /// How much has to be moved until a command is due.
    fn moved_until_due(lost: &mut Lost, address: u64) -> u64 {
        const STEP: u64 = 60 << 10;
        (1..10_000).find(|_| lost.note_moved(address, STEP) == Some(7)).expect("no command") * (STEP + ACCESS_BYTES)
    }

    #[test]
    fn a_command_costs_credit_and_the_next_one_twice_as_much() {
        let mut lost = lost();
        assert!((0..1000).all(|_| lost.note_moved(MIB, MIB).is_none()), "the revocation is under way");
        lost.note_left(6);
        assert_eq!(lost.note_moved(MIB, MIB), None);
        lost.note_left(7);
        assert_eq!(lost.note_moved(MIB - 1, 9 * MIB), None);
        assert_eq!(lost.note_moved(2 * MIB, 9 * MIB), None);
        assert_eq!(lost.note_moved(2 * MIB - 1, 1), Some(7), "what was moved meanwhile counts");
        // Few bytes are not copied for next to nothing: threads stand still for it.
        assert_eq!(moved_until_due(&mut lost, MIB), 32 * MIB);
        assert_eq!(moved_until_due(&mut lost, MIB), 64 * MIB);
        // Revoked once more: as at first.
        lost.begin(7, MIB..2 * MIB, false);
        lost.note_left(7);
        assert_eq!(moved_until_due(&mut lost, MIB), 16 * MIB);
        lost.begin(7, MIB..13 * MIB, false);
        lost.note_left(7);
        assert_eq!(moved_until_due(&mut lost, MIB), 24 * MIB);
    }

    #[test]
    fn segments_that_peers_can_keep_are_given_up_a_few_times_only() {
        let mut lost = Lost::default();
        let mut again = |is_read_only| {
            lost.begin(7, MIB..65 * MIB, is_read_only);
            lost.note_left(7);
            lost.note_moved(MIB, 999 * MIB).is_some()
        };
        assert!((0..4).all(|_| again(true)));
        assert!(!again(true) && again(false) && !again(true));
    }

    #[test]
    fn what_is_shared_again_is_not_counted_any_more() {
        let mut lost = lost();
        lost.note_left(7);
        lost.drop_range(&(MIB + 8192..MIB + 12288));
        let has = |lost: &Lost| [MIB - 1, MIB, MIB + 8192, MIB + 12288, 2 * MIB].map(|address| lost.has(address));
        assert_eq!(has(&lost), [false, true, false, true, false]);
        assert_eq!(lost.note_moved(MIB + 8192, 99 * MIB), None);
        assert_eq!(lost.note_moved(MIB + 12288, 99 * MIB), Some(7));
        lost.drop_range(&(0..MIB + 4096));
        assert_eq!(has(&lost), [false, false, false, true, false]);
        lost.drop_range(&(0..u64::MAX));
        assert!(lost.windows.is_empty());
    }

    #[test]
    fn windows_that_nobody_uses_make_room() {
        let mut lost = lost();
        lost.note_moved(MIB, 1);
        for at in 2..2 * WINDOW_COUNT_MAX as u64 {
            lost.begin(7, at * MIB..at * MIB + 4096, false);
            assert!(lost.has(at * MIB));
        }
        assert_eq!(lost.windows.len(), WINDOW_COUNT_MAX);
        assert!(lost.has(MIB) && !lost.has(2 * MIB));
    }
}
