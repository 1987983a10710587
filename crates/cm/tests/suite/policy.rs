//! Policy: which connections are allowed, and which are cut when that changes.
use crate::common::*;
use freeflow_protocol::cm::{CmEventKind as Kind, CmRequest};

const PORT: u16 = 7174;
const INVALID_SERVICE_ID: i32 = 8;
const EPERM: i32 = 1;

fn deny(world: &mut World, host: usize, from: freeflow_verbs::Gid, to: freeflow_verbs::Gid) {
    world.around[host].denied.push((from, to));
}

fn follow(world: &mut World) {
    for host in 0..world.machines.len() {
        world.machines[host].handle_policy_changed();
        while world.machines[host].looks_at_policy() {
            let now = world.now;
            world.machines[host].poll_policy(&mut world.around[host], now, 1);
        }
    }
    world.run_for(freeflow_verbs::Duration::from_millis(1));
}

#[test]
fn who_may_not_begin_is_notified_by_an_event_or_finds_nobody() {
    for passive in [0, 1] {
        let mut world = World::new(2, 1);
        world.listener(vnic(passive, 1), PORT, 1);
        let active = world.tcp(vnic(0, 0), 2);
        world.resolve(active, gid(passive, 1), PORT);
        world.heard(0);
        // A connection begun here is this host's to refuse.
        deny(&mut world, 0, gid(0, 0), gid(passive, 1));
        world.connect(active, parameters(0x11)).unwrap();
        assert_eq!(world.kinds(0), [(2, Kind::Unreachable, -EPERM)]);
        assert!(world.connect(active, parameters(0x11)).is_err(), "it may try again by the same identifier");
        world.around[0].denied.clear();
        if passive == 1 {
            let active = world.tcp(vnic(0, 0), 2);
            world.resolve(active, gid(1, 1), PORT);
            world.heard(0);
            deny(&mut world, 1, gid(0, 0), gid(1, 1));
            world.connect(active, parameters(0x11)).unwrap();
            world.run_for(freeflow_verbs::Duration::from_millis(1));
            assert_eq!(world.kinds(0), [(2, Kind::Rejected, INVALID_SERVICE_ID)], "as if nobody listened");
            assert_eq!(world.kinds(1), [], "its program does not learn of it");
        }
    }
}

#[test]
fn what_stands_is_cut_on_both_hosts() {
    for passive_host in [0, 1] {
        // Only one host's policy says so: the other end hears of it all the same.
        for denier in 0..=passive_host {
            let mut world = World::new(2, 1);
            world.listener(vnic(passive_host, 1), PORT, 1);
            let active = world.tcp(vnic(0, 0), 2);
            world.resolve(active, gid(passive_host, 1), PORT);
            world.connect(active, parameters(0x11)).unwrap();
            let passive = world.requests(vnic(passive_host, 1))[0];
            world.accept(passive, 3, 0x22).unwrap();
            world.kinds(0);
            world.call(active, |id| CmRequest::Establish { id }).unwrap();
            let both = |world: &mut World| {
                let mut all = [world.kinds(0), world.kinds(1)].concat();
                all.sort_by_key(|event| event.0);
                all
            };
            both(&mut world);
            follow(&mut world);
            assert_eq!(both(&mut world), []);
            // One direction is enough.
            let (a, b) = (gid(0, 0), gid(passive_host, 1));
            deny(&mut world, denier, a, b);
            follow(&mut world);
            assert_eq!(both(&mut world), []);
            deny(&mut world, denier, b, a);
            follow(&mut world);
            assert_eq!(both(&mut world), [(2, Kind::Disconnected, 0), (3, Kind::Disconnected, 0)]);
            follow(&mut world);
            assert_eq!(both(&mut world), [], "once");
        }
    }
}

#[test]
fn changes_that_follow_each_other_reach_the_last_one() {
    let mut world = World::new(1, 2);
    world.listener(vnic(0, 1), PORT, 1);
    for number in 0..4 {
        let active = world.tcp(vnic(0, 0), 2 + 2 * u64::from(number));
        world.resolve(active, gid(0, 1), PORT);
        world.heard(0);
        world.connect(active, parameters(0x11 + number)).unwrap();
        let passive = world.requests(vnic(0, 1))[0];
        world.accept(passive, 3 + 2 * u64::from(number), 0x22 + number).unwrap();
        world.kinds(0);
        world.call(active, |id| CmRequest::Establish { id }).unwrap();
    }
    world.kinds(0);
    for (from, to) in [(0, 1), (1, 0)] {
        deny(&mut world, 0, gid(0, from), gid(0, to));
    }
    // One look after each change, and all are cut in the end.
    for _ in 0..8 {
        let now = world.now;
        world.machines[0].handle_policy_changed();
        world.machines[0].poll_policy(&mut world.around[0], now, 1);
    }
    world.run_for(freeflow_verbs::Duration::from_millis(1));
    let cut = world.kinds(0).iter().filter(|event| event.1 == Kind::Disconnected).count();
    assert_eq!(cut, 8);
}
