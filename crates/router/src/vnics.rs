//! vNICs: made and ended by the CLI and by container hooks, remembered across restarts.
//!
//! Each has its own directory `RUN_DIR/vnics/ID` with its own socket, mounted into its container alone. The socket is open
//! to every user: being able to reach it is the permission. A restarted router puts a new socket into the same
//! directory, so that mounts stay valid.
use crate::account::Account;
use crate::admin::AdminDone;
use crate::closer::Closer;
use crate::control::{Control, Topic};
use crate::external;
use crate::jobs::Step;
use crate::log::{Lines, info};
use crate::rings::Vnic;
use crate::slab::Key;
use crate::sysfs;
use crate::sysfs_counters::remove_tree;
use crate::worker::Worker;
use freeflow_engine::{Usage, VnicCounters, VnicId};
use freeflow_orchestrator as orchestrator;
use freeflow_orchestrator::{Answer, Command, Refusal};
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, Counters, VnicStatus};
use freeflow_shm::fd;
use freeflow_verbs::{Gid, NetworkId, VerbsError};
use rustix::event::epoll;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everybody in the container may use its vNIC.
const SOCKET_MODE: u32 = 0o666;
const DIRECTORY_MODE: u32 = 0o755;

pub struct VnicEntry {
    pub record: orchestrator::Vnic,
    pub engine_id: VnicId,
    pub listener: OwnedFd,
    pub account: Arc<Account>,
    pub closer: Closer,
    pub lines: Lines,
    pub malformed_messages: u64,
    /// Why the worker gave it up, last.
    pub failed: Option<&'static str>,
}

pub fn directory(run_dir: &Path, id: &str) -> PathBuf {
    run_dir.join("vnics").join(id)
}

fn listen(run_dir: &Path, id: &str) -> io::Result<OwnedFd> {
    let directory = directory(run_dir, id);
    std::fs::create_dir_all(&directory)?;
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(DIRECTORY_MODE))?;
    let listener = fd::listen_seqpacket(directory.join("router.sock"), SOCKET_MODE)?;
    fd::refuse_descriptors(&listener)?;
    Ok(listener)
}

/// What the worker knows of a vNIC.
#[derive(Clone, Copy, Default)]
pub struct VnicNumbers {
    pub usage: Usage,
    pub counters: VnicCounters,
    pub fallback_bytes: u64,
    pub is_failed: bool,
}

impl VnicNumbers {
    pub fn counters(&self, malformed_messages: u64) -> Counters {
        let engine = &self.counters;
        Counters {
            messages: engine.messages,
            bytes: engine.bytes,
            fallback_bytes: self.fallback_bytes,
            completions_with_error: engine.completions_with_error,
            rnr_naks: engine.rnr_naks,
            retries_exceeded: engine.retries_exceeded,
            remote_access_errors: engine.remote_access_errors,
            malformed_descriptors: engine.malformed_descriptors,
            malformed_messages,
            undeliverable: engine.undeliverable,
        }
    }
}

pub fn add(sum: &mut Counters, more: &Counters) {
    sum.messages += more.messages;
    sum.bytes += more.bytes;
    sum.fallback_bytes += more.fallback_bytes;
    sum.completions_with_error += more.completions_with_error;
    sum.rnr_naks += more.rnr_naks;
    sum.retries_exceeded += more.retries_exceeded;
    sum.remote_access_errors += more.remote_access_errors;
    sum.malformed_descriptors += more.malformed_descriptors;
    sum.malformed_messages += more.malformed_messages;
    sum.undeliverable += more.undeliverable;
}

impl Worker {
    /// `external`: its second GID, if it has one.
    pub fn create_vnic(
        &mut self,
        network: NetworkId,
        record: &orchestrator::Vnic,
        external: Option<Gid>,
    ) -> Result<VnicId, VerbsError> {
        let id = self.engine.create_vnic(network, record.gid(), record.limits)?;
        self.engine.set_external_gid(id, external)?;
        self.rings.vnics.insert(id, Vnic { network, helper: None, abandoned: Vec::new(), fallback_bytes: 0 });
        Ok(id)
    }

    pub fn vnic_numbers(&self, id: VnicId) -> VnicNumbers {
        let vnic = self.rings.vnics.get(id);
        VnicNumbers {
            usage: self.engine.vnic_usage(id).unwrap_or_default(),
            counters: self.engine.vnic_counters(id).unwrap_or_default(),
            fallback_bytes: vnic.map_or(0, |vnic| vnic.fallback_bytes),
            is_failed: vnic.is_some_and(|vnic| vnic.abandoned.iter().any(|thread| !thread.has_ended())),
        }
    }
}

