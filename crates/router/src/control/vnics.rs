//! vNICs: made and ended by the CLI and by container hooks, remembered across restarts.
//!
//! Each has its own directory `RUN_DIR/vnics/ID` with its own socket, mounted into its container
//! alone. The socket is open to every user: being able to reach it is the permission. A restarted
//! router puts a new socket into the same directory, so that mounts stay valid.
use crate::admission::account::Account;
use crate::attachment::Attachment;
use crate::attachment::guest::{Absent, Guest};
use crate::base::deferred_drop::Closer;
use crate::base::log::{Lines, info, warning};
use crate::base::slab::Key;
use crate::control::admin_connection::AdminDone;
use crate::control::external;
use crate::control::placement::Place;
use crate::control::shards::{parties, routes};
use crate::control::store_slot::QueuedCommand;
use crate::control::sysfs;
use crate::control::sysfs_counters::remove_tree;
use crate::control::thread::{Control, Topic};
use crate::control::vnic_entry::{Record, VnicEntry, directory, identity_of};
use crate::dataplane::command::{CreateVnic, DestroyVnic, DestroyedVnic, Fence, NewVnic, ReadVnics, VnicName};
use crate::dataplane::meters::VnicNumbers;
use crate::dataplane::worker::Worker;
use freeflow_engine::VnicId;
use freeflow_orchestrator::objects::ObjectKind;
use freeflow_orchestrator::{Command, Pool6, Reason, Refusal};
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, Counters, VnicStatus};
use freeflow_shm::fd;
use freeflow_verbs::{Gid, Instant, NetworkId, Shaping, VerbsError};
use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Everybody in the container may use its vNIC.
const SOCKET_MODE: u32 = 0o666;
const DIRECTORY_MODE: u32 = 0o755;

fn listen(run_dir: &Path, id: &str) -> io::Result<OwnedFd> {
    let directory = directory(run_dir, id);
    std::fs::create_dir_all(&directory)?;
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(DIRECTORY_MODE))?;
    let listener = fd::listen_seqpacket(directory.join("router.sock"), SOCKET_MODE)?;
    fd::refuse_descriptors(&listener)?;
    Ok(listener)
}

pub fn add(sum: &mut Counters, more: &Counters) {
    // Libraries' own counts are in these.
    sum.messages = sum.messages.saturating_add(more.messages);
    sum.bytes = sum.bytes.saturating_add(more.bytes);
    sum.direct_messages = sum.direct_messages.saturating_add(more.direct_messages);
    sum.direct_bytes = sum.direct_bytes.saturating_add(more.direct_bytes);
    sum.slow_path_bytes += more.slow_path_bytes;
    sum.blocked_copies += more.blocked_copies;
    sum.completions_with_error += more.completions_with_error;
    sum.rnr_naks += more.rnr_naks;
    sum.retries_exceeded += more.retries_exceeded;
    sum.remote_access_errors += more.remote_access_errors;
    sum.malformed_descriptors += more.malformed_descriptors;
    sum.malformed_messages += more.malformed_messages;
    sum.undeliverable += more.undeliverable;
}

/// `external`: its second GID, if it has one.
pub(crate) fn new_vnic(network: NetworkId, record: &Record, external: Option<Gid>) -> NewVnic {
    NewVnic {
        network,
        network_name: record.network.clone(),
        gid: record.gid(),
        ipv6_gid: record.ipv6_gid(),
        external_gid: external,
        limits: record.limits,
        identity: identity_of(record),
        is_guest: record.guest_memory().is_some(),
    }
}

pub(crate) fn refused(refusal: &Refusal) -> AdminReply {
    let code = match refusal.reason {
        Reason::Invalid => AdminErrorCode::Invalid,
        Reason::NotFound => AdminErrorCode::NotFound,
        Reason::AlreadyExists | Reason::Conflict | Reason::InUse => AdminErrorCode::AlreadyExists,
        Reason::Exhausted => AdminErrorCode::Exhausted,
        Reason::Forbidden => AdminErrorCode::NotPermitted,
        Reason::Internal => AdminErrorCode::Io,
    };
    AdminReply::Failed { code, message: refusal.to_string() }
}

pub(crate) fn failed_io(what: &str, error: &io::Error) -> AdminReply {
    AdminReply::Failed { code: AdminErrorCode::Io, message: format!("{what}: {error}") }
}

fn gone() -> AdminReply {
    AdminReply::Failed { code: AdminErrorCode::NotFound, message: "no such vNIC".into() }
}

