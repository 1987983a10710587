//! Announcements of a host: how many, and where its prefixes change while it is connected.
use super::claims::{CLAIM_COUNT_MAX, ClaimSubject, Claims};
use super::file::PeersFile;
use super::prefix::{Prefix, Prefixes};
use super::state_tests::{Solo, address, file, hello, route};
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_verbs::Gid;

#[test]
fn other_prefixes_take_effect_on_a_connection_that_stays() {
    let mut solo = Solo::new(file(3));
    let (one, other) = (HostId(1), HostId(2));
    for (host, connection, name) in [(one, 1, "h1"), (other, 2, "h2")] {
        solo.state.handle_connected(solo.now, host, connection);
        solo.says(connection, hello(name, 1));
    }
    // An address of which h1 speaks before this host knows that it may have it.
    let (own, moves) = ("10.111.1.1", "10.111.9.9");
    for text in [own, moves] {
        solo.says(1, address("default", text));
    }
    assert_eq!(solo.take_updates().last(), Some(&route(own, Some(one))));
    let has = |file: &mut PeersFile, host: usize, has_it: bool| {
        let own: Prefix = format!("10.111.{}.0/24", host + 1).parse().unwrap();
        let single: Prefix = format!("{moves}/32").parse().unwrap();
        file.peers[host].prefixes = [own].into_iter().chain(has_it.then_some(single)).collect();
    };
    let mut changed = file(3);
    has(&mut changed, 0, true);
    let reload = |solo: &mut Solo, file: &PeersFile| {
        solo.state.handle_reload(solo.now, file.clone());
        let updates = solo.take_updates().into_iter();
        updates.filter(|update| !matches!(update, Update::Settings(_))).collect::<Vec<_>>()
    };
    assert_eq!(reload(&mut solo, &changed), [route(moves, Some(one))]);
    // It is h2's now, who has not announced it yet. Answers of h1 about QPs that have it count no more.
    has(&mut changed, 0, false);
    has(&mut changed, 1, true);
    assert_eq!(reload(&mut solo, &changed), [route(moves, None), Update::AskAgain { host: one }]);
    solo.says(2, address("default", moves));
    assert_eq!(solo.take_updates(), [route(moves, Some(other))]);
    // h1 has not heard of that, and says it again.
    solo.says(1, address("default", moves));
    assert_eq!(solo.take_updates(), []);
    // Back, and h1 need not say it again: both still announce it.
    has(&mut changed, 0, true);
    has(&mut changed, 1, false);
    assert_eq!(reload(&mut solo, &changed), [route(moves, Some(one)), Update::AskAgain { host: other }]);
    assert!(solo.closed.is_empty());
}

#[test]
fn a_host_can_announce_only_so_much() {
    let mut claims = Claims::default();
    let networks = std::collections::BTreeMap::new();
    let subject = |number: u32| ClaimSubject::Group {
        network: "n".into(),
        gid: Gid::from_ip(std::net::Ipv4Addr::from(number).into()),
    };
    let claim =
        |claims: &mut Claims, number| claims.claim(HostId(1), (subject(number), None), &Prefixes::default(), &networks);
    for number in 0..CLAIM_COUNT_MAX as u32 {
        assert_eq!(claim(&mut claims, number), Ok(None));
    }
    assert!(claim(&mut claims, u32::MAX).is_err());
    assert_eq!(claim(&mut claims, 0), Ok(None));
    claims.release(HostId(1), &subject(0), &networks);
    assert_eq!(claim(&mut claims, u32::MAX), Ok(None));
}
