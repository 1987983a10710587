//! The hint: one line on stderr for each process whose requests go on taking the slow path, with the
//! reason and a remedy. `FREEFLOW_HINTS=off` turns it off.
//!
//! The router asks for memory to be shared once it has used that by the slow path for a while
//! (`sharing`). Where nothing comes of it, again and again, the program is slow for good, and nobody
//! else can say why.
//!
//! Invariant: the line is written without the table's lock and without a lock or an allocation of
//! the C library's, it waits for no reader, and it goes only where stderr went when this library was
//! loaded.
use crate::process_map::{Area, ProcessMap};
use crate::ranges::{PAGE_BYTES, RegionSpan};
use std::fmt::{self, Write as _};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// `off`: no hint.
const VARIABLE: &str = "FREEFLOW_HINTS";
/// Accesses to a block of memory before the router's first command for it; the next one takes twice
/// as many.
const ACCESSES_BEFORE_COMMAND: u64 = 8;
/// The hint is worth it once so many accesses to blocks were slow that need not be.
const ACCESSES_BEFORE_HINT: u64 = 1024;
/// Blocks whose commands are counted one by one; a command for any other counts as its first.
const BLOCK_COUNT_MAX: usize = 16;
/// The most doublings that are taken for granted: time takes some of them back.
const DOUBLING_COUNT_MAX: u32 = 6;
/// The longest line, bytes: a pipe takes so much at once.
const LINE_BYTES_MAX: usize = 512;
/// The part of a mapping's name that is looked at.
const NAME_BYTES_MAX: usize = 64;

/// The line was written, or is about to be. A child of `fork` has no other one.
static IS_GIVEN: AtomicBool = AtomicBool::new(false);
/// Device and inode of stderr when the library was loaded; zeroes if there was none.
static STDERR: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Whether the environment allows a hint.
pub(crate) fn are_enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| std::env::var_os(VARIABLE).is_none_or(|value| value != "off"))
}

fn stderr_now() -> Option<libc::stat> {
    // SAFETY: all zeroes are valid, and the struct is ours to write.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        (libc::fstat(libc::STDERR_FILENO, &raw mut about) == 0).then_some(about)
    }
}

/// Notes where stderr goes. To be called when the library is loaded: later, its descriptor may be
/// anything else of the program's.
pub fn note_stderr() {
    if let Some(about) = stderr_now() {
        // Relaxed: written before the program's code runs.
        STDERR[0].store(about.st_dev, Ordering::Relaxed);
        STDERR[1].store(about.st_ino, Ordering::Relaxed);
    }
}

/// An obstacle to sharing memory with the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    SwitchedOff,
    WholePagesOnly,
    DataLimit,
    PinnedBuffers,
    Devices,
    SystemV,
    Posix,
    Memfd,
    SharedAnonymous,
    File,
    PrivateFile,
    HugePages,
    Executable,
    Unwritable,
    MappingLimit,
    NoSegment,
    NotMoved,
}

impl Obstacle {
    /// Of memory that no registration moves, whatever the circumstances.
    fn of(area: &Area, page_bytes: u64, name: &[u8]) -> Option<Self> {
        const NAMES: [(&[u8], Obstacle); 5] = [
            (b"/SYSV", Obstacle::SystemV),
            (b"/dev/shm/", Obstacle::Posix),
            (b"/memfd:", Obstacle::Memfd),
            (b"/dev/zero", Obstacle::SharedAnonymous),
            (b"/anon_hugepage", Obstacle::HugePages),
        ];
        if page_bytes > PAGE_BYTES {
            return Some(Self::HugePages);
        }
        if area.executable {
            return Some(Self::Executable);
        }
        if !area.readable || !area.writable {
            return Some(Self::Unwritable);
        }
        let named = NAMES.iter().find(|(start, _)| name.starts_with(start)).map(|&(_, obstacle)| obstacle);
        named.filter(|&named| area.shared || named == Self::HugePages).or(area.shared.then_some(Self::File))
    }

