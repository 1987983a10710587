//! Connection management by raw requests: between two vNICs of a host, between two hosts; ends, full pipes, enemies.
use crate::common::cm::*;
use crate::common::hosts::{Hosts, alone};
use crate::common::*;
use freeflow_backend::{PacketRoute, Peer, PeerIndex, Udp, UdpConfig};
use freeflow_engine::management_head;
use freeflow_orchestrator::Command;
use freeflow_orchestrator::objects::{ObjectKind, parse_object};
use freeflow_protocol::admin::{AdminReply, AdminRequest};
use freeflow_protocol::cm::{
    CmAddress, CmEvent, CmEventBody, CmEventKind, CmOption, CmReply, CmRequest, ConnectionParameters, PortSpace,
};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::{Gid, QpState, QpType, VerbsError};
use freeflow_wire::Header;
use freeflow_wire::cm::{Drep, IpHeader, MAD_QKEY, MAD_QPN, Mad, Message, Req, Rtu};
use rustix::io::Errno;
use std::path::Path;
use std::time::Instant;

/// Connects, talks, rejects and disconnects: what works between any two vNICs.
fn works_between(a: &Client, b: &Client) {
    let pair = CmPair::new(a, b);
    let (active, passive) = pair.connect();
    for (client, id) in [(a, active), (b, passive)] {
        for state in [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend] {
            let reply = client.cm(CmRequest::InitQpAttributes { id, state });
            assert!(matches!(reply, Reply::Cm(CmReply::QpAttributes { .. })), "{reply:?}");
        }
    }
    a.cm_done(CmRequest::Disconnect { id: active });
    pair.a_channel.expect(CmEventKind::Disconnected);
    pair.b_channel.expect(CmEventKind::Disconnected);
    b.cm_done(CmRequest::Disconnect { id: passive });
    a.cm_destroy(active);
    b.cm_destroy(passive);

    let second = a.cm_resolved(&pair.a_channel, pair.address, 4);
    // TimeWait of the first may end meanwhile.
    let next = |channel: &Channel| loop {
        let event = channel.event();
        if event.kind != CmEventKind::TimewaitExit {
            return event;
        }
    };
    a.cm_done(CmRequest::Connect { id: second, parameters: parameters(b"again") });
    let event = next(&pair.b_channel);
    let CmEventBody::Request { id, .. } = event.body else { panic!("{event:?}") };
    b.cm_done(CmRequest::Reject { id, private_data: b"no".to_vec(), ece: false });
    let event = next(&pair.a_channel);
    assert_eq!((event.kind, event.status), (CmEventKind::Rejected, 28), "consumer defined: {event:?}");
    let CmEventBody::Connection(said) = event.body else { panic!("{event:?}") };
    assert_eq!(said.private_data[..2], *b"no");

    // Nobody listens there.
    let third = a.cm_resolved(&pair.a_channel, CmAddress { port: pair.address.port ^ 1, ..pair.address }, 5);
    a.cm_done(CmRequest::Connect { id: third, parameters: parameters(b"") });
    let event = next(&pair.a_channel);
    assert_eq!((event.kind, event.status), (CmEventKind::Rejected, 8), "invalid service: {event:?}");
}

#[test]
fn two_vnics_of_a_host_connect() {
    let host = Host::new();
    let (a, b) = (host.client("a"), host.client("b"));
    works_between(&a, &b);
    works_between(&b, &a);
}

#[test]
fn a_vnic_connects_to_itself() {
    let host = Host::new();
    let (a, again) = (host.client("a"), host.client("a"));
    works_between(&a, &again);
    works_between(&a, &a);
}

