//! The rsockets of one epoll set: what is asked of each, what was told, whose turn it is. No calls, and no locks.
use libc::{EPOLLERR, EPOLLET, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT, c_int, epoll_event};
use std::collections::BTreeMap;

const READ_EVENTS: u32 = (EPOLLIN | libc::EPOLLRDNORM | libc::EPOLLRDHUP) as u32;
const WRITE_EVENTS: u32 = (EPOLLOUT | libc::EPOLLWRNORM) as u32;
const END_EVENTS: u32 = (EPOLLERR | EPOLLHUP) as u32;
/// Flags of poll and of epoll are the same numbers for what both have.
pub const POLL_EVENTS: u32 = READ_EVENTS | WRITE_EVENTS | END_EVENTS | libc::EPOLLPRI as u32;

#[derive(Debug)]
pub struct Member {
    pub wanted: u32,
    pub data: u64,
    /// Conditions that were reported, of an edge-triggered one.
    reported: u32,
    /// How often the program had read, and written, when it was last looked at.
    seen: (u32, u32),
    /// ONESHOT: reported, and not armed anew.
    spent: bool,
}

impl Member {
    fn is_edge(&self) -> bool {
        self.wanted & EPOLLET as u32 != 0
    }

    /// What to wait for; `None`: nothing now.
    fn events(&mut self, notes: (u32, u32)) -> Option<u32> {
        if self.spent {
            return None;
        }
        if !self.is_edge() {
            return Some(self.wanted);
        }
        let (read, written) = (notes.0 != self.seen.0, notes.1 != self.seen.1);
        self.seen = notes;
        self.reported &= !(if read { READ_EVENTS } else { 0 } | if written { WRITE_EVENTS } else { 0 });
        // An error or the end is news once more after any call.
        if read || written {
            self.reported &= READ_EVENTS | WRITE_EVENTS;
        }
        (self.reported & END_EVENTS == 0).then_some(self.wanted & !self.reported)
    }
}

/// By the program's descriptors.
#[derive(Debug, Default)]
pub struct Members {
    list: BTreeMap<c_int, Member>,
    /// The last one that was reported: the next turn is another's.
    last: c_int,
    /// Whether the kernel's set reports first next time.
    pub kernel_first: bool,
}

impl Members {
    #[must_use]
    pub fn contains(&self, fd: c_int) -> bool {
        self.list.contains_key(&fd)
    }

    /// Whether something was told of it that is told again only after the program reads or writes.
    #[must_use]
    pub fn was_told(&self, fd: c_int) -> bool {
        self.list.get(&fd).is_some_and(|member| member.reported != 0)
    }

    /// Adds or changes it: then all is news.
    pub fn set(&mut self, fd: c_int, wanted: u32, data: u64, notes: (u32, u32)) {
        self.list.insert(fd, Member { wanted, data, reported: 0, seen: notes, spent: false });
    }

    pub fn remove(&mut self, fd: c_int) -> Option<Member> {
        self.list.remove(&fd)
    }

    /// What to wait for, of each that waits for something.
    pub fn wanted(&mut self, notes: impl Fn(c_int) -> (u32, u32)) -> Vec<(c_int, u32)> {
        let wanted =
            self.list.iter_mut().filter_map(|(fd, member)| member.events(notes(*fd)).map(|events| (*fd, events)));
        wanted.collect()
    }

    /// Reports what is ready, beginning behind the last that was reported before: with little room everybody has a turn. `ready` is in
    /// the order of descriptors. How many.
    pub fn report(&mut self, ready: &[(c_int, u32)], out: &mut [epoll_event]) -> usize {
        let begin = ready.partition_point(|(fd, _)| *fd <= self.last);
        let (before, behind) = ready.split_at(begin);
        let mut count = 0;
        for (fd, events) in behind.iter().chain(before).filter(|(_, events)| *events != 0) {
            if count == out.len() {
                break;
            }
            let Some(member) = self.list.get_mut(fd) else { continue };
            out[count] = epoll_event { events: *events, u64: member.data };
            count += 1;
            self.last = *fd;
            if member.is_edge() {
                member.reported |= events;
            }
            member.spent = member.wanted & EPOLLONESHOT as u32 != 0;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN: u32 = EPOLLIN as u32;

    fn reported(members: &mut Members, ready: &[(c_int, u32)], room: usize) -> Vec<u64> {
        let mut out = vec![epoll_event { events: 0, u64: 0 }; room];
        let count = members.report(ready, &mut out);
        out[..count].iter().map(|event| event.u64).collect()
    }

    #[test]
    fn with_little_room_everybody_has_a_turn() {
        let mut members = Members::default();
        (3..8).for_each(|fd| members.set(fd, IN, fd as u64, (0, 0)));
        let busy: Vec<_> = (3..8).map(|fd| (fd, IN)).collect();
        let turns: Vec<u64> = (0..5).flat_map(|_| reported(&mut members, &busy, 2)).collect();
        assert_eq!(turns, [3, 4, 5, 6, 7, 3, 4, 5, 6, 7]);
        assert_eq!(reported(&mut members, &busy, 9), [3, 4, 5, 6, 7]);
        assert_eq!(reported(&mut members, &[(3, 0), (5, IN)], 9), [5]);
    }

    #[test]
    fn each_edge_triggered_set_hears_of_the_same_read() {
        let wanted = IN | EPOLLET as u32;
        let mut sets = [Members::default(), Members::default()];
        for set in &mut sets {
            set.set(5, wanted, 0, (7, 7));
            assert_eq!(reported(set, &[(5, IN)], 1).len(), 1);
            assert_eq!(set.wanted(|_| (7, 7)), [(5, wanted & !IN)]);
        }
        for set in &mut sets {
            assert_eq!(set.wanted(|_| (8, 7)), [(5, wanted)]);
            assert_eq!(reported(set, &[(5, IN)], 1).len(), 1);
            assert_eq!(set.wanted(|_| (8, 8)), [(5, wanted & !IN)]);
        }
    }

    #[test]
    fn the_end_is_told_once_and_one_shots_once_each_time() {
        let mut members = Members::default();
        members.set(5, IN | EPOLLET as u32, 0, (0, 0));
        assert_eq!(reported(&mut members, &[(5, IN | EPOLLHUP as u32)], 1).len(), 1);
        assert!(members.wanted(|_| (0, 0)).is_empty());
        assert_eq!(members.wanted(|_| (0, 1)).len(), 1);
        members.set(5, IN | EPOLLONESHOT as u32, 0, (0, 0));
        assert_eq!(reported(&mut members, &[(5, IN)], 1).len(), 1);
        assert!(members.wanted(|_| (1, 1)).is_empty());
        members.set(5, IN | EPOLLONESHOT as u32, 0, (0, 0));
        assert_eq!(members.wanted(|_| (1, 1)).len(), 1);
    }
}
