//! Revocation of grants, without locks: what a library copies by a grant counts only if the grant
//! still held afterwards, and a verb that ends a right waits until its process has carried out the
//! revoke commands that follow from it.
//!
//! 1. The router counts up the send queue's `GRANTS_REVOKED` ([`revoke`]), then writes a revoke
//!    command for the owner, then answers the owner's verb.
//! 2. The grantee copies, fences and looks at the number ([`Granted::copy`]). If it has changed,
//!    the router gets the request.
//! 3. The owner's command thread puts private copies in place of the pages, between
//!    [`RevokeCommands::take`] and [`RevokeCommands::finish`]. The verb waits for it ([`Awaited`]).
//!
//! An atomic must not be done twice, so it is announced ([`Granted::once`]): the grantee *enters* by
//! a word of its send queue, `ENTERED`, fences, looks at the number, does the atomic, and leaves. After 1. the
//! router looks at that word ([`entered`]) and writes no command until the grantee has left
//! ([`is_inside`]). One that does not leave in time is *expelled* ([`expel`]): its atomic, done or not, never
//! counts, and its queue pair goes to ERROR, so that nobody does it again.
//!
//! Invariant: a copy or an atomic that counts is in the owner's private copies, and none that begins after the
//! verb has returned counts. An atomic that does not count was not done, unless it was expelled.
//!
//! loom checks this very code (`tests/loom/revocation.rs`). The copies, the pipe and the mappings
//! are the kernel's and not modelled.
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Router: all grants of a send queue from before this number are void. `word`: its
/// `GRANTS_REVOKED`.
pub fn revoke(word: &AtomicU32, number: u32) {
    // Relaxed: ordered by the fence.
    word.store(number, Ordering::Relaxed);
    // SeqCst; partner: the fence in `still_granted`. A grantee sees the change, or what it wrote
    // can be seen.
    fence(Ordering::SeqCst);
}

/// Bits of `ENTERED`; its lower half is the number of the grants.
const INSIDE: u64 = 1 << 32;
const EXPELLED: u64 = 1 << 33;

/// An atomic that a grantee does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered(u64);

/// Router: the atomic that a grantee does now; after [`revoke`]. One that begins later sees that it is void. `word`:
/// its `ENTERED`.
pub fn entered(word: &AtomicU64) -> Option<Entered> {
    // Acquire; partner: the stores in `Granted::once`: what was done before can be seen.
    let value = word.load(Ordering::Acquire);
    (value & INSIDE != 0).then_some(Entered(value))
}

/// Router: whether the grantee still does that one. (Or one more that is as void.)
pub fn is_inside(word: &AtomicU64, atomic: Entered) -> bool {
    // Acquire; partner: as in `entered`.
    word.load(Ordering::Acquire) == atomic.0
}