#[test]
fn vnics_of_two_hosts_connect() {
    let _alone = alone();
    let hosts = Hosts::new();
    let (a, b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
    until_reachable(&a, &b);
    until_reachable(&b, &a);
    works_between(&a, &b);
    works_between(&b, &a);
}

/// An object as an operator declares it.
fn apply(host: &Host, kind: &str, name: &str, spec: &str) {
    let text = format!(
        r#"{{"apiVersion": "freeflow.io/v1", "kind": "{kind}", "metadata": {{"name": "{name}"}}, "spec": {spec}}}"#
    );
    let objects = vec![parse_object(&serde_json::from_str(&text).unwrap()).unwrap()];
    host.router.as_ref().unwrap().command(Command::Apply { objects }).unwrap();
}

/// A network of the tenant of `default`, and one of another tenant with the same addresses.
fn declare_networks(host: &Host) {
    apply(host, "Network", "green", r#"{"cidrs": ["10.112.0.0/16"]}"#);
    apply(host, "Network", "others", r#"{"tenant": "other", "cidrs": ["10.112.0.0/16"]}"#);
}

fn join(host: &Host) {
    let spec =
        r#"{"from": {"network": "default"}, "to": {"network": "green"}, "direction": "both", "action": "allow"}"#;
    apply(host, "AccessRule", "join", spec);
}

fn separate(host: &Host) {
    let (kind, name) = (ObjectKind::AccessRule, "join".into());
    host.router.as_ref().unwrap().command(Command::Delete { kind, name, version: None }).unwrap();
}

fn client_in(host: &Host, network: &str, id: &str, address: &str) -> Client {
    let (id, name, network, address) = (id.into(), id.into(), network.into(), Some(address.parse().unwrap()));
    match host.admin(&AdminRequest::Attach { id, name, network, address, labels: Vec::new() }) {
        AdminReply::Vnic(vnic) => Client::connect(&Path::new(&vnic.directory).join("router.sock")),
        other => panic!("{other:?}"),
    }
}

/// A datagram service is asked for, and answers.
fn serves_datagrams(a: &Client, b: &Client) {
    let (a_channel, b_channel) = (a.cm_channel(), b.cm_channel());
    let listener = b.cm_id_of(&b_channel, PortSpace::Udp, QpType::Ud, 1);
    b.cm_bound(CmRequest::Bind { id: listener, address: CmAddress::default() });
    let CmAddress { port, .. } = b.cm_bound(CmRequest::Listen { id: listener, backlog: 8 });
    let id = a.cm_id_of(&a_channel, PortSpace::Udp, QpType::Ud, 2);
    a.cm_bound(CmRequest::ResolveAddress { id, source: None, destination: at(b.gid(), port), timeout_ms: 2000 });
    a_channel.expect(CmEventKind::AddressResolved);
    a.cm_done(CmRequest::ResolveRoute { id, timeout_ms: 2000 });
    a_channel.expect(CmEventKind::RouteResolved);
    a.cm_done(CmRequest::Connect { id, parameters: parameters(b"") });
    let (passive, _) = b.cm_request(&b_channel);
    b.cm_done(CmRequest::Accept { id: passive, cookie: 3, parameters: parameters(b"") });
    a_channel.expect(CmEventKind::Established);
}

/// Both ends of a connection between two networks hear that the rule has gone, and there is no other then.
fn goes_with_the_rule(a: &Client, b: &Client, hosts: &[&Host]) {
    let pair = CmPair::new(a, b);
    pair.connect();
    hosts.iter().for_each(|host| separate(host));
    pair.a_channel.expect(CmEventKind::Disconnected);
    pair.b_channel.expect(CmEventKind::Disconnected);
    let channel = a.cm_channel();
    let id = a.cm_resolved(&channel, pair.address, 9);
    a.cm_done(CmRequest::Connect { id, parameters: parameters(b"") });
    assert_eq!(channel.expect(CmEventKind::Unreachable).status, -Errno::PERM.raw_os_error());
}

#[test]
fn vnics_of_two_joined_networks_of_a_host_connect() {
    let host = Host::new();
    let a = host.client("a");
    declare_networks(&host);
    // The other tenant's comes first, with the same address and a listener at the same port.
    let stranger = client_in(&host, "others", "stranger", "10.112.0.5");
    let b = client_in(&host, "green", "b", "10.112.0.5");
    let channel = stranger.cm_channel();
    let id = stranger.cm_id(&channel, 1);
    stranger.cm_bound(CmRequest::Bind { id, address: CmAddress { port: 7174, ..CmAddress::default() } });
    stranger.cm_bound(CmRequest::Listen { id, backlog: 8 });
    join(&host);
    works_between(&a, &b);
    works_between(&b, &a);
    serves_datagrams(&a, &b);
    serves_datagrams(&b, &a);
    // Nobody of green listens there.
    let own = a.cm_channel();
    let id = a.cm_resolved(&own, at(b.gid(), 7174), 4);
    a.cm_done(CmRequest::Connect { id, parameters: parameters(b"") });
    assert_eq!(own.expect(CmEventKind::Rejected).status, 8, "invalid service");
    assert!(channel.is_silent());
    goes_with_the_rule(&a, &b, &[&host]);
    join(&host);
    works_between(&a, &b);
}

#[test]
fn who_looks_for_an_address_of_a_network_that_is_declared_later_finds_it() {
    let host = Host::new();
    let a = host.client("a");
    let channel = a.cm_channel();
    let (id, destination) = (a.cm_id(&channel, 1), at(Gid::from_ip("10.112.0.5".parse().unwrap()), 7));
    a.cm_bound(CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 60_000 });
    declare_networks(&host);
    client_in(&host, "others", "stranger", "10.112.0.5");
    client_in(&host, "green", "b", "10.112.0.5");
    channel.expect(CmEventKind::AddressResolved);
}

#[test]
fn vnics_of_two_joined_networks_of_two_hosts_connect() {
    let _alone = alone();
    let hosts = Hosts::new();
    hosts.hosts.iter().for_each(declare_networks);
    let [first, second] = &hosts.hosts;
    let a = first.client("a");
    let b = client_in(second, "green", "b", "10.112.1.5");
    let _stranger = client_in(second, "others", "stranger", "10.112.1.6");
    let _another = client_in(first, "others", "another", "10.112.0.5");
    hosts.hosts.iter().for_each(join);
    until_reachable(&a, &b);
    until_reachable(&b, &a);
    works_between(&a, &b);
    works_between(&b, &a);
    serves_datagrams(&a, &b);
    goes_with_the_rule(&a, &b, &[first, second]);
}

#[test]
fn who_is_connected_to_a_process_of_another_host_hears_of_its_end() {
    let _alone = alone();
    let hosts = Hosts::new();
    let (a, b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
    until_reachable(&a, &b);
    let pair = CmPair::new(&a, &b);
    pair.connect();
    let CmPair { b_channel, .. } = pair;
    drop(a);
    b_channel.expect(CmEventKind::Disconnected);
}

#[test]
fn a_router_that_ends_says_so() {
    let _alone = alone();
    let mut hosts = Hosts::new();
    let (a, b) = (hosts.hosts[0].client("a"), hosts.hosts[1].client("b"));
    until_reachable(&a, &b);
    let pair = CmPair::new(&a, &b);
    pair.connect();
    hosts.hosts[0].router.take().unwrap().stop().unwrap();
    pair.b_channel.expect(CmEventKind::Disconnected);
}

#[test]
fn a_process_that_ends_leaves_nobody_waiting() {
    let host = Host::new();
    let (a, b) = (host.client("a"), host.client("b"));
    let doomed = host.client("a");
    let pair = CmPair::new(&doomed, &b);
    let (_, passive) = pair.connect();
    let CmPair { b_channel, .. } = pair;
    drop(doomed);
    assert_eq!(b_channel.expect(CmEventKind::Disconnected).cookie, 3);
    b.cm_destroy(passive);

    // A listener with requests that nobody has answered.
    let doomed = host.client("b");
    let pair = CmPair::new(&a, &doomed);
    let ids: Vec<Handle> = (0..100).map(|number| a.cm_resolved(&pair.a_channel, pair.address, number)).collect();
    for &id in &ids {
        a.cm_done(CmRequest::Connect { id, parameters: parameters(b"") });
    }
    let CmPair { a_channel, .. } = pair;
    drop(doomed);
    for _ in &ids {
        a_channel.expect(CmEventKind::Rejected);
    }
    for id in ids {
        a.cm_destroy(id);
    }
}

#[test]
fn a_vnic_that_is_detached_leaves_nobody_waiting() {
    use freeflow_protocol::admin::{AdminReply, AdminRequest};
    let host = Host::new();
    let (a, b) = (host.client("a"), host.client("b"));
    let pair = CmPair::new(&a, &b);
    pair.connect();
    assert_eq!(host.admin(&AdminRequest::Detach { id: "a".into() }), AdminReply::Done);
    pair.b_channel.expect(CmEventKind::Disconnected);
    let id = b.cm_id(&pair.b_channel, 9);
    let destination = at(a.gid(), 1);
    let reply = b.cm(CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 10 });
    if reply != Reply::Failed(VerbsError::Unreachable) {
        until("word of it", || Some(()).filter(|()| pair.b_channel.event().kind == CmEventKind::AddressError));
    }
}

#[test]
fn a_full_pipe_loses_nothing_and_keeps_the_order() {
    let host = Host::new();
    let a = host.client("a");
    let channel = a.cm_channel();
    for cookie in 0..1000 {
        let id = a.cm_id(&channel, cookie);
        a.cm_bound(CmRequest::ResolveAddress { id, source: None, destination: at(a.gid(), 1), timeout_ms: 10 });
    }
    let first: Vec<Vec<u8>> = (0..5).map(|_| channel.record()).collect();
    // A record taken out and put back does not come before those in the pipe, but before those
    // owed.
    a.cm_done(CmRequest::Repost { channel: channel.handle, records: first });
    let cookies: Vec<u64> = (0..1000).map(|_| channel.expect(CmEventKind::AddressResolved).cookie).collect();
    let back = cookies.iter().position(|&cookie| cookie == 0).unwrap();
    assert_eq!(cookies[back..back + 5], [0, 1, 2, 3, 4]);
    assert!(back < 32, "{back}");
    let others: Vec<u64> = cookies.into_iter().filter(|&cookie| cookie >= 5).collect();
    assert_eq!(others, (5..1000).collect::<Vec<u64>>());
    assert!(channel.is_silent());
}

#[test]
fn who_never_reads_is_cut_off_and_nobody_else() {
    let host = Host::new();
    let (a, b) = (host.client("a"), host.client("b"));
    let doomed = host.client("a");
    let channel = doomed.cm_channel();
    let event = CmEvent {
        cookie: 1,
        kind: CmEventKind::Rejected,
        status: 28,
        body: CmEventBody::Connection(ConnectionParameters { private_data: vec![7; 200], ..Default::default() }),
    };
    let records = vec![freeflow_protocol::encode(&event); 200];
    let request = freeflow_protocol::encode(&Request::Cm(CmRequest::Repost { channel: channel.handle, records }));
    let mut accepted = 0;
    while exchange(&doomed.socket, &request, 1).is_some() {
        accepted += 1;
        assert!(accepted < 1000, "nobody cuts it off");
    }
    assert!(accepted > 10, "{accepted}");
    works_between(&a, &b);
}

#[test]
fn requests_of_an_enemy_are_refused() {
    let host = Host::new();
    let (a, b) = (host.client("a"), host.client("b"));
    let pair = CmPair::new(&a, &b);
    let (active, passive) = pair.connect();
    let (channel, id) = (pair.a_channel.handle, active);
    let other = host.client("a");
    let foreign = |request: CmRequest| assert_eq!(other.cm_refused(request), VerbsError::NotFound);
    foreign(CmRequest::DestroyChannel { channel });
    foreign(CmRequest::Repost { channel, records: Vec::new() });
    for id in [active, passive, pair.listener, 0, u32::MAX] {
        foreign(CmRequest::DestroyId { id });
        foreign(CmRequest::Disconnect { id });
        foreign(CmRequest::Accept { id, cookie: 1, parameters: parameters(b"") });
        foreign(CmRequest::Reject { id, private_data: Vec::new(), ece: false });
        foreign(CmRequest::SetOption { id, option: CmOption::ReuseAddress(true) });
        foreign(CmRequest::Listen { id, backlog: 1 });
    }
    let own = other.cm_channel();
    let create = |channel| CmRequest::CreateId { channel, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: 1 };
    foreign(create(own.handle + 1));
    let own_id = other.cm_id(&own, 1);
    foreign(CmRequest::MigrateId { id: own_id, channel: own.handle + 1 });
    assert_eq!(other.cm_refused(CmRequest::DestroyChannel { channel: own.handle }), VerbsError::Busy);

    // Another's address; a port that is taken (what Linux says of it if one of the two is bound to all addresses).
    let bind = |gid, port| CmRequest::Bind { id: own_id, address: at(gid, port) };
    assert_eq!(other.cm_refused(bind(b.gid(), 1)), VerbsError::AddressNotAvailable);
    let (_, taken) = a.cm_listen(&pair.a_channel, 8);
    assert_eq!(other.cm_refused(bind(a.gid(), taken.port)), VerbsError::AddressNotAvailable);
    other.cm_destroy(own_id);
    other.cm_done(CmRequest::DestroyChannel { channel: own.handle });

    // Private data that no message has room for, and lies about channels.
    let long = parameters(&[1; 5000]);
    assert_eq!(a.cm_refused(CmRequest::Connect { id, parameters: long.clone() }), VerbsError::InvalidArgument);
    let next = a.cm_resolved(&pair.a_channel, pair.address, 6);
    assert_eq!(a.cm_refused(CmRequest::Connect { id: next, parameters: long.clone() }), VerbsError::InvalidArgument);
    a.cm_done(CmRequest::Connect { id: next, parameters: parameters(b"") });
    let (request, _) = b.cm_request(&pair.b_channel);
    let accept = CmRequest::Accept { id: request, cookie: 4, parameters: long };
    assert_eq!(b.cm_refused(accept), VerbsError::InvalidArgument);
    let reject = CmRequest::Reject { id: request, private_data: vec![1; 5000], ece: false };
    assert_eq!(b.cm_refused(reject), VerbsError::InvalidArgument);
    for records in [vec![Vec::new()], vec![vec![0xff; 20]], vec![vec![0; 2000]]] {
        assert_eq!(a.cm_refused(CmRequest::Repost { channel, records }), VerbsError::InvalidArgument);
    }
}

#[test]
fn identifiers_and_channels_have_limits_and_come_back() {
    let host = Host::new();
    let a = host.client("a");
    for _ in 0..2 {
        let greedy = host.client("a");
        let channel = greedy.cm_channel();
        let request =
            CmRequest::CreateId { channel: channel.handle, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: 1 };
        let made = (0..100_000).take_while(|_| greedy.cm(request.clone()) != Reply::Failed(VerbsError::NoMemory));
        let made = made.count();
        assert!((1000..100_000).contains(&made), "{made}");
        let a_channel = a.cm_channel();
        assert_eq!(
            a.cm_refused(CmRequest::CreateId {
                channel: a_channel.handle,
                port_space: PortSpace::Tcp,
                qp_type: QpType::Rc,
                cookie: 1
            }),
            VerbsError::NoMemory
        );
        drop(greedy);
        let again = || match a.cm(CmRequest::CreateId {
            channel: a_channel.handle,
            port_space: PortSpace::Tcp,
            qp_type: QpType::Rc,
            cookie: 1,
        }) {
            Reply::Cm(CmReply::Id { id }) => Some(id),
            _ => None,
        };
        let id = until("the identifiers to come back", again);
        a.cm_destroy(id);
        a.cm_done(CmRequest::DestroyChannel { channel: a_channel.handle });
    }
    let channels: Vec<(Handle, usize)> = std::iter::from_fn(|| {
        let (reply, fds) = a.ask_fds(&Request::Cm(CmRequest::CreateChannel));
        match reply {
            // Not kept open here: this process has a limit, too.
            Reply::Cm(CmReply::Channel { channel }) => Some((channel, fds.len())),
            Reply::Failed(VerbsError::NoMemory) => None,
            other => panic!("{other:?}"),
        }
    })
    .take(1_000_000)
    .collect();
    assert!((1000..1_000_000).contains(&channels.len()), "{}", channels.len());
    for (channel, _) in channels {
        a.cm_done(CmRequest::DestroyChannel { channel });
    }
}

#[test]
fn who_waits_at_a_channel_that_is_destroyed_goes_on_to_wait() {
    let host = Host::new();
    let a = host.client("a");
    let channel = a.cm_channel();
    a.cm_done(CmRequest::DestroyChannel { channel: channel.handle });
    assert!(channel.is_silent(), "neither an event nor an end");
    assert_eq!(a.cm_refused(CmRequest::DestroyChannel { channel: channel.handle }), VerbsError::NotFound);
    drop(a);
    assert_eq!(rustix::io::read(&channel.events, &mut [0; 8]), Ok(0), "the session is over");
}

/// A vNIC that floods a listener, and another that wants to be served meanwhile.
#[test]
fn a_flood_of_requests_holds_nobody_up() {
    let host = Host::new();
    let (flooder, victim) = (host.client("f"), host.client("v"));
    let (a, b) = (host.client("a"), host.client("b"));
    let (f_channel, v_channel) = (flooder.cm_channel(), victim.cm_channel());
    let (_, address) = victim.cm_listen(&v_channel, 1);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            for round in 0..3 {
                let ids: Vec<Handle> = (0..300).map(|_| flooder.cm_resolved(&f_channel, address, round)).collect();
                for &id in &ids {
                    flooder.cm_done(CmRequest::Connect { id, parameters: parameters(b"flood") });
                }
                for id in ids {
                    flooder.cm_destroy(id);
                }
            }
        });
        let began = Instant::now();
        works_between(&a, &b);
        assert!(began.elapsed().as_secs() < 10);
        flood.join().unwrap();
    });
}

