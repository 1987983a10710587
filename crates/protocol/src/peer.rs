//! Router ↔ router, over an authenticated and encrypted channel between two hosts of one peers file.
//!
//! Each message travels in a frame of its own, at most [`PEER_MESSAGE_BYTES_MAX`]. Both sides begin with
//! [`PeerMessage::Hello`], then announce all that they have, end that with [`PeerMessage::Synced`], and from then on
//! announce changes. Networks travel by name, because their numbers are each router's own.
//!
//! Decoding is total, see the crate's documentation. What a message claims is checked by its receiver.
use crate::version::Offer;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use freeflow_verbs::{Gid, QpType, Qpn};
use serde::{Deserialize, Serialize};

/// Versions and features of this release between routers. [`PeerMessage`] grows at the end only,
/// and a new variant is sent only after its feature bit was agreed on. A sealed host adds [`FEATURE_SEALED`].
pub const PEER_PROTOCOL: Offer =
    Offer { features: FEATURE_FRAMES | FEATURE_SELECTIVE | FEATURE_RECORDS | FEATURE_SHARDS, ..Offer::only(1) };
/// Packets of RC between the two hosts may be frames (`freeflow_wire::frame`).
pub const FEATURE_FRAMES: u64 = 1;
/// Beside frames: a responder may report which packets it keeps behind a missing one, and echoes marks of congestion
/// (ECN), so that packets of RC are ECN-capable.
pub const FEATURE_SELECTIVE: u64 = 1 << 1;
/// All packets between the two hosts are sealed (`freeflow_wire::sealed`). Who offers it requires it, too: a host is
/// either sealed or plain, and those of different kinds agree on nothing.
pub const FEATURE_SEALED: u64 = 1 << 2;
/// Beside frames: one may have several messages (`freeflow_wire::records`).
pub const FEATURE_RECORDS: u64 = 1 << 3;
/// The two routers know that each may have several engines ([`Shard`](freeflow_verbs::Shard)).
pub const FEATURE_SHARDS: u64 = 1 << 4;
/// Largest message, encoded, bytes.
pub const PEER_MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// A management datagram, bytes.
pub const MAD_BYTES: usize = 256;
/// Longest name of a host, bytes.
pub const HOST_NAME_BYTES_MAX: usize = 64;

/// A message between two routers. Fields: `network` is the network's name, `gid` an address of the
/// sender's in it unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum PeerMessage {
    /// First in each direction. `epoch` is random for each run of a router: another one means that
    /// whatever was learned of this host is void. The ICRC is computed between two hosts if both
    /// want it.
    Hello { offer: Offer, host: String, epoch: u64, icrc_wanted: bool },
    /// A vNIC with this address is on the sender's host.
    Attach { network: String, gid: Gid },
    /// No longer.
    Detach { network: String, gid: Gid },
    /// The sender has members of this multicast group; packets for them go to `qpn`. `None`: it has none any more.
    Group { network: String, gid: Gid, qpn: Option<Qpn> },
    /// All that the sender had when the connection began has been announced.
    Synced,
    /// Asks which QP is behind this QPN of the receiver's. → `Info`.
    Ask { qpn: Qpn },
    /// Describes the QP behind this QPN of the sender's: the answer to `Ask`, or unasked when it
    /// changed or is about to be needed. `None`: nobody.
    Info { qpn: Qpn, info: Option<QpInfo> },
    /// → `Pong` with the same stamp.
    Ping { stamp: u64 },
    /// Answer to `Ping`.
    Pong { stamp: u64 },
    /// Connection management: a MAD from a vNIC of the sender's to one of the receiver's. It may
    /// get lost between the two.
    Cm {
        network: String,
        from: Gid,
        to: Gid,
        /// [`MAD_BYTES`] long.
        mad: Vec<u8>,
    },
    /// The vNIC that has an address which the sender has announced, for access rules: its id and
    /// labels, and its other address, to which rules apply as well.
    Identity { network: String, gid: Gid, other: Option<Gid>, vnic: String, labels: Vec<(String, String)> },
    /// The sender's policy has ended the connection of the receiver's `qpn` with the sender's
    /// `peer`.
    Disconnected { qpn: Qpn, peer: Qpn },
    /// The sender's link to the receiver takes frames with so much payload; 0: none. Those between the two have what
    /// both take. Only after [`FEATURE_FRAMES`] was agreed on.
    Frames { payload_bytes: u16 },
    /// The sender will seal its packets to the receiver with this key, which nobody else knows, as soon as the receiver
    /// has it; until then with `in_use`. Only after [`FEATURE_SEALED`] was agreed on. → `SealKeyHeld`.
    SealKey { id: u32, in_use: Option<u32>, secret: SealSecret },
    /// The sender opens packets that are sealed with this key of the receiver's.
    SealKeyHeld { id: u32 },
    /// The sender's router has so many engines: the low bits of its QPNs say which has the QP. One that does not say
    /// has one. Only after [`FEATURE_SHARDS`] was agreed on, and before any other announcement.
    Shards { count: u8 },
}

