//! `fork`: the parent goes on as before; the child's use of its parent's objects fails with EIO,
//! and it may open the device again. Nothing needs to be asked for beforehand, because the router
//! reaches memory through the parent's page table and copy-on-write can't lead it astray.
use freeflow_abi::IBV_FORK_UNNEEDED;
use freeflow_client::Uncancelled;
use freeflow_client::fork::{control_descriptors, note_child};
use freeflow_remap::{after_fork_in_child, after_fork_in_parent, before_fork};
use std::ffi::{c_int, c_uint};
use std::sync::Once;

/// Runs in the child. Only async-signal-safe calls.
extern "C" fn in_child() {
    note_child();
    replace_control_descriptors();
    after_fork_in_child();
}

/// The parent's thread may have been about to be cancelled: `fork` is no cancellation point, though `close` is one.
fn replace_control_descriptors() {
    let _uncancelled = Uncancelled::begin();
    for control in control_descriptors() {
        // The copy of the connection would keep it open after the parent's end: put something inert
        // in its place.
        // SAFETY: plain descriptor calls; the descriptor is a session's and stays its own, at the
        // same number.
        unsafe {
            let inert = libc::eventfd(0, libc::EFD_CLOEXEC);
            if inert >= 0 {
                libc::dup3(inert, control, libc::O_CLOEXEC);
                libc::close(inert);
            }
        }
    }
}

/// Makes this process notice that it is a child. Called before the first session.
pub(crate) fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        // SAFETY: the handler lives as long as the library, which is never unloaded (-z nodelete).
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(in_child)) };
    });
}

/// `ibv_fork_init(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    watch();
    0
}

/// `ibv_is_fork_initialized(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> c_uint {
    IBV_FORK_UNNEEDED
}