impl Control {
    /// After a restart: what the networks' policies were, so that it holds before anybody connects,
    /// and the sockets of the vNICs that were there. Runs before the worker has its thread.
    pub(crate) fn restore_vnics(&mut self, workers: &mut [Worker]) -> io::Result<()> {
        let now = Instant(freeflow_shm::monotonic_ns());
        self.sweep_directories()?;
        // Before any vNIC has its place: limits of what is spread are divided.
        let changes = self.applied.change(&self.state);
        self.restore_access(workers);
        let ids: Vec<String> = self.state.vnics().map(|vnic| vnic.id().to_owned()).collect();
        let mut shapings = vec![Vec::new(); workers.len()];
        for id in ids {
            let Some((network, record, shaping)) = self.record_of(&id) else { continue };
            if self.is_unleased(&record.network) {
                // Its store says so soon.
                continue;
            }
            let place = self.place(network, &record);
            let shard = usize::from(place.shard);
            let vnic = new_vnic(network, &record, self.external_gid(&record.network, place.shard));
            let engine_id = workers[shard].create_vnic(&vnic).map_err(io::Error::other)?;
            shapings[shard].push((engine_id, shaping));
            let listener = self.prepare_vnic(&record.id)?;
            self.insert_vnic((record, shaping, place), engine_id, listener, true)?;
        }
        let policies = self.policies_of_shards(changes);
        for ((worker, policy), shapings) in workers.iter_mut().zip(policies).zip(shapings) {
            worker.set_policy(now, &policy);
            worker.set_shapings(now, &[], &shapings);
        }
        Ok(())
    }

    /// Directories of vNICs that there are no more: a router died between what it stored and what it did.
    fn sweep_directories(&self) -> io::Result<()> {
        for directory in std::fs::read_dir(self.config.run_dir.join("vnics"))? {
            let name = directory?.file_name();
            if let Some(id) = name.to_str().filter(|id| self.state.vnic(id).is_none()) {
                self.remove_directory(id);
            }
        }
        Ok(())
    }

    /// A vNIC as it follows from what is declared now.
    pub(crate) fn record_of(&self, id: &str) -> Option<(NetworkId, Record, Shaping)> {
        let vnic = self.state.vnic(id)?;
        let network = self.state.network(vnic.network())?.id;
        let labels = &vnic.object.metadata.labels;
        let record = Record {
            id: id.into(),
            name: vnic.title.clone(),
            network: vnic.network().into(),
            address: vnic.address,
            address6: vnic.address6,
            labels: labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
            limits: self.state.limits_of(vnic, self.config.limits),
        };
        Some((network, record, self.state.shaping_of(vnic)))
    }

    fn insert_vnic(
        &mut self,
        of: (Record, Shaping, Place),
        engine_id: VnicId,
        listener: OwnedFd,
        is_restored: bool,
    ) -> io::Result<Key> {
        let (record, shaping, place) = of;
        let id = record.id.clone();
        let network = self.state.network(&record.network).ok_or_else(|| io::Error::other("no such network"))?;
        // First: of one that can't be attached nothing is known anywhere.
        let (account, closer) = (Arc::new(Account::new(self.commons.clone())), Arc::<Closer>::default());
        let is_guest = record.guest_memory().is_some();
        let attachment: Arc<dyn Attachment> = match self.first_attachment(&record, account.clone(), closer.clone()) {
            // The others' router starts without it.
            Err(error) if is_restored && is_guest => {
                warning!("a virtual machine's vNIC can't be served; detach it", vnic = id, error = error);
                Arc::new(Absent)
            }
            made => made?,
        };
        if is_guest {
            // Its processes are no process of this host.
            let _ = std::fs::remove_file(directory(&self.config.run_dir, &id).join("router.sock"));
        }
        let identity = identity_of(&record);
        let external = self.external_gid(&record.network, place.shard);
        let cm = self.cm.attach(network.id, (record.gid(), record.ipv6_gid()), external);
        self.cm.access().set_network(network.id, &record.network);
        for gid in record.gids() {
            self.cm.access().set_vnic(network.id, gid, identity.clone());
            self.peers.attached(&record.network, gid, identity.clone());
        }
        let tree = sysfs::directory(&directory(&self.config.run_dir, &id));
        self.sysfs.add(engine_id, tree, &record, network.id, &external::gids(&record, external));
        self.name_network(place.shard, network.id, &record.network);
        let known = parties(network.id, &place.gids, &identity);
        self.tell_siblings(place.shard, &[routes(&place, Some(place.shard)), known].concat());
        let entry = VnicEntry {
            record,
            place,
            shaping,
            engine_id,
            listener,
            cm,
            attachment,
            account,
            closer,
            has_attachment_failed: false,
            identifying: 0,
            freer: Closer::default(),
            lines: Lines::default(),
            malformed_messages: 0,
            blamed: BTreeMap::new(),
            failed: None,
        };
        let key = self.vnics.insert(entry);
        self.vnics_by_id.insert(id, key);
        if let Some(entry) = self.vnics.get(key) {
            let data = epoll::EventData::new_u64(Topic::VnicListener(key).token());
            epoll::modify(&self.epoll, &entry.listener, data, epoll::EventFlags::IN)?;
        }
        Ok(key)
    }

