//! vNICs with an address of each family.
use crate::common::*;
use freeflow_protocol::cm::{CmAddress, CmEvent, CmEventBody, CmEventKind as Kind, CmOption, CmRequest};
use freeflow_verbs::{Gid, VerbsError};

const PORT: u16 = 7000;
const ANY_V6: Gid = Gid([0; 16]);

/// The GID indexes of the routes that an identifier was notified of: with its address, and by
/// itself.
fn gid_indexes(world: &mut World, host: usize) -> Vec<u8> {
    let index = |event: CmEvent| match event.body {
        CmEventBody::Route(route) => route.gid_index,
        other => panic!("{other:?}"),
    };
    world.heard(host).into_iter().map(index).collect()
}

#[test]
fn a_wildcard_listener_is_reached_by_both_families() {
    for (from, index, local) in [(gid(1, 0), 0, gid(0, 0)), (gid6(1, 0), 2, gid6(0, 0))] {
        let mut world = World::new(2, 1);
        let listener = world.tcp(vnic(0, 0), 1);
        world.bind(listener, ANY_V6, PORT).unwrap();
        world.listen(listener, 0).unwrap();
        let active = world.tcp(vnic(1, 0), 2);
        world.resolve(active, local, PORT);
        assert_eq!(gid_indexes(&mut world, 1), [index; 2]);
        world.connect(active, parameters(5)).unwrap();
        let passive = world.requests(vnic(0, 0))[0];
        let ids = world.machines[0].list(None, 10);
        let asked = ids.iter().find(|id| id.remote.is_some()).unwrap();
        assert_eq!((asked.local.unwrap().gid, asked.remote.unwrap().gid), (local, from));
        world.accept(passive, 3, 6).unwrap();
        assert_eq!(world.kinds(1), [(2, Kind::ConnectResponse, 0)]);
        for ident in [listener, active, passive] {
            world.destroy(ident);
        }
        world.finish();
    }
}

#[test]
fn each_family_is_there_by_itself() {
    let mut world = World::new(1, 2);
    let one = world.tcp(vnic(0, 0), 1);
    world.bind(one, gid6(0, 0), PORT).unwrap();
    world.listen(one, 0).unwrap();
    let other = world.tcp(vnic(0, 0), 2);
    assert!(world.bind(other, gid(0, 0), PORT).is_ok(), "the same port at another address");
    let active = world.tcp(vnic(0, 1), 3);
    world.resolve(active, gid(0, 0), PORT);
    world.heard(0);
    world.connect(active, parameters(5)).unwrap();
    assert_eq!(world.kinds(0), [(3, Kind::Rejected, 8)], "nobody listens there by IPv4");
    // From an address of one family nobody gets to the other.
    let bound = world.tcp(vnic(0, 1), 4);
    world.bind(bound, gid(0, 1), 0).unwrap();
    let destination = CmAddress { gid: gid6(0, 0), port: PORT };
    let resolve = |id| CmRequest::ResolveAddress { id, source: None, destination, timeout_ms: 1000 };
    assert_eq!(world.call(bound, resolve), Err(VerbsError::InvalidArgument));
    let six = world.tcp(vnic(0, 1), 5);
    world.call(six, |id| CmRequest::SetOption { id, option: CmOption::AddressFamilyOnly(true) }).unwrap();
    world.bind(six, ANY_V6, PORT).unwrap();
    for ident in [one, other, active, bound, six] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn loopback_and_groups_are_of_the_family_that_is_asked_for() {
    let mut world = World::new(1, 3);
    let loopback: Gid = Gid::from_ip("::1".parse().unwrap());
    let group = Gid::from_ip("ff15::7".parse().unwrap());
    for (to, index) in [(loopback, 2), (ANY_V6, 2), (v4(127, 0, 0, 1), 0), (ANY, 0), (group, 2), (v4(239, 1, 1, 1), 0)]
    {
        let ident = world.tcp(vnic(0, 0), 1);
        world.resolve(ident, to, PORT);
        assert_eq!(gid_indexes(&mut world, 0), [index; 2], "{to}");
        world.destroy(ident);
    }
    world.finish();
}
