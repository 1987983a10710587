//! Programs and files that the command needs: where they are.

use crate::failure::{Failure, Result};
use std::path::{Path, PathBuf};

/// The drop-in library, as programs know it.
pub const LIBRARY: &str = "libibverbs.so.1";

/// A program in PATH, or else in one of the directories.
pub fn find(program: &str, directories: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .chain(directories.iter().map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| is_executable(candidate))
}

pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// This program's own file.
pub fn own_path() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Failure::new(format!("can't find out where this program lies: {error}")))
}

/// The router's program: `$FREEFLOW_ROUTER`, beside this program, or in PATH.
pub fn router() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("FREEFLOW_ROUTER").map(PathBuf::from) {
        if is_executable(&path) {
            return Ok(path);
        }
        crate::fail!("$FREEFLOW_ROUTER names {}, which is not a program", path.display());
    }
    let beside = own_path()?.with_file_name("freeflow-router");
    if is_executable(&beside) {
        return Ok(beside);
    }
    find("freeflow-router", &[]).ok_or_else(|| {
        Failure::new(format!(
            "the router's program is missing: neither {} nor freeflow-router in PATH; build it with make, or set \
             FREEFLOW_ROUTER",
            beside.display()
        ))
    })
}

/// The drop-in library: `$FREEFLOW_LIBDIR`, or `../lib/freeflow` or `../lib` seen from this program.
pub fn library() -> Result<PathBuf> {
    if let Some(directory) = std::env::var_os("FREEFLOW_LIBDIR").map(PathBuf::from) {
        let path = directory.join(LIBRARY);
        if path.is_absolute() && path.is_file() {
            return Ok(path);
        }
        crate::fail!("$FREEFLOW_LIBDIR names {}, where there is no {LIBRARY}", directory.display());
    }
    let bin = own_path()?;
    let prefix = bin.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    // Installed in /usr, the plain folder may hold the distribution's own.
    [prefix.join("lib/freeflow"), prefix.join("lib")]
        .into_iter()
        .map(|directory| directory.join(LIBRARY))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            Failure::new(format!(
                "the verbs library for containers is missing: {}; build it with make, or set FREEFLOW_LIBDIR",
                prefix.join("lib").join(LIBRARY).display()
            ))
        })
}
