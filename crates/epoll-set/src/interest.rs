//! The interest list of an epoll set, as far as it consists of rsockets: which events each waits
//! for, which were reported, whose turn it is. Neither system calls nor locks.
use libc::{EPOLLERR, EPOLLET, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT, c_int, epoll_event};
use std::collections::BTreeMap;

const READ_EVENTS: u32 = (EPOLLIN | libc::EPOLLRDNORM | libc::EPOLLRDHUP) as u32;
const WRITE_EVENTS: u32 = (EPOLLOUT | libc::EPOLLWRNORM) as u32;
const END_EVENTS: u32 = (EPOLLERR | EPOLLHUP) as u32;
/// The events that `poll` knows. Its flags and epoll's are the same numbers for what both have.
pub(crate) const POLL_EVENTS: u32 = READ_EVENTS | WRITE_EVENTS | END_EVENTS | libc::EPOLLPRI as u32;

/// How often a program read and wrote a descriptor, modulo 2³². Edge-triggered entries compare it
/// with the counts that they saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    pub reads: u32,
    pub writes: u32,
}

/// One rsocket in the list.
#[derive(Debug)]
pub struct Interest {
    /// `epoll_event.events` as the program set it.
    pub events: u32,
    /// `epoll_event.data`.
    pub data: u64,
    /// Edge-triggered: conditions that were reported and hold since.
    reported: u32,
    /// Edge-triggered: the counts at the last look.
    seen: IoCounts,
    /// EPOLLONESHOT: reported, and not armed again.
    is_disarmed: bool,
}

impl Interest {
    fn is_edge_triggered(&self) -> bool {
        self.events & EPOLLET as u32 != 0
    }

    /// The events to poll for; `None`: the rsocket is left out.
    fn pending(&mut self, counts: IoCounts) -> Option<u32> {
        if self.is_disarmed {
            return None;
        }
        if !self.is_edge_triggered() {
            return Some(self.events);
        }
        let (read, written) = (counts.reads != self.seen.reads, counts.writes != self.seen.writes);
        self.seen = counts;
        self.reported &= !(if read { READ_EVENTS } else { 0 } | if written { WRITE_EVENTS } else { 0 });
        // An error or the end is reported once more after any call.
        if read || written {
            self.reported &= READ_EVENTS | WRITE_EVENTS;
        }
        (self.reported & END_EVENTS == 0).then_some(self.events & !self.reported)
    }
}

/// The rsockets of one epoll set, by the program's descriptors.
#[derive(Debug, Default)]
pub struct InterestList {
    entries: BTreeMap<c_int, Interest>,
    /// The descriptor that was reported last: the next report begins behind it.
    last_reported: c_int,
    /// Whether the kernel's set reports first next time.
    pub(crate) kernel_first: bool,
}

impl InterestList {
    #[must_use]
    pub fn contains(&self, fd: c_int) -> bool {
        self.entries.contains_key(&fd)
    }

    /// Whether a condition was reported that is reported again only after the program reads or
    /// writes.
    #[must_use]
    pub fn awaits_io(&self, fd: c_int) -> bool {
        self.entries.get(&fd).is_some_and(|interest| interest.reported != 0)
    }

    /// Adds or changes an entry, with nothing reported yet.
    pub fn set(&mut self, fd: c_int, events: u32, data: u64, seen: IoCounts) {
        self.entries.insert(fd, Interest { events, data, reported: 0, seen, is_disarmed: false });
    }

    pub fn remove(&mut self, fd: c_int) -> Option<Interest> {
        self.entries.remove(&fd)
    }

    /// The descriptors to poll, each with its events.
    pub(crate) fn pending(&mut self, counts_of: impl Fn(c_int) -> IoCounts) -> Vec<(c_int, u32)> {
        let entries = self.entries.iter_mut();
        entries.filter_map(|(fd, interest)| interest.pending(counts_of(*fd)).map(|events| (*fd, events))).collect()
    }

