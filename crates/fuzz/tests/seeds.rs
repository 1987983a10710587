//! Seeds that are written by hand: inputs that reach what chance hardly finds.
//! `FREEFLOW_UPDATE=1 cargo test -p freeflow-fuzz --test seeds` writes them into the corpora.
use freeflow_protocol::attachment::{Answer, Report, Request};
use freeflow_protocol::encode;
use freeflow_protocol::peer::{PeerMessage, SealSecret};
use freeflow_verbs::{AtomicOperation, VerbsError};
use freeflow_wire::frame::Frame;
use freeflow_wire::records::{Record, RecordsWriter};
use freeflow_wire::sealed::SealHeader;
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Reth, Service};
use std::fs;
use std::path::PathBuf;

struct Seed {
    target: &'static str,
    name: &'static str,
    bytes: Vec<u8>,
}

const ADMIN: u8 = 0;
const VIEWER: u8 = 5;
const TENANT: u8 = 10;
const NO_ROLE: u8 = 15;
const GET: u8 = 0;
const PUT: u8 = 1;
const POST: u8 = 2;
const DELETE: u8 = 3;

/// Frames, and what looks like one: behind the target's own seven bytes.
fn frames() -> Vec<Seed> {
    let frame = |operation: Operation, place: PacketPosition| {
        let opcode = Opcode::new(Service::Rc, operation, place).expect("the standard has it");
        let reth = Reth { address: 0x7000, rkey: 5, length: 4096 };
        let frame = Some(Frame { message_psn: 6, response_bytes: 0 });
        Header { reth, frame, ..Header::new(opcode, 0x11, 7) }.encode().as_slice().to_vec()
    };
    let seed = |name, packet: Vec<u8>| Seed { target: "wire", name, bytes: [&[0; 7][..], &packet].concat() };
    let mut unknown = frame(Operation::Send, PacketPosition::Only);
    unknown[0] |= 0x1e;
    let records = |operations: &[Operation]| {
        let mut writer = RecordsWriter::new(0x11, 7, (true, false));
        for operation in operations {
            let opcode = Opcode::new(Service::Rc, *operation, PacketPosition::Only).expect("the standard has it");
            let (rkey, address) = if opcode.has_reth() { (5, 0x7000) } else { (0, 0) };
            let argument = if opcode.has_immediate() || opcode.has_ieth() { 9 } else { 0 };
            writer.push(&Record { opcode, solicited: false, length: 6, rkey, address, argument });
        }
        [writer.finish(), &vec![1; 6 * operations.len()]].concat()
    };
    let kinds = [Operation::Write, Operation::SendInvalidate, Operation::WriteImmediate, Operation::SendImmediate];
    vec![
        seed("frame-write", [frame(Operation::WriteImmediate, PacketPosition::Last), vec![1; 9]].concat()),
        seed("frame-send", [frame(Operation::SendInvalidate, PacketPosition::Only), vec![1; 64]].concat()),
        seed("frame-read", frame(Operation::ReadRequest, PacketPosition::Only)),
        seed("frame-response", [frame(Operation::ReadResponse, PacketPosition::Middle), vec![1; 33]].concat()),
        seed("frame-short", frame(Operation::Write, PacketPosition::First)[..39].to_vec()),
        seed("frame-unknown", unknown),
        seed("records-kinds", records(&kinds)),
        seed("records-many", records(&[Operation::Send; 32])),
        seed("records-short", records(&[Operation::Write; 2])[..40].to_vec()),
    ]
}

/// Sealed packets, behind the target's own seven bytes: near the first number, near the last one, and too short.
fn sealed() -> Vec<Seed> {
    let seed = |name, counter, rest: &[u8]| {
        let head = SealHeader { key: 0xab_cdef, counter }.encode();
        Seed { target: "wire", name, bytes: [&[0; 7][..], &head, rest].concat() }
    };
    let steps: Vec<u8> = (0..64_u16).flat_map(|step| (step * 1021).to_be_bytes()).collect();
    vec![
        seed("sealed-first", 0, &steps),
        seed("sealed-middle", 1 << 40, &steps),
        seed("sealed-last", u64::MAX, &steps),
        seed("sealed-empty", 7, &[0; 16]),
        seed("sealed-short", 7, &[0; 15]),
    ]
}