    fn reason(self) -> &'static str {
        match self {
            Self::SwitchedOff => "FREEFLOW_REMAP=off",
            Self::WholePagesOnly => "it is not whole pages, with FREEFLOW_REMAP=whole",
            Self::DataLimit => "it is not whole pages, and the process has a limit of data",
            Self::PinnedBuffers => "it is not whole pages, and io_uring has registered buffers",
            Self::Devices => "devices may write to it, by libaio, io_uring or a device file",
            Self::SystemV => "System V shared memory",
            Self::Posix => "POSIX shared memory",
            Self::Memfd => "a memfd",
            Self::SharedAnonymous => "shared anonymous memory",
            Self::File => "a shared file mapping",
            Self::PrivateFile => "a private file mapping",
            Self::HugePages => "huge pages",
            Self::Executable => "executable memory",
            Self::Unwritable => "memory that is not writable",
            Self::MappingLimit => "the process has too many mappings",
            Self::NoSegment => "a limit of the vNIC or of the process is reached",
            Self::NotMoved => "its threads can't be stopped, or its pages do not come at once",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::SwitchedOff => "unset FREEFLOW_REMAP",
            Self::WholePagesOnly | Self::PinnedBuffers => "register whole pages",
            Self::Devices => "run it with FREEFLOW_REMAP=eager",
            Self::DataLimit => "register whole pages, or run it with `ulimit -d unlimited`",
            Self::MappingLimit => "register fewer and larger regions, or raise vm.max_map_count",
            Self::NoSegment => "register less, or raise the limits that `freeflow describe` shows",
            Self::NotMoved => "run it without debugger, tracer or userfaultfd",
            _ => "use malloc, private mmap or ibv_malloc",
        }
    }
}

/// A line of text that is made without an allocation; what does not fit is left out.
pub(crate) struct Line {
    bytes: [u8; LINE_BYTES_MAX],
    length: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let count = text.len().min(self.bytes.len() - self.length);
        self.bytes[self.length..self.length + count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
        Ok(())
    }
}

impl Line {
    fn of(region: RegionSpan, obstacle: Obstacle) -> Self {
        let mut line = Self { bytes: [0; LINE_BYTES_MAX], length: 0 };
        let RegionSpan { start, length, .. } = region;
        let (reason, remedy) = (obstacle.reason(), obstacle.remedy());
        // It never fails.
        let _ = writeln!(
            line,
            "freeflow: requests take the slow path: the region at {start:#x} of {length} bytes can't be shared with the \
             router ({reason}): {remedy}. See \"The slow path\" in FreeFlow's README; FREEFLOW_HINTS=off: no hint."
        );
        line
    }

    fn text(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Writes it, if that is possible at once. Without the table's lock.
    pub fn write(&self) {
        let Some(about) = stderr_now() else { return };
        // Relaxed: written before the program's code ran.
        let noted = STDERR.each_ref().map(|part| part.load(Ordering::Relaxed));
        if [about.st_dev, about.st_ino] == noted {
            write_at_once(libc::STDERR_FILENO, about.st_mode & libc::S_IFMT, self.text());
        }
    }
}

/// Writes all of it or nothing, and never waits for a reader.
fn write_at_once(descriptor: i32, kind: libc::mode_t, text: &[u8]) {
    let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd of ours.
    if unsafe { libc::poll(&raw mut polled, 1, 0) } <= 0 || polled.revents != libc::POLLOUT {
        return;
    }
    if [libc::S_IFIFO, libc::S_IFSOCK].contains(&kind) {
        // Others may fill it since.
        let piece = libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
        // The system call, as the oldest glibc that loads this library has no function for it. Its offset is two words
        // long; -1 is the descriptor's own.
        let (count, offset, high, flags) = (1_usize, -1_i64, 0_i64, libc::RWF_NOWAIT);
        let call = libc::SYS_pwritev2;
        // SAFETY: one piece of ours, which is only read. SIGPIPE is blocked in this thread.
        let written = unsafe { libc::syscall(call, descriptor, &raw const piece, count, offset, high, flags) };
        let has_no_way = written < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP);
        if !has_no_way {
            return;
        }
    }
    // SAFETY: the text is ours and only read. SIGPIPE and SIGTTOU are blocked in this thread.
    unsafe { libc::write(descriptor, text.as_ptr().cast(), text.len()) };
}

/// Memory that could not be shared, so far.
#[derive(Default)]
pub(crate) struct Hints {
    /// Accesses by the slow path, as far as the router's commands tell of them.
    accesses: u64,
    /// Blocks by their addresses, and the commands for each.
    blocks: [(u64, u32); BLOCK_COUNT_MAX],
    next: usize,
    line: Option<Line>,
}

impl Hints {
    /// Whether a hint may come yet.
    pub fn are_wanted(&self) -> bool {
        // Relaxed: changes under the table's lock.
        are_enabled() && !IS_GIVEN.load(Ordering::Relaxed)
    }

    /// So many commands for this block came to nothing. Whether the hint is worth it.
    pub fn note(&mut self, block: u64, more: u32) -> bool {
        let known = self.blocks.iter().position(|&(address, count)| address == block && count > 0);
        let at = known.unwrap_or_else(|| {
            self.next = (self.next + 1) % self.blocks.len();
            self.blocks[self.next] = (block, 0);
            self.next
        });
        let count = &mut self.blocks[at].1;
        for _ in 0..more {
            self.accesses += ACCESSES_BEFORE_COMMAND << (*count).min(DOUBLING_COUNT_MAX);
            *count += 1;
        }
        self.accesses >= ACCESSES_BEFORE_HINT
    }