    pub(crate) fn attach(
        &mut self,
        admin: Key,
        (id, title, network): (String, String, String),
        address: Option<IpAddr>,
        labels: Vec<(String, String)>,
    ) -> AdminDone {
        let labels = labels.into_iter().collect();
        let command = Command::Attach { id: id.clone(), title, network, address, labels };
        match self.admin_change(admin, "attach", command) {
            Err(refusal) => AdminDone::Reply(refused(&refusal)),
            Ok(_) => self.after_worker(move |control| {
                let done = control.describe_vnic(admin, &id);
                control.finish_admin(admin, done);
            }),
        }
    }

    pub(crate) fn detach(&mut self, admin: Key, id: &str) -> AdminDone {
        match self.admin_change(admin, "detach", Command::Detach { id: id.into() }) {
            Err(refusal) => AdminDone::Reply(refused(&refusal)),
            Ok(_) => self.after_worker(move |control| {
                control.finish_admin(admin, AdminDone::Reply(AdminReply::Done));
            }),
        }
    }

    /// A container has a declared vNIC, or has it no more.
    pub(crate) fn occupy(&mut self, key: Key, id: &str, container: String, occupied: bool) -> AdminReply {
        let who = self.admin_who(key);
        if occupied && self.state.vnic(id).is_none() {
            let reply = gone();
            self.note_failed(who, "attach", (ObjectKind::Vnic.name(), id), &reply);
            return reply;
        }
        if occupied == (self.occupied.get(id) == Some(&container)) {
            return AdminReply::Done;
        }
        self.note_occupied(who, id, &container, occupied);
        if occupied {
            self.occupied.insert(id.into(), container);
        } else {
            self.occupied.remove(id);
        }
        self.choose_mode();
        AdminReply::Done
    }

    /// When all is done that the worker was asked for until now.
    fn after_worker(&mut self, then: impl FnOnce(&mut Control) + Send + 'static) -> AdminDone {
        self.admin_busy = true;
        self.ask_all(
            |_| Fence {},
            move |control, _| {
                control.admin_busy = false;
                then(control);
            },
        );
        AdminDone::Later
    }

    /// The directory and the socket of a vNIC to be.
    pub(crate) fn prepare_vnic(&self, id: &str) -> io::Result<OwnedFd> {
        let prepared = listen(&self.config.run_dir, id).and_then(|listener| {
            // Nothing is awaited yet; but that there is room for it is sure.
            self.watch(listener.as_fd(), Topic::Waker, epoll::EventFlags::empty())?;
            Ok(listener)
        });
        prepared.inspect_err(|_| self.remove_directory(id))
    }

    /// A vNIC was stored: the worker makes it.
    pub(crate) fn make_vnic(&mut self, id: &str, listener: OwnedFd) {
        let Some((network, record, shaping)) = self.record_of(id) else { return };
        if self.is_unleased(&record.network) {
            // It goes with the others.
            return self.remove_directory(id);
        }
        let at = self.place(network, &record);
        let (shard, external) = (at.shard, self.external_gid(&record.network, at.shard));
        self.next_making += 1;
        let making = self.next_making;
        let place = Arc::new(OnceLock::new());
        self.making.insert(id.into(), (making, at, place.clone()));
        let command = CreateVnic { vnic: new_vnic(network, &record, external), shaping, place };
        self.ask(shard, command, move |control, made| {
            control.finish_making(making, (record, shaping, external), listener, made);
        });
    }

    fn finish_making(
        &mut self,
        making: u64,
        (record, shaping, external): (Record, Shaping, Option<Gid>),
        listener: OwnedFd,
        made: Result<VnicId, VerbsError>,
    ) {
        let (id, address) = (record.id.clone(), record.address);
        if self.making.get(&id).is_none_or(|(latest, ..)| *latest != making) {
            // It was deleted meanwhile, and may be there again: `end_vnic` saw to this one.
            return;
        }
        let Some((_, place, _)) = self.making.remove(&id) else { return };
        // The peers file or the network may say another thing since.
        let external_now = self.external_gid(&record.network, place.shard);
        if let Ok(engine_id) = made
            && external_now != external
        {
            self.give_external_gids(vec![(engine_id, external_now)]);
        }
        let inserted = match made {
            Ok(engine_id) => self.insert_vnic((record, shaping, place.clone()), engine_id, listener, false),
            Err(error) => Err(io::Error::other(error)),
        };
        let leave = move |control: &mut Self| control.placement.leave(&place);
        match inserted {
            Ok(key) => {
                info!("vNIC attached", vnic = id, address = address);
                self.publish_phase(&id);
                // Changes declared while the worker made it.
                self.publish_vnics(&[key]);
            }
            Err(error) => {
                warning!("a vNIC was refused", vnic = id, error = error);
                match made {
                    // Before the making of the next one that has its address.
                    Ok(engine_id) => {
                        self.destroy_vnic(engine_id.shard(), VnicName::Known(engine_id), id.clone(), 0, leave);
                    }
                    Err(_) => leave(self),
                }
                self.when_stored(QueuedCommand::ForgetVnic { id });
            }
        }
    }

