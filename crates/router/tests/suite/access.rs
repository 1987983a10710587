//! Access rules on whole routers, with raw clients: what is refused, what is cut when rules or
//! labels change, on one host and on two, and what is counted.
use crate::common::cm::*;
use crate::common::hosts::{Hosts, alone};
use crate::common::*;
use freeflow_orchestrator::Command;
use freeflow_orchestrator::access::AccessTable;
use freeflow_orchestrator::objects::{
    Access, AccessDirection, AccessRuleSpec, EndSelector, GroupSpec, Labels, NetworkSpec, VnicSelector, parse_object,
};
use freeflow_protocol::admin::{AdminReply, AdminRequest};
use freeflow_protocol::cm::{CmEventKind, CmRequest};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_router::{Router, RuleCounts};
use freeflow_shm::SendDescriptor;
use freeflow_verbs::{
    AsyncEventKind, Completion, CompletionStatus, Gid, QpAttributeMask, QpAttributes, QpState, QpType, SendOpcode,
    VerbsError,
};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

const NOT_PERMITTED: Reply = Reply::Failed(VerbsError::NotPermitted);
const GROUP: &str = "239.1.2.3";

fn labels(app: &str) -> Labels {
    [("app".to_owned(), app.to_owned())].into_iter().collect()
}

fn by_label(app: &str) -> EndSelector {
    EndSelector { labels: labels(app), ..EndSelector::default() }
}

pub fn denial(from: EndSelector, to: EndSelector) -> AccessRuleSpec {
    let (tenant, direction, action) = ("default".into(), AccessDirection::Both, Access::Deny);
    AccessRuleSpec { tenant, from, to, direction, action, order: 0 }
}

/// The default network with these rules.
pub fn table(rules: &[(&str, AccessRuleSpec)]) -> AccessTable {
    let network = NetworkSpec {
        tenant: "default".into(),
        cidrs: vec!["10.111.0.0/16".into()],
        range: None,
        floating: None,
        data_path: Default::default(),
        access: Access::Allow,
        external: Access::Allow,
        qos_class: None,
        quota: None,
    };
    let member = VnicSelector { labels: labels("y"), ..VnicSelector::default() };
    let group = GroupSpec { tenant: "default".into(), members: vec![member] };
    AccessTable::compile([("default", &network)], [("ys", &group)], rules.iter().map(|(name, spec)| (*name, spec)))
}

/// By label, and by a group.
fn deny_x_y() -> AccessTable {
    let to = EndSelector { group: Some("ys".into()), ..EndSelector::default() };
    table(&[("no-x-y", denial(by_label("x"), to))])
}

fn client(host: &Host, id: &str, app: &str) -> Client {
    let labels = vec![("app".into(), app.into())];
    let (name, network) = (id.into(), "default".into());
    match host.admin(&AdminRequest::Attach { id: id.into(), name, network, address: None, labels }) {
        AdminReply::Vnic(vnic) => Client::connect(&Path::new(&vnic.directory).join("router.sock")),
        other => panic!("{other:?}"),
    }
}

/// As an operator declares it.
fn relabel(host: &Host, id: &str, app: &str) {
    apply(
        host,
        &format!(
            r#"{{"apiVersion": "freeflow.io/v1", "kind": "Vnic", "metadata": {{"name": "{id}", "labels": {{"app": "{app}"}}}},
            "spec": {{"network": "default"}}}}"#
        ),
    );
}

fn apply(host: &Host, text: &str) {
    let object = parse_object(&serde_json::from_str(text).unwrap()).unwrap();
    router(host).command(Command::Apply { objects: vec![object] }).unwrap();
}

fn router(host: &Host) -> &Router {
    host.router.as_ref().unwrap()
}

/// Two clients with a connection by hand and one of rdma_cm.
struct Ends {
    a: Client,
    b: Client,
    a_cq: Cq,
    b_cq: Cq,
    a_qp: Qp,
    b_qp: Qp,
}

impl Ends {
    fn new(mut a: Client, mut b: Client) -> Self {
        let (a_cq, b_cq) = (a.create_cq(64, None), b.create_cq(64, None));
        let (a_qp, b_qp) = (a.create_qp(QpType::Rc, &a_cq), b.create_qp(QpType::Rc, &b_cq));
        a.connect_rc(&a_qp, b.gid(), b_qp.qpn, 14);
        b.connect_rc(&b_qp, a.gid(), a_qp.qpn, 14);
        Self { a, b, a_cq, b_cq, a_qp, b_qp }
    }

