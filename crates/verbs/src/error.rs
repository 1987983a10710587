//! Why a verb was refused. The one table from these to errno is in `freeflow-abi`.
use core::fmt;
use serde::{Deserialize, Serialize};

/// Why a verb was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum VerbsError {
    /// An argument, a state transition or an attribute mask that the standard forbids. EINVAL.
    InvalidArgument,
    /// A resource or a limit of the vNIC is used up. ENOMEM.
    NoMemory,
    /// The object is still in use by another. EBUSY.
    Busy,
    /// FreeFlow does not do this (yet). EOPNOTSUPP.
    NotSupported,
    /// The memory is not mapped, or not with the rights asked for. EFAULT.
    BadAddress,
    /// Policy or ownership forbids it. EPERM.
    NotPermitted,
    /// No such object in this process. ENOENT.
    NotFound,
    /// It exists already. EEXIST.
    Exists,
    /// Nothing there now. EAGAIN.
    TryAgain,
    /// The router is gone, or this vNIC was taken away. EIO.
    DeviceFatal,
    /// The other side speaks another version of the protocol. EPROTONOSUPPORT.
    VersionMismatch,
    /// No route to that address. ENETUNREACH.
    Unreachable,
    /// No answer in bounded time. ETIMEDOUT.
    TimedOut,
    /// Another has this port. EADDRINUSE.
    AddressInUse,
    /// Not an address of this vNIC. EADDRNOTAVAIL.
    AddressNotAvailable,
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidArgument => "invalid argument",
            Self::NoMemory => "a resource or a limit of the vNIC is used up",
            Self::Busy => "the object is still in use",
            Self::NotSupported => "not supported",
            Self::BadAddress => "the memory is not mapped with the rights asked for",
            Self::NotPermitted => "not permitted",
            Self::NotFound => "no such object",
            Self::Exists => "it exists already",
            Self::TryAgain => "nothing there now",
            Self::DeviceFatal => "the router is gone or the vNIC was taken away",
            Self::VersionMismatch => "the other side speaks another version",
            Self::Unreachable => "no route to that address",
            Self::TimedOut => "no answer in bounded time",
            Self::AddressInUse => "another has this port",
            Self::AddressNotAvailable => "not an address of this vNIC",
        })
    }
}

impl core::error::Error for VerbsError {}