fn refused(refusal: Refusal) -> AdminReply {
    let code = match refusal {
        Refusal::BadName | Refusal::AddressOutside | Refusal::RangeOutside => AdminErrorCode::Invalid,
        Refusal::UnknownNetwork => AdminErrorCode::NotFound,
        Refusal::Different | Refusal::AddressInUse => AdminErrorCode::AlreadyExists,
        Refusal::Exhausted => AdminErrorCode::Exhausted,
    };
    AdminReply::Failed { code, message: refusal.to_string() }
}

pub(crate) fn failed_io(what: &str, error: &io::Error) -> AdminReply {
    AdminReply::Failed { code: AdminErrorCode::Io, message: format!("{what}: {error}") }
}

impl Control {
    /// After a restart: the sockets of the vNICs that were there. Runs before the worker has its thread.
    pub fn restore_vnics(&mut self, worker: &mut Worker) -> io::Result<()> {
        let records: Vec<orchestrator::Vnic> = self.state.vnics().cloned().collect();
        for record in records {
            let network = self.state.network(&record.network).ok_or_else(|| io::Error::other("no such network"))?;
            let external = self.external.gid(&record.network);
            let engine_id = worker.create_vnic(network.id, &record, external).map_err(io::Error::other)?;
            let listener = listen(&self.config.run_dir, &record.id)?;
            self.insert_vnic(record, engine_id, listener)?;
        }
        Ok(())
    }

    fn insert_vnic(&mut self, record: orchestrator::Vnic, engine_id: VnicId, listener: OwnedFd) -> io::Result<Key> {
        let id = record.id.clone();
        if let Some(network) = self.state.network(&record.network) {
            let tree = sysfs::directory(&directory(&self.config.run_dir, &id));
            let gids = external::gids(record.gid(), self.external.gid(&record.network));
            self.sysfs.add(engine_id, tree, &record, network.id, &gids);
        }
        self.peers.attached(&record.network, record.gid());
        let account = Arc::new(Account::new(self.commons.clone()));
        let (closer, lines, malformed_messages, failed) = (Closer::default(), Lines::default(), 0, None);
        let entry = VnicEntry { record, engine_id, listener, account, closer, lines, malformed_messages, failed };
        let key = self.vnics.insert(entry);
        self.vnics_by_id.insert(id, key);
        if let Some(entry) = self.vnics.get(key) {
            self.watch(entry.listener.as_fd(), Topic::VnicListener(key), epoll::EventFlags::IN)?;
        }
        Ok(key)
    }

    pub(crate) fn attach(
        &mut self,
        admin: Key,
        (id, name, network): (String, String, String),
        address: Option<IpAddr>,
        labels: Vec<(String, String)>,
    ) -> AdminDone {
        let limits = self.config.limits;
        let network_name = network.clone();
        let mut next = self.state.clone();
        let command = Command::Attach { id: id.clone(), name, network, address, labels, limits };
        match next.apply(&command) {
            Err(refusal) => return AdminDone::Reply(refused(refusal)),
            Ok(Answer::Unchanged) => return self.describe_vnic(admin, &id),
            Ok(Answer::Changed) => {}
        }
        let (Some(record), Some(network)) = (next.vnic(&id).cloned(), next.network(&network_name)) else {
            return AdminDone::Reply(refused(Refusal::UnknownNetwork));
        };
        let (network_id, external) = (network.id, self.external.gid(&network_name));
        let listener = match listen(&self.config.run_dir, &id).and_then(|listener| {
            self.store.save(&next)?;
            Ok(listener)
        }) {
            Ok(listener) => listener,
            Err(error) => {
                self.remove_directory(&id);
                return AdminDone::Reply(failed_io("can't make the vNIC's directory and socket", &error));
            }
        };
        self.state = next;
        self.admin_busy = true;
        let mut both = Some((record, listener));
        self.worker.submit(Box::new(move |worker, _| {
            let (record, listener) = both.take().expect("a job that is done is not run again");
            let created = worker.create_vnic(network_id, &record, external);
            Step::Done(Box::new(move |control: &mut Control| {
                control.finish_attach(admin, record, listener, created);
            }))
        }));
        AdminDone::Later
    }

    fn finish_attach(
        &mut self,
        admin: Key,
        record: orchestrator::Vnic,
        listener: OwnedFd,
        created: Result<VnicId, VerbsError>,
    ) {
        self.admin_busy = false;
        let (id, address) = (record.id.clone(), record.address);
        let inserted = match created {
            Ok(engine_id) => self.insert_vnic(record, engine_id, listener),
            Err(error) => Err(io::Error::other(error)),
        };
        let done = match inserted {
            Ok(_) => {
                info!("vNIC attached", vnic = id, address = address);
                self.describe_vnic(admin, &id)
            }
            Err(error) => {
                self.forget_vnic(&id);
                AdminDone::Reply(failed_io("the vNIC was refused", &error))
            }
        };
        self.finish_admin(admin, done);
    }