    fn works(&mut self) {
        let (from, to) = (self.a.memory(8, false), self.b.memory(8, false));
        from.fill(8, 3);
        self.b.post_receive(&mut self.b_qp, 11, &[to.sge(0, 64)]);
        self.a.post_send(&mut self.a_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
        assert_eq!(self.b_cq.wait().status, CompletionStatus::Success);
        assert_eq!(self.a_cq.wait().status, CompletionStatus::Success);
        assert!(to.is_filled(8, 3));
    }

    /// Both ends hear of the cut, by the connection by hand; requests that were posted are flushed,
    /// and nothing moves any more.
    fn is_cut(&mut self) {
        for (client, qp) in [(&self.a, &self.a_qp), (&self.b, &self.b_qp)] {
            let event = read_event(&client.async_events).expect("an event");
            assert_eq!(event, (AsyncEventKind::QpFatal as u32, qp.cookie));
        }
        let (from, to) = (self.a.memory(8, false), self.b.memory(8, false));
        from.fill(8, 5);
        self.b.post_receive(&mut self.b_qp, 12, &[to.sge(0, 64)]);
        assert_eq!(self.b_cq.wait().status, CompletionStatus::WorkRequestFlushed);
        let write =
            SendDescriptor { remote_address: to.address, rkey: to.mr.rkey, ..request(SendOpcode::RdmaWrite, &[]) };
        self.a.post_send(&mut self.a_qp, &SendDescriptor { sges: &[from.sge(0, 64)], ..write });
        assert_eq!(self.a_cq.wait().status, CompletionStatus::WorkRequestFlushed);
        assert_eq!(to.word(1).load(Relaxed), 0);
    }

    fn may_connect(&mut self, allowed: bool) {
        let expected = if allowed { Reply::QpModified { state: QpState::ReadyToReceive } } else { NOT_PERMITTED };
        let (a_qp, b_qp) = (self.a.create_qp(QpType::Rc, &self.a_cq), self.b.create_qp(QpType::Rc, &self.b_cq));
        for (one, qp, other, peer) in [(&self.a, &a_qp, &self.b, &b_qp), (&self.b, &b_qp, &self.a, &a_qp)] {
            one.to_init(qp, false);
            assert_eq!(one.to_rtr(qp, other.gid(), peer.qpn), expected);
        }
    }
}

struct Datagrams {
    sender: Client,
    receiver: Client,
    send_cq: Cq,
    receive_cq: Cq,
    send_qp: Qp,
    receive_qp: Qp,
}

impl Datagrams {
    fn new(mut sender: Client, mut receiver: Client) -> Self {
        let (send_cq, receive_cq) = (sender.create_cq(64, None), receiver.create_cq(64, None));
        let (send_qp, receive_qp) =
            (sender.create_qp(QpType::Ud, &send_cq), receiver.create_qp(QpType::Ud, &receive_cq));
        for (client, qp) in [(&sender, &send_qp), (&receiver, &receive_qp)] {
            use QpAttributeMask as M;
            client.to_init(qp, true);
            let to = |state| QpAttributes { state, ..QpAttributes::default() };
            client.modify(qp, to(QpState::ReadyToReceive), M::STATE);
            let reply = client.modify(qp, to(QpState::ReadyToSend), M::STATE | M::SQ_PSN);
            assert_eq!(reply, Reply::QpModified { state: QpState::ReadyToSend });
        }
        let group = Gid::from_ip(GROUP.parse().unwrap());
        let attach = Request::AttachMulticast { qp: receive_qp.handle, gid: group };
        assert_eq!(receiver.ask(&attach), Reply::Done);
        Self { sender, receiver, send_cq, receive_cq, send_qp, receive_qp }
    }

