//! Programs and files that the command needs: where they are.

use crate::failure::{Failure, Result, fail};
use freeflow_hostnet::programs::{find_in, is_executable};
use std::path::{Path, PathBuf};

/// The drop-in libraries, as programs know them. They come from one build, and lie in one folder.
pub const LIBRARIES: [&str; 2] = [LIBRARY, "librdmacm.so.1"];
/// The one without which nothing works.
pub const LIBRARY: &str = "libibverbs.so.1";

/// This program's own file.
pub fn own_path() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Failure::new(format!("can't find out where this program lies: {error}")))
}

/// The directory above the one that this program lies in: `/usr` where a package has put it.
fn prefix() -> Result<PathBuf> {
    Ok(own_path()?.parent().and_then(Path::parent).unwrap_or(Path::new("/")).to_owned())
}

/// The router's program: `$FREEFLOW_ROUTER`, beside this program, in `../lib/freeflow` seen from it, or in PATH.
pub fn router() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("FREEFLOW_ROUTER").map(PathBuf::from) {
        if is_executable(&path) {
            return Ok(path);
        }
        fail!("$FREEFLOW_ROUTER names {}, which is not a program", path.display());
    }
    let beside = own_path()?.with_file_name("freeflow-router");
    let installed = prefix()?.join("lib/freeflow/freeflow-router");
    if let Some(path) = [&beside, &installed].into_iter().find(|path| is_executable(path)) {
        return Ok(path.clone());
    }
    find_in("freeflow-router", &[]).ok_or_else(|| {
        Failure::new(format!(
            "the router's program is missing: neither {} nor {}, nor freeflow-router in PATH; build it with make, or \
             set FREEFLOW_ROUTER",
            beside.display(),
            installed.display()
        ))
    })
}

/// The first drop-in library that is not in a folder.
fn missing_in(directory: &Path) -> Option<&'static str> {
    LIBRARIES.into_iter().find(|library| !directory.join(library).is_file())
}

/// The drop-in libibverbs: in `$FREEFLOW_LIBDIR`, or `../lib/freeflow` or `../lib` seen from this
/// program. The others are beside it.
pub fn library() -> Result<PathBuf> {
    if let Some(directory) = std::env::var_os("FREEFLOW_LIBDIR").map(PathBuf::from) {
        match missing_in(&directory) {
            None if directory.is_absolute() => return Ok(directory.join(LIBRARY)),
            missing => fail!(
                "$FREEFLOW_LIBDIR names {}, where there is no {}",
                directory.display(),
                missing.unwrap_or(LIBRARY)
            ),
        }
    }
    let prefix = prefix()?;
    // Installed in /usr, the plain folder may hold the distribution's own.
    [prefix.join("lib/freeflow"), prefix.join("lib")]
        .into_iter()
        .find(|directory| missing_in(directory).is_none())
        .map(|directory| directory.join(LIBRARY))
        .ok_or_else(|| {
            let directory = prefix.join("lib");
            let missing = directory.join(missing_in(&directory).unwrap_or(LIBRARY));
            Failure::new(format!(
                "the verbs library for containers is missing: {}; build it with make, or set FREEFLOW_LIBDIR",
                missing.display()
            ))
        })
}
