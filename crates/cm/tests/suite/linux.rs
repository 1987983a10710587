//! Beside Linux: what rping said to rping between two machines with rxe (kernel 6.1), put to a machine in the place of
//! either. The recording is that of the wire crate's tests.
use freeflow_cm::{Environment, Limits, Link, Machine, Owner, Packet, Route, Scope, ScopedGid, VnicRef};
use freeflow_protocol::cm::{
    CmAddress, CmEvent, CmEventBody, CmEventKind, CmReply, CmRequest, ConnectionParameters, PortSpace,
};
use freeflow_verbs::{Gid, Instant, PathMtu, QpType, VerbsError};
use freeflow_wire::Header;
use freeflow_wire::cm::{Kind, Mad, Message};
use std::net::Ipv4Addr;

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 3);
const PORT: u16 = 7174;
const OWNER: Owner = Owner(1);
const VNIC: VnicRef = VnicRef(1);
const NOW: Instant = Instant(1);

fn gid(address: Ipv4Addr) -> Gid {
    Gid::from_ip(address.into())
}

/// One vNIC, at the external address.
struct Host {
    address: Ipv4Addr,
    sent: Vec<Mad>,
    heard: Vec<CmEvent>,
    random: u32,
}

impl Host {
    fn place(&self) -> ScopedGid {
        ScopedGid { scope: Scope::External, gid: gid(self.address) }
    }
}

impl Environment for Host {
    fn random(&mut self) -> u32 {
        self.random += 0x1111;
        self.random
    }

    fn addresses(&self, _: VnicRef) -> [Option<ScopedGid>; 3] {
        [Some(self.place()), None, None]
    }

    fn vnic_at(&self, place: ScopedGid) -> Option<VnicRef> {
        (place == self.place()).then_some(VNIC)
    }

    fn route(&self, _: VnicRef, _: Option<Gid>, to: Gid) -> Result<Route, VerbsError> {
        Ok(Route { link: Link::External(0), local: self.place(), remote: to, gid_index: 1, mtu: PathMtu::Mtu4096 })
    }

    fn send(&mut self, packet: Packet<'_>) {
        self.sent.push(Mad::decode(packet.mad).unwrap());
    }

    fn notify(&mut self, _: Owner, _: u32, event: CmEvent) {
        self.heard.push(event);
    }
}

struct Setting {
    machine: Machine,
    host: Host,
}

impl Setting {
    fn new(address: Ipv4Addr) -> Self {
        let host = Host { address, sent: Vec::new(), heard: Vec::new(), random: 1 };
        Self { machine: Machine::new(Limits::default()), host }
    }

    fn ask(&mut self, request: CmRequest) -> Option<CmReply> {
        self.machine.handle_request(&mut self.host, NOW, OWNER, VNIC, &request).unwrap()
    }

    fn create(&mut self) -> u32 {
        let request = CmRequest::CreateId { channel: 1, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: 1 };
        match self.ask(request) {
            Some(CmReply::Id { id }) => id,
            other => panic!("{other:?}"),
        }
    }

    fn hear(&mut self, mad: Mad, from: Ipv4Addr) -> Option<CmEvent> {
        let bytes = mad.encode();
        let (from, to) = (gid(from), gid(self.host.address));
        let packet = Packet { link: Link::External(0), scope: Scope::External, from, to, mad: &bytes };
        self.machine.handle_packet(&mut self.host, NOW, packet);
        self.host.heard.pop()
    }
}

/// REQ, REP, RTU, DREQ, DREP of the recording.
fn recorded() -> [Mad; 5] {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../wire/tests/pcaps/cm_rping.pcap");
    let file = std::fs::read(file).unwrap();
    let (mut found, mut at) = (Vec::new(), 24);
    while at < file.len() {
        let length = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
        let frame = &file[at + 16..at + 16 + length];
        at += 16 + length;
        let (header, payload) = Header::parse(&frame[42..frame.len() - 4]).unwrap();
        if header.dest_qpn == 1 {
            found.push(Mad::decode(payload).unwrap());
        }
    }
    found.try_into().unwrap()
}

fn parameters(qp_number: u32) -> ConnectionParameters {
    ConnectionParameters {
        responder_resources: 1,
        initiator_depth: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        qp_number,
        ..ConnectionParameters::default()
    }
}