/// Key and base of the nonces of sealed packets. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealSecret {
    /// Of AES-128-GCM.
    pub key: [u8; 16],
    /// See `freeflow_wire::sealed::SealHeader::nonce`.
    pub base: [u8; 12],
}

impl fmt::Debug for SealSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealSecret")
    }
}

/// A QP, as its router describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpInfo {
    /// Name of its network.
    pub network: String,
    /// Address that it is connected by.
    pub gid: Gid,
    /// UD: the vNIC's IPv6 address, if it has one beside `gid`.
    pub ipv6_gid: Option<Gid>,
    /// Its type.
    pub service: QpType,
    /// The peer of a connected QP that is ready to receive.
    pub connected: Option<(Gid, Qpn)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::VersionRange;
    use crate::{decode, encode};
    use proptest::prelude::*;

    /// Messages without labels stay far below the limit: many wait in a queue at a time.
    const SHORT_BYTES_MAX: usize = 1024;

    /// With everything as long as it gets.
    fn longest() -> Vec<PeerMessage> {
        let (network, gid, qpn) = ("n".repeat(128), Gid([0xff; 16]), Qpn(Qpn::MASK));
        let info = QpInfo {
            network: network.clone(),
            gid,
            ipv6_gid: Some(gid),
            service: QpType::Rc,
            connected: Some((gid, qpn)),
        };
        let host = "h".repeat(HOST_NAME_BYTES_MAX);
        let versions = VersionRange { lowest: u32::MAX, highest: u32::MAX };
        let offer = Offer { versions, features: u64::MAX, required_features: u64::MAX };
        let cm = PeerMessage::Cm { network: network.clone(), from: gid, to: gid, mad: alloc::vec![0xff; MAD_BYTES] };
        alloc::vec![
            PeerMessage::Hello { offer, host, epoch: u64::MAX, icrc_wanted: true },
            PeerMessage::Attach { network: network.clone(), gid },
            PeerMessage::Detach { network: network.clone(), gid },
            PeerMessage::Group { network, gid, qpn: Some(qpn) },
            PeerMessage::Synced,
            PeerMessage::Ask { qpn },
            PeerMessage::Info { qpn, info: Some(info) },
            PeerMessage::Ping { stamp: u64::MAX },
            PeerMessage::Pong { stamp: u64::MAX },
            cm,
            PeerMessage::Disconnected { qpn, peer: qpn },
            PeerMessage::Frames { payload_bytes: u16::MAX },
            PeerMessage::SealKey {
                id: u32::MAX,
                in_use: Some(u32::MAX),
                secret: SealSecret { key: [0xff; 16], base: [0xff; 12] },
            },
            PeerMessage::SealKeyHeld { id: u32::MAX },
            PeerMessage::Shards { count: u8::MAX },
        ]
    }

    #[test]
    fn messages_come_back_and_fit() {
        for message in longest() {
            let bytes = encode(&message);
            assert!(bytes.len() <= SHORT_BYTES_MAX, "{message:?}");
            assert_eq!(decode::<PeerMessage>(&bytes), Ok(message));
        }
    }

    #[test]
    fn all_labels_of_a_vnic_fit() {
        let labels = (0..64).map(|_| ("k".repeat(64), "v".repeat(64))).collect();
        let (network, vnic, gid) = ("n".repeat(128), "v".repeat(128), Gid([0xff; 16]));
        let identity = PeerMessage::Identity { network, gid, other: Some(gid), vnic, labels };
        let bytes = encode(&identity);
        assert!(bytes.len() <= PEER_MESSAGE_BYTES_MAX);
        assert_eq!(decode::<PeerMessage>(&bytes), Ok(identity));
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = decode::<PeerMessage>(&bytes) {
                prop_assert_eq!(decode::<PeerMessage>(&encode(&message)), Ok(message));
            }
        }
    }
}