    /// Makes the line. `known`: an obstacle that was met; that of the memory itself comes first.
    pub fn give(&mut self, region: RegionSpan, range: &Range<u64>, known: Option<Obstacle>) {
        let obstacle = known.filter(|&known| known == Obstacle::SwitchedOff).or_else(|| {
            let mut name = [0; NAME_BYTES_MAX];
            let area = ProcessMap::open().and_then(|maps| maps.named_at(range.start, &mut name));
            area.and_then(|(area, page_bytes)| Obstacle::of(&area, page_bytes, &name)).or(known)
        });
        // Without one the memory may be shared the next time.
        if let Some(obstacle) = obstacle {
            IS_GIVEN.store(true, Ordering::Relaxed);
            self.line = Some(Line::of(region, obstacle));
        }
    }

    /// The line, to be written.
    pub fn take_line(&mut self) -> Option<Line> {
        self.line.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_hint_comes_after_much_use_of_one_block_or_some_of_many() {
        let mut hints = Hints::default();
        // 8, 24, 56, 120, 248, 504, 1016, 1528 accesses.
        assert!((0..7).all(|_| !hints.note(0x10000, 1)) && hints.note(0x10000, 1));
        let mut hints = Hints::default();
        assert!(!hints.note(0x10000, 7) && hints.note(0x10000, 1));
        let mut hints = Hints::default();
        assert!((1..128).all(|block| !hints.note(block << 16, 1)) && hints.note(128 << 16, 1));
        let mut hints = Hints::default();
        assert!((1..=64).all(|block| !hints.note(block << 16, 1)), "a little everywhere");
    }

    fn area(rights: &[u8; 4]) -> Area {
        Area {
            start: 0,
            end: 0x1000,
            offset: 0,
            file: crate::process_map::FileId::default(),
            readable: rights[0] == b'r',
            writable: rights[1] == b'w',
            executable: rights[2] == b'x',
            shared: rights[3] == b's',
        }
    }

    #[test]
    fn kinds_of_memory_are_told_apart() {
        for (rights, page_bytes, name, expected) in [
            (b"rw-s", 4096, "/SYSV00000000 (deleted)", Some(Obstacle::SystemV)),
            (b"rw-s", 0, "/dev/shm/ring", Some(Obstacle::Posix)),
            (b"rw-s", 0, "/memfd:pool (deleted)", Some(Obstacle::Memfd)),
            (b"rw-s", 0, "/dev/zero (deleted)", Some(Obstacle::SharedAnonymous)),
            (b"rw-s", 0, "/data/file", Some(Obstacle::File)),
            (b"rw-s", 2 << 20, "/SYSV00000000 (deleted)", Some(Obstacle::HugePages)),
            (b"rw-p", 2 << 20, "/anon_hugepage (deleted)", Some(Obstacle::HugePages)),
            (b"rwxp", 4096, "", Some(Obstacle::Executable)),
            (b"r--p", 4096, "/data/file", Some(Obstacle::Unwritable)),
            (b"rw-p", 4096, "", None),
            (b"rw-p", 4096, "/memfd:pool (deleted)", None),
        ] {
            assert_eq!(Obstacle::of(&area(rights), page_bytes, name.as_bytes()), expected, "{name}");
        }
    }

    #[test]
    fn every_line_is_one_line_and_fits() {
        let region = RegionSpan { owner: 1, start: u64::MAX, length: u64::MAX, is_on_demand: false };
        for obstacle in
            [Obstacle::SystemV, Obstacle::SwitchedOff, Obstacle::MappingLimit, Obstacle::NoSegment, Obstacle::NotMoved]
        {
            let line = Line::of(region, obstacle);
            let text = std::str::from_utf8(line.text()).unwrap();
            assert!(text.ends_with("no hint.\n") && text.lines().count() == 1, "{text}");
            assert!(text.contains(obstacle.reason()) && text.contains(obstacle.remedy()), "{text}");
        }
    }

    #[test]
    fn a_full_pipe_and_one_without_a_reader_are_left_alone() {
        let (mut read, write) = std::io::pipe().unwrap();
        write_at_once(write.as_raw_fd(), libc::S_IFIFO, b"a line\n");
        // SAFETY: a number of this test's own descriptor.
        let bytes = unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
        assert_eq!(bytes, 4096);
        let full = vec![7; 4096 - 7];
        std::io::Write::write_all(&mut &write, &full).unwrap();
        write_at_once(write.as_raw_fd(), libc::S_IFIFO, b"it would wait\n");
        let mut found = vec![0; 4096];
        read.read_exact(&mut found).unwrap();
        assert!(found.starts_with(b"a line\n") && found.ends_with(&full));
        drop(read);
        write_at_once(write.as_raw_fd(), libc::S_IFIFO, b"to nobody\n");
    }
}
