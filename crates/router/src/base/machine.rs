//! Limits that follow the machine: of each vNIC, unless the router is started with other ones, and
//! of all together. The machine's clock of a thread, and its randomness.
use freeflow_shm::refuses_missing_pages;
use freeflow_verbs::VnicLimits;
use std::fs::File;
use std::io::{self, Read};

/// The defaults, with `segment_bytes_max` by this machine's memory.
pub fn default_limits() -> VnicLimits {
    let limits = VnicLimits::default();
    match own_memory_bytes() {
        Some(bytes) => {
            VnicLimits { segment_bytes_max: segment_bytes(bytes, refuses_missing_pages().is_ok()), ..limits }
        }
        None => limits,
    }
}

/// Rings of all vNICs, whose pages the router may pay for: an eighth of the machine's memory.
pub fn ring_bytes_of_all() -> u64 {
    own_memory_bytes().map_or(u64::MAX, |bytes| bytes / 8)
}

/// CPU time of the calling thread, microseconds.
pub fn cpu_time_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

pub fn random_bytes<const COUNT: usize>() -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn own_memory_bytes() -> Option<u64> {
    memory_bytes(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn memory_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).filter(|&bytes| bytes > 0)
}

/// Of a vNIC, in all. Where the owner pays for its pages this bounds lengths, which are more than
/// pages: registrations make segments for stretches of addresses. Where the router may have to pay,
/// it bounds what the router pays.
fn segment_bytes(memory_bytes: u64, is_owner_charged: bool) -> u64 {
    if is_owner_charged { memory_bytes.saturating_mul(2) } else { memory_bytes / 4 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_meminfo() {
        assert_eq!(memory_bytes("MemTotal:       24117248 kB\nMemFree: 1 kB\n"), Some(23 << 30));
        for text in [
            "",
            "MemTotal: 0 kB",
            "MemTotal: many kB",
            "MemTotal: 5",
            "SwapTotal: 5 kB",
            "MemTotal: 99999999999999999999 kB",
        ] {
            assert_eq!(memory_bytes(text), None, "{text}");
        }
    }

    #[test]
    fn segments_follow_the_machine() {
        assert_eq!((segment_bytes(8 << 30, true), segment_bytes(8 << 30, false)), (16 << 30, 2 << 30));
        let limits = default_limits();
        let memory = memory_bytes(&std::fs::read_to_string("/proc/meminfo").unwrap()).unwrap();
        assert!([memory * 2, memory / 4].contains(&limits.segment_bytes_max), "{limits:?} with {memory}");
        assert_eq!(
            VnicLimits { segment_bytes_max: 0, ..limits },
            VnicLimits { segment_bytes_max: 0, ..VnicLimits::default() }
        );
    }
}
