//! The algorithms of the rings, model-checked: every interleaving and every reordering that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p freeflow-shm --release --test loom`
#![cfg(loom)]
mod biased_mutex;
mod revocation;
mod worker_lock;

use freeflow_shm::claims::{Taker, claim};
use freeflow_shm::handshake::{
    Doorbells, EventCount, announce, announced, arm, fence_for_all, leave, may_be_unseen, take_armed,
};
use freeflow_shm::layout::{ARMED_NEXT, ARMED_NONE, ARMED_SOLICITED, DIRECT_RING_OPEN};
use freeflow_shm::slot::{BoundedPublishCursor, Full, HEAD, Line, PublishCursor, SLOT_WORDS, Slot, TakeCursor, commit};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*, fence};
use loom::thread;

/// Runs a model with at most so many preemptions: enough for every bug of two threads known to the literature.
fn check(model: impl Fn() + Sync + Send + 'static) {
    check_bounded(3, model);
}

/// For models whose threads are too many for three.
fn check_bounded(preemption_count_max: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemption_count_max);
    builder.check(model);
}

fn slots(count: usize) -> Box<[Slot]> {
    (0..count).map(|_| Slot::new()).collect()
}

/// A message of which every word has the position it belongs to.
fn line(position: u32) -> Line {
    let mut line = [0; SLOT_WORDS];
    for (index, word) in line.iter_mut().enumerate() {
        *word = u64::from(position.wrapping_mul(31) ^ index as u32);
    }
    line
}

fn assert_is(position: u32, got: &Line) {
    for (index, (got, want)) in got.iter().zip(line(position)).enumerate() {
        let got = if index == HEAD { got & u64::from(u32::MAX) } else { *got };
        assert_eq!(got, want, "word {index} at {position}");
    }
}

/// A message is either taken by the receiver's last look, or its sender learns that it may not have been: never is it
/// counted as sent and lost.
#[test]
fn a_message_is_seen_or_its_sender_knows() {
    for looks in [false, true] {
        check(move || {
            // The head of the message's descriptor, STATE, WANTS_NOTIFICATION.
            let words =
                Arc::new((AtomicU64::new(0), AtomicU32::new(DIRECT_RING_OPEN), AtomicU32::new(u32::from(looks))));
            let sender = {
                let words = Arc::clone(&words);
                thread::spawn(move || {
                    words.0.store(7, Release);
                    !(announced(&words.2) && may_be_unseen(&words.1))
                })
            };
            leave(&words.1, &words.2);
            let seen = words.0.load(Acquire) == 7;
            let counted = sender.join().unwrap();
            assert!(seen || !counted, "sent, and lost");
        });
    }
}

/// A RECV that the library takes may be followed in its slot by another at once: the router, which reads it before it
/// claims it, has the old one whole, or none.
#[test]
fn a_receive_is_read_before_it_is_claimed() {
    check(|| {
        // A slot, and the word of its taker.
        let ring = Arc::new((slots(1), AtomicU32::new(0)));
        ring.0[0].publish(0, &line(0));
        let library = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let taken = claim(&ring.1, 0, Taker::Library);
                if taken {
                    // As a lock is that the poller and the poster take by turns.
                    fence(SeqCst);
                    ring.0[0].publish(1, &line(1));
                }
                taken
            })
        };
        let mut taken = false;
        if let Some((position, got)) = TakeCursor::at(0).take(&*ring.0) {
            fence(Acquire);
            taken = claim(&ring.1, position, Taker::Router);
            if taken {
                assert_is(0, &got);
            }
        }
        assert!(taken ^ library.join().unwrap());
    });
}

