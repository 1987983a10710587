//! Requests of programs about connections, and the rounds of the control thread that keep them going.
use super::pipe::{EventPipe, PIPE_BYTES};
use super::{Cm, now, remotes};
use crate::admission::access::Rules;
use crate::admission::account::Charge;
use crate::base::slab::Key;
use crate::control::external::ExternalPolicy;
use crate::control::session::Answer;
use crate::control::session::{Handled, Outcome};
use crate::control::thread::{Control, Topic};
use crate::peering::{Mad, Update};
use freeflow_cm::{Link, Owner, Packet, Scope};
use freeflow_protocol::cm::{CM_EVENT_BYTES_MAX, CmEvent, CmReply, CmRequest};
use freeflow_protocol::library::{Handle, Reply};
use freeflow_verbs::{Gid, VerbsError};
use rustix::event::epoll;
use std::sync::Arc;

/// Messages within this host that are looked at before others have their turn.
const ROUND_LETTERS_MAX: usize = 256;

impl Control {
    pub(crate) fn handle_cm(&mut self, key: Key, request: CmRequest) -> Outcome {
        // The worker may have been at a step of it when it was closed: its owner has ended, and none would end another.
        if self.connections.get(key).is_none_or(|connection| connection.closing) {
            return Err(VerbsError::DeviceFatal);
        }
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?.cm;
        let owner = self.objects(key)?.cm;
        let owner = match owner {
            Some(owner) => owner,
            None => {
                let owner = self.cm.world.add_owner(key);
                self.objects(key)?.cm = Some(owner);
                owner
            }
        };
        let answer = match request {
            CmRequest::CreateChannel => self.create_cm_channel(key, owner)?,
            CmRequest::DestroyChannel { channel } => self.destroy_cm_channel(owner, channel)?,
            CmRequest::Repost { channel, records } => self.repost(owner, channel, records)?,
            request => {
                let Cm { machine, world, .. } = &mut self.cm;
                if let CmRequest::CreateId { channel, .. } | CmRequest::MigrateId { channel, .. } = &request {
                    world.owners.get(&owner).ok_or(VerbsError::NotFound)?.channels.get(*channel)?;
                }
                if let CmRequest::DestroyId { id } = &request {
                    world.forget_preparation(owner, *id);
                }
                let reply = machine.handle_request(world, now(), owner, vnic, &request)?;
                reply.map_or_else(Answer::done, |reply| Answer::of(Reply::Cm(reply)))
            }
        };
        Ok(Handled::Answered(answer))
    }

    fn create_cm_channel(&mut self, key: Key, owner: Owner) -> Result<Answer, VerbsError> {
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::channel(&vnic.account, u64::from(vnic.record.limits.channel_count_max))?;
        let (read, write) = vnic.attachment.event_channel(PIPE_BYTES).map_err(|_| VerbsError::NoMemory)?;
        let entry = self.cm.world.owners.get_mut(&owner).ok_or(VerbsError::DeviceFatal)?;
        let channel = entry.channels.insert(EventPipe::new(write, charge));
        Ok(Answer::with(Reply::Cm(CmReply::Channel { channel }), vec![read]))
    }

    fn destroy_cm_channel(&mut self, owner: Owner, channel: Handle) -> Result<Answer, VerbsError> {
        if self.cm.machine.channel_in_use(owner, channel) {
            return Err(VerbsError::Busy);
        }
        let pipe = self.cm.world.remove_channel(owner, channel).ok_or(VerbsError::NotFound)?;
        self.unwatch_pipe(&pipe);
        if let Some(watch) = self.cm.world.leave(owner, channel, pipe) {
            let entry = self.cm.world.owners.get(&owner);
            let pipe = entry.and_then(|entry| entry.leaving.get(&watch)).ok_or(VerbsError::NotFound)?;
            // Only that it has no reader any more, which is always reported.
            if self.watch(pipe.fd(), Topic::CmChannel(watch), epoll::EventFlags::empty()).is_err() {
                self.drop_leaving(watch, owner);
            }
        }
        Ok(Answer::done())
    }

    fn drop_leaving(&mut self, watch: u64, owner: Owner) -> bool {
        let entry = self.cm.world.owners.get_mut(&owner);
        let Some(pipe) = entry.and_then(|entry| entry.leaving.remove(&watch)) else { return false };
        self.cm.world.watches.remove(&watch);
        self.unwatch(pipe.fd());
        true
    }

    fn unwatch_pipe(&mut self, pipe: &EventPipe) {
        if let Some(watch) = pipe.watch {
            self.cm.world.watches.remove(&watch);
            self.unwatch(pipe.fd());
        }
    }

    /// The library's own records, which it could have written into that pipe itself.
    fn repost(&mut self, owner: Owner, channel: Handle, records: Vec<Vec<u8>>) -> Result<Answer, VerbsError> {
        let is_event = |record: &Vec<u8>| {
            record.len() <= CM_EVENT_BYTES_MAX && freeflow_protocol::decode::<CmEvent>(record).is_ok()
        };
        if !records.iter().all(is_event) {
            return Err(VerbsError::InvalidArgument);
        }
        self.cm.world.with_channel(owner, channel, |pipe| pipe.send_first(records))?;
        Ok(Answer::done())
    }