/// Router: an atomic that the grantee does now never counts.
pub fn expel(word: &AtomicU64) {
    // Acquire, here and if the exchange fails: as in `entered`, for one that has left.
    let value = word.load(Ordering::Acquire);
    if value & INSIDE != 0 {
        // AcqRel; partner: the swap in `Granted::once`.
        let _ = word.compare_exchange(value, EXPELLED, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Library: whether grants that came with this number still hold, after bytes were copied by one, or before an atomic.
#[inline]
fn still_granted(word: &AtomicU32, number: u32) -> bool {
    // SeqCst; partner: the fence in `revoke`.
    fence(Ordering::SeqCst);
    // Relaxed: ordered by the fence.
    word.load(Ordering::Relaxed) == number
}

/// Library: a table of grants that hold together, until the number changes with which they came.
#[derive(Debug, Default)]
pub struct Granted<T> {
    table: T,
    number: u32,
}

impl<T: Default> Granted<T> {
    #[inline]
    pub fn table(&self) -> &T {
        &self.table
    }

    #[inline]
    pub fn table_mut(&mut self) -> &mut T {
        &mut self.table
    }

    /// Nothing was revoked so far. Only saves copies in vain: the look after the copy decides.
    #[inline]
    pub fn is_current(&self, word: &AtomicU32) -> bool {
        // Relaxed: the look after the copy decides.
        word.load(Ordering::Relaxed) == self.number
    }

    /// Copies by a grant of the table. False: it failed, or does not count, and the table is empty.
    #[inline]
    pub fn copy(&mut self, word: &AtomicU32, copy: impl FnOnce(&T) -> bool) -> bool {
        if copy(&self.table) && still_granted(word, self.number) {
            return true;
        }
        self.clear();
        false
    }

    /// Does something by a grant of the table that must not be done twice. `None`: it was not done,
    /// or the router has expelled it and the queue pair is in ERROR; the table is empty.
    #[inline]
    pub fn once<R>(&mut self, word: &AtomicU32, inside: &AtomicU64, act: impl FnOnce(&T) -> Option<R>) -> Option<R> {
        // Release; partner: the Acquire loads of the router, which may read this instead of the swap
        // before it. Ordered before the look by the fence there.
        inside.store(INSIDE | u64::from(self.number), Ordering::Release);
        let result = if still_granted(word, self.number) { act(&self.table) } else { None };
        // AcqRel; partners: the Acquire loads of the router, and its exchange in `expel`.
        let is_expelled = inside.swap(0, Ordering::AcqRel) & INSIDE == 0;
        if is_expelled || result.is_none() {
            self.clear();
            return None;
        }
        result
    }

    /// Adds what was granted with `number`, unless it is void by now. What is in the table with
    /// another number is void.
    pub fn admit(&mut self, word: &AtomicU32, number: u32, add: impl FnOnce(&mut T)) {
        if self.number != number {
            self.clear();
        }
        // Relaxed: as in `is_current`.
        if word.load(Ordering::Relaxed) == number {
            self.number = number;
            add(&mut self.table);
        }
    }

    #[cold]
    pub fn clear(&mut self) {
        self.table = T::default();
    }
}

/// Revoke commands of one session, as its process' command thread works them off, one after the
/// other.
#[derive(Debug)]
pub struct RevokeCommands {
    /// Those that were read, or are about to be.
    taken: AtomicU64,
    /// The first so many are carried out, or nobody is to wait for them.
    finished: AtomicU64,
    /// One could not be carried out.
    is_stuck: AtomicBool,
}

impl Default for RevokeCommands {
    fn default() -> Self {
        Self { taken: AtomicU64::new(0), finished: AtomicU64::new(0), is_stuck: AtomicBool::new(false) }
    }
}

impl RevokeCommands {
    /// Reads the next command. It counts as taken before it leaves the pipe: [`Awaited`] finds it
    /// here or there.
    pub fn take<C>(&self, read: impl FnOnce() -> Option<C>) -> Option<C> {
        // SeqCst; partner: the load in `Awaited::are_pending`, after the look at the pipe.
        self.taken.fetch_add(1, Ordering::SeqCst);
        let command = read();
        if command.is_none() {
            self.finish();
        }
        command
    }

    /// The next command is carried out, or is advice.
    pub fn finish(&self) {
        // SeqCst; partner: the load in `Self::finished`.
        self.finished.fetch_add(1, Ordering::SeqCst);
    }

    /// A command could not be carried out: nothing is finished any more.
    pub fn give_up(&self) {
        self.is_stuck.store(true, Ordering::SeqCst);
    }

    /// How many were taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// How many are finished; `None`: none will be.
    pub fn finished(&self) -> Option<u64> {
        (!self.is_stuck.load(Ordering::SeqCst)).then(|| self.finished.load(Ordering::SeqCst))
    }
}

/// The commands that a verb waits for: those given before, not those that come while it waits.
#[derive(Debug, Default)]
pub struct Awaited {
    /// So many; `None`: there may be some in the pipe.
    until: Option<u64>,
}

impl Awaited {
    /// `has_unread`: whether there is something in the pipe.
    pub fn are_pending(&mut self, commands: &RevokeCommands, has_unread: impl FnOnce() -> bool) -> bool {
        // In this order: a command that has left the pipe is among those taken.
        if self.until.is_none() && !has_unread() {
            self.until = Some(commands.taken());
        }
        self.until.is_none_or(|until| commands.finished().is_none_or(|finished| finished < until))
    }
}
