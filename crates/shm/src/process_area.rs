//! Areas of a process' map of memory, as the kernel shows them: by its query (Linux 6.11), and as text. Looks at the
//! map allocate nothing, so that a child of `fork` may use them.
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

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
const PROCMAP_QUERY: u64 = 0xc000_6611 | ((size_of::<ProcmapQuery>() as u64) << 16);
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;

/// The area that covers the address, or else the next one.
const COVERING_OR_NEXT: u64 = 16;

/// The kernel's answer about an address.
#[derive(Clone, Copy, Debug)]
pub struct QueriedArea {
    pub area: Area,
    pub page_bytes: u64,
    /// Of `name`, as much as was filled, with a zero at the end.
    pub name_bytes: usize,
}

/// Asks about an address of the map behind a descriptor of `/proc/PID/maps`: for the area that covers it, or with
/// `or_next` else the next one. An area's name comes to `name`, if that is not empty.
///
/// # Errors
/// ENOENT: there is no such area; ENOTTY: the kernel has no such query; ENAMETOOLONG; what else the kernel says.
pub fn query_area(maps: RawFd, address: u64, or_next: bool, name: &mut [u8]) -> io::Result<QueriedArea> {
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: if or_next { COVERING_OR_NEXT } else { 0 },
        query_addr: address,
        vma_name_size: name.len() as u32,
        vma_name_addr: if name.is_empty() { 0 } else { name.as_mut_ptr().expose_provenance() as u64 },
        ..Default::default()
    };
    // SAFETY: the kernel reads and writes the struct, whose size it is given, and the name's bytes, which are the
    // caller's.
    if unsafe { libc::ioctl(maps, PROCMAP_QUERY as _, &raw mut query) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let name_bytes = name.len().min(query.vma_name_size as usize);
    Ok(QueriedArea { area: Area::of(&query), page_bytes: query.vma_page_size, name_bytes })
}

/// The file behind an area; zeroes for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileId {
    pub device: (u32, u32),
    pub inode: u64,
}

/// One area of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub file: FileId,
    pub readable: bool,
    pub writable: bool,
    pub executable: bool,
    pub shared: bool,
}

impl Area {
    fn of(query: &ProcmapQuery) -> Self {
        let has = |flag| query.vma_flags & flag != 0;
        Self {
            start: query.vma_start,
            end: query.vma_end,
            offset: query.vma_offset,
            file: FileId { device: (query.dev_major, query.dev_minor), inode: query.inode },
            readable: has(READABLE),
            writable: has(WRITABLE),
            executable: has(EXECUTABLE),
            shared: has(SHARED),
        }
    }

    /// `7f0000000000-7f0000001000 rw-s 00000000 00:01 1024 /memfd:x (deleted)`; what follows the
    /// inode may be cut off.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let text = line.utf8_chunks().next()?.valid();
        let mut words = text.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?.as_bytes();
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            offset: hex(offset)?,
            file: FileId { device: (hex(major)? as u32, hex(minor)? as u32), inode: words.next()?.parse().ok()? },
            readable: rights.first() == Some(&b'r'),
            writable: rights.get(1) == Some(&b'w'),
            executable: rights.get(2) == Some(&b'x'),
            shared: rights.get(3) == Some(&b's'),
        })
    }
}

/// The map could not be read.
#[derive(Debug)]
pub struct Unreadable;

/// The lines of a file, read without allocating.
pub struct Lines {
    descriptor: RawFd,
    buffer: [u8; 4096],
    filled: usize,
    next: usize,
    position: i64,
}

impl Lines {
    /// Enough of a line for all but the name.
    pub const BYTES_MAX: usize = 160;

    /// Of a file that stays open meanwhile.
    pub fn new(descriptor: RawFd) -> Self {
        Self { descriptor, buffer: [0; 4096], filled: 0, next: 0, position: 0 }
    }

    /// Puts the next line, or as much of it as fits, into `line`; gives how much that is.
    ///
    /// # Errors
    /// The file could not be read.
    pub fn next(&mut self, line: &mut [u8]) -> Result<Option<usize>, Unreadable> {
        let mut length = 0;
        loop {
            if self.next == self.filled {
                let (into, bytes) = (self.buffer.as_mut_ptr(), self.buffer.len());
                // SAFETY: the buffer is ours to write, for so many bytes.
                let count = unsafe { libc::pread(self.descriptor, into.cast(), bytes, self.position) };
                if count <= 0 {
                    return if count == 0 { Ok(None) } else { Err(Unreadable) };
                }
                self.position += count as i64;
                (self.filled, self.next) = (count as usize, 0);
            }
            let byte = self.buffer[self.next];
            self.next += 1;
            if byte == b'\n' {
                return Ok(Some(length));
            }
            if length < line.len() {
                line[length] = byte;
                length += 1;
            }
        }
    }
}

/// The type of the file system of a device, by the text of a `/proc/PID/mountinfo`; empty where its line names none.
pub fn file_system_of(device: (u32, u32), mounts: &str) -> Option<&str> {
    let name = format!("{}:{}", device.0, device.1);
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&*name))?;
    Some(line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').next()).unwrap_or_default())
}

/// The area of `maps`, a process' `/proc/PID/maps`, that holds the address: a file that the process has mapped, shared,
/// to be read and written. May wait for that process.
///
/// The look goes by an open file, which is bound to the memory that the process had when it was opened: it never shows
/// that of a program which the process executes later. One answer is one area as it was at one moment, so file, place
/// and rights belong together.
///
/// # Errors
/// NotFound: there is none, or it is not shared, readable and writable, or shows no file; what the kernel says if that
/// memory is gone.
pub fn shared_area(maps: &File, address: u64) -> io::Result<Area> {
    let area = match query_area(maps.as_raw_fd(), address, false, &mut []) {
        Ok(answer) => answer.area,
        // Linux before 6.11 has text alone.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => area_in_text(maps, address)?,
        Err(error) => return Err(error),
    };
    // The number alone says nothing: that of memory of System V is the segment's identifier, which may be 0.
    let is_it = area.readable && area.writable && area.shared && area.file != FileId::default();
    if is_it { Ok(area) } else { Err(io::ErrorKind::NotFound.into()) }
}

fn area_in_text(maps: &File, address: u64) -> io::Result<Area> {
    let (mut lines, mut line) = (Lines::new(maps.as_raw_fd()), [0; Lines::BYTES_MAX]);
    while let Some(length) = lines.next(&mut line).map_err(|Unreadable| io::Error::last_os_error())? {
        let area = Area::parse(&line[..length]).ok_or(io::ErrorKind::InvalidData)?;
        if (area.start..area.end).contains(&address) {
            return Ok(area);
        }
    }
    Err(io::ErrorKind::NotFound.into())
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
        let by_text = |maps: &File, address| {
            let area = area_in_text(maps, address)?;
            let is_it = area.readable && area.writable && area.shared && area.file != FileId::default();
            if is_it { Ok(area) } else { Err(io::Error::from(io::ErrorKind::NotFound)) }
        };
        let ways: [fn(&File, u64) -> io::Result<Area>; 2] = [shared_area, by_text];
        for find in ways {
            let area = find(&maps, start + 5000).unwrap();
            assert_eq!((area.start, area.end, area.offset), (start, start + BYTES as u64, 0));
            assert!(area.file.inode != 0);
            assert_eq!(area, shared_area(&maps, start).unwrap());
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
