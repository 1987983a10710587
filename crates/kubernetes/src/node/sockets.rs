//! Sockets at which the kubelet finds its plugins: made, and made once more where somebody has removed them.
use crate::log;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// Only root talks to plugins.
const SOCKET_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o750;

/// The identity of a file that has a name now.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|status| (status.dev(), status.ino()))
}

/// A listening socket and its name.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl Socket {
    /// In place of one that a former process has left.
    ///
    /// # Errors
    /// Its directory can't be made or written.
    pub fn listen(path: &Path) -> io::Result<(Self, UnixListener)> {
        if let Some(directory) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))?;
        Ok((Self { path: path.into(), identity: identity(path) }, listener))
    }

    /// Whether its name leads to it yet.
    pub fn is_there(&self) -> bool {
        self.identity.is_some() && identity(&self.path) == self.identity
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.is_there()
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::line(&format!("{}: {error}", self.path.display()));
        }
    }
}

/// The kubelet's own socket: another one after its restart.
pub fn instance(path: &Path) -> Option<(u64, u64)> {
    identity(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_that_was_removed_is_noticed_and_another_one_is_left_alone() {
        let directory = std::env::temp_dir().join(format!("freeflow-kubelet-sockets-{}", std::process::id()));
        let path = directory.join("a.sock");
        let (first, _listener) = Socket::listen(&path).unwrap();
        assert!(first.is_there());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, SOCKET_MODE);
        fs::remove_file(&path).unwrap();
        assert!(!first.is_there());
        let (second, _listener) = Socket::listen(&path).unwrap();
        drop(first);
        assert!(second.is_there(), "the first one removes its own name only");
        drop(second);
        assert!(!path.exists());
        fs::remove_dir_all(&directory).unwrap();
    }
}
