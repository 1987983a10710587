//! Small clusters: that they do what large ones are measured by.
use freeflow_cluster_sim::scenes::{self, Idle, bytes_per_host_and_hour};
use freeflow_cluster_sim::world::{Pace, Setting, World};

/// A run of it is the same each time.
fn of(hosts: usize) -> Setting {
    Setting { hosts, vnics: 10, rules: 5, pace: Pace::Fixed(2_000_000), ..Setting::default() }
}

const ROOM: &str = "there are addresses for all";

fn idle(setting: Setting) -> Idle {
    scenes::idle(setting).expect(ROOM)
}

#[test]
fn hosts_that_are_not_sampled_do_as_those_that_are() {
    for setting in [of(2), of(3), of(30), Setting { sharing: 9, churn_s: 60, ..of(70) }] {
        scenes::check(setting).unwrap_or_else(|why| panic!("{setting:?}: {why}"));
    }
}

#[test]
fn words_go_to_controllers_and_other_vnics_to_all() {
    let (few, many) = (idle(of(20)), idle(of(80)));
    assert_eq!((few.problems_of_each, few.peers_of_each, few.hosts_without_block), (0, 19, 0));
    for idle in [&few, &many] {
        assert_eq!((idle.to_host.events, idle.sent.bytes), (0, 3 * idle.to_controller.bytes), "{idle:?}");
        assert!(idle.sent.bytes < idle.written.bytes / 2 && idle.behind_s < 0.1, "{idle:?}");
        // A beat of the report or a look at all, and one of the publisher, in half a minute.
        let each = idle.transactions as f64 / idle.hosts as f64 / (idle.over_s / 30.0);
        assert!((1.8..3.2).contains(&each), "{each} transactions of a host in half a minute");
    }
    let ratio = many.sent.bytes as f64 / few.sent.bytes as f64;
    assert!((3.5..4.5).contains(&ratio), "four times the hosts, {ratio} times the bytes");
    let (one, other) = (bytes_per_host_and_hour(&few), bytes_per_host_and_hour(&many));
    assert!((0.9..1.1).contains(&(one / other)), "{one} {other}");
    let changing = |hosts| idle(Setting { churn_s: 20, ..of(hosts) });
    let (few, many) = (changing(20), changing(80));
    let to_hosts = |idle: &Idle| idle.to_host.bytes as f64 * (idle.hosts - 3) as f64;
    let ratio = to_hosts(&many) / to_hosts(&few);
    assert!((13.0..24.0).contains(&ratio), "four times the hosts, {ratio} times the bytes");
}

#[test]
fn all_follow_a_change_and_the_last_one_enforces_it() {
    let changed = scenes::changed(of(40)).expect(ROOM);
    assert_eq!(changed.followed_by, 40);
    let (median, last) = (changed.median_s.expect("all"), changed.last_s.expect("all"));
    assert!(median > 0.002 && last >= median && last < 0.1, "{changed:?}");
    // Each host says that it has followed.
    assert!((36..50).contains(&changed.transactions), "{changed:?}");
}

#[test]
fn all_that_join_at_once_get_blocks_and_find_each_other() {
    let storm = scenes::storm(of(40)).expect(ROOM);
    assert_eq!(storm.blocks, 40);
    assert!(storm.settled_s.is_some_and(|settled| settled < 30.0), "{storm:?}");
}

#[test]
fn a_tenth_that_is_lost_costs_the_others_nothing_and_hears_all_when_it_is_back() {
    let loss = scenes::loss(of(40)).expect(ROOM);
    assert_eq!(loss.lost, 4);
    // The one change that was made meanwhile.
    assert!(loss.more_transactions.abs() < 80, "{loss:?}");
    assert!((3..10).contains(&loss.missed.events) && loss.settled_s.is_some_and(|settled| settled < 10.0), "{loss:?}");
}

#[test]
fn hosts_of_a_large_cluster_have_those_of_their_tenants_for_peers() {
    let (all, some) = (idle(of(70)), idle(Setting { sharing: 9, ..of(70) }));
    assert_eq!((all.peers_of_each, all.names_of_each), (69, 690));
    assert_eq!((some.networks, some.peers_of_each, some.names_of_each), (7, 9, 90));
}

#[test]
fn a_run_is_the_same_each_time() {
    let run = || {
        let (mut world, settled) = World::settled(of(25)).expect(ROOM);
        world.run_for(77_000_000_000);
        (settled, world.counts(), world.etcd.size(), world.etcd.revision())
    };
    assert_eq!(run(), run());
}

#[test]
fn networks_that_can_not_be_are_said_to_be_none() {
    let tenants = |hosts, sharing| Setting { sharing, ..of(hosts) }.networks();
    assert_eq!(tenants(1000, 31).map(|networks| networks.count), Ok(32));
    assert!(tenants(10_000, 31).is_err_and(|why| why.contains("3130000 blocks")), "{:?}", tenants(10_000, 31));
}
