//! Small clusters: that they do what large ones are measured by.
use freeflow_cluster_sim::scenes::{self, bytes_per_host_and_hour};
use freeflow_cluster_sim::world::{Pace, Setting, World};

/// A run of it is the same each time.
fn of(hosts: usize) -> Setting {
    Setting { hosts, vnics: 10, rules: 5, pace: Pace::Fixed(2_000_000), ..Setting::default() }
}

#[test]
fn hosts_that_are_not_sampled_do_as_those_that_are() {
    for hosts in [2, 3, 30] {
        scenes::check(of(hosts)).unwrap_or_else(|why| panic!("{hosts} hosts: {why}"));
    }
}

#[test]
fn a_quiet_cluster_has_traffic_by_the_number_of_its_hosts() {
    let (few, many) = (scenes::idle(of(20)), scenes::idle(of(80)));
    assert_eq!((few.problems_of_each, few.peers_of_each, few.hosts_without_block), (0, 19, 0));
    for idle in [&few, &many] {
        // How far hosts have followed goes to the one controller, and traffic of vNICs to nobody.
        assert!(idle.told_bytes == 0 && idle.sent_bytes < idle.written_bytes / 2, "{idle:?}");
        assert!(idle.behind_s < 0.1, "{idle:?}");
        // A beat of the report or a look at all, and one of the publisher, in half a minute.
        let each = idle.transactions as f64 / idle.hosts as f64 / (idle.over_s / 30.0);
        assert!((1.8..3.2).contains(&each), "{each} transactions of a host in half a minute");
    }
    let ratio = many.sent_bytes as f64 / few.sent_bytes as f64;
    assert!((3.5..4.5).contains(&ratio), "four times the hosts, {ratio} times the bytes");
    let (one, other) = (bytes_per_host_and_hour(&few), bytes_per_host_and_hour(&many));
    assert!((0.9..1.1).contains(&(one / other)), "{one} {other}");
}

#[test]
fn all_follow_a_change_and_the_last_one_enforces_it() {
    let changed = scenes::changed(of(40));
    assert_eq!(changed.followed_by, 40);
    let (median, last) = (changed.median_s.expect("all"), changed.last_s.expect("all"));
    assert!(median > 0.002 && last >= median && last < 0.1, "{changed:?}");
    // Each host says that it has followed.
    assert!((36..50).contains(&changed.transactions), "{changed:?}");
}

#[test]
fn all_that_join_at_once_get_blocks_and_find_each_other() {
    let storm = scenes::storm(of(40));
    assert_eq!(storm.blocks, 40);
    assert!(storm.settled_s.is_some_and(|settled| settled < 30.0), "{storm:?}");
}

#[test]
fn a_tenth_that_is_lost_costs_the_others_nothing_and_hears_all_when_it_is_back() {
    let loss = scenes::loss(of(40));
    assert_eq!(loss.lost, 4);
    // The one change that was made meanwhile.
    assert!(loss.more_transactions.abs() < 80, "{loss:?}");
    // The rule and its serial number: what others said meanwhile goes to the controller.
    assert!((1..10).contains(&loss.missed_events) && loss.settled_s.is_some_and(|settled| settled < 10.0), "{loss:?}");
}

#[test]
fn a_run_is_the_same_each_time() {
    let run = || {
        let (mut world, settled) = World::settled(of(25));
        world.run_for(77_000_000_000);
        (settled, world.counts(), world.etcd.size(), world.etcd.revision())
    };
    assert_eq!(run(), run());
}
