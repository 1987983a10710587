//! Messages of connection management between vNICs of two hosts.
use super::claims::Subject;
use super::state::{Note, Output, State};
use super::update::{Mad, Update};
use freeflow_engine::HostId;
use freeflow_protocol::peer::{FEATURE_CM, PeerMessage};
use freeflow_verbs::{Gid, NetworkId};

impl State {
    /// A message of connection management: the sender speaks for its own vNICs alone, and to those that are here.
    pub(super) fn handle_cm(&mut self, id: HostId, network: String, (from, to): (Gid, Gid), mad: Box<Mad>) {
        let number = self.networks.get(&network).copied();
        let (sender, receiver) =
            (Subject::Address { network: network.clone(), gid: from }, Subject::Address { network, gid: to });
        let found = number.filter(|_| self.claims.is_owner(id, &sender) && self.claims.is_local(&receiver));
        let Some((name, counters)) = self.named_counters(id) else { return };
        match found {
            Some(network) => {
                counters.received_cm += 1;
                self.outputs.push_back(Output::Update(Update::Cm { host: id, network, from, to, mad }));
            }
            None => {
                counters.refused_cm += 1;
                let (name, network) = (name.to_owned(), receiver.network().into());
                self.outputs.push_back(Output::Note(name, Note::RefusedCm { from, to, network }));
            }
        }
    }

    /// Connection management, to a host that understands it. `has_room`: its connection is not behind with what it is sent.
    pub fn send_cm(&mut self, id: HostId, network: NetworkId, (from, to): (Gid, Gid), mad: &Mad, has_room: bool) {
        let understands = self.features(id) & FEATURE_CM != 0;
        let Some(network) = self.network_name(network).filter(|_| understands) else { return };
        let Some((_, counters)) = self.named_counters(id) else { return };
        if !has_room {
            counters.dropped_cm += 1;
            return;
        }
        counters.sent_cm += 1;
        self.send(id, PeerMessage::Cm { network, from, to, mad: mad.to_vec() });
    }
}