    fn handle(&self, gid: Gid) -> Handle {
        match self.sender.ask(&Request::CreateAh { pd: self.sender.pd, attributes: address(gid) }) {
            Reply::AddressHandle { ah } => ah,
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, gid: Gid, qpn: u32) {
        let (ah, from) = (self.handle(gid), self.sender.memory(8, false));
        let sges = [from.sge(0, 64)];
        let remote_address = u64::from(ah) | u64::from(qpn) << 32;
        let send = SendDescriptor { remote_address, rkey: QKEY, ..request(SendOpcode::Send, &sges) };
        self.sender.post_send(&mut self.send_qp, &send);
        assert_eq!(self.send_cq.wait().status, CompletionStatus::Success, "the sender never knows");
    }

    /// One to the receiver itself and one to the group; both arrive.
    fn arrive(&mut self) {
        for (gid, qpn) in self.targets() {
            let to = self.receiver.memory(16, false);
            self.receiver.post_receive(&mut self.receive_qp, 1, &[to.sge(0, 128)]);
            self.send(gid, qpn);
            assert_eq!(self.receive_cq.wait().status, CompletionStatus::Success);
        }
    }

    fn targets(&self) -> [(Gid, u32); 2] {
        [(self.receiver.gid(), self.receive_qp.qpn), (Gid::from_ip(GROUP.parse().unwrap()), 0xff_ffff)]
    }

    /// Neither does: what is sent afterwards, by who may, is the first to arrive.
    fn vanish(&mut self) {
        for (gid, qpn) in self.targets() {
            self.send(gid, qpn);
        }
    }
}

#[test]
fn on_one_host_rules_hold_as_soon_as_they_are_said() {
    let host = Host::new();
    let mut ends = Ends::new(client(&host, "a", "x"), client(&host, "b", "y"));
    let (c, d) = (client(&host, "c", "z"), client(&host, "d", "z"));
    let mut others = Ends::new(c, d);
    let connect = |id| Client::connect(&Path::new(&host.attach(id).directory).join("router.sock"));
    let mut datagrams = Datagrams::new(connect("a"), connect("b"));
    let (cm_a, cm_b) = (connect("a"), connect("b"));
    let cm = CmPair::new(&cm_a, &cm_b);
    router(&host).set_access(table(&[]));
    ends.works();
    datagrams.arrive();
    cm.connect();

    router(&host).set_access(deny_x_y());
    ends.is_cut();
    cm.a_channel.expect(CmEventKind::Disconnected);
    cm.b_channel.expect(CmEventKind::Disconnected);
    assert_eq!(router(&host).access_counts(Some("no-x-y")), RuleCounts { refusals: 0, disconnections: 2 }, "both ends");
    ends.may_connect(false);
    datagrams.vanish();
    let id = cm_a.cm_id(&cm.a_channel, 9);
    cm_a.cm_bound(CmRequest::ResolveAddress { id, source: None, destination: cm.address, timeout_ms: 2000 });
    let next = |kind| loop {
        let event = cm.a_channel.event();
        if event.kind != CmEventKind::TimewaitExit {
            assert_eq!(event.kind, kind);
            break;
        }
    };
    next(CmEventKind::AddressResolved);
    cm_a.cm_done(CmRequest::ResolveRoute { id, timeout_ms: 2000 });
    next(CmEventKind::RouteResolved);
    cm_a.cm_done(CmRequest::Connect { id, parameters: parameters(b"") });
    next(CmEventKind::Unreachable);
    // Two at RTR, a datagram, a member of a group, a request.
    let all = RuleCounts { refusals: 5, disconnections: 2 };
    until("everything is counted", || (router(&host).access_counts(Some("no-x-y")) == all).then_some(()));
    others.works();

    // Labels are another way: one that is not `y` any more may.
    relabel(&host, "b", "z");
    ends.may_connect(true);
    datagrams.arrive();
    // And one that is now may not.
    relabel(&host, "c", "x");
    others.works();
    relabel(&host, "d", "y");
    others.is_cut();
    router(&host).set_access(table(&[]));
    others.may_connect(true);
}

#[test]
fn between_hosts_one_that_refuses_is_enough() {
    let _alone = alone();
    let hosts = Hosts::new();
    // Rules on one of them; it knows the other's labels by its word.
    for says_no in [0, 1] {
        let id = |name: &str| format!("{name}{says_no}");
        let (a, b) = (client(&hosts.hosts[0], &id("a"), "x"), client(&hosts.hosts[1], &id("b"), "y"));
        let mut ends = Ends::new(a, b);
        ends.works();
        let again = |host: usize, name: &str| {
            let vnic = hosts.hosts[host].attach(&id(name));
            Client::connect(&Path::new(&vnic.directory).join("router.sock"))
        };
        let mut datagrams = Datagrams::new(again(0, "a"), again(1, "b"));
        let (gid, qpn) = datagrams.targets()[1];
        let to = datagrams.receiver.memory(16, false);
        datagrams.receiver.post_receive(&mut datagrams.receive_qp, 1, &[to.sge(0, 128)]);
        until("the group to be known", || {
            datagrams.send(gid, qpn);
            let came = datagrams.receive_cq.ring.poll(&mut Completion::default());
            datagrams.receive_cq.ring.commit();
            came.then_some(())
        });
        let no = router(&hosts.hosts[says_no]);
        no.set_access(deny_x_y());
        ends.is_cut();
        assert_eq!(no.access_counts(Some("no-x-y")).disconnections, 1, "this host's end");
        let before = no.access_counts(Some("no-x-y")).refusals;
        datagrams.vanish();
        // Of who sends it is the one to the receiver, of who receives it both; more may be on their
        // way to the group from before.
        let least = if says_no == 0 { 1 } else { 2 };
        until("datagrams are counted", || (no.access_counts(Some("no-x-y")).refusals >= before + least).then_some(()));
        no.set_access(table(&[]));
    }
}
