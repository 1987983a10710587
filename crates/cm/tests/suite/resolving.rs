//! Destinations that nobody has yet: who waits, how long, and that nothing is left of it.
use crate::common::*;
use freeflow_cm::Owner;
use freeflow_protocol::cm::{CmAddress, CmEventKind as Kind, CmRequest};
use freeflow_verbs::{Duration, VerbsError};

const PORT: u16 = 7471;
const TIMED_OUT: i32 = -110;

/// A world of one host that nobody can be reached from, until `come`.
fn lonely() -> World {
    let mut world = World::new(1, 1);
    world.around[0].cut = true;
    world
}

fn come(world: &mut World, gid: freeflow_verbs::Gid) {
    world.around[0].cut = false;
    world.machines[0].handle_new_address(gid);
}

fn address(world: &mut World, ident: Ident, gid: freeflow_verbs::Gid, timeout_ms: u32) {
    let destination = CmAddress { gid, port: PORT };
    world.call(ident, |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms }).unwrap();
}

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[test]
fn time_passes_and_nobody_comes() {
    let mut world = lonely();
    for timeout_ms in [0, 1, 700] {
        let ident = world.tcp(vnic(0, 0), 1);
        let begun = world.now;
        address(&mut world, ident, gid(0, 1), timeout_ms);
        if timeout_ms > 0 {
            assert_eq!(world.machines[0].poll_timeout(), Some(begun + millis(timeout_ms.into())));
            assert_eq!(world.machines[0].list(None, 9)[0].state, "ADDR_QUERY");
            world.run_for(millis(u64::from(timeout_ms) - 1));
            assert_eq!(std::mem::take(&mut world.around[0].heard).len(), 0);
            world.run_for(millis(1));
        }
        assert_eq!(world.kinds(0), [(1, Kind::AddressError, TIMED_OUT)]);
        assert_eq!(std::mem::take(&mut world.around[0].unreachable), [(vnic(0, 0), gid(0, 1))], "notified once");
        assert_eq!(world.machines[0].poll_timeout(), None);
        // It may try again, and the last look is taken when the time is over.
        address(&mut world, ident, gid(0, 1), 10);
        world.around[0].cut = false;
        world.run_for(millis(10));
        assert_eq!(world.kinds(0), [(1, Kind::AddressResolved, 0)]);
        assert_eq!(world.around[0].unreachable, []);
        world.around[0].cut = true;
        world.destroy(ident);
        world.finish();
    }
}

#[test]
fn who_comes_in_time_is_found() {
    for by_address in [true, false] {
        let mut world = lonely();
        let ident = world.tcp(vnic(0, 0), 1);
        address(&mut world, ident, gid(0, 1), 5000);
        world.run_for(millis(1000));
        // Somebody else comes, or nobody of those that a new link may lead to.
        world.machines[0].handle_new_address(gid(0, 2));
        world.machines[0].handle_new_routes();
        assert_eq!(world.kinds(0), []);
        if by_address {
            come(&mut world, gid(0, 1));
        } else {
            world.around[0].cut = false;
            world.machines[0].handle_new_routes();
        }
        assert_eq!(world.kinds(0), [(1, Kind::AddressResolved, 0)]);
        assert_eq!(world.machines[0].poll_timeout(), None, "nothing is waited for any more");

        // It is gone again before the route was asked for.
        world.around[0].cut = true;
        world.call(ident, |id| CmRequest::ResolveRoute { id, timeout_ms: 50 }).unwrap();
        assert_eq!(world.machines[0].list(None, 9)[0].state, "ROUTE_QUERY");
        world.run_for(millis(50));
        assert_eq!(world.kinds(0), [(1, Kind::RouteError, TIMED_OUT)]);
        world.call(ident, |id| CmRequest::ResolveRoute { id, timeout_ms: 50 }).unwrap();
        come(&mut world, gid(0, 1));
        assert_eq!(world.kinds(0), [(1, Kind::RouteResolved, 0)]);
        world.destroy(ident);
        world.finish();
    }
}

#[test]
fn nothing_else_goes_while_it_waits() {
    let mut world = lonely();
    let ident = world.tcp(vnic(0, 0), 1);
    address(&mut world, ident, gid(0, 1), 5000);
    let destination = CmAddress { gid: gid(0, 2), port: PORT };
    let again = |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 1 };
    assert_eq!(world.call(ident, again), Err(VerbsError::InvalidArgument));
    let route = |id| CmRequest::ResolveRoute { id, timeout_ms: 1 };
    assert_eq!(world.call(ident, route), Err(VerbsError::InvalidArgument));
    assert_eq!(world.listen(ident, 1), Err(VerbsError::InvalidArgument));
    assert_eq!(world.connect(ident, parameters(0x11)), Err(VerbsError::InvalidArgument));
    assert_eq!(world.kinds(0), []);
    world.destroy(ident);
    world.finish();
}

#[test]
fn who_ends_meanwhile_leaves_nothing() {
    for what in 0..3 {
        let mut world = lonely();
        let ident = world.tcp(vnic(0, 0), 1);
        let other = world.tcp(vnic(0, 1), 2);
        address(&mut world, ident, gid(0, 1), 5000);
        address(&mut world, other, gid(0, 1), 5000);
        // Both a turn that is due and a round over all are under way.
        world.machines[0].handle_new_address(gid(0, 1));
        world.machines[0].handle_new_routes();
        let now = world.now;
        let World { machines, around, .. } = &mut world;
        match what {
            0 => assert_eq!(world.destroy(ident), 0),
            1 => machines[0].destroy_owner(&mut around[0], now, Owner(vnic(0, 0).0)),
            _ => {
                machines[0].destroy_vnic(&mut around[0], now, vnic(0, 0));
                assert_eq!(world.kinds(0), [(1, Kind::DeviceRemoval, 0)]);
                world.destroy(ident);
            }
        }
        come(&mut world, gid(0, 1));
        assert_eq!(world.kinds(0), [(2, Kind::AddressResolved, 0)], "{what}");
        world.destroy(other);
        assert!(world.machines[0].is_empty());
    }
}

/// However many wait: a call deals with so many of them, and the rest has its turn at once afterwards.
#[test]
fn a_crowd_has_its_turns() {
    const COUNT: u64 = 3000;
    for by_address in [true, false] {
        let mut world = lonely();
        for cookie in 0..COUNT {
            let ident =
                world.create(vnic(0, 0), freeflow_protocol::cm::PortSpace::Ib, freeflow_verbs::QpType::Rc, cookie);
            address(&mut world, ident, gid(0, 1), 5000);
        }
        world.around[0].cut = false;
        if by_address {
            world.machines[0].handle_new_address(gid(0, 1));
        } else {
            world.machines[0].handle_new_routes();
        }
        let now = world.now;
        let World { machines, around, .. } = &mut world;
        let mut calls = 0;
        while machines[0].poll_timeout().is_some_and(|at| at <= now) {
            machines[0].handle_timeout(&mut around[0], now);
            calls += 1;
            assert!(around[0].heard.len() <= calls * 1024);
        }
        assert_eq!(around[0].heard.len() as u64, COUNT);
        assert!(around[0].heard.iter().all(|heard| heard.event.kind == Kind::AddressResolved));
        machines[0].destroy_owner(&mut around[0], now, Owner(vnic(0, 0).0));
        assert!(machines[0].is_empty());
    }
}
