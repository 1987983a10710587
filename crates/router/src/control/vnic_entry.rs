//! A vNIC as the control thread knows it.
use crate::admission::access::VnicIdentity;
use crate::admission::account::Account;
use crate::admission::violations::{Resource, Share};
use crate::attachment::{Attachment, guest};
use crate::base::deferred_drop::Closer;
use crate::base::log::Lines;
use crate::control::placement::Place;
use crate::control::session::NamedMemory;
use freeflow_cm::VnicRef;
use freeflow_engine::VnicId;
use freeflow_shm::Segment;
use freeflow_verbs::{Gid, Shaping, VerbsError, VnicLimits};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A vNIC as its sessions and the worker need it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub id: String,
    /// Of the container that it was made for.
    pub name: String,
    pub network: String,
    pub address: Ipv4Addr,
    /// In a network that has IPv6 addresses, too.
    pub address6: Option<Ipv6Addr>,
    pub labels: Vec<(String, String)>,
    pub limits: VnicLimits,
}

impl Record {
    /// Size of its shared-memory device, bytes: it is a virtual machine's. 0: not one that can be.
    pub fn guest_memory(&self) -> Option<u64> {
        let (_, bytes) = self.labels.iter().find(|(name, _)| name == guest::LABEL)?;
        Some(bytes.parse().unwrap_or(0))
    }

    pub fn gid(&self) -> Gid {
        Gid::from_ip(IpAddr::V4(self.address))
    }

    pub fn ipv6_gid(&self) -> Option<Gid> {
        self.address6.map(|address| Gid::from_ip(IpAddr::V6(address)))
    }

    /// Those of its addresses.
    pub fn gids(&self) -> impl Iterator<Item = Gid> + use<> {
        std::iter::once(self.gid()).chain(self.ipv6_gid())
    }
}

pub struct VnicEntry {
    pub record: Record,
    pub place: Place,
    /// Limits of its requests, as last sent to the worker.
    pub shaping: Shaping,
    pub engine_id: VnicId,
    pub listener: OwnedFd,
    /// Its name in connection management.
    pub cm: VnicRef,
    pub account: Arc<Account>,
    pub closer: Arc<Closer>,
    /// How its processes are reached.
    pub attachment: Arc<dyn Attachment>,
    /// It has ended, and its connections were closed.
    pub has_attachment_failed: bool,
    /// Connections whose processes are being looked at.
    pub identifying: u32,
    /// Frees memory, and nothing that a tenant could block.
    pub freer: Closer,
    pub lines: Lines,
    pub malformed_messages: u64,
    /// The Quotas that were last in the way of its programs, and when that was reported,
    /// nanoseconds.
    pub blamed: BTreeMap<(Share, Resource), (String, u64)>,
    /// Why the worker gave it up, last.
    pub failed: Option<&'static str>,
}

impl VnicEntry {
    /// New memory that its processes map, too: in the one file that they share with the router, or by `create`.
    ///
    /// # Errors
    /// NoMemory.
    pub fn new_memory(
        &self,
        bytes: usize,
        create: impl FnOnce(usize) -> io::Result<(Segment, OwnedFd)>,
    ) -> Result<(Segment, NamedMemory), VerbsError> {
        let made = match self.attachment.shared_memory() {
            Some(memory) => memory.part(bytes).map(|(segment, offset)| (segment, NamedMemory::Offset(offset))),
            None => create(bytes).map(|(segment, file)| (segment, NamedMemory::File(file))),
        };
        made.map_err(|_| VerbsError::NoMemory)
    }
}

pub fn directory(run_dir: &Path, id: &str) -> PathBuf {
    run_dir.join("vnics").join(id)
}

/// Identity of a vNIC, as rules see it.
pub fn identity_of(vnic: &Record) -> Arc<VnicIdentity> {
    let addresses = match vnic.address6 {
        Some(address6) => vec![vnic.address.into(), address6.into()],
        None => Vec::new(),
    };
    Arc::new(VnicIdentity { vnic: vnic.id.clone(), labels: vnic.labels.iter().cloned().collect(), addresses })
}
