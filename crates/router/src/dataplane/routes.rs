//! Questions to other hosts and their answers, and management datagrams: the part of
//! [`fabric`](crate::dataplane::fabric) that concerns queue pairs, too.
use crate::dataplane::fabric::{Agreed, EXTERNAL_GID_INDEX, Host, MAD_FLOW};
use crate::dataplane::ports::Ports;
use crate::dataplane::siblings::{host_of, shard_of};
use crate::dataplane::worker::Worker;
use crate::peering::{Mad, SealMessage, Settings, Update};
use freeflow_engine::{GroupChange, HostId, Path, Source, SourceBody, Token, TransmitOutcome, VnicId, management_head};
use freeflow_protocol::peer::{FEATURE_FRAMES, FEATURE_RECORDS, FEATURE_SEALED, FEATURE_SELECTIVE};
use freeflow_verbs::{Gid, GlobalRoute, Instant, NetworkId, Psn, Qpn};

/// Changes of one QP that follow on each other are one, unless they concern two hosts: a QP that is brought to RTR
/// finds its way, and is somebody else.
fn merge_changes(changed: &mut Vec<(Qpn, Option<HostId>)>) {
    changed.dedup_by(|later, earlier| {
        let is_one = later.0 == earlier.0 && (later.1 == earlier.1 || later.1.is_none() || earlier.1.is_none());
        if is_one {
            earlier.1 = earlier.1.or(later.1);
        }
        is_one
    });
}

impl Ports {
    /// Sends a management datagram to a machine without FreeFlow, if some network may talk to it.
    pub(crate) fn send_management(&mut self, to: Gid, mad: &Mad) {
        let fabric = &mut self.fabric;
        let network = fabric.external.iter().find(|external| external.allow.iter().any(|prefix| prefix.contains(to)));
        let Some(network) = network.map(|external| external.network) else { return fabric.mads_lost += 1 };
        let host = fabric.external_host(network, to);
        let Some(destination) = host.and_then(|host| fabric.destination(host, MAD_FLOW)) else {
            return fabric.mads_lost += 1;
        };
        fabric.mad_psn = (fabric.mad_psn + 1) & Psn::MASK;
        let head = management_head(fabric.mad_psn);
        let body = Source { prefix: &[], body: SourceBody::Bytes(mad) };
        // The token is for what comes back later, and nothing does.
        if self.start_transmit(Token(u64::MAX), &destination, &[head], body) != TransmitOutcome::Sent {
            self.fabric.mads_lost += 1;
        }
    }

    pub(crate) fn find_path(&mut self, vnic: VnicId, to: NetworkId, route: &GlobalRoute) -> Path {
        if !self.fabric.has_hosts() {
            return Path::Local;
        }
        let Some(network) = self.vnics.get(vnic).map(|vnic| vnic.network) else { return Path::Local };
        let fabric = &mut self.fabric;
        let host = match route.sgid_index {
            EXTERNAL_GID_INDEX => fabric.external_host(network, route.dgid),
            _ => fabric.routes.get(&(to, route.dgid)).copied(),
        };
        let Some(host) = host else { return Path::Local };
        // All datagrams from one vNIC to one address are of one flow, unless they have labels.
        let flow = vnic.index ^ route.flow_label.rotate_left(12);
        fabric.destination(host, flow).map_or(Path::Local, Path::Wire)
    }
}

impl Worker {
    /// Something that the peers thread has found out.
    pub(crate) fn handle_peers_update(&mut self, now: Instant, update: Update) {
        let (fabric, engine, access) = (&mut self.ports.fabric, &mut self.engine, &mut self.ports.access);
        match update {
            Update::Settings(settings) => self.handle_settings(now, settings),
            Update::HostUp { host, address, icrc, epoch, agreed } => {
                let has = |feature| agreed.features & feature != 0;
                let (frames, sealed) = (has(FEATURE_FRAMES), has(FEATURE_SEALED));
                if fabric.set_host(host, address, Agreed { icrc, frames, sealed }, None) {
                    fabric.note_epoch(host, epoch);
                    fabric.set_features(host, frames && has(FEATURE_SELECTIVE), frames && has(FEATURE_RECORDS));
                    fabric.offer_key(host, now);
                    if frames {
                        fabric.peers.frames(host, fabric.own_frame_bytes(host));
                    }
                    engine.handle_peer_changed(&mut self.ports, now, host, None);
                }
            }
            // Its QPs have timers of their own, and it may be back before they expire; whether with
            // frames, it will say. Connections are the control thread's.
            Update::HostDown { host } => fabric.set_frame_bytes(host, 0),
            Update::Cm { .. } => {}
            Update::SealKey { host, id, in_use, secret } => {
                if fabric.accept_key(host, now, (id, in_use), &secret) {
                    fabric.peers.seal(host, SealMessage::Held { id });
                }
            }
            Update::SealKeyHeld { host, id } => fabric.use_key(host, now, id),
            Update::Shards { host, count } => fabric.set_shards(host, count),
            Update::Frames { host, payload_bytes } => fabric.set_frame_bytes(host, payload_bytes),
            Update::Route { network, gid, host: Some(host) } => {
                fabric.routes.insert((network, gid), host);
                access.set_remote(network, gid, None);
            }
            Update::Route { network, gid, host: None } => {
                fabric.routes.remove(&(network, gid));
                access.remove_remote(network, gid);
            }
            Update::Party { network, gid, identity } => access.set_remote(network, gid, identity),
            Update::Disconnected { host, qpn, peer } => engine.handle_disconnected(&mut self.ports, qpn, host, peer),
            Update::Peer { host, qpn, info } => {
                let is_kept = fabric.keeps_answer(host, qpn, info.as_ref());
                if let Some(entry) = fabric.hosts.get_mut(&host) {
                    if is_kept {
                        entry.note_answer(now, qpn, info);
                    }
                    engine.handle_peer_changed(&mut self.ports, now, host, Some(qpn));
                }
            }
            Update::Removed { host } => {
                fabric.remove_host(host);
                fabric.forget_removed(|host| engine.is_connected_to(host));
            }
            Update::PeersGone { host } => {
                fabric.forget_keys(host, now);
                self.forget_peers(now, host, Host::forget_all);
            }
            // The host keeps what it was told of ours, so it is notified as before.
            Update::AskAgain { host } => self.forget_peers(now, host, Host::forget_answers),
            Update::Group { host, network, gid, qpn } => fabric.set_group(host, (network, gid), qpn),
            Update::Asked { host, qpn } => {
                let info = engine.peer_info(qpn);
                if info.is_some() {
                    fabric.note_notified(host, qpn);
                }
                fabric.notify(host, qpn, info);
            }
        }
    }

