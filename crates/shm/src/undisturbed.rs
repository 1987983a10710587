//! Times in which the calling thread is disturbed by nothing of the program's: by no signal handler,
//! which could call `fork` or another verb, and by no cancellation.
//!
//! A thread that has a lock of the library on which a fork may have to wait is undisturbed as long.
use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::forget;

/// Signals that a fault raises: blocked, they would end the process where the program handles them.
const SYNCHRONOUS: [c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
/// Signals that the C library uses itself.
const C_LIBRARY: [c_int; 2] = [32, 33];
/// Of `pthread.h`.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

thread_local! {
    /// How many times contain the present moment.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The signal mask and the cancellation state before the outermost.
    static BEFORE: Cell<(u64, c_int)> = const { Cell::new((0, 0)) };
}

/// `how`: SIG_BLOCK, SIG_UNBLOCK or SIG_SETMASK. Gives the mask before.
fn change_signal_mask(how: c_int, mask: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: both are valid signal sets of the kernel's size.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut before, size_of::<u64>()) };
    before
}

/// The signals that have no handler: they end the process, stop it, or do nothing.
fn unhandled() -> u64 {
    let is_unhandled = |signal: c_int| {
        // SAFETY: all zeroes are valid; the struct is ours to write.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let is_known = libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0;
            is_known && matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
        }
    };
    (1..=64).filter(|&signal| is_unhandled(signal)).fold(0, |mask, signal| mask | 1 << (signal - 1))
}

fn set_cancel_state(state: c_int) -> c_int {
    let mut before = 0;
    // SAFETY: `before` is ours to write.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

/// All signals but those; of signal `n`, bit `n - 1`.
const fn blocked() -> u64 {
    let mut mask = u64::MAX;
    let mut at = 0;
    while at < SYNCHRONOUS.len() + C_LIBRARY.len() {
        let signal = if at < SYNCHRONOUS.len() { SYNCHRONOUS[at] } else { C_LIBRARY[at - SYNCHRONOUS.len()] };
        mask &= !(1 << (signal - 1));
        at += 1;
    }
    mask
}

/// The thread that made it runs no signal handler until it is dropped, and is not cancelled. They
/// may be nested.
#[derive(Debug)]
pub struct Undisturbed(PhantomData<*const ()>);

impl Undisturbed {
    #[must_use]
    pub fn begin() -> Self {
        let depth = DEPTH.get();
        if depth == 0 {
            // The signals first: a handler that comes before finds all as it was.
            let mask = change_signal_mask(libc::SIG_BLOCK, blocked());
            BEFORE.set((mask, set_cancel_state(PTHREAD_CANCEL_DISABLE)));
        }
        DEPTH.set(depth + 1);
        Self(PhantomData)
    }

    /// Lets signals through that run no handler, so that a program which waits for long can be ended.
    pub fn admit_unhandled(&self) {
        let (before, _) = BEFORE.get();
        change_signal_mask(libc::SIG_UNBLOCK, unhandled() & !before);
    }

    /// It lasts until [`Self::kept`] is dropped.
    pub fn keep(self) {
        forget(self);
    }

    /// The one that this thread, or the parent of this child of `fork`, kept.
    #[must_use]
    pub fn kept() -> Self {
        Self(PhantomData)
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 {
            let (mask, state) = BEFORE.get();
            set_cancel_state(state);
            change_signal_mask(libc::SIG_SETMASK, mask);
        }
    }
}

/// The thread that made it is not cancelled until it is dropped. They may be nested.
#[derive(Debug)]
pub struct Uncancelled(c_int, PhantomData<*const ()>);

impl Uncancelled {
    #[must_use]
    pub fn begin() -> Self {
        Self(set_cancel_state(PTHREAD_CANCEL_DISABLE), PhantomData)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        set_cancel_state(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask_now() -> u64 {
        change_signal_mask(libc::SIG_BLOCK, 0)
    }

    fn cancel_state_now() -> c_int {
        let state = set_cancel_state(PTHREAD_CANCEL_DISABLE);
        set_cancel_state(state);
        state
    }

    #[test]
    fn the_outermost_ends_it() {
        let before = (mask_now(), cancel_state_now());
        {
            let _outer = Undisturbed::begin();
            let inner = Undisturbed::begin();
            drop(Uncancelled::begin());
            inner.keep();
            drop(Undisturbed::kept());
            let never = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
            assert_eq!((mask_now(), cancel_state_now()), (blocked() & !never, PTHREAD_CANCEL_DISABLE));
        }
        assert_eq!((mask_now(), cancel_state_now()), before);
    }

    #[test]
    fn a_signal_that_ends_the_program_is_admitted_if_nobody_handles_it() {
        extern "C" fn handle(_: c_int) {}
        // SAFETY: no other test uses this signal.
        unsafe { libc::signal(libc::SIGUSR2, handle as *const () as libc::sighandler_t) };
        let undisturbed = Undisturbed::begin();
        let is_blocked = |signal: c_int| mask_now() >> (signal - 1) & 1 == 1;
        assert!(is_blocked(libc::SIGUSR2) && is_blocked(libc::SIGTERM));
        undisturbed.admit_unhandled();
        assert!(is_blocked(libc::SIGUSR2) && !is_blocked(libc::SIGTERM));
    }

    #[test]
    fn faults_are_let_through() {
        assert_eq!(blocked() >> (libc::SIGSEGV - 1) & 1, 0);
        assert_eq!(blocked() >> (libc::SIGALRM - 1) & 1, 1);
        assert_eq!(blocked() >> 63, 1);
    }
}
