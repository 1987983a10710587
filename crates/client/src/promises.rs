//! RECVs of an SRQ that are promised to messages of direct rings.
//!
//! A SEND that stands in a direct ring has succeeded, so a ring takes messages only as RECVs are
//! posted. Those of an SRQ belong to no queue pair; whichever has a message takes the next one, and
//! so does the router. Therefore RECVs are promised by number: the rings that are polled share what
//! is posted, and each tells its sender how many messages it takes, of which length. The RECV
//! itself is taken when the message is polled.
//!
//! Invariant: what polled rings are promised, the SRQ has, as long as the router takes nothing. If
//! it does, a message may have to wait in its ring for the next post. So a RECV that is there is
//! never withheld from who needs it.
use crate::regions::SGES_MAX;
use freeflow_shm::RequestProducer;
use freeflow_verbs::Sge;

/// Most messages that a ring is promised RECVs for.
pub(crate) const PROMISED_MAX: u32 = 64;

/// State of an SRQ that direct rings take RECVs of. Under the lock of its ring.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    /// RECVs before this position were taken, by whomever.
    next: u32,
    /// RECVs before this position were looked at.
    seen: u32,
    room: LeastRoom,
    /// Rings that are polled, and what these are promised.
    ring_count: u32,
    promised: u32,
}

/// A share of the RECVs that are posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub count: u32,
    /// Each takes so many bytes.
    pub room: u32,
    /// There are no more.
    pub is_all: bool,
}

impl Promises {
    fn catch_up(&mut self, ring: &RequestProducer) {
        self.next = later(self.next, ring.taken());
        self.seen = later(self.seen, self.next);
    }

    /// RECVs that are posted and that nobody has taken, as far as is known here.
    pub fn untaken(&mut self, ring: &RequestProducer) -> u32 {
        self.catch_up(ring);
        ring.position().wrapping_sub(self.next)
    }

    /// Takes the next RECV. → its position.
    pub fn take(&mut self, ring: &RequestProducer) -> Option<u32> {
        for _ in 0..self.untaken(ring) {
            let position = self.next;
            self.next = position.wrapping_add(1);
            if ring.claim_receive(position) {
                ring.set_claimed(self.next);
                return Some(position);
            }
        }
        None
    }

    /// A ring is polled from now on. So many messages were promised RECVs before.
    pub fn add_ring(&mut self, left: u32) {
        self.ring_count += 1;
        self.promised += left;
    }

    pub fn remove_ring(&mut self, left: u32) {
        self.ring_count -= 1;
        self.forget(left);
    }

    /// Messages of a polled ring have come.
    pub fn forget(&mut self, count: u32) {
        self.promised = self.promised.saturating_sub(count);
    }

    /// Promises RECVs to a polled ring that so many are left to. `room`: how many bytes a RECV
    /// takes; `None`: the router must deliver to it, and to those before it that are left then.
    pub fn promise(&mut self, ring: &RequestProducer, left: u32, mut room: impl FnMut(&[Sge]) -> Option<u32>) -> Share {
        self.catch_up(ring);
        while self.seen != ring.position() {
            let mut sges = [Sge::default(); SGES_MAX + 1];
            let count = ring.receive_at(self.seen, &mut sges);
            let Some(bytes) = room(&sges[..count]) else { break };
            self.room.note(bytes, self.next, self.seen);
            self.seen = self.seen.wrapping_add(1);
        }
        let available = self.seen.wrapping_sub(self.next).saturating_sub(self.promised);
        let wanted = PROMISED_MAX.saturating_sub(left);
        let count = available.div_ceil(self.ring_count.max(1)).min(wanted);
        self.promised += count;
        Share { count, room: self.room.of(self.next, self.seen), is_all: count < wanted }
    }
}

/// The least room of RECVs that are posted: of those that were looked at since some position, and
/// since an earlier one, until that has been taken.
#[derive(Debug)]
struct LeastRoom {
    room: u32,
    room_since: u32,
    since: u32,
}

impl Default for LeastRoom {
    fn default() -> Self {
        Self { room: u32::MAX, room_since: u32::MAX, since: 0 }
    }
}

impl LeastRoom {
    /// A RECV was looked at that has position `seen`; those before `next` were taken.
    fn note(&mut self, bytes: u32, next: u32, seen: u32) {
        self.pass(next, seen);
        self.room = self.room.min(bytes);
        self.room_since = self.room_since.min(bytes);
    }

    fn of(&mut self, next: u32, seen: u32) -> u32 {
        self.pass(next, seen);
        self.room
    }

    fn pass(&mut self, next: u32, seen: u32) {
        if next.wrapping_sub(self.since).cast_signed() >= 0 && self.since != seen {
            (self.room, self.room_since, self.since) = (self.room_since, u32::MAX, seen);
        }
    }
}

