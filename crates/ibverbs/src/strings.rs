//! Names of statuses, events, node types and port states, and conversions of rates.
//!
//! The texts are those that rdma-core gives: programs print them and scripts look for them.
use core::ffi::{CStr, c_char, c_int, c_uint};

const UNKNOWN: &CStr = c"unknown";

/// By `enum ibv_wc_status`.
static WC_STATUS: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

/// By `enum ibv_event_type`.
static EVENT_TYPE: [&CStr; 21] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
    c"Device link speed change",
];

/// By `enum ibv_node_type`; 0 is none.
static NODE_TYPE: [&CStr; 8] = [
    UNKNOWN,
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

/// By `enum ibv_port_state`.
static PORT_STATE: [&CStr; 6] = [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];

/// By `enum ibv_wr_opcode`; 12 and 13 are none.
static WR_OPCODE: [Option<&CStr>; 16] = [
    Some(c"rdma-write"),
    Some(c"rdma-write-with-imm"),
    Some(c"send"),
    Some(c"send-with-imm"),
    Some(c"rdma-read"),
    Some(c"atomic-cmp-and-swp"),
    Some(c"atomic-fetch-and-add"),
    Some(c"local-inv"),
    Some(c"bind-mw"),
    Some(c"send-with-inv"),
    Some(c"tso"),
    Some(c"driver1"),
    None,
    None,
    Some(c"flush"),
    Some(c"atomic-write"),
];

fn name(table: &[&'static CStr], index: c_int) -> *const c_char {
    usize::try_from(index).ok().and_then(|index| table.get(index)).copied().unwrap_or(UNKNOWN).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    name(&WC_STATUS, status)
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    name(&EVENT_TYPE, event)
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    name(&NODE_TYPE, node_type)
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    name(&PORT_STATE, state)
}

/// Lies in the private nodes, but is declared in the public header.
pub(crate) extern "C" fn wr_opcode_str(opcode: c_uint) -> *const c_char {
    WR_OPCODE.get(opcode as usize).copied().flatten().unwrap_or(UNKNOWN).as_ptr()
}

struct Rate {
    /// `enum ibv_rate`.
    code: c_uint,
    /// Multiple of 2.5 Gbit/s, as rdma-core counts it; 0 where it gives none.
    multiple: c_int,
    mbps: c_int,
}

const fn rate(code: c_uint, multiple: c_int, mbps: c_int) -> Rate {
    Rate { code, multiple, mbps }
}

const RATE_MAX: c_uint = 0;

static RATES: [Rate; 23] = [
    rate(2, 1, 2_500),
    rate(5, 2, 5_000),
    rate(3, 4, 10_000),
    rate(6, 8, 20_000),
    rate(4, 12, 30_000),
    rate(7, 16, 40_000),
    rate(8, 24, 60_000),
    rate(9, 32, 80_000),
    rate(10, 48, 120_000),
    rate(11, 0, 14_062),
    rate(12, 0, 56_250),
    rate(13, 0, 112_500),
    rate(14, 0, 168_750),
    rate(15, 0, 25_781),
    rate(16, 0, 103_125),
    rate(17, 0, 206_250),
    rate(18, 0, 309_375),
    rate(19, 11, 28_125),
    rate(20, 20, 53_125),
    rate(21, 160, 425_000),
    rate(22, 240, 637_500),
    rate(23, 320, 850_000),
    rate(24, 480, 1_275_000),
];

fn find(matches: impl Fn(&Rate) -> bool) -> Option<&'static Rate> {
    RATES.iter().find(|rate| matches(rate))
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(code: c_uint) -> c_int {
    find(|rate| rate.code == code && rate.multiple != 0).map_or(-1, |rate| rate.multiple)
}

#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(multiple: c_int) -> c_uint {
    find(|rate| rate.multiple == multiple && multiple != 0).map_or(RATE_MAX, |rate| rate.code)
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(code: c_uint) -> c_int {
    find(|rate| rate.code == code).map_or(-1, |rate| rate.mbps)
}

#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_uint {
    find(|rate| rate.mbps == mbps).map_or(RATE_MAX, |rate| rate.code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pointer: *const c_char) -> &'static str {
        // SAFETY: every function here returns a static C string.
        unsafe { CStr::from_ptr(pointer) }.to_str().unwrap()
    }

    #[test]
    fn names_and_unknown_numbers() {
        assert_eq!(text(ibv_wc_status_str(0)), "success");
        assert_eq!(text(ibv_wc_status_str(5)), "Work Request Flushed Error");
        assert_eq!(text(ibv_event_type_str(8)), "local catastrophic error");
        assert_eq!(text(ibv_node_type_str(1)), "InfiniBand channel adapter");
        assert_eq!(text(ibv_port_state_str(4)), "active");
        assert_eq!(text(wr_opcode_str(14)), "flush");
        for wrong in [-1, 24, c_int::MAX, c_int::MIN] {
            assert_eq!(text(ibv_wc_status_str(wrong)), "unknown");
        }
        assert_eq!(text(ibv_node_type_str(-1)), "unknown");
        assert_eq!(text(wr_opcode_str(12)), "unknown");
        assert_eq!(text(wr_opcode_str(u32::MAX)), "unknown");
    }

    #[test]
    fn rates_go_there_and_back() {
        for rate in &RATES {
            assert_eq!(mbps_to_ibv_rate(ibv_rate_to_mbps(rate.code)), rate.code);
            if rate.multiple != 0 {
                assert_eq!(mult_to_ibv_rate(ibv_rate_to_mult(rate.code)), rate.code);
            }
        }
        assert_eq!(
            (ibv_rate_to_mbps(0), ibv_rate_to_mult(16), mult_to_ibv_rate(0), mbps_to_ibv_rate(1)),
            (-1, -1, 0, 0)
        );
    }
}