    /// The session is over: so are its connections.
    pub(crate) fn end_cm_owner(&mut self, owner: Owner) {
        let Cm { machine, world, .. } = &mut self.cm;
        machine.destroy_owner(world, now(), owner);
        let Some(entry) = world.owners.remove(&owner) else { return };
        for watch in entry.leaving.keys() {
            world.watches.remove(watch);
        }
        for pipe in entry.channels.values() {
            self.unwatch_pipe(pipe);
        }
        for pipe in entry.leaving.values() {
            self.unwatch(pipe.fd());
        }
    }

    /// The router ends in order: other hosts are notified that its connections do.
    pub(crate) fn end_cm(&mut self) {
        let owners: Vec<Owner> = self.cm.world.owners.keys().copied().collect();
        for owner in owners {
            self.end_cm_owner(owner);
        }
    }

    /// At the end of each round of the control thread: time has passed, messages within this host wait.
    pub(crate) fn run_cm(&mut self) {
        let now = now();
        self.follow_cm_policy(now);
        let Cm { machine, world, .. } = &mut self.cm;
        if machine.poll_timeout().is_some_and(|due| due <= now) {
            machine.handle_timeout(world, now);
        }
        for _ in 0..ROUND_LETTERS_MAX {
            let Some(letter) = world.letters.pop() else { break };
            let (from, to) = (letter.from, letter.to);
            let Some(scope) = world.arrival(letter.scope, from, to) else {
                world.lost.refused += 1;
                continue;
            };
            let packet = Packet { link: Link::Local, scope, from, to, mad: &letter.mad };
            machine.handle_packet(world, now, packet);
        }
        self.settle_cm();
    }

    /// Deals with QPs that are to be changed, channels that are full, and with who does not read them.
    fn settle_cm(&mut self) {
        self.prepare_qps();
        while let Some(watch) = self.cm.world.behind.pop() {
            let Some((owner, channel)) = self.cm.world.watches.get(&watch).copied() else { continue };
            let Some(entry) = self.cm.world.owners.get(&owner) else { continue };
            let Ok(pipe) = entry.channels.get(channel) else { continue };
            if self.watch(pipe.fd(), Topic::CmChannel(watch), epoll::EventFlags::OUT).is_err() {
                self.fail_session(entry.connection, "an event channel can't be watched");
            }
        }
        while let Some(key) = self.cm.world.failed.pop() {
            self.fail_session(key, "events of connection management are not read");
        }
    }

    /// A channel that was full has room, or one that was destroyed has nobody at its other end.
    pub(crate) fn handle_cm_room(&mut self, watch: u64) {
        let world = &mut self.cm.world;
        let Some(&(owner, channel)) = world.watches.get(&watch) else { return };
        if self.drop_leaving(watch, owner) {
            return;
        }
        let world = &mut self.cm.world;
        let paid = world.with_channel(owner, channel, EventPipe::pay);
        let Some(entry) = world.owners.get_mut(&owner).filter(|_| paid.is_ok()) else { return };
        if let Ok(pipe) = entry.channels.get_mut(channel)
            && !pipe.is_behind()
        {
            pipe.watch = None;
            world.watches.remove(&watch);
            let _ = epoll::delete(&self.epoll, pipe.fd());
        }
    }

    /// Something that the peers thread has found out.
    pub(crate) fn handle_peers_update(&mut self, update: Update) {
        let Cm { machine, world, .. } = &mut self.cm;
        match update {
            Update::Cm { host, from: (sender, from), to: (receiver, to), mad } => {
                let (link, scope) = (Link::Router(host.0), Scope::Network(receiver));
                // The peers thread may have known other networks.
                if world.arrival(Scope::Network(sender), from, to) != Some(scope) {
                    world.lost.refused += 1;
                    return;
                }
                machine.handle_packet(world, now(), Packet { link, scope, from, to, mad: &*mad });
            }
            Update::Party { network, gid, identity } => world.access.get_mut().set_remote(network, gid, identity),
            update => {
                match &update {
                    Update::Route { network, gid, host: Some(_) } => {
                        world.access.get_mut().set_remote(*network, *gid, None);
                        machine.handle_new_address(*gid);
                    }
                    Update::Route { network, gid, host: None } => world.access.get_mut().remove_remote(*network, *gid),
                    Update::HostUp { .. } | Update::Settings(_) => machine.handle_new_routes(),
                    _ => {}
                }
                let remotes = || remotes(machine);
                for link in world.places.handle_update(update, remotes) {
                    machine.handle_link_down(world, now(), link);
                }
            }
        }
    }

    /// A management datagram of an external machine.
    pub(crate) fn handle_management(&mut self, from: Gid, mad: &Mad) {
        let Cm { machine, world, .. } = &mut self.cm;
        let allowed = world.places.allows_external(from, None);
        let Some(to) = world.places.own_address().filter(|_| allowed) else {
            world.lost.refused += 1;
            return;
        };
        let number = world.places.external_number(from);
        let packet = Packet { link: Link::External(number), scope: Scope::External, from, to, mad };
        machine.handle_packet(world, now(), packet);
    }

    /// Rules are in force for connection management: on this host, and between hosts.
    pub(crate) fn set_cm_rules(&mut self, rules: Arc<Rules>) {
        self.peers.address_map(rules.address_map.clone());
        self.cm.set_rules(rules);
    }

    /// The peers file was read again: vNICs have another second address, or none.
    pub(crate) fn set_cm_externals(&mut self, policy: &ExternalPolicy) {
        for (_, entry) in self.vnics.iter() {
            self.cm.world.places.set_external(entry.cm, policy.gid(&entry.record.network));
        }
        self.cm.machine.handle_new_routes();
    }
}