/// A machine without FreeFlow, as far as its QP 1 goes.
struct Machine {
    udp: Udp,
}

const MACHINE: &str = "127.0.0.9";

impl Machine {
    /// At this address, facing the first host.
    fn new(address: &str) -> Self {
        let address = address.parse().unwrap();
        let mut udp = Udp::open(UdpConfig::new(vec![address])).unwrap();
        let host = "127.0.0.2".parse().unwrap();
        let (path_mtu_bytes, frame_bytes) = (4096, 0);
        let external = true;
        let peer = Peer {
            address: host,
            local: address,
            icrc: true,
            external,
            path_mtu_bytes,
            frames: false,
            frame_bytes,
            sealed: false,
            shards: 1,
        };
        udp.set_peer(PeerIndex(0), peer).unwrap();
        Self { udp }
    }

    fn send(&mut self, message: Message) {
        let mad = Mad { status: 0, transaction_id: 7, attribute_modifier: 0, message };
        let head = management_head(3);
        let place = self
            .udp
            .reserve(PacketRoute { to: PeerIndex(0), qpn: 1, flow: 0, spreads: false, traffic_class: 0 }, head.bytes())
            .unwrap();
        let (header, body) = place.split_at_mut(usize::from(head.header.length));
        header.copy_from_slice(head.header.as_slice());
        body.copy_from_slice(&mad.encode());
        self.udp.commit();
        self.udp.flush();
    }

