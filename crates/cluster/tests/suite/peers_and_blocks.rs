//! The other hosts, and their addresses.
use crate::given::{Given, ROOT, network, object, record};
use freeflow_cluster::{Followed, HostRecord, News, PeersOf, View};
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::store::Entry;
use freeflow_router::peering::PeersFile;
use serde_json::json;

fn peers(view: &View) -> PeersOf {
    PeersOf::host("h1", &record(1), view, &view.declared().expect("it makes sense"))
}

fn given() -> Given {
    let red = object("Network", "red", json!({"tenant": "red", "cidrs": ["10.50.0.0/24", "fd00:50::/64"]}));
    Given::new().declared(vec![red]).host("h1", &record(1)).host("h2", &record(2))
}

#[test]
fn others_are_believed_to_have_their_blocks() {
    let view = given().block("red", "h1", "10.50.0.0/28").block("red", "h2", "10.50.0.16/28").view();
    let PeersOf { peers, problems } = peers(&view);
    assert_eq!(problems, []);
    let [peer] = &peers[..] else { panic!("{peers:?}") };
    assert_eq!((peer.host.as_str(), peer.address.to_string().as_str()), ("h2", "192.0.2.2"));
    assert_eq!(peer.prefixes, ["10.111.2.0/24", "10.50.0.16/28", "fd00:50::10/124"]);
}

fn bad(change: impl Fn(&mut HostRecord)) -> HostRecord {
    let mut record = record(3);
    change(&mut record);
    record
}

/// A host writes its record as it likes, when it joins and later.
#[test]
fn a_record_takes_nothing_that_another_has_for_longer() {
    type Change = fn(&mut HostRecord);
    let cases: [(&str, Change, &str, &[&str]); 7] = [
        ("an address", |record| record.address = [192, 0, 2, 2].into(), "address", &["h2"]),
        ("this host's address", |record| record.address = [192, 0, 2, 1].into(), "address", &["h2"]),
        ("a key", |record| record.public_key = "02".repeat(32), "key", &["h2"]),
        ("a range", |record| record.default_range = "10.111.0.0/16".into(), "overlaps", &["h2"]),
        ("all of them", |record| record.default_range = "10.0.0.0/8".into(), "overlaps", &["h2"]),
        ("a network's range", |record| record.default_range = "10.50.0.128/25".into(), "network red", &["h2"]),
        ("another family", |record| record.address = "2001:db8::3".parse().expect("an address"), "kind of IP", &["h2"]),
    ];
    for (what, change, word, left) in cases {
        // Of a name that comes first; and of one that was there first, with another record until now.
        let joined = given().host("a", &bad(change));
        let changed = Given::new().host("a", &record(3));
        let changed = changed.and(given()).host("a", &bad(change));
        for given in [joined, changed] {
            let PeersOf { peers, problems } = peers(&given.view());
            let hosts: Vec<&str> = peers.iter().map(|peer| peer.host.as_str()).collect();
            assert_eq!(hosts, left, "{what}");
            assert!(problems.len() == 1 && problems[0].message.contains(word), "{what}: {problems:?}");
        }
    }
}

/// Before its own record is there, and where another had its address, say under its name of before.
#[test]
fn a_host_believes_itself_first() {
    let mut impostor = record(7);
    for given in [
        Given::new().host("a", &record(1)).host("h2", &record(2)),
        Given::new().host("a", &record(1)).host("h1", &record(1)).host("h2", &record(2)),
        {
            impostor.public_key = record(1).public_key;
            Given::new().host("a", &impostor).host("h2", &record(2))
        },
    ] {
        let PeersOf { peers, problems } = peers(&given.view());
        assert_eq!(peers.iter().map(|peer| peer.host.as_str()).collect::<Vec<_>>(), ["h2"], "{problems:?}");
        assert_eq!(problems[0].name.as_deref(), Some("a"));
    }
}

/// It says that it has the next one's block, before that one is there.
#[test]
fn a_host_with_a_block_has_no_other_range() {
    let says = |range: &str| HostRecord { default_range: range.into(), ..record(2) };
    for (range, is_believed) in
        [("10.111.2.0/24", true), ("10.111.2.128/25", true), ("10.111.3.0/24", false), ("10.111.0.0/16", false)]
    {
        let given = Given::new().block("default", "h2", "10.111.2.0/24").block("default", "h3", "10.111.3.0/24");
        let given = given.host("h2", &says(range)).host("hand", &record(4)).host("h3", &record(3));
        let PeersOf { peers, problems } = peers(&given.view());
        let prefixes = |name: &str| {
            peers.iter().find(|peer| peer.host == name).map(|peer| peer.prefixes.clone()).unwrap_or_default()
        };
        assert_eq!((prefixes("h3"), prefixes("hand")), (vec!["10.111.3.0/24".into()], vec!["10.111.4.0/24".into()]));
        let expected = if is_believed { vec![range.to_owned()] } else { Vec::new() };
        assert_eq!((prefixes("h2"), problems.len()), (expected, usize::from(!is_believed)), "{range}: {problems:?}");
    }
}

