//! FreeFlow's programs and libraries, copied from a pod's image onto its node.
//!
//! Container engines run the hook on the node, and containers get the libraries from there. Each file is replaced as a
//! whole: a program that runs and a library that is mounted stay as they are until their users end.
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Directories of the image that the node gets: programs, and what they and containers need.
const PARTS: [&str; 2] = ["bin", "lib/freeflow"];
/// Programs are called so; the image may have others.
const PROGRAM_PREFIX: &str = "freeflow";
const FILE_COUNT_MAX: usize = 1000;

fn failed(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Files of a directory and those below it, with their paths from `from`. No links are followed.
fn files(from: &Path, part: &Path, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let directory = from.join(part);
    for entry in fs::read_dir(&directory).map_err(|error| failed(&directory, &error))? {
        let entry = entry.map_err(|error| failed(&directory, &error))?;
        let path = part.join(entry.file_name());
        let kind = entry.file_type().map_err(|error| failed(&entry.path(), &error))?;
        let is_ours = part != Path::new("bin") || entry.file_name().to_string_lossy().starts_with(PROGRAM_PREFIX);
        if kind.is_dir() {
            files(from, &path, found)?;
        } else if kind.is_file() && is_ours {
            found.push(path);
        }
        if found.len() > FILE_COUNT_MAX {
            return Err(format!("{}: more than {FILE_COUNT_MAX} files", directory.display()));
        }
    }
    Ok(())
}

fn same(one: &Path, other: &Path) -> io::Result<bool> {
    let (Ok(mut one), Ok(mut other)) = (File::open(one), File::open(other)) else { return Ok(false) };
    let (first, second) = (one.metadata()?, other.metadata()?);
    if first.len() != second.len() || first.mode() != second.mode() {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        let count = one.read(&mut left)?;
        if count == 0 {
            return Ok(true);
        }
        other.read_exact(&mut right[..count])?;
        if left[..count] != right[..count] {
            return Ok(false);
        }
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let directory = to.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let name = to.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let temporary = directory.join(format!(".{name}.new"));
    // One that was left by a copy that did not end.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut source = File::open(from)?;
    let mode = source.metadata()?.permissions().mode() & 0o755;
    let mut target = File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let copied = io::copy(&mut source, &mut target)
        .and_then(|_| target.set_permissions(fs::Permissions::from_mode(mode)))
        .and_then(|()| target.flush())
        .and_then(|()| target.sync_all())
        .and_then(|()| fs::rename(&temporary, to));
    if copied.is_err() {
        // The failure counts, whether or not its remains can be removed.
        drop(fs::remove_file(&temporary));
    }
    copied
}

/// Copies `bin/freeflow*` and `lib/freeflow/` of one directory into another one; how many files were changed.
///
/// # Errors
/// A sentence for people. Files that were copied stay; the others are as they were.
pub fn install(from: &Path, to: &Path) -> Result<usize, String> {
    let mut all = Vec::new();
    for part in PARTS {
        files(from, Path::new(part), &mut all)?;
    }
    if all.is_empty() {
        return Err(format!("{}: there is nothing of FreeFlow", from.display()));
    }
    // Programs come last: they find their libraries of the same version.
    all.sort_by_key(|path| (path.starts_with("bin"), path.clone()));
    let mut count = 0;
    for path in all {
        let (source, target) = (from.join(&path), to.join(&path));
        let error = |error: io::Error| failed(&target, &error);
        if !same(&source, &target).map_err(error)? {
            copy(&source, &target).map_err(error)?;
            count += 1;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new() -> Self {
            let name = format!("ff-install-{}-{:?}", std::process::id(), std::thread::current().id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn put(path: &Path, text: &str, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn programs_and_libraries_are_replaced_as_a_whole() {
        let directory = Directory::new();
        let (from, to) = (directory.0.join("usr"), directory.0.join("opt/freeflow"));
        put(&from.join("bin/freeflow"), "one", 0o755);
        put(&from.join("bin/tc"), "another's", 0o755);
        put(&from.join("lib/freeflow/libibverbs.so.1"), "library", 0o644);
        put(&from.join("lib/freeflow/rsocket/librspreload.so"), "preload", 0o644);
        std::os::unix::fs::symlink("/etc/passwd", from.join("lib/freeflow/link")).unwrap();
        assert_eq!(install(&from, &to), Ok(3));
        assert_eq!(install(&from, &to), Ok(0));
        assert!(!to.join("bin/tc").exists() && !to.join("lib/freeflow/link").exists());
        assert_eq!(fs::metadata(to.join("bin/freeflow")).unwrap().permissions().mode() & 0o777, 0o755);
        // Somebody has it open.
        let mut user = File::open(to.join("bin/freeflow")).unwrap();
        put(&from.join("bin/freeflow"), "two", 0o755);
        put(&to.join("bin/.freeflow.new"), "a copy that did not end", 0o600);
        assert_eq!(install(&from, &to), Ok(1));
        let mut text = String::new();
        user.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), fs::read_to_string(to.join("bin/freeflow")).unwrap().as_str()), ("one", "two"));
        assert!(!to.join("bin/.freeflow.new").exists());
        assert!(install(&directory.0.join("none"), &to).is_err());
    }
}
