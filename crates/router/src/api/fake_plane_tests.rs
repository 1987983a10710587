//! The server without a router: what it asks of the control thread, and what it makes of the answers.
use super::caller::{Caller, Role};
use super::health::Probes;
use super::link::Link;
use super::meters::{HostMeter, MeterPage, Position, VnicMeter};
use super::plane::{ApiRequest, NotDone};
use super::routes::{Asking, LeaseFile, Server, router};
use super::users::Users;
use super::watch::History;
use crate::admission::violations::ViolationClass;
use crate::audit::{Audit, Who};
use crate::dataplane::meters::{VnicNumbers, WorkerMeter};
use axum::body::{Body, to_bytes};
use axum::extract::Extension;
use axum::http::Request;
use freeflow_orchestrator::{Reason, Refusal, Revision};
use freeflow_protocol::admin::{
    CmId, CmStatus, Counters, DataPath, NetworkStatus, PeersStatus, QpPath, QpStatus, RouterStatus, VnicStatus, WireQp,
    WireStatus,
};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const HOST: &str = "/apis/freeflow.io/v1/hosts/h";

fn admin() -> Role {
    Role { is_admin: true, ..Role::default() }
}

fn tenant() -> Role {
    Role { tenants: ["red".to_owned()].into(), ..Role::default() }
}