/// A router refuses the whole file for one line that it does not like.
#[test]
fn routers_take_the_file_whatever_hosts_say() {
    let addresses =
        ["224.0.0.1", "255.255.255.255", "127.0.0.1", "0.0.0.0", "169.254.1.1", "::1", "ff02::1", "::ffff:1.2.3.4"];
    let mut records: Vec<HostRecord> =
        addresses.iter().map(|address| bad(|record| record.address = address.parse().expect("an address"))).collect();
    for range in ["all", "10.9.0.0/+24", "10.9.0.0/024", "010.9.0.0/24", "10.9.0.1/24", "fd00::/64"] {
        records.push(bad(|record| record.default_range = range.into()));
    }
    for key in ["02", &"0A".repeat(32), &"zz".repeat(32), &"é".repeat(32)] {
        records.push(bad(|record| record.public_key = key.into()));
    }
    records.push(bad(|record| record.control_port = 0));
    let sound = given().view().hosts().len();
    for record in &records {
        assert_eq!(given().host("a", record).view().hosts().len(), sound, "{record:?}");
    }
    for name in ["-", "", &"a".repeat(65), "..", "a b", "é"] {
        assert_eq!(given().host(name, &record(3)).view().hosts().len(), sound, "{name}");
    }
    assert_eq!(given().key("hosts/a/data/record", b"{").view().hosts().len(), sound);
    // And what is left is taken: also where blocks, ranges and networks of tenants overlap.
    let networks =
        vec![network("red", "10.50.0.0/16"), network("blue", "10.50.0.0/24"), network("green", "10.111.0.0/16")];
    let given = Given::new().declared(networks);
    let given = (1..=4).fold(given, |given, number| given.host(&format!("h{number}"), &record(number)));
    let given = given.block("red", "h2", "10.50.0.0/24").block("blue", "h3", "10.50.0.16/28").block(
        "green",
        "h4",
        "10.111.2.0/24",
    );
    let found = peers(&given.host("h5", &bad(|record| record.default_range = "10.50.0.0/28".into())).view());
    let file =
        json!({"host": "h1", "address": "192.0.2.1", "key_file": "host.key", "wire": "plain", "peers": found.peers});
    let parsed = PeersFile::parse(&file.to_string());
    let parsed = parsed.unwrap_or_else(|error| panic!("{error}: {file:#}"));
    assert_eq!(parsed.peers.len(), found.peers.len());
    assert_eq!(found.peers.iter().map(|peer| peer.host.as_str()).collect::<Vec<_>>(), ["h3", "h4"], "{found:?}");
}

#[test]
fn a_block_outside_its_network_is_believed_of_nobody() {
    let view = given().block("red", "h2", "10.0.0.0/8").block("blue", "h2", "10.50.0.0/28").view();
    assert_eq!(peers(&view).peers[0].prefixes, ["10.111.2.0/24"]);
}

#[test]
fn more_than_a_router_takes_is_left_out_and_said() {
    let named = |number: u32| (format!("n{number}"), format!("10.{}.{}.0", 64 + number / 256, number % 256));
    let all = || (0..2050).map(named);
    let both = |(number, (name, base)): (usize, (String, String))| {
        let cidrs = json!([format!("{base}/24"), format!("fd00:{number:x}::/64")]);
        object("Network", &name, json!({"tenant": "many", "cidrs": cidrs}))
    };
    let networks = all().enumerate().map(both).collect();
    let given = all()
        .fold(Given::new().declared(networks).host("h1", &record(1)).host("h2", &record(2)), |given, (name, base)| {
            given.block(&name, "h2", &format!("{base}/28"))
        });
    let PeersOf { peers, problems } = peers(&given.view());
    assert_eq!(peers[0].prefixes.len(), 4096);
    assert!(problems.len() == 5 && problems[0].message.contains("more than 4096 ranges"), "{problems:?}");
}

#[test]
fn a_controller_looks_only_where_something_has_come_that_it_decides_by() {
    let mut view = Given::new().declared(vec![network("red", "10.50.0.0/16")]).host("h1", &record(1)).view();
    let (mut at, declared) = (1000, 1001);
    let mut is_look_due = |key: &str, value: Option<Vec<u8>>| {
        at += 1;
        let (before, key, revision) = (view.control_version(), format!("{ROOT}/{key}"), Revision(at));
        let entry = |value| Entry { key: key.clone(), value, created: revision, modified: revision, lease: None };
        view.take(News::Changed(revision, vec![(key.clone(), value.map(entry))]));
        view.control_version() != before
    };
    let word = |revision, at_s, range: Option<&str>| {
        let ranges = range.map(|range| ("red".to_owned(), range.to_owned())).into_iter().collect();
        serde_json::to_vec(&Followed { revision, at_s, ranges, ..Followed::default() }).ok()
    };
    assert!(is_look_due("declared/data/serial", Some(Vec::new())), "at the revision that hosts follow");
    let said = "said/h1/data/followed";
    assert!(is_look_due(said, word(declared - 1, 1, None)), "the first word");
    assert!(!is_look_due(said, word(declared - 1, 2, None)), "the same again");
    assert!(is_look_due(said, word(declared, 3, None)), "now it has followed all");
    assert!(!is_look_due(said, word(declared + 9, 4, None)));
    assert!(is_look_due(said, word(declared + 9, 5, Some("10.50.0.0/24"))), "another range");
    assert!(!is_look_due("said/h1/receipts/w/1", Some(b"done".to_vec())));
    assert!(!is_look_due("hosts/h1/data/members/0", Some(b"{\"networks\":{}}".to_vec())));
    for key in ["blocks/data/serial", "places/data/serial", "declared/data/serial", "hosts/h1/data/holdings"] {
        assert!(is_look_due(key, Some(b"{}".to_vec())), "{key}");
    }
    assert!(
        is_look_due("blocks/data/red/h1", Some(b"10.50.0.0/24".to_vec())) && is_look_due("hosts/h1/data/record", None)
    );
    assert!(is_look_due(said, None), "it has said nothing");
    let before = view.control_version();
    view.take(News::Listed(Revision(at + 1), Vec::new()));
    assert_ne!(view.control_version(), before);
}