/// Two slots, four requests, over the end of a lap and over the wrap of the u32 count. The slot is free again when the
/// completion was polled, here a count of requests taken.
#[test]
fn requests_cross_whole_over_lap_and_wrap() {
    check(|| {
        const COUNT: u32 = 4;
        // A lap before the wrap: position u32::MAX expects sequence 0, which is what a slot never published holds.
        let first = u32::MAX - 2;
        let ring = Arc::new((slots(2), AtomicU32::new(first)));
        let producer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut cursor = PublishCursor::at(first);
                for _ in 0..COUNT {
                    while cursor.position().wrapping_sub(ring.1.load(Acquire)) >= 2 {
                        thread::yield_now();
                    }
                    let position = cursor.position();
                    assert_eq!(cursor.publish(&*ring.0, &line(position)), position);
                }
            })
        };
        let mut cursor = TakeCursor::at(first);
        let mut expected = first;
        while expected != first.wrapping_add(COUNT) {
            match cursor.take(&*ring.0) {
                Some((position, got)) => {
                    assert_eq!(position, expected);
                    assert_is(position, &got);
                    expected = expected.wrapping_add(1);
                    ring.1.store(expected, Release);
                }
                None => thread::yield_now(),
            }
        }
        producer.join().unwrap();
        assert!(!cursor.has_next(&*ring.0));
    });
}

/// Two entries' room, three completions: the producer overwrites only what the consumer has read.
#[test]
fn completions_cross_whole_and_are_never_overwritten() {
    check(|| {
        const COUNT: u32 = 3;
        let ring = Arc::new((slots(2), AtomicU32::new(0)));
        let producer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut cursor = BoundedPublishCursor::at(0, 0, 2);
                for position in 0..COUNT {
                    while cursor.publish(&*ring.0, &ring.1, &line(position)) == Err(Full) {
                        thread::yield_now();
                    }
                }
                assert!(cursor.unconsumed(&ring.1) <= 2);
            })
        };
        let mut cursor = TakeCursor::default();
        while cursor.position() != COUNT {
            match cursor.take(&*ring.0) {
                Some((position, got)) => {
                    assert_is(position, &got);
                    commit(&ring.1, cursor.position());
                }
                None => thread::yield_now(),
            }
        }
        producer.join().unwrap();
    });
}

/// A send is published while the router stops polling: the router sees it, or the library rings.
#[test]
fn no_send_is_lost_when_the_router_stops_polling() {
    check(|| {
        let shared = Arc::new((slots(2), AtomicU32::new(1)));
        let library = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                PublishCursor::default().publish(&*shared.0, &line(0));
                !announced(&shared.1)
            })
        };
        announce(&shared.1, false);
        let mut cursor = TakeCursor::default();
        let taken = cursor.take(&*shared.0);
        if let Some((position, got)) = taken {
            assert_is(position, &got);
        }
        let rings = library.join().unwrap();
        assert!(rings || taken.is_some(), "lost");
    });
}

/// A receive is published while the router begins to wait for one.
#[test]
fn no_receive_is_lost_when_the_router_begins_to_want_one() {
    check(|| {
        let shared = Arc::new((slots(2), AtomicU32::new(0)));
        let library = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut cursor = PublishCursor::default();
                cursor.publish(&*shared.0, &line(0));
                let first = announced(&shared.1);
                cursor.publish(&*shared.0, &line(1));
                (first, announced(&shared.1))
            })
        };
        announce(&shared.1, true);
        let mut cursor = TakeCursor::default();
        let seen = cursor.pending(&*shared.0, 2);
        assert_eq!(cursor.take(&*shared.0).is_some(), seen > 0 || cursor.position() > 0);
        let (first, second) = library.join().unwrap();
        assert!(first || cursor.position() > 0, "the first is lost");
        assert!(second || seen == 2 || cursor.has_next(&*shared.0), "the second is lost");
        // A side that doesn't ring was seen by the look after the announcement.
        assert!(second || seen == 2);
    });
}

/// The doorbells of a session, and whether the kick was given.
struct Bells {
    summary: AtomicU64,
    words: [AtomicU64; 2],
    sleeps: AtomicU32,
    kicked: AtomicBool,
}

impl Bells {
    fn new() -> Self {
        Self {
            summary: AtomicU64::new(0),
            words: [AtomicU64::new(0), AtomicU64::new(0)],
            sleeps: AtomicU32::new(0),
            kicked: AtomicBool::new(false),
        }
    }