fn rest_requests() -> Vec<Seed> {
    let network = r#"{"spec": {"tenant": "blue", "cidrs": ["10.7.0.0/16"]}}"#;
    let rule = concat!(
        r#"{"items": [{"apiVersion": "freeflow.io/v1", "kind": "AccessRule", "metadata": {"name": "r"}, "#,
        r#""spec": {"tenant": "blue", "from": {"labels": {"tier": "web"}}, "to": {}, "action": "deny"}}]}"#
    );
    let requests: [(&str, u8, &str, &str); 16] = [
        ("list", ADMIN + GET, "networks?labelSelector=tier%3Dweb%2C!old,a!=b", ""),
        ("watch", TENANT + GET, "vnics?watch=true&resourceVersion=7&labelSelector=a", ""),
        ("get", VIEWER + GET, "hosts/h1?watch=false", ""),
        ("get-not-utf8", ADMIN + GET, "networks/%ff", ""),
        ("put", ADMIN + PUT, "networks/blue?dryRun=true", network),
        ("put-other-name", ADMIN + PUT, "networks/red", r#"{"metadata": {"name": "blue"}, "spec": {"cidrs": []}}"#),
        ("delete", ADMIN + DELETE, "groups/g%67?resourceVersion=4&dryRun=false", ""),
        ("apply", TENANT + POST, "apply?dryRun=false", rule),
        ("apply-misspelt", ADMIN + POST, "apply?dryrun=true", rule),
        ("apply-unknown-field", ADMIN + POST, "apply", r#"{"items": [], "dryRun": true}"#),
        ("faults", ADMIN + PUT, "hosts/h1/wire/faults", r#"{"lossPpm": 1000, "seed": 3}"#),
        ("faults-viewer", VIEWER + DELETE, "hosts/h1/wire/faults", ""),
        ("qps", VIEWER + GET, "hosts/h1/qps?continue=3", ""),
        ("peers-tenant", TENANT + GET, "hosts/h1/peers", ""),
        ("data-path", ADMIN + PUT, "networks/blue/dataPath", r#"{"dataPath": "routed"}"#),
        ("no-role", NO_ROLE + GET, "networks", ""),
    ];
    let seed = |&(name, choice, path, body): &(&'static str, u8, &str, &str)| {
        let text = format!("/apis/freeflow.io/v1/{path}\n{body}");
        Seed { target: "rest_request", name, bytes: [&[choice], text.as_bytes()].concat() }
    };
    let mut seeds: Vec<Seed> = requests.iter().map(seed).collect();
    for (name, choice, path) in [
        ("openapi", TENANT + GET, "/openapi/v3"),
        ("version", VIEWER + GET, "/version"),
        ("metrics-tenant", TENANT + GET, "/metrics"),
        ("not-utf8", ADMIN + GET, "/apis/freeflow.io/v1/networks/%ff"),
    ] {
        seeds.push(Seed { target: "rest_request", name, bytes: [&[choice], path.as_bytes()].concat() });
    }
    seeds
}

fn manifests() -> Vec<Seed> {
    let texts = [
        (
            "two-documents",
            "kind: Network\nmetadata: {name: blue}\nspec:\n  cidrs:\n  - 10.1.0.0/16\n---\n# nothing\n---\n\
             kind: QosClass\nmetadata:\n  name: slow\nspec: {vnic: {rate: 1Gbit}, weight: 3}\n",
        ),
        (
            "list",
            "kind: NetworkList\nitems:\n- {kind: Network, metadata: {name: a}}\n- {kind: Network, metadata: {name: b}}\n",
        ),
        ("json", r#"{"kind": "Group", "metadata": {"name": "g"}, "spec": {"members": [{"vnics": ["v", "w"]}]}}"#),
        ("aliases", "kind: Group\nmetadata: &m {name: g}\nspec: {members: [&a {vnics: [v]}, *a, {labels: *m}]}\n"),
        (
            "words",
            "kind: Vnic\nmetadata: {name: v, labels: {a: no, b: \"1\", c: ~, d: 1e3, e: 0x1f, f: .inf, g: -0.0}}\n\
             spec: {network: |\n  line\n  line\n}\n",
        ),
        (
            "texts",
            "kind: Vnic\nmetadata:\n  name: v\n  labels:\n    a: >-\n      folded\n      text\n    'b c': \"\\u00e9\\t\"\n",
        ),
        ("twice", "kind: Network\nkind: Group\nmetadata: {name: x}\n"),
        ("tag", "kind: !!python/object x\n"),
        ("no-name", "kind: Network\nmetadata: {name: 1}\n"),
        (
            "deep",
            "kind: Group\nmetadata: {name: g}\nspec: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]\n",
        ),
    ];
    texts.map(|(name, text)| Seed { target: "manifest", name, bytes: text.into() }).into()
}

/// Steps of `cm_machine`: a listener on host 0 and a program on host 1, whose request is the third identifier.
mod cm {
    pub const TCP: u8 = 0;
    pub const UDP: u8 = 4;
    pub const DELIVER_ALL: u8 = 15;
    pub const OTHER_HOST: u8 = 0;
    pub const EXTERNAL: u8 = 0x80;

    pub fn begin(space: u8, to: u8) -> Vec<u8> {
        vec![6, space, 7, space + 1, to, DELIVER_ALL]
    }

    /// A request about an identifier, by its owner.
    pub fn ask(which: u8, rest: &[u8]) -> Vec<u8> {
        [&[1, which, 0], rest].concat()
    }

    /// With five bytes of private data.
    pub fn accept(which: u8) -> Vec<u8> {
        [ask(which, &[7, 5, 0, 9, 0]), vec![DELIVER_ALL]].concat()
    }

    pub fn establish(which: u8) -> Vec<u8> {
        [ask(which, &[10]), vec![DELIVER_ALL]].concat()
    }

    pub fn disconnect(which: u8) -> Vec<u8> {
        [ask(which, &[12]), vec![DELIVER_ALL]].concat()
    }

    pub fn destroy(which: u8) -> Vec<u8> {
        ask(which, &[0])
    }

    pub fn pass(ms: u16) -> Vec<u8> {
        [&[13], &ms.to_le_bytes()[..]].concat()
    }
}

fn cm_machines() -> Vec<Seed> {
    use cm::*;
    let connected = |to| [begin(TCP, to), accept(2), establish(1)].concat();
    let join = [vec![0, UDP], ask(0, &[2, 0, 1]), ask(0, &[0x1e, 0xe0]), ask(0, &[0x0e, 0xe0]), destroy(0)];
    let scripts: [(&str, Vec<u8>); 9] = [
        ("connection", [connected(OTHER_HOST), disconnect(2), pass(200), destroy(2), destroy(1), destroy(0)].concat()),
        ("external", [connected(EXTERNAL), disconnect(1), pass(50), pass(200), destroy(0)].concat()),
        ("datagrams", [begin(UDP, OTHER_HOST), accept(2), pass(500), destroy(0)].concat()),
        ("rejected", [begin(TCP, OTHER_HOST), ask(2, &[9, 3]), vec![DELIVER_ALL], destroy(1)].concat()),
        ("listener-goes", [begin(TCP, OTHER_HOST), destroy(0), vec![DELIVER_ALL], pass(100)].concat()),
        ("no-answer", [begin(TCP, OTHER_HOST), pass(100), pass(100), pass(100), pass(60_000)].concat()),
        ("multicast", join.concat()),
        // The REQ changed, twice delivered, and its sender another's.
        (
            "spoilt",
            [vec![6, TCP, 7, TCP + 1, 0, 11, 0, 24, 0, 1, 10, 0, 11, 0, 1, 2, 5, 10, 0, 9, 0], connected(0)].concat(),
        ),
        // Link down, cut off, policy, the vNIC and the owner gone.
        ("disturbed", [connected(0), vec![14, 4, 14, 6, 14, 10, 14, 12, 14, 2, 14, 1], pass(300)].concat()),
    ];
    scripts.map(|(name, bytes)| Seed { target: "cm_machine", name, bytes }).into()
}

/// Steps of `peer_state`: host 1 and host 2 have the same prefix.
mod peers {
    pub const NETWORKS: [u8; 2] = [10, 0x1a];
    /// Of the prefix of hosts 1 and 2, of this host, and a group.
    pub const THEIRS: u8 = 0x05;
    pub const OWN: u8 = 0xb1;
    pub const GROUP: u8 = 0xc1;

    /// The host dials and says Hello, on the connection of this place.
    pub fn up(host: u8, place: u8, epoch: u8) -> Vec<u8> {
        vec![host << 4, 1 | place << 4, epoch]
    }

    pub fn say(place: u8, message: &[u8]) -> Vec<u8> {
        [&[3 | place << 4], message].concat()
    }

    pub fn attach(place: u8, gid: u8) -> Vec<u8> {
        say(place, &[0, gid])
    }

    pub fn pass(quarters_of_ms: u16) -> Vec<u8> {
        [&[9], &quarters_of_ms.to_le_bytes()[..]].concat()
    }
}

fn peer_states() -> Vec<Seed> {
    use peers::*;
    let one = || [NETWORKS.to_vec(), up(0, 0, 5), attach(0, THEIRS), say(0, &[7])].concat();
    let own = |gid| vec![11, 0, gid];
    // This host becomes sealed; host 1 comes up as sealed, and as plain; keys that are, and that can't be.
    let says = |message: &PeerMessage| {
        let bytes = encode(message);
        [&[8][..], &(bytes.len() as u16).to_le_bytes(), &bytes].concat()
    };
    let key = |id| says(&PeerMessage::SealKey { id, in_use: None, secret: SealSecret { key: [7; 16], base: [8; 12] } });
    let (becomes_sealed, held) = (vec![0x0c, 0x26], says(&PeerMessage::SealKeyHeld { id: 5 }));
    let shards = |count| says(&PeerMessage::Shards { count });
    let scripts: [(&str, Vec<u8>); 11] = [
        ("shards", [one(), shards(8), shards(1), shards(3)].concat()),
        ("sealed", [becomes_sealed.clone(), up(0, 0, 0x45), key(5), held.clone(), key(1 << 24)].concat()),
        ("sealed-and-plain", [becomes_sealed, up(0, 0, 5), up(0, 0, 0x45), vec![0x0c, 6], held].concat()),
        ("announced", [one(), say(0, &[4, THEIRS])].concat()),
        ("two-of-one-address", [one(), up(1, 1, 6), attach(1, THEIRS), say(0, &[4, THEIRS]), vec![2]].concat()),
        ("own-address", [one(), own(THEIRS), say(0, &[14, THEIRS, THEIRS]), vec![11, 2, THEIRS]].concat()),
        ("group", [one(), say(0, &[5, GROUP, 1]), say(0, &[5, GROUP, 0]), own(GROUP)].concat()),
        ("cm", [one(), own(OWN), say(0, &[12, THEIRS, OWN]), say(0, &[12, THEIRS, THEIRS])].concat()),
        ("silent", [one(), pass(250), pass(250), pass(1000), pass(8000)].concat()),
        ("restarted", [one(), vec![2], up(0, 0, 9), attach(0, THEIRS + 1), say(0, &[7])].concat()),
        (
            "file-and-network",
            [one(), vec![0x8a, 10, 12, 0x04, 0x0c], up(0, 0, 5), vec![15], say(0, &[9, 1, 0, 0, 0, THEIRS])].concat(),
        ),
    ];
    scripts.map(|(name, bytes)| Seed { target: "peer_state", name, bytes }).into()
}

fn attachments() -> Vec<Seed> {
    let (request, process, address, channel) = (3, 4, 0x7f00_0000_1000, 5);
    let reports = [
        ("done", Report::Done { request, outcome: Ok(Answer::Done) }),
        ("bytes", Report::Done { request, outcome: Ok(Answer::Bytes(vec![7; 64])) }),
        ("value", Report::Done { request, outcome: Ok(Answer::Value(u64::MAX)) }),
        ("refused", Report::Done { request, outcome: Err(VerbsError::NotPermitted) }),
        ("process-ended", Report::ProcessEnded { process }),
        ("event-taken", Report::EventTaken { channel }),
        ("channel-closed", Report::ChannelClosed { channel }),
    ];
    let operation = AtomicOperation::FetchAdd { add: 1 };
    let requests = [
        ("identify", Request::Identify { request, pid: 77, uid: 0, gid: 0 }),
        ("read", Request::Read { request, process, address, length: 4096 }),
        ("write", Request::Write { request, process, address, bytes: vec![1, 2, 3] }),
        ("atomic", Request::Atomic { request, process, address, operation }),
        ("freeze", Request::Freeze { request, process, thread: 78, quiesce: true }),
        ("event", Request::Event { channel, record: vec![9; 16] }),
    ];
    let seed =
        |name, kind: u8, message: Vec<u8>| Seed { target: "attachment", name, bytes: [vec![kind], message].concat() };
    let reports = reports.map(|(name, report)| seed(name, 0, encode(&report)));
    reports.into_iter().chain(requests.map(|(name, request)| seed(name, 1, encode(&request)))).collect()
}

#[test]
fn the_corpora_have_the_seeds() {
    let corpora = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for seed in [rest_requests(), frames(), sealed(), manifests(), cm_machines(), peer_states(), attachments()]
        .into_iter()
        .flatten()
    {
        let folder = corpora.join(seed.target);
        let path = folder.join(format!("seed-{}", seed.name));
        if std::env::var_os("FREEFLOW_UPDATE").is_some() {
            fs::create_dir_all(&folder).expect("the folder");
            fs::write(&path, &seed.bytes).expect("written");
        }
        assert_eq!(fs::read(&path).ok().as_ref(), Some(&seed.bytes), "{}: FREEFLOW_UPDATE=1 writes it", path.display());
    }
}
