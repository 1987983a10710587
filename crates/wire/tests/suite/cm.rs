//! Messages of connection management: those that two Linux hosts sent each other (rdma_cm over rxe,
//! kernel 6.1) decode and re-encode byte for byte; any others decode or are refused.
use crate::list;
use freeflow_wire::Header;
use freeflow_wire::cm::{
    Apr, Drep, Dreq, IpHeader, Kind, Lap, MAD_BYTES, MAD_QKEY, MAD_QPN, Mad, Malformed, Message, Mra, Rej, Rep, Req,
    Rtu, SidrRep, SidrReq, Transport,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::fmt::Write;

const CAPTURES: [(&str, usize); 4] =
    [("cm_reject.pcap", 2), ("cm_rping.pcap", 5), ("cm_rstream.pcap", 5), ("cm_udaddy.pcap", 2)];

/// MADs to QP 1 in a capture of Ethernet frames with IPv4.
fn mads(name: &str) -> Vec<[u8; MAD_BYTES]> {
    let file = std::fs::read(format!("{}/tests/pcaps/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    let (mut found, mut at) = (Vec::new(), 24);
    while at < file.len() {
        let frame = &file[at + 16..at + 16 + word(at + 8)];
        at += 16 + frame.len();
        let datagram = &frame[14 + 20 + 8..frame.len() - 4];
        let (header, payload) = Header::parse(datagram).unwrap();
        if header.dest_qpn == MAD_QPN {
            assert_eq!((header.deth.qkey, header.deth.source_qpn), (MAD_QKEY, MAD_QPN));
            found.push(payload.try_into().unwrap());
        }
    }
    found
}

#[test]
fn recorded_messages_decode_and_re_encode_byte_for_byte() {
    for (name, count) in CAPTURES {
        let mads = mads(name);
        assert_eq!(mads.len(), count, "{name}");
        for (number, bytes) in mads.iter().enumerate() {
            let mad = Mad::decode(bytes).unwrap_or_else(|error| panic!("{name} {number}: {error:?}"));
            assert_eq!(&mad.encode(), bytes, "{name} {number}: {mad:x?}");
        }
    }
}

/// Contents of the captures, as a reviewed list: an error that encoding and decoding share would
/// show here.
#[test]
fn recorded_messages_say_what_is_listed() {
    let mut text = String::new();
    for (name, _) in CAPTURES {
        for bytes in mads(name) {
            let mad = Mad::decode(&bytes).unwrap();
            let printed = format!("{:x?}", mad.message);
            // Private data is long, and mostly zeros.
            let printed = printed.split(", private_data").next().unwrap();
            writeln!(text, "{name} {} tid {:x} {printed}", mad.message.kind().name(), mad.transaction_id).unwrap();
            let header = match &mad.message {
                Message::Req(req) => IpHeader::decode(&req.private_data),
                Message::SidrReq(request) => IpHeader::decode(&request.private_data),
                _ => continue,
            };
            let header = header.unwrap();
            let bytes = header.encode();
            match &mad.message {
                Message::Req(req) => assert_eq!(bytes, req.private_data[..IpHeader::BYTES]),
                Message::SidrReq(request) => assert_eq!(bytes, request.private_data[..IpHeader::BYTES]),
                _ => {}
            }
            writeln!(text, "{name} {header:x?}").unwrap();
        }
    }
    list::compare("cm.txt", &text);
}

/// Each field alone, all bits set: where it stands, and that no two stand in the same place.
#[test]
fn fields_do_not_overlap() {
    fn set(message: Message) -> Vec<usize> {
        let bytes = Mad::new(0, message).encode();
        (24 * 8..MAD_BYTES * 8).filter(|bit| bytes[bit / 8] >> (7 - bit % 8) & 1 == 1).map(|bit| bit - 24 * 8).collect()
    }
    macro_rules! fields {
        ($kind:ident { $($field:ident = $value:expr),* $(,)? }, $total:expr) => {{
            let mut seen = std::collections::BTreeSet::new();
            let mut total = 0;
            $(
                let bits = set(Message::$kind($kind { $field: $value, ..$kind::default() }));
                assert!(!bits.is_empty(), stringify!($field));
                total += bits.len();
                seen.extend(bits);
            )*
            assert_eq!(seen.len(), total, stringify!($kind));
            assert_eq!(total, $total, stringify!($kind));
        }};
    }
    let all = u32::MAX;
    fields!(Mra { local_comm_id = all, remote_comm_id = all, about = 255, service_timeout = 255, private_data = [255; 222] }, 64 + 7 + 1776);
    fields!(Rej { local_comm_id = all, remote_comm_id = all, about = 255, information_length = 255, reason = 65535, information = [255; 72], private_data = [255; 148] }, 64 + 2 + 7 + 16 + 576 + 1184);
    fields!(Rep { local_comm_id = all, remote_comm_id = all, local_qkey = all, local_qpn = all, vendor_id_high = 255, local_eecn = all, vendor_id_middle = 255, starting_psn = all, vendor_id_low = 255, responder_resources = 255, initiator_depth = 255, target_ack_delay = 255, failover_accepted = 255, flow_control = true, rnr_retry_count = 255, srq = true, local_ca_guid = u64::MAX, private_data = [255; 196] }, 288 - 4 + 1568);
    fields!(Rtu { local_comm_id = all, remote_comm_id = all, private_data = [255; 224] }, 1856);
    fields!(Dreq { local_comm_id = all, remote_comm_id = all, remote_qpn = all, private_data = [255; 220] }, 64 + 24 + 1760);
    fields!(Drep { local_comm_id = all, remote_comm_id = all, private_data = [255; 224] }, 1856);
    fields!(Apr { local_comm_id = all, remote_comm_id = all, information_length = 255, status = 255, information = [255; 72], private_data = [255; 148] }, 64 + 16 + 576 + 1184);
    fields!(Lap { local_comm_id = all, remote_comm_id = all, remote_qpn = all, remote_response_timeout = 255, alternate_local_lid = 65535, alternate_remote_lid = 65535, alternate_local_gid = [255; 16], alternate_remote_gid = [255; 16], alternate_flow_label = all, alternate_traffic_class = 255, alternate_hop_limit = 255, alternate_packet_rate = 255, alternate_service_level = 255, alternate_subnet_local = true, alternate_ack_timeout = 255, private_data = [255; 168] }, 64 + 29 + 32 + 256 + 20 + 8 + 8 + 6 + 5 + 5 + 1344);
    fields!(SidrReq { request_id = all, pkey = 65535, service_id = u64::MAX, private_data = [255; 216] }, 32 + 16 + 64 + 1728);
    fields!(SidrRep { request_id = all, status = 255, information_length = 255, vendor_id_high = 65535, qpn = all, vendor_id_low = 255, service_id = u64::MAX, qkey = all, information = [255; 72], private_data = [255; 136] }, 192 + 576 + 1088);
    fields!(Req { local_comm_id = all, vendor_id = all, service_id = u64::MAX, local_ca_guid = u64::MAX, local_qkey = all, local_qpn = all, responder_resources = 255, local_eecn = all, initiator_depth = 255, remote_eecn = all, remote_response_timeout = 255, transport_service = 255, flow_control = true, starting_psn = all, local_response_timeout = 255, retry_count = 255, pkey = 65535, path_mtu = 255, rdc_exists = true, rnr_retry_count = 255, cm_retries_max = 255, srq = true, extended_transport = 255, primary_local_lid = 65535, primary_remote_lid = 65535, primary_local_gid = [255; 16], primary_remote_gid = [255; 16], primary_flow_label = all, primary_packet_rate = 255, primary_traffic_class = 255, primary_hop_limit = 255, primary_service_level = 255, primary_subnet_local = true, primary_ack_timeout = 255, alternate_local_lid = 65535, alternate_remote_lid = 65535, alternate_local_gid = [255; 16], alternate_remote_gid = [255; 16], alternate_flow_label = all, alternate_packet_rate = 255, alternate_traffic_class = 255, alternate_hop_limit = 255, alternate_service_level = 255, alternate_subnet_local = true, alternate_ack_timeout = 255, sap_supported = true, private_data = [255; 92] }, 1120 - 8 - 32 - (6 + 3 + 3) - (6 + 3 + 2) + 736);
}

#[test]
fn vendor_ids_and_transports() {
    let mut rep = Rep::default();
    rep.set_vendor_id(0x0012_3456);
    assert_eq!((rep.vendor_id_high, rep.vendor_id_middle, rep.vendor_id_low), (0x12, 0x34, 0x56));
    assert_eq!(rep.vendor_id(), 0x0012_3456);
    let mut reply = SidrRep::default();
    reply.set_vendor_id(0x0012_3456);
    assert_eq!((reply.vendor_id_high, reply.vendor_id_low, reply.vendor_id()), (0x1234, 0x56, 0x0012_3456));
    for transport in [Transport::Rc, Transport::Uc, Transport::Rd, Transport::Xrc] {
        let mut req = Req::default();
        req.set_transport(transport);
        assert_eq!(req.transport(), Some(transport));
    }
    let reserved = Req { transport_service: 3, extended_transport: 2, ..Req::default() };
    assert_eq!(reserved.transport(), None);
}

#[test]
fn what_is_no_message() {
    let good = Mad::new(7, Message::Rtu(Rtu::default())).encode();
    assert!(Mad::decode(&good).is_ok());
    assert_eq!(Mad::decode(&good[..255]), Err(Malformed::Length));
    assert_eq!(Mad::decode(&[&good[..], &[0]].concat()), Err(Malformed::Length));
    for (at, value, error) in [
        (0, 2, Malformed::Version),
        (1, 3, Malformed::Class),
        (2, 1, Malformed::Version),
        (3, 0x81, Malformed::Method),
        (16, 1, Malformed::Attribute),
        (17, 0x0f, Malformed::Attribute),
        (17, 0x1b, Malformed::Attribute),
    ] {
        let mut bytes = good;
        bytes[at] = value;
        assert_eq!(Mad::decode(&bytes), Err(error), "byte {at}");
    }
    for (number, kind) in Kind::ALL.into_iter().enumerate() {
        assert_eq!(kind.index(), number);
    }
}

proptest! {
    /// Any bytes; most of them with a right header, since chance does not find one.
    #[test]
    fn decoding_is_total(mut bytes in vec(any::<u8>(), 0..300), attribute in 0x0fu8..0x1c, right in any::<bool>()) {
        if right && bytes.len() >= 24 {
            bytes.resize(MAD_BYTES, 0x5a);
            bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
            bytes[16..18].copy_from_slice(&[0, attribute]);
        }
        if let Ok(mad) = Mad::decode(&bytes) {
            let again = mad.encode();
            prop_assert_eq!(Mad::decode(&again), Ok(mad), "what is read is what is written");
        }
    }

    #[test]
    fn ip_headers(bytes in vec(any::<u8>(), 0..40), version in 0u8..16) {
        let mut bytes = bytes;
        if bytes.len() > 1 {
            (bytes[0], bytes[1]) = (bytes[0] & 1, version << 4);
        }
        if let Some(header) = IpHeader::decode(&bytes) {
            prop_assert!(bytes.len() >= IpHeader::BYTES && bytes[0] == 0 && (version == 4 || version == 6));
            prop_assert_eq!(IpHeader::decode(&header.encode()), Some(header));
        }
    }
}
