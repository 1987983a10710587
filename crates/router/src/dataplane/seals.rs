//! Keys of sealed hosts: the worker's sockets draw and use them, the peers thread brings them to the other host.
//!
//! A key is offered when a host comes up, before anything is asked of it, and the other host says that it has it before
//! it answers: so requests of connected QPs, which wait for such an answer (W1), find a key. (The first acknowledgement
//! may come before the word that the key is there, and is repeated.)
use crate::base::log::warning;
use crate::dataplane::fabric::Fabric;
use crate::peering::SealMessage;
use freeflow_backend::{KeyOffer, PeerIndex};
use freeflow_engine::HostId;
use freeflow_protocol::peer::SealSecret;
use freeflow_verbs::Instant;

fn message(offer: KeyOffer) -> SealMessage {
    let KeyOffer { id, in_use, secret } = offer;
    SealMessage::Key { id, in_use, secret: SealSecret { key: secret.key, base: secret.base } }
}

impl Fabric {
    /// From now on nothing goes to a router, or is taken from one, that is not sealed.
    pub(crate) fn seal_hosts(&mut self) {
        let Some(udp) = &mut self.udp else { return };
        for (id, _) in self.hosts.iter().filter(|(_, host)| host.external.is_none()) {
            udp.set_sealed(PeerIndex(id.0));
        }
    }

    /// A host is up: if it is sealed, it gets a key.
    pub(crate) fn offer_key(&mut self, id: HostId, now: Instant) {
        let Some(udp) = &mut self.udp else { return };
        match udp.offer_key(PeerIndex(id.0), now.0) {
            Ok(Some(offer)) => self.peers.seal(id, message(offer)),
            Ok(None) => {}
            Err(error) => warning!("no key for a sealed host yet", error = error),
        }
    }

    /// A host has a key of its own that it will seal with. False: it is not sealed.
    pub(crate) fn accept_key(
        &mut self,
        id: HostId,
        now: Instant,
        (key, in_use): (u32, Option<u32>),
        secret: &SealSecret,
    ) -> bool {
        let Some(udp) = &mut self.udp else { return false };
        let secret = freeflow_backend::SealSecret { key: secret.key, base: secret.base };
        udp.accept_key(PeerIndex(id.0), now.0, &KeyOffer { id: key, in_use, secret })
    }

    /// A host has this key of ours.
    pub(crate) fn use_key(&mut self, id: HostId, now: Instant, key: u32) {
        if let Some(udp) = &mut self.udp {
            udp.use_key(PeerIndex(id.0), now.0, key);
        }
    }

    pub(crate) fn forget_keys(&mut self, id: HostId, now: Instant) {
        if let Some(udp) = &mut self.udp {
            udp.forget_keys(PeerIndex(id.0), now.0);
        }
    }

    /// Brings hosts the keys that replace worn ones.
    pub(crate) fn renew_keys(&mut self, now: Instant) {
        while let Some(udp) = &mut self.udp
            && let Some((index, offer)) = udp.poll_key(now.0)
        {
            self.peers.seal(HostId(index.0), message(offer));
        }
    }

    /// When [`Self::renew_keys`] has something to do.
    pub(crate) fn keys_due(&self) -> Option<Instant> {
        self.udp.as_ref().map(|udp| udp.keys_due_ns()).filter(|&due_ns| due_ns != u64::MAX).map(Instant)
    }
}