    /// It is stored that a vNIC is gone: nobody finds it any more, its sessions end, and then it has no address.
    pub(crate) fn end_vnic(&mut self, id: &str) {
        self.occupied.remove(id);
        if let Some((_, at, place)) = self.making.remove(id) {
            // Behind its making, and before the making of the next one that has its address.
            self.destroy_vnic(at.shard, VnicName::Making(place), id.into(), 0, move |control| {
                control.placement.leave(&at);
            });
        }
        let Some((key, engine_id)) =
            self.vnics_by_id.remove(id).and_then(|key| Some((key, self.vnics.get(key)?.engine_id)))
        else {
            self.remove_directory(id);
            return;
        };
        self.close_connections_of(id);
        let malformed = self.vnics.get(key).map_or(0, |entry| entry.malformed_messages);
        if let Some(entry) = self.vnics.get(key) {
            self.unwatch(&entry.listener);
        }
        self.sysfs.remove(engine_id);
        self.remove_directory(id);
        self.destroy_vnic(engine_id.shard(), VnicName::Known(engine_id), id.into(), malformed, move |control| {
            let Some(entry) = control.vnics.remove(key) else { return };
            control.cm.detach(entry.cm);
            for gid in entry.record.gids() {
                control.peers.detached(&entry.record.network, gid);
            }
            control.forget_at_siblings(&entry.place);
            info!("vNIC detached", vnic = entry.record.id);
            let VnicEntry { closer, listener, attachment, .. } = entry;
            // With all that was never accepted, or not identified yet.
            closer.close((listener, attachment.take_waiting()), 1);
        });
    }

    fn destroy_vnic(
        &mut self,
        shard: u8,
        vnic: VnicName,
        id: String,
        malformed: u64,
        then: impl FnOnce(&mut Control) + Send + 'static,
    ) {
        self.ask(shard, DestroyVnic { vnic }, move |control, destroyed| {
            if let Some(destroyed) = destroyed {
                let DestroyedVnic { numbers, sessions, vnic, error } = *destroyed;
                drop(vnic);
                control.free(&id, sessions);
                if let Some(error) = error {
                    info!("the engine kept a vNIC", vnic = id, error = error);
                }
                add(&mut control.retired, &numbers.counters(malformed));
            }
            then(control);
        });
    }

    pub(crate) fn remove_directory(&self, id: &str) {
        let directory = directory(&self.config.run_dir, id);
        let _ = std::fs::remove_file(directory.join("router.sock"));
        Guest::remove(&directory);
        remove_tree(&sysfs::directory(&directory));
        // Anything else in it is not the router's, and then it stays.
        let _ = std::fs::remove_dir(&directory);
    }

    fn describe_vnic(&mut self, admin: Key, id: &str) -> AdminDone {
        let Some((&key, entry)) = self.vnics_by_id.get(id).and_then(|key| Some((key, self.vnics.get(*key)?))) else {
            return AdminDone::Reply(gone());
        };
        let engine_id = entry.engine_id;
        self.ask_for(
            admin,
            engine_id.shard(),
            ReadVnics { vnics: vec![engine_id], counts_direct: false },
            move |control, numbers| match numbers.first().and_then(|numbers| control.vnic_status(key, numbers)) {
                Some(status) => AdminReply::Vnic(status),
                None => gone(),
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
            gateway: IpAddr::V4(network.gateway()),
            address6: entry.record.address6,
            prefix_length6: network.pool6.map_or(0, Pool6::prefix_length),
            directory: directory(&self.config.run_dir, &entry.record.id).display().to_string(),
            labels: entry.record.labels.clone(),
            session_count: numbers.usage.sessions,
            qp_count: numbers.usage.qps,
            mr_count: numbers.usage.mrs,
            registered_bytes: numbers.usage.registered_bytes,
            worker: numbers.worker,
            shard: entry.engine_id.shard().into(),
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
