//! Messages of connection management between vNICs of two hosts.
use super::claims::ClaimSubject;
use super::state::{Note, Output, State};
use super::update::{Mad, MadEnds, Update};
use crate::admission::access::Key;
use crate::admission::address_map::AddressMap;
use freeflow_engine::HostId;
use freeflow_protocol::peer::PeerMessage;
use freeflow_verbs::NetworkId;
use std::sync::Arc;

impl State {
    /// Where addresses are, as it is declared here now.
    pub fn handle_address_map(&mut self, address_map: Arc<AddressMap>) {
        self.address_map = address_map;
    }

    /// A message of connection management: the sender speaks for its own vNICs alone, and to those
    /// that are here. `network` is the sender's.
    pub(super) fn handle_cm(&mut self, id: HostId, network: String, ends: MadEnds, mad: Box<Mad>) {
        let keys = self.keys_of(id, &network, ends);
        let Some((name, counters)) = self.named_counters(id) else { return };
        match keys {
            Some((from, to)) => {
                counters.received_cm += 1;
                self.outputs.push_back(Output::Update(Update::Cm { host: id, from, to, mad }));
            }
            None => {
                counters.refused_cm += 1;
                let (name, MadEnds { from, to }) = (name.to_owned(), ends);
                self.outputs.push_back(Output::Note(name, Note::RefusedCm { from, to, network }));
            }
        }
    }

    /// Both ends of a message, if the one is the host's and the other is here, and each finds the
    /// other where that is.
    fn keys_of(&self, id: HostId, network: &str, MadEnds { from, to }: MadEnds) -> Option<(Key, Key)> {
        let from = (*self.networks.get(network)?, from);
        let to = self.address_map.receiver(from, to)?;
        let subject = |(network, gid): Key| Some(ClaimSubject::Address { network: self.network_name(network)?, gid });
        let is_so = self.claims.is_owner(id, &subject(from)?) && self.claims.is_local(&subject(to)?);
        is_so.then_some((from, to))
    }