    /// Out of the state and off the disk; the worker has no part in it.
    fn forget_vnic(&mut self, id: &str) {
        let _ = self.state.apply(&Command::Detach { id: id.into() });
        if let Err(error) = self.store.save(&self.state) {
            info!("can't store the state", error = error);
        }
        if let Some(entry) = self.vnics_by_id.remove(id).and_then(|key| self.vnics.remove(key)) {
            self.unwatch(&entry.listener);
            self.peers.detached(&entry.record.network, entry.record.gid());
            self.sysfs.remove(entry.engine_id);
            let VnicEntry { mut closer, listener, .. } = entry;
            // With all that was never accepted.
            closer.close(listener, 1);
        }
        self.remove_directory(id);
    }

    fn remove_directory(&self, id: &str) {
        let directory = directory(&self.config.run_dir, id);
        let _ = std::fs::remove_file(directory.join("router.sock"));
        remove_tree(&sysfs::directory(&directory));
        // Anything else in it is not the router's, and then it stays.
        let _ = std::fs::remove_dir(&directory);
    }

    pub(crate) fn detach(&mut self, admin: Key, id: &str) -> AdminDone {
        let Some(vnic) = self.vnics_by_id.get(id).and_then(|&key| self.vnics.get(key)) else {
            return AdminDone::Reply(AdminReply::Done);
        };
        let engine_id = vnic.engine_id;
        self.close_connections_of(id);
        self.admin_busy = true;
        let (id, malformed) = (id.to_owned(), vnic_malformed(self, id));
        let mut held = Some(id);
        self.worker.submit(Box::new(move |worker, now| {
            let id = held.take().expect("a job that is done is not run again");
            let sessions = worker.destroy_sessions_of(now, engine_id);
            let counters = worker.vnic_numbers(engine_id).counters(malformed);
            let destroyed = worker.engine.destroy_vnic(engine_id);
            let vnic = worker.rings.vnics.remove(engine_id);
            Step::Done(Box::new(move |control: &mut Control| {
                drop((sessions, vnic));
                if let Err(error) = destroyed {
                    info!("the engine kept a vNIC", vnic = id, error = error);
                }
                add(&mut control.retired, &counters);
                control.forget_vnic(&id);
                info!("vNIC detached", vnic = id);
                control.admin_busy = false;
                control.finish_admin(admin, AdminDone::Reply(AdminReply::Done));
            }))
        }));
        AdminDone::Later
    }

    fn describe_vnic(&mut self, admin: Key, id: &str) -> AdminDone {
        let Some((&key, entry)) = self.vnics_by_id.get(id).and_then(|key| Some((key, self.vnics.get(*key)?))) else {
            return AdminDone::Reply(refused(Refusal::UnknownNetwork));
        };
        let engine_id = entry.engine_id;
        self.ask_worker(
            admin,
            move |worker| worker.vnic_numbers(engine_id),
            move |control, numbers| match control.vnic_status(key, &numbers) {
                Some(status) => AdminReply::Vnic(status),
                None => refused(Refusal::UnknownNetwork),
            },
        )
    }

    pub(crate) fn vnic_status(&self, key: Key, numbers: &VnicNumbers) -> Option<VnicStatus> {
        let entry = self.vnics.get(key)?;
        let network = self.state.network(&entry.record.network)?;
        Some(VnicStatus {
            id: entry.record.id.clone(),
            name: entry.record.name.clone(),
            network: entry.record.network.clone(),
            address: IpAddr::V4(entry.record.address),
            prefix_length: network.pool.prefix_length(),
            gateway: IpAddr::V4(network.gateway),
            directory: directory(&self.config.run_dir, &entry.record.id).display().to_string(),
            labels: entry.record.labels.clone(),
            session_count: numbers.usage.sessions,
            qp_count: numbers.usage.qps,
            mr_count: numbers.usage.mrs,
            registered_bytes: numbers.usage.registered_bytes,
            failed: entry.failed.filter(|_| numbers.is_failed).map(str::to_owned),
            counters: numbers.counters(entry.malformed_messages),
        })
    }

    /// The router ends in order: nobody finds its sockets any more. The directories stay, for the next router.
    pub fn remove_sockets(&self) {
        for (_, entry) in self.vnics.iter() {
            let _ = std::fs::remove_file(directory(&self.config.run_dir, &entry.record.id).join("router.sock"));
        }
        self.sysfs.mark_all_down();
    }
}

fn vnic_malformed(control: &Control, id: &str) -> u64 {
    let vnic = control.vnics_by_id.get(id).and_then(|&key| control.vnics.get(key));
    vnic.map_or(0, |vnic| vnic.malformed_messages)
}