#[test]
fn linux_connects_to_us() {
    let [req, rep, mut rtu, mut dreq, drep] = recorded();
    let mut setting = Setting::new(SERVER);
    let listener = setting.create();
    setting.ask(CmRequest::Bind { id: listener, address: CmAddress { gid: gid(Ipv4Addr::UNSPECIFIED), port: PORT } });
    setting.ask(CmRequest::Listen { id: listener, backlog: 3 });
    let event = setting.hear(req, CLIENT).unwrap();
    let CmEventBody::Request { id, route, parameters: asked, qp_type } = event.body else { panic!() };
    assert_eq!((route.local, route.remote.gid), (CmAddress { gid: gid(SERVER), port: PORT }, gid(CLIENT)));
    assert_eq!((asked.qp_number, qp_type, route.remote.port), (0x19, QpType::Rc, 0x8d51));
    setting.ask(CmRequest::Accept { id, cookie: 2, parameters: parameters(0x19) });
    let (Message::Rep(ours), Message::Rep(theirs)) = (setting.host.sent.pop().unwrap().message, rep.message) else {
        panic!()
    };
    // All but the numbers that each draws, and the adapter's own.
    let mut same = ours;
    same.local_comm_id = theirs.local_comm_id;
    (same.starting_psn, same.local_ca_guid) = (theirs.starting_psn, theirs.local_ca_guid);
    assert_eq!(same, theirs);
    let Message::Rtu(said) = &mut rtu.message else { panic!() };
    said.remote_comm_id = ours.local_comm_id;
    assert_eq!(setting.hear(rtu, CLIENT).unwrap().kind, CmEventKind::Established);
    let Message::Dreq(said) = &mut dreq.message else { panic!() };
    said.remote_comm_id = ours.local_comm_id;
    assert_eq!(setting.hear(dreq, CLIENT).unwrap().kind, CmEventKind::Disconnected);
    let (Message::Drep(answer), Message::Drep(theirs)) = (setting.host.sent.pop().unwrap().message, drep.message)
    else {
        panic!()
    };
    assert_eq!(answer.remote_comm_id, theirs.remote_comm_id);
}

#[test]
fn we_connect_to_linux() {
    let [req, mut rep, rtu, dreq, mut drep] = recorded();
    let mut setting = Setting::new(CLIENT);
    let id = setting.create();
    let destination = CmAddress { gid: gid(SERVER), port: PORT };
    setting.ask(CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 2000 });
    setting.ask(CmRequest::ResolveRoute { id, timeout_ms: 2000 });
    setting.ask(CmRequest::Connect { id, parameters: parameters(0x19) });
    let (Message::Req(ours), Message::Req(theirs)) = (setting.host.sent.pop().unwrap().message, req.message) else {
        panic!()
    };
    let mut same = ours;
    (same.local_comm_id, same.starting_psn) = (theirs.local_comm_id, theirs.starting_psn);
    same.local_ca_guid = theirs.local_ca_guid;
    // A hint for the fabric.
    same.primary_flow_label = theirs.primary_flow_label;
    // The source port in the IP header.
    same.private_data[2..4].copy_from_slice(&theirs.private_data[2..4]);
    assert_eq!(same, theirs);
    let Message::Rep(said) = &mut rep.message else { panic!() };
    said.remote_comm_id = ours.local_comm_id;
    let CmEventBody::Connection(heard) = setting.hear(rep, SERVER).unwrap().body else { panic!() };
    assert_eq!((heard.qp_number, heard.private_data.len()), (0x19, 196));
    setting.ask(CmRequest::Establish { id });
    setting.ask(CmRequest::Disconnect { id });
    let [ours_rtu, ours_dreq]: [Mad; 2] = std::mem::take(&mut setting.host.sent).try_into().unwrap();
    let (Message::Rtu(said), Message::Rtu(theirs)) = (ours_rtu.message, rtu.message) else { panic!() };
    assert_eq!((said.remote_comm_id, said.local_comm_id), (theirs.remote_comm_id, ours.local_comm_id));
    let (Message::Dreq(said), Message::Dreq(theirs)) = (ours_dreq.message, dreq.message) else { panic!() };
    assert_eq!((said.remote_comm_id, said.remote_qpn), (theirs.remote_comm_id, theirs.remote_qpn));
    let Message::Drep(said) = &mut drep.message else { panic!() };
    said.remote_comm_id = ours.local_comm_id;
    assert_eq!(setting.hear(drep, SERVER).unwrap().kind, CmEventKind::Disconnected);
    assert_eq!(setting.machine.counts().messages[Kind::Drep.index()].refused, 0);
}
