//! The linked `librdmacm.so.1`: what it exports, that the distribution's programs load with it, and
//! that the documents name all of it. `scripts/link-rdmacm` makes the file.
//!
//! FREEFLOW_RDMACM names the file. Without it these tests pass unrun, unless FREEFLOW_REQUIRE_LIB=1, as in `make test`.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const LIST: &str = include_str!("../symbols.txt");
/// Of rdmacm-utils and perftest.
const PROGRAMS: [&str; 12] = [
    "rping",
    "ucmatose",
    "udaddy",
    "mckey",
    "rdma_server",
    "rdma_client",
    "rdma_xserver",
    "rdma_xclient",
    "cmtime",
    "ib_send_bw",
    "ib_write_lat",
    "ib_read_bw",
];

fn required() -> bool {
    std::env::var_os("FREEFLOW_REQUIRE_LIB").is_some_and(|value| value == "1")
}

fn library() -> Option<PathBuf> {
    match std::env::var_os("FREEFLOW_RDMACM") {
        Some(path) => Some(std::fs::canonicalize(path).expect("FREEFLOW_RDMACM names no file")),
        None if required() => panic!("FREEFLOW_RDMACM is not set: run scripts/link-rdmacm and name its librdmacm.so.1"),
        None => {
            eprintln!("not run: FREEFLOW_RDMACM is not set");
            None
        }
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn names() -> impl Iterator<Item = &'static str> {
    LIST.lines().filter(|line| !line.starts_with('#'))
}

#[test]
fn exports_exactly_the_list() {
    let Some(library) = library() else { return };
    let output = Command::new("readelf").args(["--dyn-syms", "--wide"]).arg(&library).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<&str> = stdout
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|columns| columns.len() >= 8 && matches!(columns[4], "GLOBAL" | "WEAK"))
        .filter(|columns| !matches!(columns[6], "UND" | "ABS"))
        .map(|columns| columns[7])
        .collect();
    let expected: BTreeSet<&str> = names().collect();
    assert_eq!(expected, exported);
}

/// Facts of rdma-core: how many names of connection management its nodes have.
#[test]
fn the_list_has_the_nodes_of_rdma_core() {
    for (minor, count) in [(0, 35), (1, 1), (2, 2), (3, 3), (4, 3)] {
        let node = format!("@@RDMACM_1.{minor}");
        let found = names().filter(|name| name.starts_with("rdma_") && name.ends_with(&node)).count();
        assert_eq!(found, count, "{node}");
    }
    let last: Vec<_> = names().filter(|name| name.ends_with("@@RDMACM_1.5")).collect();
    assert_eq!(last, ["repoll_create@@RDMACM_1.5", "repoll_ctl@@RDMACM_1.5", "repoll_wait@@RDMACM_1.5"]);
}

#[test]
fn the_documents_name_every_public_function() {
    let document = concat!(include_str!("../../../docs/RDMACM.md"), include_str!("../../../docs/RSOCKET.md"));
    let missing: Vec<_> = names()
        .filter_map(|line| line.split('@').next())
        .filter(|name| !document.contains(&format!("`{name}`")))
        .collect();
    assert!(missing.is_empty(), "docs/RDMACM.md and docs/RSOCKET.md lack {missing:?}");
}

/// Whether `file` finds every symbol that it wants of connection management, in the nodes it wants them in.
fn assert_loads(library: &Path, file: &Path) {
    let output = Command::new("ldd")
        .arg("-r")
        .arg(file)
        .env("LD_LIBRARY_PATH", library.parent().unwrap())
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap();
    let text = text(&output);
    for bad in ["undefined symbol: rdma_", "not found", "no version information", "symbol lookup error"] {
        assert!(!text.contains(bad), "ldd -r {}:\n{text}", file.display());
    }
    let ours = library.parent().unwrap().to_str().unwrap();
    for name in ["librdmacm.so.1 ", "libibverbs.so.1 "] {
        let taken = text.lines().find(|line| line.trim_start().starts_with(name));
        assert!(taken.is_none_or(|line| line.contains(ours)), "{} took another library:\n{text}", file.display());
    }
}

#[test]
fn programs_load() {
    let Some(library) = library() else { return };
    for name in PROGRAMS {
        let path = Path::new("/usr/bin").join(name);
        assert!(path.exists() || !required(), "{name} is missing: apt-get install rdmacm-utils perftest");
        if path.exists() {
            assert_loads(&library, &path);
        }
    }
}
