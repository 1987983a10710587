//! Revocation of grants, model-checked: a grantee that copies, the router that revokes, the owner's
//! command thread and its verb.
//!
//! Pages are bare atomics without ordering; the pipe of commands is two counts, weaker than the kernel's.
//!
//! Each of these changes makes a model fail:
//!
//! | change | model that fails |
//! |---|---|
//! | `revoke` or `still_granted` without its fence | `a_write_that_counts…` |
//! | `Granted::copy` looks before it copies, or not at all | `a_write_that_counts…` |
//! | `Granted::copy` keeps its table when a copy does not count | `a_grantee_that_was_revoked…` |
//! | `Granted::admit` keeps what came with another number | `a_later_grant…` |
//! | `Granted::admit` does not look whether the number still holds | none: the look after the copy decides |
//! | `RevokeCommands::take` reads before it counts | `a_verb_returns…` |
//! | `RevokeCommands::take` finishes what it has read | `a_verb_returns…` |
//! | `Awaited` counts before it looks at the pipe | `a_verb_returns…` |
//! | `Awaited` counts again at each look | none: it then waits for later commands too |
//! | `Awaited` does not look at the pipe | `a_verb_returns…` |
//! | the count of finished ones with Relaxed, at either end | `a_verb_returns…` |
//! | `Granted::once` without the look | `an_atomic…_once` |
//! | `Granted::once` leaves with Relaxed | `an_atomic…_once` |
//! | `Granted::once` enters with Relaxed | none: what the router waits for ends by the swap, but where the next number is entered |
//! | the router does not look at `entered`, or looks with Relaxed, or `is_inside` does | `an_atomic…_once` |
//! | `Granted::once` does not look whether it was expelled | `an_expelled_atomic…` |
//! | `expel` with Relaxed where the grantee has left | `an_expelled_atomic…` |
//! | the count of taken ones with Relaxed | none: the pipe orders it, which a kernel need not promise |
use crate::check;
use freeflow_shm::revocation::{Awaited, Granted, RevokeCommands, entered, expel, is_inside, revoke};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use loom::thread;

/// The last number before it begins again at 0.
const BEFORE: u32 = u32::MAX;

/// Grants of a table, by the index of their page.
type Table = Vec<usize>;

fn granted(word: &AtomicU32, number: u32, page: usize) -> Granted<Table> {
    let mut granted = Granted::<Table>::default();
    granted.admit(word, number, |table| table.push(page));
    assert_eq!(granted.table(), &[page]);
    granted
}

/// Page that the owner and the grantee map, and the owner's private copy.
#[derive(Default)]
struct Page {
    shared: AtomicU32,
    private: AtomicU32,
}

impl Page {
    /// By the owner's command thread.
    fn take_back(&self) {
        self.private.store(self.shared.load(Relaxed), Relaxed);
    }
}

struct Memory {
    word: AtomicU32,
    inside: AtomicU64,
    pages: [Page; 2],
}

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self { word: AtomicU32::new(BEFORE), inside: AtomicU64::new(0), pages: Default::default() })
    }

    fn write(&self, granted: &mut Granted<Table>, page: usize) -> bool {
        granted.copy(&self.word, |table| {
            let is_granted = table.contains(&page);
            if is_granted {
                self.pages[page].shared.store(7, Relaxed);
            }
            is_granted
        })
    }
}

impl Memory {
    /// An atomic addition of 1.
    fn add(&self, granted: &mut Granted<Table>, page: usize) -> bool {
        let before = granted.once(&self.word, &self.inside, |table| {
            table.contains(&page).then(|| self.pages[page].shared.fetch_add(1, Relaxed))
        });
        before.is_some()
    }

    /// As the router: waits for an atomic, or gives it up.
    fn revoke(&self, number: u32, waits: bool) {
        revoke(&self.word, number);
        let Some(atomic) = entered(&self.inside) else { return };
        if !waits {
            return expel(&self.inside);
        }
        while is_inside(&self.inside, atomic) {
            thread::yield_now();
        }
    }
}

/// The router does again the one that does not count.
#[test]
fn an_atomic_is_done_once() {
    check(|| {
        let memory = Memory::new();
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || memory.add(&mut granted, 0))
        };
        memory.revoke(BEFORE.wrapping_add(1), true);
        memory.pages[0].take_back();
        let counts = grantee.join().unwrap();
        let done = memory.pages[0].private.load(Relaxed);
        assert_eq!(done, u32::from(counts), "lost, or done twice");
        assert_eq!(memory.inside.load(Relaxed), 0);
    });
}

/// The router may see that the second one is being done, and not the end of the first one.
#[test]
fn two_atomics_in_a_row_are_done_once_each() {
    check(|| {
        let memory = Memory::new();
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || u32::from(memory.add(&mut granted, 0)) + u32::from(memory.add(&mut granted, 0)))
        };
        memory.revoke(BEFORE.wrapping_add(1), true);
        memory.pages[0].take_back();
        let count = grantee.join().unwrap();
        assert_eq!(memory.pages[0].private.load(Relaxed), count, "lost, or done twice");
    });
}

/// One that counts is in the private copy even so.
#[test]
fn an_expelled_atomic_does_not_count() {
    check(|| {
        let memory = Memory::new();
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let counts = memory.add(&mut granted, 0);
                assert!(counts || granted.table().is_empty());
                counts
            })
        };
        memory.revoke(BEFORE.wrapping_add(1), false);
        memory.pages[0].take_back();
        let counts = grantee.join().unwrap();
        assert!(!counts || memory.pages[0].private.load(Relaxed) == 1, "lost");
    });
}

