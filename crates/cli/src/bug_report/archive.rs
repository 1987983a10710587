//! A tar archive (POSIX ustar), readable by its owner alone. It is there whole, or not at all: until then it is a file
//! beside it with a name that begins with a dot.

use crate::failure::{Context as _, Failure, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const BLOCK_BYTES: usize = 512;
const NAME_BYTES_MAX: usize = 100;
const FILE_MODE: u32 = 0o600;

pub struct Archive {
    path: PathBuf,
    half: PathBuf,
    out: BufWriter<File>,
    modified_s: u64,
    is_whole: bool,
}

impl Archive {
    /// Makes a new file; one that is there, also as a link, is left alone.
    pub fn create(path: &Path, modified_s: u64) -> Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(is_there(path));
        }
        let mut name = OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{}.new", std::process::id()));
        let half = path.with_file_name(name);
        let file = File::options().write(true).create_new(true).mode(FILE_MODE).open(&half);
        let file = file.map_err(|error| Failure::new(format!("can't write {}: {error}", path.display())))?;
        Ok(Self { path: path.to_owned(), half, out: BufWriter::new(file), modified_s, is_whole: false })
    }

    pub fn add(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let what = self.path.display().to_string();
        let padding = content.len().next_multiple_of(BLOCK_BYTES) - content.len();
        let header = header(name, content.len() as u64, self.modified_s)?;
        let parts = [&header[..], content, &[0; BLOCK_BYTES][..padding]];
        parts.into_iter().try_for_each(|part| self.out.write_all(part)).context(format!("can't write {what}"))
    }

    /// Ends the archive, which stays.
    pub fn finish(mut self) -> Result<()> {
        let what = format!("can't write {}", self.path.display());
        self.out.write_all(&[0; 2 * BLOCK_BYTES]).context(&what)?;
        self.out.flush().context(&what)?;
        self.out.get_ref().sync_all().context(&what)?;
        match renameat_with(CWD, &self.half, CWD, &self.path, RenameFlags::NOREPLACE) {
            // A file system that knows no such flag; the name was free a moment ago.
            Err(Errno::INVAL) => fs::rename(&self.half, &self.path).context(&what)?,
            Err(Errno::EXIST) => return Err(is_there(&self.path)),
            renamed => renamed.context(&what)?,
        }
        self.is_whole = true;
        Ok(())
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        if !self.is_whole {
            let _ = fs::remove_file(&self.half);
        }
    }
}

fn is_there(path: &Path) -> Failure {
    Failure::new(format!("{} is there already; name another file: --output FILE", path.display()))
}

fn header(name: &str, bytes: u64, modified_s: u64) -> Result<[u8; BLOCK_BYTES]> {
    if name.len() > NAME_BYTES_MAX || bytes >> 33 != 0 {
        return Err(Failure::new(format!("{name} does not fit an archive")));
    }
    let mut header = [0; BLOCK_BYTES];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    put(0, name.as_bytes());
    put(100, format!("{FILE_MODE:07o}").as_bytes());
    put(108, b"0000000");
    put(116, b"0000000");
    put(124, format!("{bytes:011o}").as_bytes());
    put(136, format!("{modified_s:011o}").as_bytes());
    // The checksum counts its own place as blanks.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    put(265, b"root");
    put(297, b"root");
    let sum: u32 = header.iter().copied().map(u32::from).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_archive_is_the_owners_and_is_not_left_half() {
        let directory = std::env::temp_dir().join(format!("freeflow-archive-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let path = directory.join("report.tar");
        let mut archive = Archive::create(&path, 1).unwrap();
        assert!(!path.exists(), "half an archive has the name");
        archive.add("a/b.txt", b"content").unwrap();
        assert!(archive.add(&"x".repeat(101), b"").is_err());
        archive.finish().unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!((bytes.len(), &bytes[512..519]), (4 * BLOCK_BYTES, &b"content"[..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Archive::create(&path, 1).is_err(), "a file that is there is left alone");
        fs::remove_file(&path).unwrap();
        drop(Archive::create(&path, 1).unwrap());
        let late = Archive::create(&path, 1).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        assert!(late.finish().is_err(), "what came meanwhile is left alone, too");
        fs::remove_file(&path).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir(&directory).unwrap();
    }
}