    fn doorbells(&self) -> Doorbells<'_> {
        Doorbells { summary: &self.summary, words: &self.words, router_sleeps: &self.sleeps }
    }

    fn ring(&self, doorbell: u32) {
        if self.doorbells().ring(doorbell) {
            self.kicked.store(true, Relaxed);
        }
    }

    fn take(&self) -> Vec<u32> {
        let mut rang = Vec::new();
        self.doorbells().take(|doorbell| rang.push(doorbell));
        rang
    }
}

/// A doorbell rings while the router goes to sleep: the router stays awake, or is kicked and then finds the doorbell.
#[test]
fn no_doorbell_is_lost_when_the_router_goes_to_sleep() {
    check(|| {
        let bells = Arc::new(Bells::new());
        let library = {
            let bells = Arc::clone(&bells);
            thread::spawn(move || bells.ring(70))
        };
        announce(&bells.sleeps, true);
        let awake = !bells.doorbells().is_empty();
        library.join().unwrap();
        assert!(awake || bells.kicked.load(Relaxed), "sleeps for ever");
        announce(&bells.sleeps, false);
        assert_eq!(bells.take(), [70]);
    });
}

/// The router takes doorbells while two ring: each is taken, now or at the next look, with the request that it is for.
#[test]
fn doorbells_are_taken_with_their_requests() {
    check(|| {
        let shared = Arc::new((Bells::new(), slots(2)));
        let library = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut cursor = PublishCursor::default();
                cursor.publish(&*shared.1, &line(0));
                shared.0.ring(3);
                cursor.publish(&*shared.1, &line(1));
                shared.0.ring(64);
            })
        };
        let mut rang = shared.0.take();
        for (position, doorbell) in [3, 64].into_iter().enumerate() {
            let published = TakeCursor::at(position as u32).has_next(&*shared.1);
            assert!(published || !rang.contains(&doorbell), "doorbell {doorbell} came before its request: {rang:?}");
        }
        library.join().unwrap();
        rang.extend(shared.0.take());
        rang.sort_unstable();
        rang.dedup();
        assert_eq!(rang, [3, 64]);
        assert!(shared.0.take().is_empty());
    });
}

/// The whole way of a send to a router that stops polling and goes to sleep meanwhile.
#[test]
fn a_send_reaches_a_router_that_falls_asleep() {
    check(|| {
        let shared = Arc::new((Bells::new(), slots(1), AtomicU32::new(1)));
        let library = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                PublishCursor::default().publish(&*shared.1, &line(0));
                if !announced(&shared.2) {
                    shared.0.ring(0);
                }
            })
        };
        let mut cursor = TakeCursor::default();
        announce(&shared.2, false);
        if cursor.take(&*shared.1).is_none() {
            announce(&shared.0.sleeps, true);
            let awake = !shared.0.doorbells().is_empty();
            library.join().unwrap();
            assert!(awake || shared.0.kicked.load(Relaxed), "sleeps for ever");
            assert_eq!(shared.0.take(), [0]);
            assert!(cursor.take(&*shared.1).is_some());
        } else {
            library.join().unwrap();
        }
    });
}

/// The library arms and looks once more while the router completes: it sees the completion, or gets the event.
fn arming_loses_nothing(before: u32, solicited_only: bool) {
    check(move || {
        let shared = Arc::new((slots(2), AtomicU32::new(before), AtomicU32::new(0)));
        let router = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut cursor = BoundedPublishCursor::at(0, 0, 2);
                cursor.publish(&*shared.0, &shared.2, &line(0)).unwrap();
                take_armed(&shared.1, true)
            })
        };
        arm(&shared.1, solicited_only);
        let seen = TakeCursor::default().take(&*shared.0);
        if let Some((position, got)) = seen {
            assert_is(position, &got);
        }
        let event = router.join().unwrap();
        assert!(seen.is_some() || event, "lost");
        // An event disarms; but it may be owed to the arming before, and this one still stand.
        assert!(event || shared.1.load(Relaxed) != ARMED_NONE);
    });
}

