//! Commands to the orchestrator, and its answers.
use crate::objects::{AnyObject, Cause, Labels, ObjectKind};
use crate::pool::Pool;
use crate::store::Revision;
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
        /// The objects, as their writer gives them.
        objects: Vec<AnyObject>,
    },
    /// The same, of what is declared for all hosts of a cluster: its vNICs have addresses of the networks' `floating`
    /// parts, and no others.
    ApplyForCluster {
        /// The objects, as the cluster has them.
        objects: Vec<AnyObject>,
    },
    /// Deletes an object that nothing uses.
    Delete {
        /// Kind of the object.
        kind: ObjectKind,
        /// Name of the object.
        name: String,
        /// Only if it is at this resourceVersion.
        version: Option<u64>,
    },
    /// For a container: the same `id` again gives the vNIC that is there, if network and address
    /// agree. Its labels become these; a vNIC that was declared keeps those of its others that are
    /// not given.
    Attach {
        /// Id of the vNIC.
        id: String,
        /// Name of the container.
        title: String,
        /// Name of the network.
        network: String,
        /// The address that is asked for; `None`: any free one.
        address: Option<IpAddr>,
        /// Labels of the vNIC.
        labels: Labels,
    },
    /// An unknown id is no error.
    Detach {
        /// Id of the vNIC.
        id: String,
    },
    /// Sets the data path of a network (`freeflow network set`).
    SetDataPath {
        /// Name of the network.
        network: String,
        /// The data path.
        path: DataPath,
    },
    /// A router begins: its host, and the network `default` as `freeflow up` has it.
    Begin {
        /// Name of the host.
        host: String,
        /// Pool of the network `default`.
        pool: Pool,
        /// The part of it that this host gives out.
        range: Option<Pool>,
        /// Name of its bridge.
        bridge: String,
    },
}

/// Kind of change to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// It was made.
    Created,
    /// Its labels or its spec are others.
    Configured,
    /// It is as it was.
    Unchanged,
    /// It is gone.
    Deleted,
}

/// Result of a command for one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Kind of the object.
    pub kind: ObjectKind,
    /// Name of the object.
    pub name: String,
    /// The change.
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

impl Plan {
    /// The results, once the writes are stored as this revision.
    pub fn into_results(self, revision: Revision) -> Vec<Outcome> {
        let mut results = self.results;
        for outcome in &mut results {
            if matches!(outcome.what, Change::Created | Change::Configured) {
                outcome.object.metadata_mut().resource_version = Some(revision.0);
            }
        }
        results
    }
}

/// Kind of a refusal; the REST server has an HTTP status for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Reason {
    /// A field has a value that can't be.
    Invalid,
    /// No such object.
    NotFound,
    /// A rule of the orchestrator, or the tenant's share, forbids it.
    Forbidden,
    /// Somebody else has changed it meanwhile, or it is one that stays.
    Conflict,
    /// The name, or the address, is taken.
    AlreadyExists,
    /// Other objects use it.
    InUse,
    /// No room is left: addresses, bytes, or objects.
    Exhausted,
    /// The store failed.
    Internal,
}

impl Reason {
    /// HTTP's status for it.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Invalid => 422,
            Self::NotFound => 404,
            Self::Forbidden => 403,
            Self::Conflict | Self::AlreadyExists | Self::InUse => 409,
            Self::Exhausted => 507,
            Self::Internal => 500,
        }
    }

    /// Its word in answers.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Invalid => "Invalid",
            Self::NotFound => "NotFound",
            Self::Forbidden => "Forbidden",
            Self::Conflict => "Conflict",
            Self::AlreadyExists => "AlreadyExists",
            Self::InUse => "InUse",
            Self::Exhausted => "Exhausted",
            Self::Internal => "Internal",
        }
    }
}

/// Why a command was refused; all is as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Kind of refusal.
    pub reason: Reason,
    /// A sentence for people.
    pub message: String,
    /// The object that it is about.
    pub object: Option<(ObjectKind, String)>,
    /// Errors by field, of `Invalid`.
    pub causes: Vec<Cause>,
    /// Of `InUse`: `Vnic a`, …: all of them, or the first [`USER_COUNT_MAX`].
    pub users: Vec<String>,
}

/// Users that a refusal lists.
pub const USER_COUNT_MAX: usize = 10_000;

impl Refusal {
    /// A refusal without object, causes and users.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), object: None, causes: Vec::new(), users: Vec::new() }
    }

    /// The same refusal, of an object.
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