fn later(one: u32, other: u32) -> u32 {
    if other.wrapping_sub(one).cast_signed() > 0 { other } else { one }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_shm::layout::QueueShape;
    use freeflow_shm::{RequestConsumer, Segment, Take};
    use freeflow_verbs::ReceiveRequest;
    use std::sync::Arc;

    const SLOTS: u32 = 256;

    struct Srq {
        ring: RequestProducer,
        router: RequestConsumer,
        promises: Promises,
    }

    impl Srq {
        fn new() -> Self {
            let shape = QueueShape::receive(SLOTS, 1);
            let segment = Arc::new(Segment::create("test", shape.bytes()).unwrap().0);
            let mut router = RequestConsumer::new(segment.clone(), 0, shape, SLOTS, 1, 0);
            router.share();
            Self { ring: RequestProducer::new(segment, 0, shape), router, promises: Promises::default() }
        }

        fn post(&mut self, lengths: impl IntoIterator<Item = u32>) {
            for length in lengths {
                self.ring.publish_receive(u64::from(length), &[Sge { address: 0, length, lkey: 1 }]);
            }
        }

        fn promise(&mut self, left: u32) -> Share {
            self.promises.promise(&self.ring, left, |sges| (sges[0].length != 13).then_some(sges[0].length))
        }

        /// The lengths of those that the library and the router take by turns.
        fn take(&mut self, count: usize) -> Vec<u32> {
            let mut taken = Vec::new();
            for turn in 0..count {
                let wr_id = if turn % 2 == 0 {
                    let position = self.promises.take(&self.ring).unwrap();
                    self.ring.wr_id_at(position)
                } else {
                    let mut request = ReceiveRequest::default();
                    assert_eq!(self.router.take_receive(&mut request), Take::Ready);
                    request.work_request_id
                };
                taken.push(wr_id as u32);
            }
            taken
        }
    }

    #[test]
    fn each_receive_has_one_taker() {
        let mut srq = Srq::new();
        for lap in 0..40_u32 {
            let lengths: Vec<u32> = (0..SLOTS - 3).map(|i| lap * SLOTS + i + 1).collect();
            srq.post(lengths.iter().copied());
            assert_eq!(srq.take(lengths.len()), lengths);
            assert_eq!(srq.promises.take(&srq.ring), None);
            assert_eq!(srq.router.take_receive(&mut ReceiveRequest::default()), Take::Empty);
        }
    }

    #[test]
    fn rings_share_what_is_posted() {
        let mut srq = Srq::new();
        srq.promises.add_ring(0);
        srq.promises.add_ring(0);
        srq.post([64; 10]);
        assert_eq!(srq.promise(0), Share { count: 5, room: 64, is_all: true });
        assert_eq!(srq.promise(0).count, 3);
        assert_eq!(srq.promise(5).count, 1, "what is left after both");
        srq.promises.remove_ring(3);
        assert_eq!(srq.promise(6).count, 4);
        assert_eq!(srq.promise(10).count, 0);
        srq.post([64; 200]);
        assert_eq!(srq.promise(10), Share { count: PROMISED_MAX - 10, room: 64, is_all: false });
        // The router takes some that were promised: no more are.
        (0..200).for_each(|_| assert_eq!(srq.router.take_receive(&mut ReceiveRequest::default()), Take::Ready));
        assert_eq!(srq.promise(40), Share { count: 0, room: 64, is_all: true });
        srq.promises.forget(64);
        assert_eq!(srq.promise(0).count, 10);
    }

    #[test]
    fn the_shortest_receive_that_is_posted_counts() {
        let mut srq = Srq::new();
        srq.promises.add_ring(0);
        srq.post([100, 50, 80]);
        assert_eq!(srq.promise(0), Share { count: 3, room: 50, is_all: true });
        assert_eq!(srq.take(2), [100, 50]);
        srq.post([90; 4]);
        srq.promises.forget(2);
        assert!(srq.promise(1).room <= 80);
        assert_eq!(srq.take(3), [80, 90, 90]);
        srq.post([90; 2]);
        srq.promise(0);
        srq.post([90; 2]);
        assert_eq!(srq.promise(0).room, 90, "the short ones are gone");
        // One that only the router can fill stops the promises; the router comes to it.
        srq.post([13, 70]);
        let before = srq.promise(0).count;
        assert_eq!((before, srq.promise(0).count), (0, 0));
        let mut request = ReceiveRequest::default();
        while request.work_request_id != 13 {
            assert_eq!(srq.router.take_receive(&mut request), Take::Ready);
        }
        srq.promises.forget(64);
        assert_eq!(srq.promise(0), Share { count: 1, room: 70, is_all: true });
    }
}