#[test]
fn arming_for_the_next_completion_loses_nothing() {
    arming_loses_nothing(ARMED_NONE, false);
    arming_loses_nothing(ARMED_SOLICITED, false);
}

#[test]
fn arming_for_a_solicited_completion_loses_nothing() {
    arming_loses_nothing(ARMED_NONE, true);
    arming_loses_nothing(ARMED_NEXT, true);
}

/// One arming gives one event, however many completions.
#[test]
fn one_arming_gives_one_event() {
    check(|| {
        let armed = Arc::new(AtomicU32::new(0));
        let router = {
            let armed = Arc::clone(&armed);
            thread::spawn(move || u32::from(take_armed(&armed, false)) + u32::from(take_armed(&armed, true)))
        };
        arm(&armed, false);
        let events = router.join().unwrap();
        assert_eq!(events, u32::from(armed.load(Relaxed) == ARMED_NONE));
    });
}

/// `completed` and `awaited` of a session.
#[derive(Default)]
struct Counts(AtomicU64, AtomicU64);

impl Counts {
    fn events(&self) -> EventCount<'_> {
        EventCount { completed: &self.0, awaited: &self.1 }
    }

    /// A poller that finds nothing and goes to sleep. `None`: it has seen the completion, or the
    /// futex sees that the count has changed. Else the count at which it sleeps.
    fn sleep(&self, slots: &[Slot]) -> Option<u64> {
        let seen = self.events().completed();
        if TakeCursor::default().has_next(slots) {
            return None;
        }
        self.events().await_next(seen);
        (self.0.load(Relaxed) == seen).then_some(seen)
    }

    /// The router's end of a turn; whether it wakes the sleepers.
    fn complete(&self, slots: &[Slot], count: u64) -> bool {
        let never_consumed = AtomicU32::new(0);
        let mut cursor = BoundedPublishCursor::at(count as u32 - 1, 0, 2);
        cursor.publish(slots, &never_consumed, &line(count as u32 - 1)).unwrap();
        self.events().advance(count);
        fence_for_all();
        self.events().is_awaited(count)
    }
}

/// Two pollers go to sleep while a completion comes: each sees it, or is woken.
#[test]
fn no_poller_sleeps_over_a_completion() {
    check(|| {
        let shared = Arc::new((Counts::default(), slots(2)));
        let pollers = [(); 2].map(|()| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.0.sleep(&shared.1))
        });
        let woken = shared.0.complete(&shared.1, 1);
        for poller in pollers {
            assert!(woken || poller.join().unwrap() != Some(0), "lost");
        }
    });
}

/// One that slept over an earlier count does not keep the router waking, and one that sleeps now is woken.
#[test]
fn sleepers_are_woken_by_the_count_that_they_await() {
    check(|| {
        let shared = Arc::new((Counts::default(), slots(2)));
        shared.0.events().await_next(0);
        assert!(shared.0.complete(&shared.1, 1));
        let poller = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let seen = shared.0.events().completed();
                shared.0.events().await_next(seen);
                (shared.0.0.load(Relaxed) == seen).then_some(seen)
            })
        };
        let woken = shared.0.complete(&shared.1, 2);
        assert!(woken || poller.join().unwrap() != Some(1), "lost");
        assert!(!shared.0.events().is_awaited(4));
    });
}

/// The models above can fail at all: without the fences, loom finds the lost wake-up.
#[test]
#[should_panic(expected = "lost")]
fn without_fences_a_wake_up_is_lost() {
    check(|| {
        let shared = Arc::new((slots(2), AtomicU32::new(1)));
        let library = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                PublishCursor::default().publish(&*shared.0, &line(0));
                shared.1.load(Relaxed) == 0
            })
        };
        shared.1.store(0, Relaxed);
        let taken = TakeCursor::default().take(&*shared.0);
        let rings = library.join().unwrap();
        assert!(rings || taken.is_some(), "lost");
    });
}
