//! Owners of ports: Linux's rules, in a port space of each vNIC; one for all at the shared external address.
use crate::common::*;
use freeflow_protocol::cm::{CmEventKind as Kind, CmOption, CmRequest, PortSpace};
use freeflow_verbs::{Gid, QpType, VerbsError};

const PORT: u16 = 7000;
const ANY_V6: Gid = Gid([0; 16]);
const IN_USE: VerbsError = VerbsError::AddressInUse;
const NOT_AVAILABLE: VerbsError = VerbsError::AddressNotAvailable;

fn option(world: &mut World, ident: Ident, option: CmOption) {
    world.call(ident, |id| CmRequest::SetOption { id, option }).unwrap();
}

#[test]
fn the_same_address_twice() {
    let mut world = World::new(1, 1);
    let first = world.tcp(vnic(0, 0), 1);
    assert_eq!(world.bind(first, gid(0, 0), PORT).unwrap().port, PORT);
    let second = world.tcp(vnic(0, 0), 2);
    assert_eq!(world.bind(second, gid(0, 0), PORT), Err(IN_USE));
    assert_eq!(world.bind(second, ANY, PORT), Err(NOT_AVAILABLE), "as Linux says it of wildcards");
    let other = world.create(vnic(0, 0), PortSpace::Udp, QpType::Ud, 3);
    assert!(world.bind(other, gid(0, 0), PORT).is_ok(), "another port space");
    let neighbour = world.tcp(vnic(0, 1), 4);
    assert!(world.bind(neighbour, gid(0, 1), PORT).is_ok(), "another vNIC");
    world.destroy(first);
    assert!(world.bind(second, gid(0, 0), PORT).is_ok(), "it is free again");
    for ident in [second, other, neighbour] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn addresses_of_others() {
    let mut world = World::new(2, 2);
    let id = world.tcp(vnic(0, 2), 1);
    for foreign in
        [gid(0, 0), gid(1, 0), gid6(0, 0), gid6(1, 2), external(0), external(1), v4(8, 8, 8, 8), v4(239, 1, 1, 1)]
    {
        assert_eq!(world.bind(id, foreign, PORT), Err(NOT_AVAILABLE), "{foreign}");
    }
    assert_eq!(world.bind(id, v4(127, 0, 0, 1), PORT).unwrap().gid, gid(0, 2), "loopback is the vNIC itself");
    let mut loopback = ANY_V6;
    loopback.0[15] = 1;
    let second = world.tcp(vnic(0, 2), 2);
    assert_eq!(world.bind(second, loopback, PORT + 1).unwrap().gid, gid6(0, 2), "its address of that family");
    let ipoib = world.create(vnic(0, 2), PortSpace::Ipoib, QpType::Ud, 3);
    assert_eq!(world.bind(ipoib, gid(0, 2), PORT), Err(VerbsError::InvalidArgument), "not over Ethernet");
    for ident in [id, second, ipoib] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn loopback_connects_to_the_vnic_itself() {
    for to in [v4(127, 0, 0, 1), ANY, gid(0, 2)] {
        let mut world = World::new(1, 3);
        let listener = world.listener(vnic(0, 2), PORT, 1);
        let active = world.tcp(vnic(0, 2), 2);
        world.resolve(active, to, PORT);
        world.heard(0);
        world.connect(active, parameters(5)).unwrap();
        let passive = world.requests(vnic(0, 2))[0];
        world.accept(passive, 3, 6).unwrap();
        assert_eq!(world.kinds(0), [(2, Kind::ConnectResponse, 0)]);
        world.call(active, |id| CmRequest::Establish { id }).unwrap();
        assert_eq!(world.kinds(0), [(3, Kind::Established, 0)]);
        for ident in [listener, active, passive] {
            world.destroy(ident);
        }
        world.finish();
    }
}

#[test]
fn families() {
    let mut world = World::new(1, 4);
    let v6 = world.tcp(vnic(0, 0), 1);
    option(&mut world, v6, CmOption::AddressFamilyOnly(true));
    world.bind(v6, ANY_V6, PORT).unwrap();
    let v4 = world.tcp(vnic(0, 0), 2);
    assert!(world.bind(v4, ANY, PORT).is_ok(), "each for its own family");
    let both = world.tcp(vnic(0, 0), 3);
    assert_eq!(world.bind(both, ANY_V6, PORT), Err(NOT_AVAILABLE));
    world.destroy(v4);
    world.listen(v6, 0).unwrap();
    let active = world.tcp(vnic(0, 1), 4);
    world.resolve(active, gid(0, 0), PORT);
    world.heard(0);
    world.connect(active, parameters(5)).unwrap();
    assert_eq!(world.kinds(0), [(4, Kind::Rejected, 8)], "an IPv6-only listener does not hear IPv4");
    world.destroy(v6);
    world.bind(both, ANY_V6, PORT).unwrap();
    world.listen(both, 0).unwrap();
    let second = world.tcp(vnic(0, 1), 5);
    world.resolve(second, gid(0, 0), PORT);
    world.connect(second, parameters(6)).unwrap();
    assert_eq!(world.requests(vnic(0, 0)).len(), 1, "one for both hears both");
    for ident in [active, second, both] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn reuse() {
    let mut world = World::new(1, 5);
    let [first, second, third] = [1, 2, 3].map(|cookie| world.tcp(vnic(0, 0), cookie));
    option(&mut world, first, CmOption::ReuseAddress(true));
    option(&mut world, second, CmOption::ReuseAddress(true));
    world.bind(first, gid(0, 0), PORT).unwrap();
    assert!(world.bind(second, gid(0, 0), PORT).is_ok());
    assert_eq!(world.bind(third, gid(0, 0), PORT), Err(IN_USE), "it did not say so");
    assert_eq!(world.listen(first, 0), Err(IN_USE), "only one listens");
    world.destroy(second);
    world.listen(first, 0).unwrap();
    option(&mut world, third, CmOption::ReuseAddress(true));
    assert_eq!(world.bind(third, gid(0, 0), PORT), Err(IN_USE), "not beside a listener");
    for ident in [first, third] {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn any_port() {
    let mut world = World::new(1, 6);
    let mut seen = std::collections::BTreeSet::new();
    let idents: Vec<_> = (0..2000)
        .map(|_| {
            let ident = world.tcp(vnic(0, 0), 1);
            let port = world.bind(ident, ANY, 0).unwrap().port;
            assert!((32_768..=60_999).contains(&port) && seen.insert(port), "{port}");
            ident
        })
        .collect();
    let spread = seen.last().unwrap() - seen.first().unwrap();
    assert!(spread > 20_000, "they begin anywhere");
    for ident in idents {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn identifiers_are_limited() {
    let limits = freeflow_cm::Limits { ids_per_vnic_max: 40_000, ..freeflow_cm::Limits::default() };
    let mut world = World::with(1, 7, limits);
    let idents: Vec<_> = (0..28_232)
        .map(|_| {
            let ident = world.tcp(vnic(0, 0), 1);
            world.bind(ident, ANY, 0).unwrap();
            ident
        })
        .collect();
    let one_more = world.tcp(vnic(0, 0), 1);
    assert_eq!(world.bind(one_more, ANY, 0), Err(NOT_AVAILABLE), "no port is left");
    for ident in idents.into_iter().chain([one_more]) {
        world.destroy(ident);
    }
    let limits = freeflow_cm::Limits { ids_per_vnic_max: 3, ..freeflow_cm::Limits::default() };
    let mut world = World::with(1, 8, limits);
    let listener = world.listener(vnic(0, 0), PORT, 1);
    let [_, _] = [1, 2].map(|cookie| world.tcp(vnic(0, 0), cookie));
    let create = CmRequest::CreateId { channel: 1, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: 1 };
    assert_eq!(world.ask(0, 9, vnic(0, 0), &create), Err(VerbsError::NoMemory));
    let active = world.tcp(vnic(0, 1), 4);
    world.resolve(active, gid(0, 0), PORT);
    world.connect(active, parameters(5)).unwrap();
    assert_eq!(world.requests(vnic(0, 0)).len(), 0);
    assert_eq!(world.machines[0].counts().overflows, 1, "there is no room for the request");
    let _ = listener;
    let now = world.now;
    let World { machines, around, .. } = &mut world;
    for owner in [vnic(0, 0).0, vnic(0, 1).0] {
        machines[0].destroy_owner(&mut around[0], now, freeflow_cm::Owner(owner));
    }
    world.finish();
}

#[test]
fn the_shared_external_address() {
    let mut world = World::new(2, 9);
    // The first wildcard listener gets the port there; the second is heard within the network only.
    let first = world.listener(vnic(1, 0), PORT, 1);
    let second = world.listener(vnic(1, 1), PORT, 2);
    let third = world.tcp(vnic(1, 1), 3);
    assert_eq!(world.bind(third, external(1), PORT), Err(NOT_AVAILABLE), "beside its own wildcard");
    world.destroy(second);
    assert_eq!(world.bind(third, external(1), PORT), Err(IN_USE), "another vNIC has it");
    let mut actives = Vec::new();
    let mut ask = |world: &mut World, to| {
        let active = world.tcp(vnic(0, 0), 9);
        world.resolve(active, to, PORT);
        world.connect(active, parameters(5 + actives.len() as u32)).unwrap();
        actives.push(active);
        world.heard(1).first().map(|event| event.cookie)
    };
    assert_eq!(ask(&mut world, external(1)), Some(1));
    assert_eq!(ask(&mut world, gid(1, 0)), Some(1));
    assert_eq!(ask(&mut world, gid(1, 1)), None);
    world.destroy(first);
    world.bind(third, external(1), PORT).unwrap();
    world.listen(third, 0).unwrap();
    assert_eq!(ask(&mut world, external(1)), Some(3));
    assert_eq!(ask(&mut world, gid(1, 1)), None, "it is at the external address only");
    // A vNIC without that address can't have it.
    let without = world.tcp(vnic(1, 3), 4);
    assert_eq!(world.bind(without, external(1), PORT + 1), Err(NOT_AVAILABLE));
    for ident in actives.into_iter().chain([third, without]) {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn very_many_share_a_port() {
    let mut world = World::new(1, 10);
    let sharer = |world: &mut World, cookie| {
        let ident = world.tcp(vnic(0, 2), cookie);
        option(world, ident, CmOption::ReuseAddress(true));
        world.bind(ident, gid(0, 2), PORT).unwrap();
        ident
    };
    let first = sharer(&mut world, 1);
    for cookie in 0..16_382 {
        sharer(&mut world, cookie);
    }
    let other = world.tcp(vnic(0, 2), 3);
    assert_eq!(world.bind(other, gid(0, 2), PORT), Err(IN_USE), "it did not say so");
    assert_eq!(world.bind(other, ANY, PORT), Err(NOT_AVAILABLE));
    assert_eq!(world.listen(first, 0), Err(IN_USE), "only one listens");
    let active = world.tcp(vnic(0, 1), 4);
    world.resolve(active, gid(0, 2), PORT);
    world.connect(active, parameters(5)).unwrap();
    assert_eq!(world.kinds(0).last(), Some(&(4, Kind::Rejected, 8)), "nobody listens");
    world.destroy(active);
    let now = world.now;
    let World { machines, around, .. } = &mut world;
    machines[0].destroy_owner(&mut around[0], now, freeflow_cm::Owner(vnic(0, 2).0));
    world.finish();
}

#[test]
fn ways_of_sharing_follow_the_identifier() {
    let mut world = World::new(1, 11);
    let wildcard = world.tcp(vnic(0, 0), 1);
    world.bind(wildcard, ANY, PORT).unwrap();
    let second = world.tcp(vnic(0, 0), 2);
    option(&mut world, second, CmOption::ReuseAddress(true));
    assert_eq!(world.bind(second, gid(0, 0), PORT), Err(NOT_AVAILABLE));
    // The first has an address of its own from here on.
    world.resolve(wildcard, gid(0, 1), PORT);
    assert_eq!(world.bind(second, gid(0, 0), PORT), Err(IN_USE));
    option(&mut world, wildcard, CmOption::ReuseAddress(true));
    assert!(world.bind(second, gid(0, 0), PORT).is_ok(), "now both share");
    world.destroy(wildcard);
    world.listen(second, 0).unwrap();
    world.destroy(second);
    world.finish();
}

#[test]
fn nobody_gets_all_ports_of_the_shared_address() {
    let limits = freeflow_cm::Limits { ids_per_vnic_max: 30_000, ..freeflow_cm::Limits::default() };
    let mut world = World::with(1, 12, limits);
    let greed = |world: &mut World, of| {
        let mut idents = Vec::new();
        loop {
            let ident = world.tcp(of, 1);
            idents.push(ident);
            match world.bind(ident, external(0), 0) {
                Ok(_) => {}
                Err(error) => break assert_eq!(error, NOT_AVAILABLE),
            }
        }
        idents
    };
    let mut first = greed(&mut world, vnic(0, 0));
    assert_eq!(first.len() - 1, 28_232 * 3 / 4);
    let second = greed(&mut world, vnic(0, 1));
    assert!(second.len() > 5000, "{}", second.len());
    let last = first.pop().unwrap();
    assert!(world.bind(last, gid(0, 0), 0).is_ok(), "its own address is its own");
    world.destroy(last);
    let named = world.tcp(vnic(0, 0), 2);
    let port = (32_768..61_000).find(|port| world.bind(named, external(0), *port) != Err(IN_USE));
    assert_eq!(port, None, "nor by name");
    world.destroy(named);
    for ident in first.into_iter().chain(second) {
        world.destroy(ident);
    }
    world.finish();
}

#[test]
fn the_greedy_leave_identifiers_to_others() {
    let limits = freeflow_cm::Limits { ids_max: 400, ids_per_vnic_max: 250, ..freeflow_cm::Limits::default() };
    let mut world = World::with(1, 13, limits);
    let mut held = Vec::new();
    for number in 0..VNICS_PER_HOST {
        let create = CmRequest::CreateId { channel: 1, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: 1 };
        let of = vnic(0, number);
        held.push((0..1000).take_while(|_| world.ask(0, of.0, of, &create).is_ok()).count());
    }
    assert_eq!(held, [250, 113, 28, 7], "each three quarters of what it finds");
    let now = world.now;
    let World { machines, around, .. } = &mut world;
    for number in 0..VNICS_PER_HOST {
        machines[0].destroy_owner(&mut around[0], now, freeflow_cm::Owner(vnic(0, number).0));
    }
    world.finish();
}