    /// The next message that came to QP 1.
    fn receive(&mut self) -> Message {
        until("a management datagram", || {
            let mut datagram = self.udp.next_datagram()?;
            let received = self.udp.next_packet(&mut datagram)?;
            let (header, payload) = Header::parse(received.packet).unwrap();
            assert_eq!((header.dest_qpn, header.deth.source_qpn, header.deth.qkey), (MAD_QPN, MAD_QPN, MAD_QKEY));
            let mad = Mad::decode(payload).unwrap();
            self.udp.give_back(datagram);
            Some(mad.message)
        })
    }
}

/// The addresses of this test are of the loopback interface, and those a vNIC takes for itself: so
/// the machine is the active side.
#[test]
fn external_machines_connect_by_packets_of_qp_1() {
    let _alone = alone();
    let hosts = Hosts::with_external(MACHINE);
    let a = hosts.hosts[0].client("a");
    let (mut machine, mut stranger) = (Machine::new(MACHINE), Machine::new("127.0.0.8"));
    let channel = a.cm_channel();
    let (_, address) = a.cm_listen(&channel, 6);
    let (source, destination) = (Gid::from_ip(MACHINE.parse().unwrap()).0, a.welcome.gids[1].0);
    let asks = |local_comm_id: u32| {
        let service_id = 0x0106_0000 | u64::from(address.port);
        let mut req = Req { local_comm_id, service_id, local_qpn: local_comm_id, pkey: 0xffff, ..Req::default() };
        (req.path_mtu, req.primary_hop_limit, req.cm_retries_max) = (3, 64, 15);
        (req.primary_local_gid, req.primary_remote_gid) = (source, destination);
        (req.primary_local_lid, req.primary_remote_lid) = (0xffff, 0xffff);
        let header = IpHeader { source_port: 999, source, destination };
        req.private_data[..IpHeader::BYTES].copy_from_slice(&header.encode());
        Message::Req(req)
    };
    // From an address that is not listed nobody hears it.
    stranger.send(asks(77));
    assert!(channel.is_silent());
    machine.send(asks(78));
    let (request, _) = a.cm_request(&channel);
    a.cm_done(CmRequest::Reject { id: request, private_data: b"no".to_vec(), ece: false });
    let Message::Rej(rej) = machine.receive() else { panic!("no REJ") };
    assert_eq!((rej.remote_comm_id, rej.reason), (78, 28));

    machine.send(asks(79));
    let (id, _) = a.cm_request(&channel);
    a.cm_done(CmRequest::Accept { id, cookie: 7, parameters: parameters(b"yes") });
    let Message::Rep(rep) = machine.receive() else { panic!("no REP") };
    assert_eq!((rep.remote_comm_id, &rep.private_data[..3]), (79, &b"yes"[..]));
    let (local_comm_id, remote_comm_id) = (79, rep.local_comm_id);
    // Nobody else can say so for it.
    stranger.send(Message::Rtu(Rtu { local_comm_id, remote_comm_id, ..Rtu::default() }));
    assert!(channel.is_silent());
    machine.send(Message::Rtu(Rtu { local_comm_id, remote_comm_id, ..Rtu::default() }));
    assert_eq!(channel.expect(CmEventKind::Established).cookie, 7);
    a.cm_done(CmRequest::Disconnect { id });
    let mut next = machine.receive();
    while let Message::Rep(_) = next {
        next = machine.receive();
    }
    let Message::Dreq(dreq) = next else { panic!("no DREQ: {next:?}") };
    assert_eq!(dreq.remote_comm_id, 79);
    machine.send(Message::Drep(Drep { local_comm_id, remote_comm_id, ..Drep::default() }));
    channel.expect(CmEventKind::Disconnected);
    // It was the sockets that dropped the stranger's.
    assert!(hosts.wire(0).counters.iter().any(|(name, count)| name == "unknown_source" && *count == 2));
}

