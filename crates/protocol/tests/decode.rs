//! Decoding is total: whatever a container sends, the router gets a message or an error.
use freeflow_protocol::version::{Agreement, VersionRange};
use freeflow_protocol::{
    DecodeError, MESSAGE_BYTES_MAX, PROTOCOL,
    admin::{AdminReply, AdminRequest},
    decode, encode,
    library::{Reply, Request, Welcome},
};
use freeflow_verbs::*;
use proptest::prelude::*;

fn device() -> DeviceAttributes {
    DeviceAttributes {
        name: "freeflow0".into(),
        firmware_version: "1".into(),
        node_guid: 1,
        mr_bytes_max: u64::MAX,
        qp_count_max: 1,
        queue_work_requests_max: 2,
        sge_count_max: 3,
        cq_count_max: 4,
        cqe_count_max: 5,
        mr_count_max: 6,
        pd_count_max: 7,
        qp_rd_atomic_max: 8,
        srq_count_max: 9,
        srq_work_requests_max: 10,
        srq_sge_count_max: 11,
        ah_count_max: 12,
        inline_bytes_max: 13,
        completion_vector_count: 1,
        mw_count_max: 3,
        multicast_group_count_max: 4,
        multicast_attach_count_max: 5,
        device_memory_bytes_max: 6,
        port: PortAttributes {
            active: true,
            max_mtu: PathMtu::Mtu4096,
            active_mtu: PathMtu::Mtu4096,
            gid_table_length: 1,
            message_bytes_max: 1 << 31,
            active_speed: 32,
            active_width: 2,
        },
    }
}

fn samples() -> Vec<Request> {
    let capabilities = QpCapabilities { max_send_wr: 1, max_recv_wr: 2, ..QpCapabilities::default() };
    vec![
        Request::Hello { protocol: PROTOCOL, layouts: VersionRange::only(1), program: "ib_write_bw".into() },
        Request::OpenContext,
        Request::RegisterMr { pd: 1, address: 2, length: u64::MAX, iova: 4, access: Access::LOCAL_WRITE },
        Request::CreateCq { context: 1, cqe: 2, channel: Some(3), cookie: 4, timestamps: true },
        Request::CreateQp {
            qp_type: QpType::Ud,
            pd: Some(1),
            send_cq: Some(2),
            recv_cq: Some(3),
            srq: None,
            xrcd: None,
            capabilities,
            all_signaled: true,
            block_own_multicast: false,
            cookie: 9,
            connection: Some(3),
        },
        Request::ModifyQp { qp: 1, attributes: QpAttributes::default(), mask: QpAttributeMask(u32::MAX) },
        Request::CreateAh { pd: 1, attributes: AddressHandleAttributes::default() },
        Request::ImportContext { pass: [9; 16] },
        Request::ReregisterMr { mr: 1, pd: None, change: RegionChange { translation: None, access: Some(Access(1)) } },
        Request::OpenXrcd {
            context: 1,
            file: Some(FileIdentity { device: 1, inode: 2 }),
            flags: XrcdOpenFlags::CREATE,
        },
    ]
}

#[test]
fn messages_survive_the_trip() {
    for request in samples() {
        assert_eq!(decode::<Request>(&encode(&request)), Ok(request));
    }
    let welcome = Reply::Welcome(Welcome {
        protocol: Agreement { version: 1, features: 0 },
        layout_version: 1,
        device: device(),
        gids: vec![Gid([7; 16])],
        network: "default".into(),
        vnic: "a".into(),
        session_segment_bytes: 4096,
    });
    assert_eq!(decode::<Reply>(&encode(&welcome)), Ok(welcome));
    let failed = Reply::Failed(VerbsError::NoMemory);
    assert_eq!(decode::<Reply>(&encode(&failed)), Ok(failed));
}

#[test]
fn bytes_after_a_message_are_refused() {
    let mut bytes = encode(&Request::OpenContext);
    bytes.push(0);
    assert_eq!(decode::<Request>(&bytes), Err(DecodeError::TrailingBytes));
}

#[test]
fn oversized_messages_are_refused_unread() {
    assert_eq!(decode::<Request>(&vec![0; MESSAGE_BYTES_MAX + 1]), Err(DecodeError::TooLong));
}

#[test]
fn a_cut_message_is_malformed() {
    for request in samples() {
        let bytes = encode(&request);
        for length in 0..bytes.len() {
            assert_eq!(decode::<Request>(&bytes[..length]), Err(DecodeError::Malformed), "{request:?} cut at {length}");
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        let _ = decode::<Request>(&bytes);
        let _ = decode::<Reply>(&bytes);
        let _ = decode::<AdminRequest>(&bytes);
        let _ = decode::<AdminReply>(&bytes);
    }

    #[test]
    fn mutated_messages_decode_or_fail(which in 0usize..10, at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut bytes = encode(&samples()[which]);
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(request) = decode::<Request>(&bytes) {
            // Bytes that decode are a message: it encodes again, though perhaps shorter (a longer
            // varint means the same).
            prop_assert!(encode(&request).len() <= bytes.len());
        }
    }
}