    /// Nothing that the host has said of its QPs counts any more: it is asked for those that are needed.
    fn forget_peers(&mut self, now: Instant, host: HostId, forget: impl FnOnce(&mut Host)) {
        if let Some(entry) = self.ports.fabric.hosts.get_mut(&host) {
            forget(entry);
        }
        self.engine.handle_peer_changed(&mut self.ports, now, host, None);
    }

    fn handle_settings(&mut self, now: Instant, settings: Settings) {
        self.ports.fabric.handle_settings(settings);
        // A QP that is connected to a machine without FreeFlow may have lost its permission, or have it again.
        let external: Vec<HostId> = self.ports.fabric.hosts().filter(|host| host.2).map(|host| host.0).collect();
        for host in external {
            self.engine.handle_peer_changed(&mut self.ports, now, host, None);
        }
    }

    /// Notifies other routers which of our QPNs are somebody else now, and which groups have
    /// members here; then asks them what this turn wants to know.
    pub(crate) fn notify_peers(&mut self) {
        while let Some(GroupChange { network, group, qpn }) = self.engine.poll_group_change() {
            self.ports.fabric.announce_group(network, group, qpn);
        }
        let strangers = self.ports.fabric.siblings.as_mut().map(|siblings| siblings.strangers()).unwrap_or_default();
        for (shard, qpn) in strangers {
            self.ports.fabric.note_notified(host_of(shard), qpn);
            self.ports.fabric.notify(host_of(shard), qpn, self.engine.peer_info(qpn));
        }
        let mut changed = std::mem::take(&mut self.ports.fabric.changed);
        merge_changes(&mut changed);
        for (qpn, peer) in changed.drain(..) {
            let info = self.engine.peer_info(qpn);
            let fabric = &mut self.ports.fabric;
            if let Some(siblings) = &mut fabric.siblings {
                siblings.note_changed(qpn);
            }
            for host in fabric.listeners(qpn, peer, info.is_some()) {
                fabric.notify(host, qpn, info);
            }
        }
        let fabric = &mut self.ports.fabric;
        fabric.changed = changed;
        for (host, qpn) in fabric.questions.drain(..) {
            match (shard_of(host), &fabric.siblings) {
                (Some(shard), Some(siblings)) => siblings.ask(shard, qpn),
                // Too many commands: it is tried again when this question is due again.
                _ => drop(fabric.peers.ask(host, qpn)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_one_qp_are_one_unless_two_hosts_hear_of_them() {
        let (one, two) = (Some(HostId(1)), Some(HostId(2)));
        let merged = |changes: &[(u32, Option<HostId>)]| {
            let mut changed = changes.iter().map(|&(qpn, peer)| (Qpn(qpn), peer)).collect();
            merge_changes(&mut changed);
            changed.into_iter().map(|(qpn, peer)| (qpn.0, peer)).collect::<Vec<_>>()
        };
        assert_eq!(merged(&[(7, one), (7, None)]), [(7, one)]);
        assert_eq!(merged(&[(7, None), (7, one), (7, one)]), [(7, one)]);
        assert_eq!(merged(&[(7, None), (7, None)]), [(7, None)]);
        assert_eq!(merged(&[(7, one), (7, two)]), [(7, one), (7, two)]);
        assert_eq!(merged(&[(7, one), (8, None), (7, None)]), [(7, one), (8, None), (7, None)]);
    }
}
