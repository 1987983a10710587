//! Snapshots of an engine: all of it, versioned, and total in what they accept.
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use proptest::prelude::*;
use std::path::Path;

/// An engine that has something of everything, with work half done.
fn crowded() -> Net {
    crowded_of(Shard::ONLY)
}

fn crowded_of(shard: Shard) -> Net {
    let mut net = Net::of_shard(shard);
    net.world.always_put_off = true;
    let (a, b) = net.pair(QpType::Rc);
    net.post_receive(&b, 1, &[b.sge(0, 4096)]);
    net.post_send(&a, request(1, SendOpcode::Send, &[a.sge(0, 100), a.sge(512, 1000)]));
    net.post_send(&a, remote(2, SendOpcode::RdmaWrite, &[a.sge(0, 64)], &b, 8192));
    let (c, _) = net.pair(QpType::Uc);
    net.engine.alloc_mw(c.session, c.pd, WindowKind::Type2).unwrap();
    net.engine.alloc_null_mr(c.session, c.pd).unwrap();
    net.engine.open_xrcd(c.session, c.context, None, freeflow_verbs::XrcdOpenFlags::CREATE).unwrap();
    // Waits for a RECV, with its timer armed.
    let (d, e) = (net.end(QpType::Rc), net.end_with(QpType::Rc, true));
    net.connect(&d, &e);
    net.connect(&e, &d);
    let mut inline = request(3, SendOpcode::SendWithImmediate, &[]);
    inline.flags.0 |= SendFlags::INLINE;
    inline.inline_length = 1024;
    inline.inline_data = [0xa5; 1024];
    net.post_send(&d, inline);
    let (target, qpn) = net.qp(&e, QpType::XrcReceive);
    let initiator = net.end(QpType::XrcSend);
    let target = End { qp: target, qpn, ..e };
    net.connect(&initiator, &target);
    net.connect(&target, &initiator);
    net.xrc_srq(&target);
    let member = net.end(QpType::Ud);
    net.connect(&member, &member);
    let group = Gid::from_ip("239.0.0.1".parse().unwrap());
    net.engine.attach_multicast(member.session, member.qp, group).unwrap();
    net.engine.create_ah(member.session, member.pd, &address(group)).unwrap();
    net.work();
    assert!(!net.world.pending.is_empty() && net.engine.poll_timeout().is_some());
    net
}

#[test]
fn what_is_read_is_what_was_written() {
    let mut net = crowded();
    let snapshot = net.engine.snapshot();
    let restored = Engine::restore(&snapshot).unwrap();
    assert!(restored.snapshot() == snapshot);
    assert_eq!(restored.usage(), net.engine.usage());
    assert_eq!(restored.poll_timeout(), net.engine.poll_timeout());
    // It goes on: the copies land in the restored engine.
    net.engine = restored;
    net.world.always_put_off = false;
    net.settle();
    assert!(net.engine.snapshot() != snapshot);
    let done: usize = net.world.completions.values().map(|ring| ring.len()).sum();
    assert_eq!(done, 3, "a SEND at both ends, a WRITE at one");
}

#[test]
fn the_shard_is_part_of_the_state() {
    let shard = Shard::new(2, 4).unwrap();
    let mut net = crowded_of(shard);
    let snapshot = net.engine.snapshot();
    let mut restored = Engine::restore(&snapshot).unwrap();
    assert_eq!(restored.shard(), shard);
    // Both go on with the same names and numbers.
    let create = |engine: &mut Engine| {
        let vnic = engine.create_vnic(NetworkId(1), gid(99), VnicLimits::default()).unwrap();
        let session = engine.create_session(vnic).unwrap();
        let context = engine.open_context(session).unwrap();
        (vnic, session, engine.alloc_pd(session, context).unwrap())
    };
    let made = create(&mut restored);
    assert_eq!(made, create(&mut net.engine));
    assert_eq!([made.0.shard(), made.1.shard(), made.2.shard()], [2; 3]);
    // The first two bytes are its index and the count: names or numbers are not of any other shard.
    for (index, count) in [(1, 4), (0, 1), (3, 4), (2, 8), (4, 4), (2, 3), (2, 16)] {
        let mut other = snapshot.clone();
        other[20..22].copy_from_slice(&[index, count]);
        assert_eq!(Engine::restore(&sealed(other)).err(), Some(SnapshotError::Damaged), "{index} of {count}");
    }
    assert_eq!(&snapshot[20..22], &[2, 4]);
}

#[test]
fn each_way_of_being_none_has_its_error() {
    let snapshot = crowded().engine.snapshot();
    let refused = |bytes: &[u8]| Engine::restore(bytes).err();
    assert_eq!(refused(&[]), Some(SnapshotError::NotASnapshot));
    assert_eq!(refused(b"something else altogether"), Some(SnapshotError::NotASnapshot));
    let mut other = snapshot.clone();
    other[8] += 1;
    assert_eq!(refused(&other), Some(SnapshotError::Version { found: SNAPSHOT_VERSION + 1 }));
    assert_eq!(refused(&snapshot[..snapshot.len() - 1]), Some(SnapshotError::Damaged));
    let mut longer = snapshot.clone();
    longer.push(0);
    assert_eq!(refused(&longer), Some(SnapshotError::Damaged));
}

/// With a checksum that fits, so that the decoder sees the damage.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let checksum = bytes[20..].iter().fold(0xcbf2_9ce4_8422_2325, sum);
    bytes[12..20].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn damage_is_an_error_or_an_engine(
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in prop::option::of(any::<prop::sample::Index>()),
    ) {
        thread_local!(static SNAPSHOT: Vec<u8> = crowded().engine.snapshot());
        let mut bytes = SNAPSHOT.with(Clone::clone);
        prop_assert!(sealed(bytes.clone()) == bytes);
        for (place, byte) in places {
            let place = 20 + place.index(bytes.len() - 20);
            bytes[place] = byte;
        }
        if let Some(end) = end {
            bytes.truncate(20 + end.index(bytes.len() - 20));
        }
        if let Ok(engine) = Engine::restore(&sealed(bytes)) {
            let again = engine.snapshot();
            prop_assert!(Engine::restore(&again).unwrap().snapshot() == again);
        }
    }

    #[test]
    fn any_bytes_are_an_error_or_an_engine(body in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = Engine::new(Seed([7; 32])).snapshot();
        bytes.truncate(20);
        bytes.extend(body);
        let _ = Engine::restore(&sealed(bytes));
    }
}

/// Fields that are not written. Each is a decision: what is left out must be no state.
const SKIPPED: [&str; 2] = [
    // Filled and emptied within one call.
    "requester.rs: pub heads: Vec<PacketHead>,",
    "requester.rs: pub inline: Vec<u8>,",
];

#[test]
fn no_field_is_left_out() {
    let mut found = Vec::new();
    for crate_path in ["src", "../verbs/src", "../wire/src"] {
        look_for_skips(&Path::new(env!("CARGO_MANIFEST_DIR")).join(crate_path), &mut found);
    }
    assert_eq!(found, SKIPPED, "a field that a snapshot does not hold");
}

fn look_for_skips(folder: &Path, found: &mut Vec<String>) {
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            look_for_skips(&path, found);
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if line.trim_start().starts_with("#[serde(") && (line.contains("skip") || line.contains("default")) {
                let field = lines.next().unwrap_or_default().trim();
                // Configuration that people write has defaults; it is written whole.
                if line.trim() != "#[serde(default)]" || !field.starts_with("pub struct VnicLimits") {
                    found.push(format!("{}: {field}", path.file_name().unwrap().display()));
                }
            }
        }
    }
}
