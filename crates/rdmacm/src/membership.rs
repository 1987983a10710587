//! Memberships of multicast groups. `multicast` begins and ends them.
use crate::born::lock;
use crate::boundary::{Outcome, checked};
use crate::verbs;
use freeflow_abi::{gid_to_c, ibv_gid, ibv_qp};
use freeflow_verbs::{AddressHandleAttributes, Gid};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// A pointer of the program's, which is only given back.
pub(crate) struct Opaque(pub *mut c_void);

// SAFETY: never followed.
unsafe impl Send for Opaque {}
// SAFETY: the same.
unsafe impl Sync for Opaque {}

impl Opaque {
    pub fn as_ptr(&self) -> *const c_void {
        self.0
    }
}

/// An identifier's membership of a multicast group.
pub(crate) struct Membership {
    pub key: u64,
    pub id_key: u64,
    /// As the program named it: it names it so when it leaves.
    pub shown: Vec<u8>,
    pub address: Gid,
    pub context: Opaque,
    pub send_only: bool,
    /// The group that the QP was attached to.
    pub attached: Mutex<Option<ibv_gid>>,
    pub delivered: AtomicU32,
    pub completed: AtomicU32,
}

impl Membership {
    /// Counted with the identifier's state locked: SeqCst costs nothing there, and says what is
    /// meant.
    pub fn count_delivered(&self) {
        self.delivered.fetch_add(1, Ordering::SeqCst);
    }

    /// Before the identifier's own count, which wakes the waiter.
    pub fn count_completed(&self) {
        self.completed.fetch_add(1, Ordering::SeqCst);
    }

    pub fn is_acknowledged(&self) -> bool {
        self.completed.load(Ordering::SeqCst) >= self.delivered.load(Ordering::SeqCst)
    }

    /// The group is there: the identifier's QP is attached, if it shall receive.
    pub fn joined(&self, qp: Option<*mut ibv_qp>, group: &AddressHandleAttributes) -> Outcome<()> {
        let Some(qp) = qp.filter(|_| !self.send_only) else { return Ok(()) };
        let gid = gid_to_c(group.grh.map_or(self.address, |route| route.dgid));
        // SAFETY: the QP of an identifier exists; a local.
        checked(unsafe { verbs::ibv_attach_mcast(qp, &raw const gid, group.dlid) })?;
        *lock(&self.attached) = Some(gid);
        Ok(())
    }

    /// Detaches the identifier's QP.
    pub fn detach(&self, qp: Option<*mut ibv_qp>) {
        if let (Some(qp), Some(gid)) = (qp, lock(&self.attached).take()) {
            // SAFETY: the QP of an identifier exists; a local.
            unsafe { verbs::ibv_detach_mcast(qp, &raw const gid, 0) };
        }
    }
}
