//! Commands to the orchestrator, and its answers.
use crate::objects::{AnyObject, Cause, Labels, ObjectKind};
use crate::pool::Pool;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;
use freeflow_protocol::admin::DataPath;
use serde::Serialize;

/// All or nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Makes what is not there, changes what is. References among them hold in whatever order they come.
    Apply {
        objects: Vec<AnyObject>,
    },
    Delete {
        kind: ObjectKind,
        name: String,
        /// Only if it is at this resourceVersion.
        version: Option<u64>,
    },
    /// For a container: the same `id` again gives the vNIC that is there, if network and address
    /// agree. Its labels become these; a vNIC that was declared keeps those of its others that are
    /// not given.
    Attach {
        id: String,
        title: String,
        network: String,
        address: Option<IpAddr>,
        labels: Labels,
    },
    /// An unknown id is no error.
    Detach {
        id: String,
    },
    SetDataPath {
        network: String,
        path: DataPath,
    },
    /// A router begins: its host, and the network `default` as `freeflow up` has it.
    Begin {
        host: String,
        pool: Pool,
        range: Option<Pool>,
        bridge: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    Created,
    Configured,
    Unchanged,
    Deleted,
}

/// Result of a command for one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub kind: ObjectKind,
    pub name: String,
    pub what: Change,
    /// As it is now, or was before it was deleted; without status. Its resourceVersion is that of
    /// before until the plan is adopted.
    pub object: AnyObject,
}

/// The writes that a command comes to, of which none is done yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Keys of the store, and their new values; `None`: no longer.
    pub writes: Vec<(String, Option<Vec<u8>>)>,
    /// In the order of the command's objects.
    pub results: Vec<Outcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Reason {
    Invalid,
    NotFound,
    Forbidden,
    /// Somebody else has changed it meanwhile, or it is one that stays.
    Conflict,
    AlreadyExists,
    InUse,
    Exhausted,
    /// The store failed.
    Internal,
}

/// Why a command was refused; all is as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub message: String,
    /// The object that it is about.
    pub object: Option<(ObjectKind, String)>,
    pub causes: Vec<Cause>,
    /// Of `InUse`: `Vnic a`, …: all of them, or the first [`USER_COUNT_MAX`].
    pub users: Vec<String>,
}

/// Users that a refusal lists.
pub const USER_COUNT_MAX: usize = 10_000;

impl Refusal {
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), object: None, causes: Vec::new(), users: Vec::new() }
    }

    pub fn about(self, kind: ObjectKind, name: &str) -> Self {
        Self { object: Some((kind, name.to_string())), ..self }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.object {
            Some((kind, name)) => write!(f, "{kind} {name}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl core::error::Error for Refusal {}
