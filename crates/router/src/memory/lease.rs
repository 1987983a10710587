//! Lease that all processes with a segment hold together.
use crate::admission::account::Charge;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Lease that all processes with a segment hold together.
pub struct SegmentLease {
    /// For further processes; absent if there was none to spare.
    descriptor: Option<(OwnedFd, Charge)>,
    /// Of the bits in [`sharing`].
    sharing: AtomicU8,
    _charge: Charge,
}

/// Flags: other holders of a segment's descriptor, and uses of its memory. What is set stays.
mod sharing {
    /// Another process, or another handle.
    pub const IMPORTED: u8 = 1;
    /// A process that something of it was granted to.
    pub const GRANTED: u8 = 1 << 1;
    /// A grant was revoked, for good.
    pub const REVOKED: u8 = 1 << 2;
    /// Parts of it were taken back: what they held may still lie there.
    pub const TAKEN_BACK: u8 = 1 << 3;
    /// Its file is the process' own, which nothing seals, and which others may have mapped.
    pub const BORROWED: u8 = 1 << 4;
    pub const NOT_GRANTABLE: u8 = IMPORTED | REVOKED | TAKEN_BACK | BORROWED;
}

impl SegmentLease {
    pub fn new(descriptor: Option<(OwnedFd, Charge)>, charge: Charge) -> Arc<Self> {
        Arc::new(Self { descriptor, sharing: AtomicU8::new(0), _charge: charge })
    }

    /// Of a segment whose file the process made: it has no descriptor, and is never granted.
    pub fn borrowed(charge: Charge) -> Arc<Self> {
        Arc::new(Self { descriptor: None, sharing: AtomicU8::new(sharing::BORROWED), _charge: charge })
    }

    pub fn is_borrowed(&self) -> bool {
        // Relaxed: set before anybody else has it.
        self.sharing.load(Relaxed) & sharing::BORROWED != 0
    }

    pub fn descriptor(&self) -> Option<&OwnedFd> {
        self.descriptor.as_ref().map(|(descriptor, _)| descriptor)
    }

    /// Sets a bit unless one of the others is set. Control thread and worker both do it.
    fn mark(&self, bit: u8, others: u8) -> bool {
        // Relaxed, both: one word, which orders its own changes; nothing else is read by it.
        let mark = |before: u8| (before & others == 0).then_some(before | bit);
        self.sharing.fetch_update(Relaxed, Relaxed, mark).is_ok()
    }

    /// False: some of it is, or was, granted to other processes. Private copies that take its place
    /// would not be shared.
    pub fn mark_imported(&self) -> bool {
        self.mark(sharing::IMPORTED, sharing::GRANTED)
    }

    /// Whether it may be granted, now that somebody asks.
    pub fn mark_granted(&self) -> bool {
        self.mark(sharing::GRANTED, sharing::NOT_GRANTABLE)
    }

    /// Whether [`Self::mark_granted`] would do.
    pub fn may_be_granted(&self) -> bool {
        // Relaxed: as in `mark`.
        self.sharing.load(Relaxed) & sharing::NOT_GRANTABLE == 0
    }

    pub fn mark_revoked(&self) {
        self.mark(sharing::REVOKED, 0);
    }

    /// Nothing may be put there any more: others may still reach it.
    pub fn is_revoked(&self) -> bool {
        // Relaxed: as in `mark`.
        self.sharing.load(Relaxed) & sharing::REVOKED != 0
    }

    pub fn is_imported(&self) -> bool {
        // Relaxed: as in `mark`.
        self.sharing.load(Relaxed) & sharing::IMPORTED != 0
    }

    pub fn note_taken_back(&self) {
        self.mark(sharing::TAKEN_BACK, 0);
    }
}
