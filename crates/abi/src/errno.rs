//! The one table from refusals to errno.
use core::ffi::c_int;
use freeflow_verbs::VerbsError;

/// The errno that a program sees for `error`: the one that a NIC's driver gives in the same case.
pub const fn errno_of(error: VerbsError) -> c_int {
    match error {
        VerbsError::InvalidArgument => libc::EINVAL,
        VerbsError::NoMemory => libc::ENOMEM,
        VerbsError::Busy => libc::EBUSY,
        VerbsError::NotSupported => libc::EOPNOTSUPP,
        VerbsError::BadAddress => libc::EFAULT,
        VerbsError::NotPermitted => libc::EPERM,
        VerbsError::NotFound => libc::ENOENT,
        VerbsError::Exists => libc::EEXIST,
        VerbsError::TryAgain => libc::EAGAIN,
        VerbsError::DeviceFatal => libc::EIO,
        VerbsError::VersionMismatch => libc::EPROTONOSUPPORT,
        VerbsError::Unreachable => libc::ENETUNREACH,
        VerbsError::TimedOut => libc::ETIMEDOUT,
        VerbsError::AddressInUse => libc::EADDRINUSE,
        VerbsError::AddressNotAvailable => libc::EADDRNOTAVAIL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_is_success() {
        for error in [
            VerbsError::InvalidArgument,
            VerbsError::NoMemory,
            VerbsError::Busy,
            VerbsError::NotSupported,
            VerbsError::BadAddress,
            VerbsError::NotPermitted,
            VerbsError::NotFound,
            VerbsError::Exists,
            VerbsError::TryAgain,
            VerbsError::DeviceFatal,
            VerbsError::VersionMismatch,
            VerbsError::Unreachable,
            VerbsError::TimedOut,
            VerbsError::AddressInUse,
            VerbsError::AddressNotAvailable,
        ] {
            assert!(errno_of(error) > 0, "{error:?}");
        }
    }
}
