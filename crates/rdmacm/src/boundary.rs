//! The boundary to C: -1 and errno, and no panic beyond it.
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Or an errno.
pub(crate) type Outcome<T> = Result<T, c_int>;

pub(crate) fn set_errno(number: c_int) {
    // SAFETY: glibc gives the address of this thread's errno.
    unsafe { *libc::__errno_location() = number };
}

pub(crate) fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// The errno that a verb left; never 0, which would be success.
pub(crate) fn last_errno() -> c_int {
    match errno() {
        0 => libc::EIO,
        number => number,
    }
}

/// Runs the body of a call; a panic in it becomes EIO.
pub(crate) fn guarded<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(libc::EIO))
}

/// For calls that return 0, or -1 and set errno.
pub(crate) fn status(body: impl FnOnce() -> Outcome<()>) -> c_int {
    match guarded(body) {
        Ok(()) => 0,
        Err(number) => {
            set_errno(number);
            -1
        }
    }
}

/// For calls that return a pointer, or NULL and set errno.
pub(crate) fn pointer<T>(body: impl FnOnce() -> Outcome<*mut T>) -> *mut T {
    guarded(body).unwrap_or_else(|number| {
        set_errno(number);
        std::ptr::null_mut()
    })
}

/// For calls that have no way to fail.
pub(crate) fn quiet(body: impl FnOnce()) {
    let _ = guarded(|| {
        body();
        Ok(())
    });
}

/// Result of a verb that returns 0 or an errno.
pub(crate) fn checked(code: c_int) -> Outcome<()> {
    match code {
        0 => Ok(()),
        number if number > 0 => Err(number),
        _ => Err(last_errno()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_the_device() {
        assert_eq!(status(|| panic!("never crosses")), -1);
        assert_eq!(errno(), libc::EIO);
        assert!(pointer::<u8>(|| Err(libc::ENODEV)).is_null());
        assert_eq!(errno(), libc::ENODEV);
    }

    #[test]
    fn verbs_say_their_errno_in_two_ways() {
        assert_eq!(checked(0), Ok(()));
        assert_eq!(checked(libc::EBUSY), Err(libc::EBUSY));
        set_errno(libc::ENOMEM);
        assert_eq!(checked(-1), Err(libc::ENOMEM));
    }
}