/// The code and the text of one answer, by a control thread that serves like this.
async fn answer(link: Link, role: Role, (method, path, body): (&str, &str, &'static str)) -> (u16, String) {
    let caller = Caller { who: Who { uid: 0, pid: 1, role: role.to_string() }, role: Arc::new(role) };
    let place = Arc::new(Users::new(1 << 20).enter(&caller).unwrap());
    let run_dir = std::env::temp_dir();
    let server = Arc::new(Server {
        link,
        history: History::new(Revision(7)),
        audit: Audit::default(),
        lane: Default::default(),
        reads: Default::default(),
        probes: Probes::new(run_dir.clone(), run_dir.clone()),
        host: "h".into(),
        lease_file: Arc::new(LeaseFile { directory: run_dir, is_stale: false }.into()),
    });
    let app = TowerToHyperService::new(router(server).layer(Extension(Asking { caller, place })));
    let request = Request::builder().method(method).uri(path).body(Body::from(body)).unwrap();
    let response = app.call(request).await.unwrap();
    let code = response.status().as_u16();
    let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (code, String::from_utf8(bytes.to_vec()).unwrap())
}

/// With a worker that turns.
fn link(serve: impl Fn(ApiRequest) + Send + Sync + 'static) -> Link {
    Link::new(serve, |turned| turned.send(()).unwrap())
}

async fn get(serve: impl Fn(ApiRequest) + Send + Sync + 'static, path: &str) -> (u16, Value) {
    let (code, text) = answer(link(serve), admin(), ("GET", path, "")).await;
    (code, serde_json::from_str(&text).unwrap())
}

fn qp(qpn: u32) -> QpStatus {
    QpStatus {
        vnic: "v".into(),
        qpn,
        qp_type: "RC".into(),
        state: "RTS".into(),
        peer_address: None,
        peer_qpn: None,
        path: QpPath::Routed,
        direct_ring: false,
        grants: false,
        reason: None,
        sent_messages: 0,
        slow_path_accesses: 0,
        slow_path_bytes: 0,
        slow_path_reason: None,
        direct_messages: 0,
    }
}

fn host_vnic(id: &str) -> VnicStatus {
    VnicStatus {
        id: id.into(),
        name: String::new(),
        network: "red".into(),
        address: [10, 0, 0, 2].into(),
        prefix_length: 24,
        gateway: [10, 0, 0, 1].into(),
        address6: None,
        prefix_length6: 0,
        directory: String::new(),
        labels: vec![("stays_as_it_is".into(), "so_does_this".into())],
        session_count: 0,
        qp_count: 0,
        mr_count: 0,
        registered_bytes: 0,
        worker: 0,
        shard: 0,
        failed: None,
        counters: Counters::default(),
    }
}

fn host_network(name: &str) -> NetworkStatus {
    NetworkStatus {
        name: name.into(),
        id: 1,
        pool: "10.0.0.0/24".into(),
        gateway: [10, 0, 0, 1].into(),
        prefix_length: 24,
        pool6: None,
        vnic_count: 1,
        bridge: String::new(),
        data_path: DataPath::Auto,
    }
}

/// Every part of the host; two pages each of those that have pages.
fn serve_parts(request: ApiRequest) {
    match request {
        ApiRequest::ReadRouter(_, reply) => reply.give(RouterStatus { qp_count: 3, ..RouterStatus::default() }),
        ApiRequest::ReadPeers(_, reply) => reply.give(PeersStatus { unknown_connections: 3, ..PeersStatus::default() }),
        ApiRequest::PageVnics(call, reply) => match call.after.as_deref() {
            // A page may be empty and not the last.
            None => reply.give((Vec::new(), Some("a".into()))),
            Some(after) => reply.give((vec![host_vnic(after)], None)),
        },
        ApiRequest::PageNetworks(call, reply) => {
            reply.give((vec![host_network(call.after.as_deref().unwrap_or("first"))], Some("red".into())));
        }
        ApiRequest::PageQps(call, reply) => match (call.vnic.as_deref(), call.after_qpn) {
            (Some("none"), _) => reply.give(None),
            (_, None) => reply.give(Some((vec![qp(7)], true))),
            (_, Some(7)) => reply.give(Some((vec![qp(9)], false))),
            (_, Some(other)) => panic!("after {other}"),
        },
        ApiRequest::PageWire(call, reply) => {
            let qpn = call.after_qpn.map_or(7, |after| after + 2);
            let qp = WireQp {
                qpn,
                dest_qpn: 1,
                host: 1,
                window_bytes: 0,
                in_flight_bytes: 0,
                smoothed_rtt_ns: 0,
                counters: Vec::new(),
            };
            reply.give((WireStatus { qps: vec![qp], ..WireStatus::default() }, call.after_qpn.is_none()));
        }
        ApiRequest::PageConnections(call, reply) => {
            let id = CmId {
                vnic: "v".into(),
                position: call.after.map_or((5, 7), |(vnic, handle)| (vnic, handle + 2)),
                state: "LISTEN".into(),
                port_space: "TCP".into(),
                qp_type: "RC".into(),
                local: None,
                remote: None,
                qpn: None,
                remote_qpn: None,
            };
            reply.give((CmStatus { ids: vec![id], ..CmStatus::default() }, call.after.is_none()));
        }
        _ => panic!("another request"),
    }
}

#[tokio::test]
async fn a_page_says_where_the_next_one_begins() {
    for (part, first, second) in [("qps", "/items/0/qpn", 9), ("wire", "/status/qps/0/qpn", 9)] {
        let (code, page) = get(serve_parts, &format!("{HOST}/{part}")).await;
        assert_eq!((code, &page["metadata"]["continue"]), (200, &"7".into()), "{page}");
        let (_, page) = get(serve_parts, &format!("{HOST}/{part}?continue=7")).await;
        assert_eq!(page.pointer(first), Some(&second.into()), "{page}");
        assert_eq!(page["metadata"]["continue"], "");
    }
    let (_, page) = get(serve_parts, &format!("{HOST}/vnics?continue=")).await;
    assert_eq!((&page["items"], &page["metadata"]["continue"]), (&Value::Array(Vec::new()), &"a".into()));
    let (_, page) = get(serve_parts, &format!("{HOST}/vnics?continue=a")).await;
    assert_eq!((&page["items"][0]["id"], &page["metadata"]["continue"]), (&"a".into(), &"".into()));
    assert_eq!(page["items"][0]["labels"][0][0], "stays_as_it_is");
    let (_, page) = get(serve_parts, &format!("{HOST}/networks?continue=blue")).await;
    assert_eq!((&page["items"][0]["name"], &page["metadata"]["continue"]), (&"blue".into(), &"red".into()));
    let (_, page) = get(serve_parts, &format!("{HOST}/cm?continue=")).await;
    assert_eq!(page["metadata"]["continue"], "5:7");
    let (_, page) = get(serve_parts, &format!("{HOST}/cm?continue=5:7")).await;
    assert_eq!(page.pointer("/status/ids/0/position/1"), Some(&9.into()));
    for (part, field) in [("router", "qpCount"), ("peers", "unknownConnections")] {
        let (code, whole) = get(serve_parts, &format!("{HOST}/{part}")).await;
        assert_eq!((code, &whole["status"][field], whole.get("metadata")), (200, &3.into(), None));
    }
    assert_eq!(get(serve_parts, &format!("{HOST}/qps?vnic=none")).await.0, 404);
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_the_control_thread_is_asked() {
    let asked = |_: ApiRequest| panic!("asked");
    for part in ["router", "vnics", "networks", "qps", "wire", "cm", "peers"] {
        let path = format!("{HOST}/{part}");
        assert_eq!(answer(link(asked), tenant(), ("GET", &path, "")).await.0, 403, "{part}");
        assert_eq!(get(asked, &format!("{path}?continues=7")).await.0, 400, "{part}");
        assert_eq!(get(asked, &path.replace("/h/", "/other/")).await.0, 404, "{part}");
    }
    for (path, code) in [("qps?continue=x", 400), ("cm?continue=7", 400), ("nothing", 404)] {
        assert_eq!(get(asked, &format!("{HOST}/{path}")).await.0, code, "{path}");
    }
    let viewer = || Role { is_viewer: true, ..Role::default() };
    for (method, path, body) in [("POST", "peers/reload", ""), ("PUT", "wire/faults", "{}")] {
        let path = format!("{HOST}/{path}");
        assert_eq!(answer(link(asked), viewer(), (method, &path, body)).await.0, 403, "{path}");
    }
    let spoilt = ("PUT", &*format!("{HOST}/wire/faults"), r#"{"loss": 1}"#);
    assert_eq!(answer(link(asked), admin(), spoilt).await.0, 422);
}

#[tokio::test]
async fn refusals_of_the_control_thread_have_their_codes() {
    let delete = ("DELETE", "/apis/freeflow.io/v1/groups/g", "");
    let changed = |not_done: fn() -> NotDone| {
        link(move |request| match request {
            ApiRequest::ChangeObjects(call, reply) => {
                assert_eq!((call.verb, call.dry_run, call.caller.who.pid), ("delete", false, 1));
                reply.give(Err(not_done()));
            }
            _ => panic!("another request"),
        })
    };
    let (code, text) = answer(changed(|| NotDone::Busy), admin(), delete).await;
    assert!(code == 503 && text.contains("Busy"), "{code} {text}");
    let in_use = changed(|| NotDone::Refused(Refusal::new(Reason::InUse, "used by another")));
    let (code, text) = answer(in_use, admin(), delete).await;
    assert!(code == 409 && text.contains("used by another"), "{code} {text}");
    let (code, text) = answer(link(drop), admin(), ("GET", &format!("{HOST}/router"), "")).await;
    assert!(code == 500 && text.contains("the router ends"), "{code} {text}");
}

#[tokio::test(start_paused = true)]
async fn a_control_thread_that_does_not_answer_is_not_awaited_for_ever() {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let requests = kept.clone();
    let silent = link(move |request| requests.lock().unwrap().push(request));
    let (code, text) = answer(silent, admin(), ("GET", &format!("{HOST}/router"), "")).await;
    assert!(code == 500 && text.contains("does not answer"), "{code} {text}");
    let [ApiRequest::ReadRouter(_, reply)] = &kept.lock().unwrap()[..] else { panic!("another request") };
    assert!(!reply.is_awaited());
}

#[tokio::test(start_paused = true)]
async fn each_thread_that_is_not_well_is_named() {
    let peers = |runs: bool| {
        move |request: ApiRequest| {
            if let ApiRequest::CheckPeersThread(_, reply) = request {
                reply.give(runs);
            }
        }
    };
    let livez = ("GET", "/livez", "");
    assert_eq!(answer(link(peers(true)), admin(), livez).await, (200, "ok\n".into()));
    for (link, expected) in [
        (link(peers(false)), "peers: the thread has ended"),
        (link(drop), "control: the thread does not answer"),
        (Link::new(peers(true), drop), "worker: it does not turn"),
        (Link::new(drop, drop), "control: the thread does not answer; worker: it does not turn"),
    ] {
        let (code, text) = answer(link, admin(), livez).await;
        let text: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((code, &text["message"]), (500, &expected.into()));
    }
}

#[tokio::test]
async fn health_is_reported_with_what_is_wrong() {
    let reported = Arc::new(Mutex::new(Vec::new()));
    let reports = reported.clone();
    let link = link(move |request| match request {
        ApiRequest::CheckPeersThread(_, reply) => reply.give(false),
        ApiRequest::ReportHealth(call, _) => reports.lock().unwrap().push(call.wrong),
        _ => panic!("another request"),
    });
    assert_eq!(answer(link, admin(), ("GET", "/readyz", "")).await.0, 500);
    assert_eq!(*reported.lock().unwrap(), [["peers: the thread has ended"]]);
}

fn vnic(id: &str) -> VnicMeter {
    VnicMeter {
        id: id.into(),
        title: String::new(),
        tenant: "red".into(),
        network: "net".into(),
        address: [10, 0, 0, 1].into(),
        address6: None,
        numbers: VnicNumbers::default(),
        malformed_messages: 0,
        used: Default::default(),
        shaping: Default::default(),
        tenant_limit: Default::default(),
        is_metered: true,
        qps: Vec::new(),
    }
}

fn host() -> HostMeter {
    HostMeter {
        host: "h".into(),
        uptime_s: 0,
        mode: "adaptive",
        vnic_count: 2,
        peer_count: 0,
        connected_peer_count: 0,
        revision: 7,
        lost_audit_lines: 0,
        networks: Vec::new(),
        violations: [0; ViolationClass::ALL.len()],
        access: Vec::new(),
        cm_connections: 0,
        worker: WorkerMeter::default(),
    }
}

#[tokio::test]
async fn metrics_take_every_page() {
    let pages = Arc::new(AtomicUsize::new(0));
    let counted = pages.clone();
    let link = link(move |request| match request {
        ApiRequest::CountQpPaths(_, reply) => reply.give(BTreeMap::new()),
        ApiRequest::ReadHostMeter(_, reply) => reply.give(host()),
        ApiRequest::PageMeters(call, reply) => {
            assert!(call.tenants.is_none() && !call.with_qps);
            counted.fetch_add(1, Relaxed);
            let (id, next) = match &call.after {
                None => ("one", Some(Position { vnic: "one".into(), qpn: None })),
                Some(_) => ("two", None),
            };
            reply.give(MeterPage { vnics: vec![vnic(id)], next, read_ns: 0 });
        }
        _ => panic!("another request"),
    });
    let (code, text) = answer(link, admin(), ("GET", "/metrics", "")).await;
    assert_eq!((code, pages.load(Relaxed)), (200, 2));
    for id in ["one", "two"] {
        assert!(text.contains(&format!("freeflow_vnic_qps{{tenant=\"red\",network=\"net\",vnic=\"{id}\"}} 0\n")));
    }
    assert!(text.contains("freeflow_router_vnics_left_out 0\n"));
}

#[tokio::test]
async fn a_tenant_is_metered_alone() {
    let link = link(|request| match request {
        ApiRequest::PageMeters(call, reply) => {
            assert_eq!(call.tenants, Some(["red".to_owned()].into()));
            assert_eq!(call.after, Some(Position { vnic: "a".into(), qpn: Some(7) }));
            reply.give(MeterPage { vnics: vec![vnic("a")], next: None, read_ns: 99 });
        }
        _ => panic!("another request"),
    });
    let path = "/apis/freeflow.io/v1/live?qps=true&continue=a:7";
    let (code, text) = answer(link, tenant(), ("GET", path, "")).await;
    let list: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &list["metadata"]["nanoseconds"], &list["items"][0]["vnic"]), (200, &99.into(), &"a".into()));
}
