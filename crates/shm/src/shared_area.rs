//! A look at another process' map of memory: which file it has mapped at an address, shared and for writing.
//!
//! The look goes by an open `/proc/PID/maps`, which is bound to the memory that the process had when it was opened: it
//! never shows that of a program which the process executes later. One answer is one area as it was at one moment, so
//! file, place and rights belong together.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// An area of a process' map: a file that it has mapped, shared, to be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedArea {
    pub start: u64,
    pub end: u64,
    /// In the file, bytes.
    pub offset: u64,
    /// Major and minor number.
    pub device: (u32, u32),
    pub inode: u64,
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u64 = 0xc068_6611;
/// Bits of `vma_flags`.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const SHARED: u64 = 8;
const WANTED: u64 = READABLE | WRITABLE | SHARED;

impl SharedArea {
    /// The area of `maps`, a process' `/proc/PID/maps`, that holds the address. May wait for that process.
    ///
    /// # Errors
    /// NotFound: there is none, or it is not shared, readable and writable, or shows no file; what the kernel says if
    /// that memory is gone.
    pub fn find(maps: &File, address: u64) -> io::Result<Self> {
        let mut query =
            ProcmapQuery { size: size_of::<ProcmapQuery>() as u64, query_addr: address, ..Default::default() };
        // SAFETY: the kernel reads and writes the struct, whose size it is given.
        if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) } != 0 {
            let error = io::Error::last_os_error();
            // Linux before 6.11 has text alone.
            return if error.raw_os_error() == Some(libc::ENOTTY) {
                Self::find_in_text(maps, address)
            } else {
                Err(error)
            };
        }
        let area = Self {
            start: query.vma_start,
            end: query.vma_end,
            offset: query.vma_offset,
            device: (query.dev_major, query.dev_minor),
            inode: query.inode,
        };
        if query.vma_flags & WANTED == WANTED && area.has_file() {
            Ok(area)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    /// The number alone says nothing: that of memory of System V is the segment's identifier, which may be 0.
    fn has_file(&self) -> bool {
        (self.device, self.inode) != ((0, 0), 0)
    }

    fn find_in_text(maps: &File, address: u64) -> io::Result<Self> {
        let (mut line, mut buffer, mut position) = (Vec::new(), [0; 4096], 0);
        loop {
            let count = maps.read_at(&mut buffer, position)?;
            position += count as u64;
            if count == 0 {
                return Err(io::ErrorKind::NotFound.into());
            }
            for &byte in &buffer[..count] {
                if byte != b'\n' {
                    line.push(byte);
                    continue;
                }
                let (start, end, area) = Self::parse(&line).ok_or(io::ErrorKind::InvalidData)?;
                line.clear();
                if (start..end).contains(&address) {
                    return area.ok_or_else(|| io::ErrorKind::NotFound.into());
                }
            }
        }
    }

    /// `7f0000000000-7f0000001000 rw-s 00000000 00:01 1024 /memfd:x (deleted)`: from where to where, and the area if it
    /// is one that is looked for.
    fn parse(line: &[u8]) -> Option<(u64, u64, Option<Self>)> {
        let text = line.utf8_chunks().next()?.valid();
        let mut words = text.split_ascii_whitespace();
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (hex(start)?, hex(end)?);
        let rights = words.next()?.as_bytes();
        let offset = hex(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = (u32::try_from(hex(major)?).ok()?, u32::try_from(hex(minor)?).ok()?);
        let inode = words.next()?.parse().ok()?;
        let is_shared = rights.starts_with(b"rw") && rights.get(3) == Some(&b's');
        let area = Self { start, end, offset, device, inode };
        Some((start, end, (is_shared && area.has_file()).then_some(area)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    #[test]
    fn both_ways_find_what_is_shared_and_writable_alone() {
        const BYTES: usize = 1 << 16;
        let maps = File::open("/proc/self/maps").unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new mappings of this test's own.
        let (shared, private) = unsafe {
            let null = std::ptr::null_mut();
            (
                mmap_anonymous(null, BYTES, rights, MapFlags::SHARED).unwrap(),
                mmap_anonymous(null, BYTES, rights, MapFlags::PRIVATE).unwrap(),
            )
        };
        let (start, other) = (shared.addr() as u64, private.addr() as u64);
        let ways = [SharedArea::find, SharedArea::find_in_text];
        for find in ways {
            let area = find(&maps, start + 5000).unwrap();
            assert_eq!((area.start, area.end, area.offset), (start, start + BYTES as u64, 0));
            assert!(area.inode != 0);
            assert_eq!(area, SharedArea::find(&maps, start).unwrap());
            for nothing in [other, 4096, u64::MAX >> 8] {
                assert_eq!(find(&maps, nothing).unwrap_err().kind(), io::ErrorKind::NotFound, "{nothing:#x}");
            }
        }
        // SAFETY: the test's own mappings, which nothing refers to.
        unsafe {
            mprotect(shared, BYTES, MprotectFlags::READ).unwrap();
            assert!(ways.iter().all(|find| find(&maps, start).is_err()), "it is read-only now");
            munmap(shared, BYTES).unwrap();
            munmap(private, BYTES).unwrap();
        }
        assert!(ways.iter().all(|find| find(&maps, start).is_err()));
    }
}