/// Connections a second, from resolved identifiers to closed ones. Run by hand, in release mode.
#[test]
#[ignore = "a measurement"]
fn rate() {
    const COUNT: usize = 20_000;
    const BATCH: usize = 500;
    let host = Host::new();
    let (a, b) = (host.client("a"), host.client("b"));
    let pair = CmPair::new(&a, &b);
    let mut time = std::time::Duration::ZERO;
    std::thread::scope(|scope| {
        // The other end: accepts, and closes when it is closed.
        scope.spawn(|| {
            let mut left = COUNT;
            let mut ids = std::collections::BTreeMap::new();
            while left > 0 {
                let event = pair.b_channel.event();
                match (event.kind, event.body) {
                    (CmEventKind::ConnectRequest, CmEventBody::Request { id, .. }) => {
                        let cookie = u64::from(id);
                        b.cm_done(CmRequest::Accept { id, cookie, parameters: parameters(b"") });
                        ids.insert(cookie, id);
                    }
                    (CmEventKind::Disconnected, _) => {
                        b.cm_destroy(ids.remove(&event.cookie).unwrap());
                        left -= 1;
                    }
                    (CmEventKind::Established | CmEventKind::TimewaitExit, _) => {}
                    other => panic!("{other:?}"),
                }
            }
        });
        for _ in 0..COUNT / BATCH {
            let resolved = |number| a.cm_resolved(&pair.a_channel, pair.address, number as u64);
            let ids: Vec<Handle> = (0..BATCH).map(resolved).collect();
            let began = Instant::now();
            for &id in &ids {
                a.cm_done(CmRequest::Connect { id, parameters: parameters(b"") });
            }
            let mut left = BATCH;
            while left > 0 {
                let event = pair.a_channel.event();
                let id = ids[event.cookie as usize];
                match event.kind {
                    CmEventKind::ConnectResponse => {
                        a.cm_done(CmRequest::Establish { id });
                        a.cm_done(CmRequest::Disconnect { id });
                    }
                    CmEventKind::Established => a.cm_done(CmRequest::Disconnect { id }),
                    CmEventKind::Disconnected => left -= 1,
                    CmEventKind::TimewaitExit => {}
                    other => panic!("{other:?}"),
                }
            }
            time += began.elapsed();
            for id in ids {
                a.cm_destroy(id);
            }
            while !pair.a_channel.is_silent() {
                pair.a_channel.event();
            }
        }
    });
    println!("{:.0} connections a second", COUNT as f64 / time.as_secs_f64());
}
