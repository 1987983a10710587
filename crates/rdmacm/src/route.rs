//! The addresses, route and path record that an identifier shows to its program.
use crate::address::{PKEY_DEFAULT, is_any, store};
use crate::boundary::Outcome;
use crate::id::Id;
use freeflow_abi::{gid_to_c, ibv_sa_path_rec};
use freeflow_protocol::cm::{CmAddress, CmRoute};

/// Rate in path records: 100 Gb/s (`IBV_RATE_100_GBPS`), as the port's.
const RATE_100_GBPS: u8 = 16;
/// Selectors of a path record: exactly this.
const EXACTLY: u8 = 2;
/// `IBV_PATH_FLAG_GMP | PRIMARY | BIDIRECTIONAL`, which rdma-core leaves in `preference`.
const PATH_FLAGS: u8 = 0x2b;

/// The identifier is bound there.
pub(crate) fn note_local(id: &Id, local: CmAddress) {
    // SAFETY: the pointer is the identifier's own.
    unsafe {
        let route = &mut (*id.as_c()).route;
        store(&mut route.addr.src, local);
        route.addr.ibaddr.sgid = gid_to_c(local.gid);
    }
    if !is_any(local.gid) {
        id.bind_device();
    }
}

/// Both ends are known.
pub(crate) fn note_route(id: &Id, route: &CmRoute) {
    note_local(id, route.local);
    // SAFETY: the pointer is the identifier's own.
    unsafe {
        let to = &mut (*id.as_c()).route.addr;
        store(&mut to.dst, route.remote);
        to.ibaddr.dgid = gid_to_c(route.remote.gid);
    }
    id.bind_device();
}

/// Gives the identifier its one path record.
pub(crate) fn note_path(id: &Id, route: &CmRoute) -> Outcome<()> {
    note_route(id, route);
    let record = ibv_sa_path_rec {
        dgid: gid_to_c(route.remote.gid),
        sgid: gid_to_c(route.local.gid),
        hop_limit: route.hop_limit,
        traffic_class: route.traffic_class,
        reversible: 1,
        numb_path: 1,
        pkey: PKEY_DEFAULT.to_be(),
        mtu_selector: EXACTLY,
        mtu: route.mtu as u8,
        rate_selector: EXACTLY,
        rate: RATE_100_GBPS,
        packet_life_time_selector: EXACTLY,
        packet_life_time: route.packet_life_time,
        preference: PATH_FLAGS,
        ..ibv_sa_path_rec::default()
    };
    // SAFETY: the pointer is the identifier's own; calloc's memory is that long.
    unsafe {
        let to = &mut (*id.as_c()).route;
        if to.path_rec.is_null() {
            to.path_rec = libc::calloc(1, size_of::<ibv_sa_path_rec>()).cast();
        }
        if to.path_rec.is_null() {
            return Err(libc::ENOMEM);
        }
        *to.path_rec = record;
        to.num_paths = 1;
    }
    Ok(())
}
