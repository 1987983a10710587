//! Ports below 1024, for processes with CAP_NET_BIND_SERVICE, as in Linux's `cma_use_port`.
//!
//! The library asks this of its own thread, so it is good advice for honest programs and binds
//! nobody: the router does not see capabilities (they change from call to call and from thread to
//! thread, and the process behind a number is another one by the time that one looks). Ports are a
//! vNIC's own, so whoever goes past this takes a port from nobody but its own container.
use crate::boundary::Outcome;
use std::ffi::c_int;

/// `PROT_SOCK`.
const PRIVILEGED_END: u16 = 1024;
/// A network namespace may say otherwise for its sockets (container runtimes do): what programs may
/// have by TCP they have here.
const UNPRIVILEGED_START: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
const CAP_NET_BIND_SERVICE: u32 = 10;
/// `_LINUX_CAPABILITY_VERSION_3`: two words of each set.
const VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct Header {
    version: u32,
    pid: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn may_bind_services() -> bool {
    let mut header = Header { version: VERSION, pid: 0 };
    let mut data = [Data::default(); 2];
    // SAFETY: the structures of this version.
    let code = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) };
    // Where the call is forbidden, this is not known.
    code != 0 || data[0].effective & 1 << CAP_NET_BIND_SERVICE != 0
}

fn unprivileged_start() -> u16 {
    let text = std::fs::read_to_string(UNPRIVILEGED_START).unwrap_or_default();
    text.trim().parse().unwrap_or(PRIVILEGED_END)
}

/// EACCES for a port that this thread may not have. Port 0 is any.
pub(crate) fn check_port(port: u16) -> Outcome<()> {
    let privileged = (1..PRIVILEGED_END).contains(&port);
    if privileged && !may_bind_services() && port < unprivileged_start() { Err(libc::EACCES) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_port_and_high_ones_are_everybodys() {
        for port in [0, PRIVILEGED_END, u16::MAX] {
            assert_eq!(check_port(port), Ok(()));
        }
        let allowed = may_bind_services() || unprivileged_start() <= 1;
        assert_eq!(check_port(1).is_ok(), allowed);
    }
}
