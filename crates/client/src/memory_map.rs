//! Whether memory is mapped with the rights that a registration asks for: what pinning would find out on a NIC.
//!
//! It is a courtesy to the program (EFAULT now instead of error completions later), not protection: the router checks
//! every access by itself, and the program may unmap the memory a moment later.
use freeflow_verbs::VerbsError;
use std::fs;

/// Checks that every byte is mapped readable, and writable if asked, by reading `/proc/self/maps`.
///
/// # Errors
/// BadAddress if not. A process that can't read its own maps passes: the router finds out.
pub fn check_mapped(address: u64, length: u64, writable: bool) -> Result<(), VerbsError> {
    let end = address.checked_add(length).ok_or(VerbsError::BadAddress)?;
    match fs::read_to_string("/proc/self/maps") {
        Ok(maps) => check_lines(&maps, address, end, writable),
        Err(_) => Ok(()),
    }
}

fn check_lines(maps: &str, address: u64, end: u64, writable: bool) -> Result<(), VerbsError> {
    let mut reached = address;
    for line in maps.lines() {
        if reached >= end {
            break;
        }
        let Some(area) = Area::parse(line) else { continue };
        if area.end <= reached {
            continue;
        }
        if area.start > reached || !area.readable || (writable && !area.writable) {
            return Err(VerbsError::BadAddress);
        }
        reached = area.end;
    }
    if reached >= end { Ok(()) } else { Err(VerbsError::BadAddress) }
}

struct Area {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
}

impl Area {
    /// `55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0 [heap]`
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?.as_bytes();
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            readable: rights.first() == Some(&b'r'),
            writable: rights.get(1) == Some(&b'w'),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 r--p 00000000 00:00 0
3000-5000 rw-p 00000000 00:00 0
5000-6000 ---p 00000000 00:00 0
8000-9000 rw-s 00000000 00:01 7 /memfd:x
";

    #[test]
    fn rights_and_holes() {
        assert!(check_lines(MAPS, 0x1800, 0x4000, false).is_ok());
        assert!(check_lines(MAPS, 0x1800, 0x4000, true).is_err());
        assert!(check_lines(MAPS, 0x3000, 0x5000, true).is_ok());
        assert!(check_lines(MAPS, 0x4000, 0x5001, false).is_err());
        assert!(check_lines(MAPS, 0x6000, 0x8800, false).is_err());
        assert!(check_lines(MAPS, 0x8000, 0x9000, true).is_ok());
        assert!(check_lines(MAPS, 0x8000, 0x9001, true).is_err());
    }

    #[test]
    fn own_stack_and_null() {
        let here = 0u64;
        let address = std::ptr::from_ref(&here).addr() as u64;
        assert!(check_mapped(address, 8, true).is_ok());
        assert!(check_mapped(0, 8, false).is_err());
        assert!(check_mapped(u64::MAX, 8, false).is_err());
    }
}
