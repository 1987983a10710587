//! Address handles, and the way from a received datagram back to its sender.
use crate::boundary::{Outcome, code, pointer};
use crate::context::session;
use crate::pd::ParentUse;
use freeflow_abi::{
    ah_attributes_from_c, ah_attributes_to_c, ibv_ah, ibv_ah_attr, ibv_context, ibv_grh, ibv_pd, ibv_wc,
};
use freeflow_client::Session;
use freeflow_verbs::{AddressHandleAttributes, CompletionFlags, Gid, GlobalRoute, VerbsError};
use std::ffi::c_int;
use std::net::Ipv4Addr;

/// An address handle as C sees it, and what is behind it.
#[repr(C)]
struct Ah {
    c: ibv_ah,
    _parent_use: ParentUse,
}

/// `ibv_create_ah(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the C contract.
    pointer(|| unsafe { create(pd, &ah_attributes_from_c(&*attr)) })
}

/// # Safety
/// `pd` is allocated.
unsafe fn create(pd: *mut ibv_pd, attributes: &AddressHandleAttributes) -> Outcome<*mut ibv_ah> {
    // SAFETY: this function's contract.
    let (context, pd_handle) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: a PD's context is open.
    let handle = unsafe { session(context) }.create_address_handle(pd_handle, attributes)?;
    // SAFETY: this function's contract.
    let ah = Ah { c: ibv_ah { context, pd, handle }, _parent_use: unsafe { ParentUse::of(pd) } };
    Ok(Box::into_raw(Box::new(ah)).cast())
}

/// `ibv_destroy_ah(3)`.
///
/// # Safety
/// `ah` exists, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    code(|| {
        // SAFETY: the C contract; made by `Box::into_raw` above.
        unsafe {
            session((*ah).context).destroy_address_handle((*ah).handle)?;
            drop(Box::from_raw(ah.cast::<Ah>()));
        }
        Ok(())
    })
}

/// `ibv_init_ah_from_wc(3)`: 0, or -1 with errno: EPROTONOSUPPORT if the GRH is neither IPv4 nor
/// IPv6, EINVAL if it was not sent to a GID of the port.
///
/// # Safety
/// The pointers are valid; `grh` if the completion says that there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    crate::boundary::number(|| {
        // SAFETY: the C contract.
        unsafe { *attr = ah_attributes_to_c(&from_completion(session(context), port, &*wc, grh)?) };
        Ok(0)
    })
}

/// `ibv_create_ah_from_wc(3)`.
///
/// # Safety
/// The pointers are valid; `grh` if the completion says that there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    pointer(|| {
        // SAFETY: the C contract.
        unsafe { create(pd, &from_completion(session((*pd).context), port, &*wc, grh)?) }
    })
}

/// # Safety
/// `grh` is valid if the completion says that there is one.
unsafe fn from_completion(
    session: &Session,
    port: u8,
    wc: &ibv_wc,
    grh: *const ibv_grh,
) -> Outcome<AddressHandleAttributes> {
    let grh = if wc.wc_flags & u32::from(CompletionFlags::GRH) == 0 {
        None
    } else {
        // SAFETY: forty bytes without padding, any value of which is valid.
        let header = unsafe { &*grh.cast::<[u8; GRH_BYTES]>() };
        Some(route_back(session.gids(), header)?)
    };
    Ok(AddressHandleAttributes {
        grh,
        dlid: wc.slid,
        service_level: wc.sl,
        source_path_bits: wc.dlid_path_bits,
        static_rate: 0,
        port,
    })
}

const GRH_BYTES: usize = size_of::<ibv_grh>();

/// The IPv4 header stands at the end of the forty bytes (IBTA annex A17.4.5.2).
const IPV4_OFFSET: usize = 20;

/// The route from the receiver of a datagram back to its sender.
fn route_back(gids: &[Gid], header: &[u8; GRH_BYTES]) -> Outcome<GlobalRoute> {
    let ipv4 = &header[IPV4_OFFSET..];
    let is_ipv6 = header[0] >> 4 == 6;
    let is_ipv4 = if is_ipv6 { ipv4[0] == 0x45 && checksum(ipv4) == 0xffff } else { ipv4[0] >> 4 == 4 };
    let (source, destination, route) = if is_ipv4 {
        let address =
            |at: usize| Gid::from_ip(Ipv4Addr::new(ipv4[at], ipv4[at + 1], ipv4[at + 2], ipv4[at + 3]).into());
        let route = GlobalRoute { traffic_class: ipv4[1], hop_limit: ipv4[8], ..GlobalRoute::default() };
        (address(12), address(16), route)
    } else if is_ipv6 {
        // Version, traffic class and flow label share the first word.
        let word = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        let address = |at: usize| Gid(std::array::from_fn(|i| header[at + i]));
        let route = GlobalRoute {
            flow_label: word & 0xf_ffff,
            traffic_class: (word >> 20) as u8,
            hop_limit: header[7],
            ..GlobalRoute::default()
        };
        (address(8), address(24), route)
    } else {
        return Err(VerbsError::VersionMismatch);
    };
    let sgid_index = gids.iter().position(|gid| *gid == destination).ok_or(VerbsError::InvalidArgument)?;
    Ok(GlobalRoute { dgid: source, sgid_index: sgid_index as u8, ..route })
}

/// One's complement sum of a header: 0xffff if its checksum is right.
fn checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

const _: () = assert!(GRH_BYTES == 40);

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4_header() -> [u8; GRH_BYTES] {
        let mut header = [0; GRH_BYTES];
        header[20..].copy_from_slice(&[0x45, 0x10, 0, 60, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 7, 10, 0, 0, 9]);
        let sum = !checksum(&header[20..]);
        header[30..32].copy_from_slice(&sum.to_be_bytes());
        header
    }

    #[test]
    fn ipv4_route() {
        let own = Gid::from_ip(Ipv4Addr::new(10, 0, 0, 9).into());
        let route = route_back(&[Gid::default(), own], &ipv4_header()).unwrap();
        assert_eq!(route.dgid, Gid::from_ip(Ipv4Addr::new(10, 0, 0, 7).into()));
        assert_eq!((route.sgid_index, route.traffic_class, route.hop_limit), (1, 0x10, 64));
        assert_eq!(route_back(&[Gid::default()], &ipv4_header()), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn ipv4_behind_bytes_that_look_like_ipv6() {
        let own = Gid::from_ip(Ipv4Addr::new(10, 0, 0, 9).into());
        let mut header = ipv4_header();
        header[0] = 0x60;
        assert!(route_back(&[own], &header).unwrap().dgid.to_ipv4().is_some());
        header[31] ^= 1;
        assert_eq!(route_back(&[own], &header), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn ipv6_route_and_nonsense() {
        let mut header = [0; GRH_BYTES];
        header[..4].copy_from_slice(&0x6ab1_2345_u32.to_be_bytes());
        header[7] = 3;
        header[8..24].copy_from_slice(&[1; 16]);
        header[24..].copy_from_slice(&[2; 16]);
        let route = route_back(&[Gid([2; 16])], &header).unwrap();
        assert_eq!((route.dgid, route.flow_label, route.traffic_class), (Gid([1; 16]), 0x1_2345, 0xab));
        assert_eq!(route_back(&[], &[0; GRH_BYTES]), Err(VerbsError::VersionMismatch));
    }
}
