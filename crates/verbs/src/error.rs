//! Why a verb was refused. The one table from these to errno is in `freeflow-abi`.
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a verb was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Error)]
pub enum VerbsError {
    /// An argument, a state transition or an attribute mask that the standard forbids. EINVAL.
    #[error("invalid argument")]
    InvalidArgument,
    /// A resource or a limit of the vNIC is used up. ENOMEM.
    #[error("a resource or a limit of the vNIC is used up")]
    NoMemory,
    /// The object is still in use by another. EBUSY.
    #[error("the object is still in use")]
    Busy,
    /// FreeFlow does not do this (yet). EOPNOTSUPP.
    #[error("not supported")]
    NotSupported,
    /// The memory is not mapped, or not with the rights asked for. EFAULT.
    #[error("the memory is not mapped with the rights asked for")]
    BadAddress,
    /// Policy or ownership forbids it. EPERM.
    #[error("not permitted")]
    NotPermitted,
    /// No such object in this process. ENOENT.
    #[error("no such object")]
    NotFound,
    /// It exists already. EEXIST.
    #[error("it exists already")]
    Exists,
    /// Nothing there now. EAGAIN.
    #[error("nothing there now")]
    TryAgain,
    /// The router is gone, or this vNIC was taken away. EIO.
    #[error("the router is gone or the vNIC was taken away")]
    DeviceFatal,
    /// The other side speaks another version of the protocol. EPROTONOSUPPORT.
    #[error("the other side speaks another version")]
    VersionMismatch,
    /// No route to that address. ENETUNREACH.
    #[error("no route to that address")]
    Unreachable,
    /// No answer in bounded time. ETIMEDOUT.
    #[error("no answer in bounded time")]
    TimedOut,
    /// Another has this port. EADDRINUSE.
    #[error("another has this port")]
    AddressInUse,
    /// Not an address of this vNIC. EADDRNOTAVAIL.
    #[error("not an address of this vNIC")]
    AddressNotAvailable,
}
