//! The process's own map of memory, area by area: by the kernel's query where it has one (Linux
//! 6.11), else by reading the text. Nothing here allocates, so that a child of `fork` may use it.
use freeflow_client::{Lines, Unreadable, query_area};
use std::os::fd::RawFd;

pub(crate) use freeflow_client::{Area, FileId};

/// The longest name that is asked for.
const NAME_BYTES_MAX: usize = 4096;

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
        maps.has_query = query_area(descriptor, 0, true, &mut []).is_ok();
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

    /// Shows the areas that touch `from..to`, ascending, until `visit` says false. Their ends are
    /// not cut. False: the map could not be read, and nothing follows from an area that was not shown.
    pub(crate) fn visit(&self, from: u64, to: u64, visit: &mut dyn FnMut(&Area) -> bool) -> bool {
        if !self.has_query {
            return self.visit_text(from, to, visit);
        }
        let mut at = from;
        while at < to {
            let area = match query_area(self.descriptor, at, true, &mut []) {
                Ok(answer) => answer.area,
                Err(error) => return error.raw_os_error() == Some(libc::ENOENT),
            };
            if area.start >= to || !visit(&area) {
                return true;
            }
            at = area.end;
        }
        true
    }

    /// The area that covers an address. `None`, too, if the map could not be read.
    pub(crate) fn area_at(&self, address: u64) -> Option<Area> {
        let mut found = None;
        self.visit(address, address + 1, &mut |area| {
            found = Some(*area);
            false
        });
        found
    }

    /// The area that covers an address, and the size of its pages in bytes, or 0 where the kernel does
    /// not say it. As much of its name as fits comes to `name`.
    pub(crate) fn named_at(&self, address: u64, name: &mut [u8]) -> Option<(Area, u64)> {
        if !self.has_query {
            return Some((self.named_by_text(address, name)?, 0));
        }
        let mut all = [0_u8; NAME_BYTES_MAX];
        let ask = |name: &mut [u8]| query_area(self.descriptor, address, false, name);
        // A longer one is no name of the kernel's own.
        let answer = ask(&mut all).or_else(|_| ask(&mut [])).ok()?;
        let length = name.len().min(answer.name_bytes);
        name[..length].copy_from_slice(&all[..length]);
        Some((answer.area, answer.page_bytes))
    }

    fn named_by_text(&self, address: u64, name: &mut [u8]) -> Option<Area> {
        let mut lines = Lines::new(self.descriptor);
        let mut line = [0; Lines::BYTES_MAX];
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
        let mut lines = Lines::new(self.descriptor);
        let mut line = [0; Lines::BYTES_MAX];
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
        for has_query in [query_area(maps.descriptor, 0, true, &mut []).is_ok(), false] {
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
