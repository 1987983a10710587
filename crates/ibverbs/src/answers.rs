//! Public functions whose answer follows from what FreeFlow is, or from another query.
use crate::context::ibv_query_port;
use crate::unsupported::refuse;
use core::ffi::{c_int, c_uint, c_void};
use freeflow_abi::{ibv_context, ibv_port_attr, ibv_qp};

/// Nothing to do before a fork: the router reaches private memory through the parent's own page
/// table, so a page that is copied on write after a fork is found where the parent sees it.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _bytes: usize) -> c_int {
    0
}

/// See [`ibv_dontfork_range`].
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _bytes: usize) -> c_int {
    0
}

/// 0: no order of the bytes of one message is promised, but that its last bytes come last.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _opcode: c_uint, _flags: u32) -> c_int {
    0
}

/// Mbit/s of one lane for a speed code (IBTA 14.2.5.6); none for a code that the device never
/// reports.
fn lane_mbps(active_speed: u8) -> Option<u64> {
    Some(match active_speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    })
}

/// Lanes for a width code.
fn lanes(active_width: u8) -> Option<u64> {
    Some(match active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    })
}

/// In units of 100 Mbit/s. EINVAL for a port that the device has not.
///
/// # Safety
/// The C contract: `context` is open, `speed` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port_speed(context: *mut ibv_context, port: u32, speed: *mut u64) -> c_int {
    let Ok(port) = u8::try_from(port) else { return libc::EINVAL };
    let mut attributes = ibv_port_attr::default();
    // SAFETY: the C contract: the context is open. The attributes are larger than what
    // ibv_query_port writes.
    let result = unsafe { ibv_query_port(context, port, &raw mut attributes) };
    if result != 0 {
        return result;
    }
    let (Some(lane), Some(count)) = (lane_mbps(attributes.active_speed), lanes(attributes.active_width)) else {
        return refuse();
    };
    // SAFETY: the C contract: `speed` is valid for a write.
    unsafe { speed.write(lane * count / 100) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edr_times_four_is_a_hundred_gigabit() {
        assert_eq!(lane_mbps(32).unwrap() * lanes(2).unwrap(), 100_000);
        assert_eq!((lane_mbps(0), lanes(0)), (None, None));
    }
}
