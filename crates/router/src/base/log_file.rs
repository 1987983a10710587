//! `router.log`, where standard error is that file: bounded, with files of former times beside it
//! (`router.log.1` is the latest).
//!
//! The file that is full is renamed and a new one takes its place as standard output and error, so
//! that a panic's message is there, too. Where that fails, the old one is written on. The router's
//! main thread does it, shortly before the file is full: the others need no right to make files for
//! the log. A disk that takes no line stops nobody: lines that it did not take are counted, and the
//! first one that it takes again is behind a line that says how many.
use freeflow_shm::Doorbell;
use rustix::fs::{Mode, OFlags, fstat, open};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The name of a file of former times.
pub(crate) fn numbered(path: &Path, number: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if number > 0 {
        name.push(format!(".{number}"));
    }
    name.into()
}

/// Of each file, and how many there are.
const FILE_BYTES_MAX: u64 = 8 << 20;
const FILE_COUNT: usize = 4;
/// Room left when the main thread is woken, for lines until it has done its work.
const RESERVE_BYTES: u64 = 256 << 10;

static LOG: Mutex<Option<LogFile>> = Mutex::new(None);
/// Wakes the thread that rotates.
static FULL: OnceLock<Doorbell> = OnceLock::new();

/// From now on standard error is bounded, if it is this file; whoever writes its last line rotates
/// it, until [`rotate_here`].
pub fn keep(path: &Path) {
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let (Ok(ours), Ok(named)) = (fstat(io::stderr()), rustix::fs::stat(path)) else { return };
    if identity(ours) == identity(named) {
        let bytes = u64::try_from(named.st_size).unwrap_or(0);
        *LOG.lock().unwrap_or_else(PoisonError::into_inner) = Some(LogFile::new(path, bytes, FILE_BYTES_MAX));
    }
}

/// From now on the calling thread rotates: it calls [`rotate_if_full`] when the doorbell has rung.
pub fn rotate_here() -> io::Result<&'static Doorbell> {
    if FULL.get().is_none() {
        let _ = FULL.set(Doorbell::new()?);
    }
    rotate_if_full();
    FULL.get().ok_or_else(|| io::ErrorKind::NotFound.into())
}

pub fn rotate_if_full() {
    let _ = FULL.get().is_some_and(Doorbell::drain);
    if let Some(log) = &mut *LOG.lock().unwrap_or_else(PoisonError::into_inner) {
        log.make_room(RESERVE_BYTES, replace_outputs);
    }
}

/// Writes a line to standard error.
pub fn write(line: &[u8]) {
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    match (&mut *log, FULL.get()) {
        (Some(log), Some(full)) => {
            log.write(line, &mut io::stderr());
            if !log.has_room(RESERVE_BYTES) {
                full.kick();
            }
        }
        (Some(log), None) => {
            log.make_room(line.len() as u64, replace_outputs);
            log.write(line, &mut io::stderr());
        }
        // Nothing to report to if stderr is gone.
        (None, _) => drop(io::stderr().write_all(line)),
    }
}

/// Has standard output and error go to a new file.
fn replace_outputs(path: &Path) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::from(0o600))?;
    rustix::stdio::dup2_stderr(&file)?;
    rustix::stdio::dup2_stdout(&file)?;
    Ok(())
}

struct LogFile {
    path: PathBuf,
    bytes: u64,
    bytes_max: u64,
    /// Lines that could not be written, since the last one that could.
    lost: u64,
    /// The last write left a part of a line.
    is_torn: bool,
}

impl LogFile {
    fn new(path: &Path, bytes: u64, bytes_max: u64) -> Self {
        Self { path: path.into(), bytes, bytes_max, lost: 0, is_torn: false }
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.bytes == 0 || self.bytes + bytes <= self.bytes_max
    }

    fn make_room(&mut self, bytes: u64, replace: impl Fn(&Path) -> io::Result<()>) {
        if !self.has_room(bytes) {
            // If it can't be, the old file goes on for as much again.
            let _ = self.rotate().and_then(|()| replace(&self.path));
            (self.bytes, self.is_torn) = (0, false);
        }
    }

    fn write(&mut self, line: &[u8], output: &mut impl Write) {
        let mut text = Vec::new();
        if self.is_torn {
            text.push(b'\n');
        }
        if self.lost > 0 {
            text.extend_from_slice(format!("warn  lines of this log were lost count={}\n", self.lost).as_bytes());
        }
        text.extend_from_slice(line);
        match output.write_all(&text) {
            Ok(()) => (self.bytes, self.lost, self.is_torn) = (self.bytes + text.len() as u64, 0, false),
            Err(_) => (self.lost, self.is_torn) = (self.lost + 1, true),
        }
    }

    fn rotate(&self) -> io::Result<()> {
        for number in (0..FILE_COUNT - 1).rev() {
            match std::fs::rename(numbered(&self.path, number), numbered(&self.path, number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, read_to_string};

    /// Takes lines while it is asked to.
    #[derive(Default)]
    struct Disk {
        text: Vec<u8>,
        is_full: bool,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.is_full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.text.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_loses_lines_and_says_how_many() {
        let (mut log, mut disk) = (LogFile::new(Path::new("/nonexistent"), 0, 1000), Disk::default());
        log.write(b"one\n", &mut disk);
        disk.is_full = true;
        (0..7).for_each(|_| log.write(b"lost\n", &mut disk));
        disk.is_full = false;
        log.write(b"two\n", &mut disk);
        log.write(b"three\n", &mut disk);
        let text = String::from_utf8(disk.text).unwrap();
        assert_eq!(text, "one\n\nwarn  lines of this log were lost count=7\ntwo\nthree\n");
    }

    #[test]
    fn files_are_bounded_and_no_line_is_lost_on_the_way() {
        let directory = std::env::temp_dir().join(format!("ff-log-file-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("router.log");
        let mut log = LogFile::new(&path, 0, 100);
        let current = std::cell::RefCell::new(File::create(&path).unwrap());
        for number in 0..20 {
            let line = format!("{number:039}\n");
            let replace = |path: &Path| {
                *current.borrow_mut() = File::create(path)?;
                Ok(())
            };
            // The file of now, whichever that is once the old one has gone.
            struct Now<'a>(&'a std::cell::RefCell<File>);
            impl Write for Now<'_> {
                fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                    self.0.borrow_mut().write(bytes)
                }
                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }
            log.make_room(line.len() as u64, replace);
            log.write(line.as_bytes(), &mut Now(&current));
        }
        let names = ["router.log.3", "router.log.2", "router.log.1", "router.log"];
        let all = names.map(|name| read_to_string(directory.join(name)).unwrap()).concat();
        let numbers: Vec<u32> = all.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers, (12..20).collect::<Vec<_>>());
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), FILE_COUNT);
        // A rename that fails: the lines go on into the old file.
        std::fs::remove_dir_all(&directory).unwrap();
        let mut disk = Disk::default();
        for _ in 0..20 {
            log.make_room(40, |_| Err(io::ErrorKind::NotFound.into()));
            log.write(&[b'x'; 40], &mut disk);
        }
        assert_eq!(disk.text.len(), 800);
    }
}
