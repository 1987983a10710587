//! Peers files with many hosts, of which some leave and are back.
use super::file::{KEY_BYTES, PEER_COUNT_MAX, PeerEntry, PeersFile};
use super::numbers::NUMBER_KEPT;
use super::state::*;
use super::state_tests::{Solo, address, file, hello, route};
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_verbs::Duration;
use std::net::Ipv4Addr;

#[test]
fn a_host_that_is_back_within_seconds_is_the_same_one_and_says_all_again() {
    let mut solo = Solo::new(file(3));
    for (host, connection, name) in [(HostId(1), 1, "h1"), (HostId(2), 2, "h2")] {
        solo.state.handle_connected(solo.now, host, connection);
        solo.says(connection, hello(name, 1));
        solo.says(connection, address("default", &format!("10.111.{}.1", host.0)));
    }
    solo.take_updates();
    let (mut without, host) = (file(3), HostId(1));
    without.peers.remove(0);
    for connection in [3, 4] {
        solo.state.handle_reload(solo.now, without.clone());
        let updates = solo.take_updates();
        let gone = [
            Update::HostDown { host },
            route("10.111.1.1", None),
            Update::Removed { host },
            Update::PeersGone { host },
        ];
        assert_eq!(updates[..4], gone, "nothing of it is kept");
        assert!(matches!(updates[4..], [Update::Settings(_)]), "nothing is said of others: {updates:?}");
        solo.pass(Duration::from_millis(500));
        solo.state.handle_reload(solo.now, file(3));
        assert!(matches!(solo.take_updates()[..], [Update::Settings(_)]));
        assert_eq!(solo.state.host_named("h1").map(|(host, _)| host), Some(host), "QPs there name it by this number");
        solo.state.handle_connected(solo.now, host, connection);
        solo.says(connection, hello("h1", 1));
        solo.says(connection, address("default", "10.111.1.1"));
        let updates = solo.take_updates();
        assert!(matches!(updates[..2], [Update::PeersGone { .. }, Update::HostUp { host: HostId(1), .. }]));
        assert_eq!(updates[2..], [route("10.111.1.1", Some(host))]);
    }
    assert_eq!(solo.closed, [1, 3], "the other host's connection has stayed");
    assert_eq!(solo.state.statuses()[1].state, "up");
}

#[test]
fn who_is_to_be_dialed_and_leaves_is_dialed_once_when_it_is_back() {
    let mut solo = Solo::new(file(1));
    solo.pass(Duration(0));
    assert_eq!(solo.dials, [HostId(1), HostId(2)]);
    let mut without = file(1);
    without.peers.remove(1);
    solo.state.handle_reload(solo.now, without);
    assert!(solo.state.is_dialing(HostId(1)) && !solo.state.is_dialing(HostId(2)));
    solo.state.handle_reload(solo.now, file(1));
    assert!(!solo.state.is_dialing(HostId(2)), "not before its time");
    solo.pass(Duration(0));
    assert_eq!(solo.dials, [HostId(1), HostId(2), HostId(2)]);
    assert_eq!(solo.state.poll_timeout(), None);
}

/// Hosts with numbers from `first` on.
fn crowd(first: u32, count: u32) -> PeersFile {
    let peer = |number: u32| PeerEntry {
        host: format!("p{number}"),
        address: Ipv4Addr::from(0x0a00_0000 + number).into(),
        control_port: 4790,
        public_key: [number as u8; KEY_BYTES],
        prefixes: [format!("fd00:{:x}:{:x}::/48", number >> 16, number & 0xffff).parse().unwrap()]
            .into_iter()
            .collect(),
    };
    PeersFile { peers: (first..first + count).map(peer).collect(), ..file(1) }
}

#[test]
fn hosts_that_there_is_no_number_for_are_a_problem_until_others_are_long_gone() {
    let (of_file, mut first) = (PEER_COUNT_MAX as u32, 0);
    let mut solo = Solo::new(crowd(0, of_file));
    while first + 2 * of_file <= HOST_NUMBER_MAX {
        first += of_file;
        solo.state.handle_reload(solo.now, crowd(first, of_file));
    }
    let last = HOST_NUMBER_MAX - first - of_file;
    let (next, now) = (crowd(first + of_file, of_file), solo.now);
    solo.state.handle_reload(now, next.clone());
    let with_problem = |solo: &Solo| {
        let statuses = solo.state.statuses();
        assert_eq!(statuses.len(), PEER_COUNT_MAX, "each host is shown");
        statuses.iter().filter(|status| status.problem == Some(Why::NoNumber) && status.state == "down").count() as u32
    };
    assert_eq!(with_problem(&solo), of_file - last);
    let left_out = &next.peers[PEER_COUNT_MAX - 1].host;
    assert!(solo.state.host_named(left_out).is_none());
    // Those that were there first are long gone.
    solo.pass(NUMBER_KEPT);
    solo.state.handle_reload(solo.now, next.clone());
    assert_eq!((with_problem(&solo), solo.state.host_named(left_out).is_some()), (0, true));
    assert!(solo.state.host_named("p0").is_none());
}