#[test]
fn a_write_that_counts_is_in_the_private_copy() {
    check(|| {
        let memory = Memory::new();
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || memory.write(&mut granted, 0))
        };
        revoke(&memory.word, BEFORE.wrapping_add(1));
        memory.pages[0].take_back();
        let counts = grantee.join().unwrap();
        assert!(!counts || memory.pages[0].private.load(Relaxed) == 7, "lost");
    });
}

/// A READ that counts brings nothing older than what the owner wrote and said before.
#[test]
fn no_read_counts_that_begins_after_the_owner_went_on() {
    check(|| {
        let memory = Memory::new();
        let said = Arc::new(AtomicU32::new(0));
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let (memory, said) = (Arc::clone(&memory), Arc::clone(&said));
            thread::spawn(move || {
                let mut got = 0;
                let heard = said.load(Acquire);
                let counts = granted.copy(&memory.word, |_| {
                    got = memory.pages[0].shared.load(Relaxed);
                    true
                });
                (heard, counts.then_some(got))
            })
        };
        revoke(&memory.word, BEFORE.wrapping_add(1));
        memory.pages[0].take_back();
        memory.pages[0].private.store(9, Relaxed);
        said.store(1, Release);
        let (heard, got) = grantee.join().unwrap();
        assert!(heard == 0 || got.is_none(), "it read what is no longer the owner's");
    });
}

/// Two revocations, and two copies: what was void once stays void.
#[test]
fn a_grantee_that_was_revoked_has_nothing_left() {
    check(|| {
        let memory = Memory::new();
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let first = memory.write(&mut granted, 0);
                assert!(first || granted.table().is_empty(), "void, and kept");
                let second = memory.write(&mut granted, 0);
                assert!(first || !second);
                first
            })
        };
        revoke(&memory.word, BEFORE.wrapping_add(1));
        memory.pages[0].take_back();
        revoke(&memory.word, BEFORE.wrapping_add(2));
        let counts = grantee.join().unwrap();
        assert!(!counts || memory.pages[0].private.load(Relaxed) == 7, "lost");
    });
}

/// The router revokes one page, then grants another: the answer does not bring the first one back.
#[test]
fn a_later_grant_does_not_revive_one_that_is_void() {
    check(|| {
        let memory = Memory::new();
        let answer = Arc::new(AtomicU32::new(BEFORE));
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let (memory, answer) = (Arc::clone(&memory), Arc::clone(&answer));
            thread::spawn(move || {
                // An answer of now, or of before the revocation and long on its way.
                let number = answer.load(Acquire);
                granted.admit(&memory.word, number, |table| table.push(1));
                memory.write(&mut granted, 0)
            })
        };
        let number = BEFORE.wrapping_add(1);
        revoke(&memory.word, number);
        memory.pages[0].take_back();
        answer.store(number, Release);
        let counts = grantee.join().unwrap();
        assert!(!counts || memory.pages[0].private.load(Relaxed) == 7, "lost");
    });
}

/// The commands of a session.
#[derive(Default)]
struct Session {
    commands: RevokeCommands,
    written: AtomicU32,
    read: AtomicU32,
    carried_out: AtomicU32,
}

impl Session {
    fn has_unread(&self) -> bool {
        self.written.load(Acquire) != self.read.load(Acquire)
    }

    /// The command thread's; by it alone.
    fn serve_one(&self) {
        let command = loop {
            let command = self.commands.take(|| {
                let at = self.read.load(Relaxed);
                (self.written.load(Acquire) != at).then(|| {
                    self.read.store(at + 1, Release);
                    at
                })
            });
            match command {
                Some(at) => break at,
                // Woken for nothing.
                None => thread::yield_now(),
            }
        };
        self.carried_out.store(command + 1, Relaxed);
        self.commands.finish();
    }

    fn settle(&self) {
        let mut awaited = Awaited::default();
        while awaited.are_pending(&self.commands, || self.has_unread()) {
            thread::yield_now();
        }
    }
}

/// The router writes the command before it answers the verb. What comes later is not waited for.
#[test]
fn a_verb_returns_when_its_commands_are_carried_out() {
    check(|| {
        let session = Arc::new(Session::default());
        let thread = {
            let session = Arc::clone(&session);
            thread::spawn(move || session.serve_one())
        };
        session.written.store(1, Release);
        session.settle();
        assert_eq!(session.carried_out.load(Relaxed), 1, "returned too early");
        // Nobody serves this one.
        let mut awaited = Awaited::default();
        assert!(!awaited.are_pending(&session.commands, || session.has_unread()));
        session.written.store(2, Release);
        assert!(!awaited.are_pending(&session.commands, || session.has_unread()));
        thread.join().unwrap();
    });
}

/// All of it: the grantee copies, the router revokes and answers, the command thread takes the page
/// back, the verb returns.
#[test]
fn nothing_that_counts_is_missing_when_the_verb_returns() {
    check(|| {
        let (memory, session) = (Memory::new(), Arc::new(Session::default()));
        let mut granted = granted(&memory.word, BEFORE, 0);
        let grantee = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || memory.write(&mut granted, 0))
        };
        let owner = {
            let (memory, session) = (Arc::clone(&memory), Arc::clone(&session));
            thread::spawn(move || {
                // Not the loop for nothing of the other model: it waits in `poll`.
                while !session.has_unread() {
                    thread::yield_now();
                }
                session.commands.take(|| Some(session.read.store(1, Release)));
                memory.pages[0].take_back();
                session.commands.finish();
            })
        };
        revoke(&memory.word, BEFORE.wrapping_add(1));
        session.written.store(1, Release);
        session.settle();
        let shown = memory.pages[0].private.load(Relaxed);
        let counts = grantee.join().unwrap();
        assert!(!counts || shown == 7, "lost");
        owner.join().unwrap();
    });
}
