//! The process's own map of memory, area by area: by the kernel's query where it has one (Linux
//! 6.11), else by reading the text. Nothing here allocates, so that a child of `fork` may use it.
use std::os::fd::RawFd;

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

/// The longest name that is asked for.
const NAME_BYTES_MAX: usize = 4096;

/// The file behind an area; zeroes for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileId {
    pub device: (u32, u32),
    pub inode: u64,
}

/// One area of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub file: FileId,
    pub readable: bool,
    pub writable: bool,
    pub executable: bool,
    pub shared: bool,
}

/// `/proc/thread-self/maps`, open: `/proc/self` is the first thread's, and empty once that has ended.
pub struct ProcessMap {
    descriptor: RawFd,
    has_query: bool,
}

impl ProcessMap {
    /// `None`: this process can't read its own map. One that shows nothing is not that of a process
    /// that runs.
    #[must_use]
    pub fn open() -> Option<Self> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        // SAFETY: the path is a C string.
        let descriptor = unsafe { libc::open(c"/proc/thread-self/maps".as_ptr(), flags) };
        if descriptor < 0 {
            return None;
        }
        let mut maps = Self { descriptor, has_query: true };
        let mut query = ProcmapQuery { query_flags: COVERING_OR_NEXT, ..Default::default() };
        maps.has_query = maps.query(&mut query);
        let mut shows_any = maps.has_query;
        if !shows_any {
            let is_read = maps.visit(0, u64::MAX, &mut |_| {
                shows_any = true;
                false
            });
            shows_any &= is_read;
        }
        shows_any.then_some(maps)
    }

    /// The same map, always read as text.
    #[cfg(test)]
    pub(crate) fn by_text(mut self) -> Self {
        self.has_query = false;
        self
    }

    /// Whether a look at one area is cheap.
    pub(crate) fn has_query(&self) -> bool {
        self.has_query
    }

    fn query(&self, query: &mut ProcmapQuery) -> bool {
        query.size = size_of::<ProcmapQuery>() as u64;
        // SAFETY: the kernel reads and writes the struct, whose size it is given.
        unsafe { libc::ioctl(self.descriptor, PROCMAP_QUERY, query) == 0 }
    }

    /// Shows the areas that touch `from..to`, ascending, until `visit` says false. Their ends are
    /// not cut. False: the map could not be read, and nothing follows from an area that was not shown.
    pub(crate) fn visit(&self, from: u64, to: u64, visit: &mut dyn FnMut(&Area) -> bool) -> bool {
        if !self.has_query {
            return self.visit_text(from, to, visit);
        }
        let mut at = from;
        while at < to {
            let mut query = ProcmapQuery { query_addr: at, query_flags: COVERING_OR_NEXT, ..Default::default() };
            if !self.query(&mut query) {
                return std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT);
            }
            if query.vma_start >= to || !visit(&Area::of(&query)) {
                return true;
            }
            at = query.vma_end;
        }
        true
    }

    /// The area that covers an address, and the size of its pages in bytes, or 0 where the kernel does
    /// not say it. As much of its name as fits comes to `name`.
    pub(crate) fn named_at(&self, address: u64, name: &mut [u8]) -> Option<(Area, u64)> {
        if !self.has_query {
            return Some((self.named_by_text(address, name)?, 0));
        }
        let mut query = ProcmapQuery { query_addr: address, ..Default::default() };
        let mut all = [0_u8; NAME_BYTES_MAX];
        (query.vma_name_addr, query.vma_name_size) = (all.as_mut_ptr().expose_provenance() as u64, all.len() as u32);
        if !self.query(&mut query) {
            // A longer one is no name of the kernel's own.
            query = ProcmapQuery { query_addr: address, ..Default::default() };
            if !self.query(&mut query) {
                return None;
            }
        }
        let length = name.len().min(query.vma_name_size as usize);
        name[..length].copy_from_slice(&all[..length]);
        Some((Area::of(&query), query.vma_page_size))
    }

    fn named_by_text(&self, address: u64, name: &mut [u8]) -> Option<Area> {
        let mut lines = Lines { descriptor: self.descriptor, buffer: [0; 4096], filled: 0, next: 0, position: 0 };
        let mut line = [0; 160];
        while let Some(length) = lines.next(&mut line).unwrap_or(None) {
            let Some(area) = Area::parse(&line[..length]).filter(|area| area.end > address) else { continue };
            let start = line[..length].iter().position(|&byte| byte == b'/').unwrap_or(length);
            let found = &line[start..length];
            let length = found.len().min(name.len());
            name[..length].copy_from_slice(&found[..length]);
            return (area.start <= address).then_some(area);
        }
        None
    }

    fn visit_text(&self, from: u64, to: u64, visit: &mut dyn FnMut(&Area) -> bool) -> bool {
        let mut lines = Lines { descriptor: self.descriptor, buffer: [0; 4096], filled: 0, next: 0, position: 0 };
        let mut line = [0; 160];
        loop {
            let length = match lines.next(&mut line) {
                Ok(Some(length)) => length,
                Ok(None) => return true,
                Err(Unreadable) => return false,
            };
            let Some(area) = Area::parse(&line[..length]) else { continue };
            if area.end <= from {
                continue;
            }
            if area.start >= to || !visit(&area) {
                return true;
            }
        }
    }
}

impl Drop for ProcessMap {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and nobody else's.
        unsafe { libc::close(self.descriptor) };
    }
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
    fn parse(line: &[u8]) -> Option<Self> {
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
struct Unreadable;

/// The lines of a file, read without allocating.
struct Lines {
    descriptor: RawFd,
    buffer: [u8; 4096],
    filled: usize,
    next: usize,
    position: i64,
}

impl Lines {
    /// Puts the next line, or as much of it as fits, into `line`; gives how much that is.
    fn next(&mut self, line: &mut [u8]) -> Result<Option<usize>, Unreadable> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(maps: &ProcessMap) -> Vec<Area> {
        let mut process_map = Vec::new();
        maps.visit(0, u64::MAX >> 8, &mut |area| {
            process_map.push(*area);
            true
        });
        process_map
    }

    #[test]
    fn both_ways_see_the_same() {
        let mut maps = ProcessMap::open().unwrap();
        // An area of this test's own, which no other test changes meanwhile.
        // SAFETY: a new mapping.
        let own = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        let own = own.addr() as u64;
        let find = |process_map: Vec<Area>| {
            process_map.into_iter().find(|area| (area.start..area.end).contains(&own)).unwrap()
        };
        let quick = find(collect(&maps));
        maps.has_query = false;
        let slow = find(collect(&maps));
        assert_eq!(quick, slow);
        assert!(slow.shared && slow.writable && !slow.executable && slow.file.inode != 0);
        for has_query in [maps.query(&mut ProcmapQuery { query_flags: COVERING_OR_NEXT, ..Default::default() }), false]
        {
            maps.has_query = has_query;
            let mut name = [0; 16];
            let (named, page_bytes) = maps.named_at(own, &mut name).unwrap();
            assert_eq!((named, &name[..10]), (slow, &b"/dev/zero "[..]));
            assert_eq!(page_bytes, if has_query { 4096 } else { 0 });
            assert_eq!(maps.named_at(8, &mut name), None);
        }
        let here = &raw const maps as u64;
        let mut seen = 0;
        maps.visit(here, here + 1, &mut |area| {
            assert!(!area.shared && area.file == FileId::default());
            seen += 1;
            true
        });
        assert_eq!(seen, 1);
    }
}