    /// Connection management, to a host that is connected. `has_room`: its connection is not behind
    /// with what it is sent.
    pub fn send_cm(&mut self, id: HostId, network: NetworkId, ends: MadEnds, mad: &Mad, has_room: bool) {
        let Some(network) = self.network_name(network).filter(|_| self.is_up(id)) else { return };
        let Some((_, counters)) = self.named_counters(id) else { return };
        if !has_room {
            counters.dropped_cm += 1;
            return;
        }
        counters.sent_cm += 1;
        let MadEnds { from, to } = ends;
        self.send(id, PeerMessage::Cm { network, from, to, mad: mad.to_vec() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::access::VnicIdentity;
    use crate::peering::file::{KEY_BYTES, PeerEntry, PeersFile};
    use freeflow_protocol::peer::{MAD_BYTES, PEER_PROTOCOL};
    use freeflow_verbs::{Gid, Instant};
    use std::collections::BTreeMap;

    const H: HostId = HostId(1);
    const NOW: Instant = Instant(1_000_000_000_000);
    const RED: NetworkId = NetworkId(7);
    const GREEN: NetworkId = NetworkId(8);
    const BLUE: NetworkId = NetworkId(9);

    fn gid(text: &str) -> Gid {
        Gid::from_ip(text.parse().unwrap())
    }

    /// Red and green of one tenant, with these first halves of addresses, and blue of another with green's.
    fn address_map(red: &str, green: &str) -> Arc<AddressMap> {
        let range = |half: &str| [(gid(&format!("{half}.0.0")), gid(&format!("{half}.255.255")))].into_iter();
        let networks = [(RED, "one", range(red)), (GREEN, "one", range(green)), (BLUE, "other", range(green))];
        Arc::new(AddressMap::new(networks.into_iter()))
    }

    /// This host has an address of green and of blue, the other one of red and of blue: the same ones in each case.
    struct Ends(State);

    const THERE: &str = "10.1.1.5";
    const HERE: &str = "10.2.2.5";

    impl Ends {
        fn new() -> Self {
            let peer = PeerEntry {
                host: "h1".into(),
                address: "192.0.2.1".parse().unwrap(),
                control_port: 4790,
                public_key: [1; KEY_BYTES],
                prefixes: ["10.0.0.0/8".parse().unwrap()].into_iter().collect(),
            };
            let file = PeersFile {
                host: "h2".into(),
                address: "192.0.2.2".parse().unwrap(),
                control_port: 4790,
                key_file: "key".into(),
                icrc: true,
                frames: true,
                sealed: false,
                peers: vec![peer],
                external: Vec::new(),
                dscp: 0,
            };
            let mut ends = Self(State::new(NOW, file, 2));
            for (name, network) in [("red", RED), ("green", GREEN), ("blue", BLUE)] {
                ends.0.handle_network(name, Some(network));
            }
            ends.attach("green", HERE);
            ends.0.handle_connected(NOW, H, 1);
            let (offer, host) = (PEER_PROTOCOL, "h1".into());
            ends.hears(PeerMessage::Hello { offer, host, epoch: 1, icrc_wanted: true });
            ends.announces("red", THERE);
            ends
        }

        fn attach(&mut self, network: &str, text: &str) {
            let identity = VnicIdentity { vnic: "v".into(), labels: BTreeMap::new(), addresses: Vec::new() };
            self.0.handle_address(network, gid(text), Some(Arc::new(identity)));
        }

        fn hears(&mut self, message: PeerMessage) {
            self.0.handle_message(NOW, 1, message, true);
        }

        fn announces(&mut self, network: &str, text: &str) {
            self.hears(PeerMessage::Attach { network: network.into(), gid: gid(text) });
        }

        /// Both ends named by a message of the other host; `None`: it is refused.
        fn relay(&mut self, network: &str, from: &str, to: &str) -> Option<(Key, Key)> {
            let refused = self.0.statuses()[0].counters.refused_cm;
            while self.0.poll_output().is_some() {}
            self.hears(PeerMessage::Cm {
                network: network.into(),
                from: gid(from),
                to: gid(to),
                mad: vec![9; MAD_BYTES],
            });
            let outputs: Vec<Output> = std::iter::from_fn(|| self.0.poll_output()).collect();
            let found = outputs.into_iter().find_map(|output| match output {
                Output::Update(Update::Cm { host: H, from, to, .. }) => Some((from, to)),
                _ => None,
            });
            assert_eq!(self.0.statuses()[0].counters.refused_cm - refused, u64::from(found.is_none()));
            found
        }
    }

    #[test]
    fn who_has_an_address_in_the_senders_tenant_is_spoken_to() {
        let mut ends = Ends::new();
        let across = Some(((RED, gid(THERE)), (GREEN, gid(HERE))));
        assert_eq!(ends.relay("red", THERE, HERE), None, "nothing is said of where addresses are");
        ends.0.handle_address_map(address_map("10.1", "10.2"));
        assert_eq!(ends.relay("red", THERE, HERE), across);
        assert_eq!(ends.relay("red", "10.1.1.6", HERE), None, "not the host's own");
        assert_eq!(ends.relay("green", THERE, HERE), None, "not in that network");
        assert_eq!(ends.relay("red", THERE, "10.2.2.6"), None, "not here");
        assert_eq!(ends.relay("red", THERE, THERE), None);
        // The other tenant's with the same addresses stay among themselves.
        ends.announces("blue", THERE);
        assert_eq!(ends.relay("blue", THERE, HERE), None);
        ends.attach("blue", HERE);
        assert_eq!(ends.relay("blue", THERE, HERE), Some(((BLUE, gid(THERE)), (BLUE, gid(HERE)))));
        assert_eq!(ends.relay("red", THERE, HERE), across);
        ends.0.handle_address("green", gid(HERE), None);
        assert_eq!(ends.relay("red", THERE, HERE), None, "blue's does not get what is for green's");
    }

    #[test]
    fn who_would_not_be_answered_is_not_heard() {
        let mut ends = Ends::new();
        // As this host sees it the sender's address is nobody's: those of green would look for it in green.
        ends.0.handle_address_map(address_map("10.9", "10.2"));
        assert_eq!(ends.relay("red", THERE, HERE), None);
        // Here it is green's own.
        ends.0.handle_address_map(address_map("10.2", "10.1"));
        ends.attach("red", HERE);
        assert_eq!(ends.relay("red", THERE, HERE), None);
        // Nobody's that it is may be in each network itself, as ever.
        ends.0.handle_address_map(address_map("10.8", "10.9"));
        assert_eq!(ends.relay("red", THERE, HERE), Some(((RED, gid(THERE)), (RED, gid(HERE)))));
    }
}