    /// Writes an event for each ready descriptor, beginning behind the one that was reported last,
    /// so that every descriptor has its turn however little room there is. `ready` is in the order
    /// of descriptors. Returns the number of events.
    pub(crate) fn report(&mut self, ready: &[(c_int, u32)], out: &mut [epoll_event]) -> usize {
        let begin = ready.partition_point(|(fd, _)| *fd <= self.last_reported);
        let (before, behind) = ready.split_at(begin);
        let mut count = 0;
        for (fd, events) in behind.iter().chain(before).filter(|(_, events)| *events != 0) {
            if count == out.len() {
                break;
            }
            let Some(interest) = self.entries.get_mut(fd) else { continue };
            out[count] = epoll_event { events: *events, u64: interest.data };
            count += 1;
            self.last_reported = *fd;
            if interest.is_edge_triggered() {
                interest.reported |= events;
            }
            interest.is_disarmed = interest.events & EPOLLONESHOT as u32 != 0;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN: u32 = EPOLLIN as u32;

    fn counts(reads: u32, writes: u32) -> IoCounts {
        IoCounts { reads, writes }
    }

    fn reported(list: &mut InterestList, ready: &[(c_int, u32)], room: usize) -> Vec<u64> {
        let mut out = vec![epoll_event { events: 0, u64: 0 }; room];
        let count = list.report(ready, &mut out);
        out[..count].iter().map(|event| event.u64).collect()
    }

    #[test]
    fn with_little_room_every_descriptor_has_a_turn() {
        let mut list = InterestList::default();
        (3..8).for_each(|fd| list.set(fd, IN, fd as u64, counts(0, 0)));
        let busy: Vec<_> = (3..8).map(|fd| (fd, IN)).collect();
        let turns: Vec<u64> = (0..5).flat_map(|_| reported(&mut list, &busy, 2)).collect();
        assert_eq!(turns, [3, 4, 5, 6, 7, 3, 4, 5, 6, 7]);
        assert_eq!(reported(&mut list, &busy, 9), [3, 4, 5, 6, 7]);
        assert_eq!(reported(&mut list, &[(3, 0), (5, IN)], 9), [5]);
    }

    #[test]
    fn each_edge_triggered_set_sees_the_same_read() {
        let events = IN | EPOLLET as u32;
        let mut lists = [InterestList::default(), InterestList::default()];
        for list in &mut lists {
            list.set(5, events, 0, counts(7, 7));
            assert_eq!(reported(list, &[(5, IN)], 1).len(), 1);
            assert_eq!(list.pending(|_| counts(7, 7)), [(5, events & !IN)]);
        }
        for list in &mut lists {
            assert_eq!(list.pending(|_| counts(8, 7)), [(5, events)]);
            assert_eq!(reported(list, &[(5, IN)], 1).len(), 1);
            assert_eq!(list.pending(|_| counts(8, 8)), [(5, events & !IN)]);
        }
    }

    #[test]
    fn the_end_is_reported_once_and_one_shots_once_each_time() {
        let mut list = InterestList::default();
        list.set(5, IN | EPOLLET as u32, 0, counts(0, 0));
        assert_eq!(reported(&mut list, &[(5, IN | EPOLLHUP as u32)], 1).len(), 1);
        assert!(list.pending(|_| counts(0, 0)).is_empty());
        assert_eq!(list.pending(|_| counts(0, 1)).len(), 1);
        list.set(5, IN | EPOLLONESHOT as u32, 0, counts(0, 0));
        assert_eq!(reported(&mut list, &[(5, IN)], 1).len(), 1);
        assert!(list.pending(|_| counts(1, 1)).is_empty());
        list.set(5, IN | EPOLLONESHOT as u32, 0, counts(0, 0));
        assert_eq!(list.pending(|_| counts(1, 1)).len(), 1);
    }
}
