//! Which way messages within a host may go, as the admin interface sets and shows it; what outlives the router.
use crate::common::{BASE, Host, config, host_path, networks, qps};
use freeflow_protocol::admin::{DataPath, QpPath, QpStatus};
use freeflow_protocol::library::{Reply, Request};
use freeflow_router::Router;
use freeflow_shm::layout::direct_ring;
use freeflow_verbs::{QpAttributeMask, QpAttributes, QpState, QpType, VnicLimits};
use std::os::fd::OwnedFd;

/// The code of the answer.
fn set(host: &Host, network: &str, path: DataPath) -> u16 {
    let body = serde_json::json!({"dataPath": path}).to_string();
    host.rest("PUT", &format!("{BASE}/networks/{network}/dataPath"), &body).0
}

fn data_path(host: &Host) -> DataPath {
    networks(&host.run_dir())[0].data_path
}

fn page(host: &Host, vnic: Option<&str>, after_qpn: Option<u32>) -> (Vec<QpStatus>, bool) {
    qps(&host.run_dir(), vnic, after_qpn)
}

fn restart(host: &mut Host) {
    host.router = None;
    host.router = Some(Router::start(config(&host.directory.0, VnicLimits::default())).unwrap());
}

/// The reason of each QP of a vNIC, in order of number.
fn reasons(host: &Host, vnic: &str) -> Vec<String> {
    let qps = page(host, Some(vnic), None).0;
    assert!(qps.iter().all(|qp| qp.path == QpPath::Routed && !qp.direct_ring && !qp.grants), "{qps:?}");
    qps.into_iter().map(|qp| qp.reason.unwrap()).collect()
}

#[test]
fn the_data_path_outlives_the_router() {
    let mut host = Host::new();
    assert_eq!(data_path(&host), DataPath::Auto);
    assert_eq!(set(&host, "none", DataPath::Routed), 404);
    for path in [DataPath::Routed, DataPath::Routed, DataPath::Direct] {
        assert_eq!(set(&host, "default", path), 200);
        assert_eq!(data_path(&host), path);
        restart(&mut host);
        assert_eq!(data_path(&host), path);
    }
}

#[test]
fn each_qp_says_why_it_is_routed() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (cq_a, cq_b) = (a.create_cq(16, None), b.create_cq(16, None));
    let one = a.create_qp(QpType::Rc, &cq_a);
    assert_eq!(reasons(&host, "a"), ["not connected"]);
    let other = b.create_qp(QpType::Rc, &cq_b);
    a.connect_rc(&one, b.gid(), other.qpn, 14);
    assert_eq!(reasons(&host, "a"), ["no peer"]);
    b.to_init(&other, false);
    assert_eq!(b.to_rtr(&other, a.gid(), one.qpn), Reply::QpModified { state: QpState::ReadyToReceive });
    assert_eq!(
        (reasons(&host, "a"), reasons(&host, "b")),
        (vec!["not asked yet".into()], vec!["only receives".into()])
    );
    let failed = QpAttributes { state: QpState::Error, ..QpAttributes::default() };
    b.modify(&other, failed, QpAttributeMask::STATE);
    assert_eq!((reasons(&host, "a"), reasons(&host, "b")), (vec!["no peer".into()], vec!["in error".into()]));
    let reset = QpAttributes { state: QpState::Reset, ..QpAttributes::default() };
    b.modify(&other, reset, QpAttributeMask::STATE);
    b.connect_rc(&other, a.gid(), one.qpn, 14);
    assert_eq!(reasons(&host, "a"), ["not asked yet"]);
    let _datagrams = b.create_qp(QpType::Ud, &cq_b);
    let mut both = reasons(&host, "b");
    both.sort();
    assert_eq!(both, ["not asked yet", "not connected"]);
    assert_eq!(set(&host, "default", DataPath::Routed), 200);
    assert_eq!(reasons(&host, "a"), ["policy"]);
    // It holds for those who connect after a restart, too.
    restart(&mut host);
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (cq_a, cq_b) = (a.create_cq(16, None), b.create_cq(16, None));
    let (one, other) = (a.create_qp(QpType::Rc, &cq_a), b.create_qp(QpType::Rc, &cq_b));
    a.connect_rc(&one, b.gid(), other.qpn, 14);
    b.connect_rc(&other, a.gid(), one.qpn, 14);
    assert_eq!(reasons(&host, "a"), ["policy"]);
    assert_eq!(set(&host, "default", DataPath::Direct), 200);
    assert_eq!(reasons(&host, "a"), ["not asked yet"]);
    let status = &page(&host, Some("a"), None).0[0];
    assert_eq!((status.qpn, status.qp_type.as_str(), status.state.as_str()), (one.qpn, "RC", "RTS"));
    assert_eq!((status.peer_qpn, status.peer_address), (Some(other.qpn), b.gid().to_ipv4().map(Into::into)));
    let counts = host.status();
    assert_eq!((counts.qp_count, counts.direct_ring_qp_count, counts.grant_qp_count), (2, 0, 0));
}

#[test]
fn qps_are_listed_by_the_page() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (cq_a, cq_b) = (a.create_cq(16, None), b.create_cq(16, None));
    let mut expected: Vec<u32> = (0..150).map(|_| a.create_qp(QpType::Uc, &cq_a).qpn).collect();
    let foreign = b.create_qp(QpType::Uc, &cq_b).qpn;
    expected.sort();
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let (qps, more) = page(&host, Some("a"), after);
        assert!(qps.iter().all(|qp| qp.vnic == "a" && qp.state == "RESET" && qp.peer_qpn.is_none()));
        listed.extend(qps.iter().map(|qp| qp.qpn));
        after = listed.last().copied();
        if !more {
            break;
        }
    }
    assert_eq!(listed, expected);
    assert_eq!(page(&host, None, Some(foreign - 1)).0[0].vnic, "b");
    let none = host.rest("GET", &host_path(&host.run_dir(), "qps?vnic=none"), "");
    assert_eq!((none.0, none.1["message"].as_str()), (404, Some("no such vNIC")));
}

#[test]
fn a_channel_has_credits_for_the_receivers_queue() {
    let host = Host::new();
    let (mut a, mut b) = (host.client("a"), host.client("b"));
    let (cq_a, cq_b) = (a.create_cq(16, None), b.create_cq(16, None));
    let (one, other) = (a.create_qp(QpType::Rc, &cq_a), b.create_qp(QpType::Rc, &cq_b));
    a.connect_rc(&one, b.gid(), other.qpn, 14);
    b.connect_rc(&other, a.gid(), one.qpn, 14);
    let credits = |(reply, descriptors): (Reply, Vec<OwnedFd>)| match reply {
        Reply::Direct { credit_count, segment_bytes, .. } if descriptors.len() == 1 => {
            assert!(direct_ring::bytes(credit_count) as u64 <= segment_bytes);
            credit_count
        }
        other => panic!("{other:?}"),
    };
    let reported = [
        credits(a.ask_fds(&Request::OpenDirectRing { qp: one.handle })),
        credits(b.ask_fds(&Request::AcceptDirectRing { qp: other.handle })),
    ];
    assert!(reported[0] == reported[1] && reported[0] < 256, "{reported:?}: more than RECVs");
    let qps = page(&host, Some("a"), None).0;
    assert_eq!((qps[0].path, qps[0].direct_ring, qps[0].reason.as_deref()), (QpPath::Direct, true, None));
}
