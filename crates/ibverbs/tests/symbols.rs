//! The linked `libibverbs.so.1`: what it exports, that programs and providers of the distribution
//! load with it, and that what asks by name and version (NCCL) finds it. `scripts/link-ibverbs`
//! makes the file.
//!
//! FREEFLOW_LIB names the file. Without it these tests pass unrun, unless FREEFLOW_REQUIRE_LIB=1, as in `make test`.
use core::ffi::{CStr, c_char, c_int, c_void};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const LIST: &str = include_str!("../symbols.txt");
/// Functions of glibc that the libraries call, with the versions that they ask for.
const GLIBC: &str = include_str!("../../../scripts/glibc/symbols.txt");
/// The oldest glibc that the libraries load with.
const GLIBC_MOST: [u32; 3] = [2, 17, 0];

/// Symbols that NCCL needs at IBVERBS_1.1; without any one of them it turns InfiniBand off.
const NCCL_NEEDS: [&str; 22] = [
    "ibv_get_device_list",
    "ibv_free_device_list",
    "ibv_get_device_name",
    "ibv_open_device",
    "ibv_close_device",
    "ibv_get_async_event",
    "ibv_ack_async_event",
    "ibv_query_device",
    "ibv_query_port",
    "ibv_query_gid",
    "ibv_query_qp",
    "ibv_alloc_pd",
    "ibv_dealloc_pd",
    "ibv_reg_mr",
    "ibv_dereg_mr",
    "ibv_create_cq",
    "ibv_destroy_cq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_destroy_qp",
    "ibv_fork_init",
    "ibv_event_type_str",
];

/// Symbols that NCCL uses if they are there.
const NCCL_WANTS: [(&str, &str); 5] = [
    ("ibv_reg_mr_iova2", "IBVERBS_1.8"),
    ("ibv_reg_dmabuf_mr", "IBVERBS_1.12"),
    ("ibv_query_ece", "IBVERBS_1.10"),
    ("ibv_set_ece", "IBVERBS_1.10"),
    ("ibv_query_port_speed", "IBVERBS_1.16"),
];

const SYSTEM_LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

fn required() -> bool {
    std::env::var_os("FREEFLOW_REQUIRE_LIB").is_some_and(|value| value == "1")
}

/// The library under test.
fn library() -> Option<PathBuf> {
    match std::env::var_os("FREEFLOW_LIB") {
        Some(path) => Some(std::fs::canonicalize(path).expect("FREEFLOW_LIB names no file")),
        None if required() => panic!("FREEFLOW_LIB is not set: run scripts/link-ibverbs and name its libibverbs.so.1"),
        None => {
            eprintln!("not run: FREEFLOW_LIB is not set");
            None
        }
    }
}

/// A file of one of the distribution's packages.
fn installed(path: &str, package: &str) -> Option<PathBuf> {
    let path = PathBuf::from(path);
    if path.exists() {
        return Some(path);
    }
    assert!(!required(), "{} is missing: apt-get install {package}", path.display());
    eprintln!("not run: {} is missing ({package})", path.display());
    None
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// `program` with the library under test before the system's.
fn with_library(library: &Path, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library.parent().unwrap()).env_remove("LD_PRELOAD");
    command
}

/// Whether every symbol that `file` wants is found, in the nodes it wants them in.
fn assert_loads(library: &Path, file: &Path) {
    let output = with_library(library, Path::new("ldd")).arg("-r").arg(file).output().unwrap();
    let text = text(&output);
    for bad in ["undefined symbol", "not found", "no version information", "symbol lookup error"] {
        assert!(!text.contains(bad), "ldd -r {}:\n{text}", file.display());
    }
    let ours = library.parent().unwrap().to_str().unwrap();
    let taken = text.lines().find(|line| line.trim_start().starts_with("libibverbs.so.1 "));
    assert!(taken.is_some_and(|line| line.contains(ours)), "{} took another library:\n{text}", file.display());
}

struct Loaded(*mut c_void);

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

impl Loaded {
    fn open(library: &Path) -> Self {
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: a C string; the library's constructors may run at any time.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{} does not load", library.display());
        Self(handle)
    }

    fn find(&self, name: &str, version: &str) -> *mut c_void {
        let (name, version) = (CString::new(name).unwrap(), CString::new(version).unwrap());
        // SAFETY: an open handle and two C strings.
        unsafe { dlvsym(self.0, name.as_ptr(), version.as_ptr()) }
    }
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
    let expected: BTreeSet<&str> = LIST.lines().filter(|line| !line.starts_with('#')).collect();
    let missing: Vec<_> = expected.difference(&exported).collect();
    let extra: Vec<_> = exported.difference(&expected).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing {missing:#?}\nnot in the list {extra:#?}");
}

/// The numbers of a version like `GLIBC_2.17` or `GLIBC_2.2.5`; `None` for other names.
fn glibc_version(name: &str) -> Option<[u32; 3]> {
    let mut numbers = name.strip_prefix("GLIBC_")?.split('.').map(|number| number.parse().unwrap_or(u32::MAX));
    Some([numbers.next()?, numbers.next()?, numbers.next().unwrap_or(0)])
}

#[test]
fn no_library_wants_a_newer_glibc_than_2_17() {
    let Some(library) = library() else { return };
    let directory = library.parent().unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1", "rsocket/librspreload.so"] {
        let file = directory.join(name);
        let output = Command::new("readelf").args(["--version-info", "--wide"]).arg(&file).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let stdout = String::from_utf8(output.stdout).unwrap();
        let wanted: BTreeSet<&str> = stdout.split_whitespace().filter(|word| word.starts_with("GLIBC_")).collect();
        assert!(wanted.contains("GLIBC_2.2.5"), "{name}: {wanted:?}");
        // A name without numbers (GLIBC_PRIVATE, GLIBC_ABI_DT_RELR) is none of 2.17 either.
        let newer: Vec<_> = wanted.iter().filter(|name| glibc_version(name).is_none_or(|it| it > GLIBC_MOST)).collect();
        assert!(newer.is_empty(), "{name} wants {newer:?}");
    }
}

/// The list that the libraries are linked against, by this machine's glibc, which keeps all older versions.
#[test]
fn the_list_of_glibc_has_the_versions_of_2_17() {
    let files = ["libc.so.6", "ld-linux-x86-64.so.2"].map(|name| format!("{SYSTEM_LIBRARIES}/{name}"));
    if !files.iter().all(|file| Path::new(file).exists()) {
        assert!(!required(), "{files:?} are missing");
        return;
    }
    let output = Command::new("readelf").args(["--dyn-syms", "--wide"]).args(&files).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let mut newest = BTreeMap::new();
    for words in stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()) {
        let Some((name, version)) = words.get(7).and_then(|word| word.split_once('@')) else { continue };
        let Some(version) = glibc_version(version.trim_start_matches('@')) else { continue };
        if words[6] != "UND" && version <= GLIBC_MOST {
            let known = newest.entry(name).or_insert(version);
            *known = version.max(*known);
        }
    }
    let mut version = None;
    let mut count = 0;
    for line in GLIBC.lines().filter(|line| !line.starts_with('#')) {
        if !line.starts_with('\t') {
            version = glibc_version(line.split_whitespace().nth(1).unwrap());
            continue;
        }
        for name in line.split_whitespace() {
            assert_eq!(newest.get(name).copied(), version, "{name}");
            count += 1;
        }
    }
    assert!(count > 100, "{count} names");
}

/// The list itself, as facts of rdma-core: sizes of its nodes.
#[test]
fn the_list_has_the_nodes_of_rdma_core() {
    let count = |end: &str| LIST.lines().filter(|line| line.ends_with(end)).count();
    assert_eq!((count("@@IBVERBS_1.0"), count("@IBVERBS_1.0") - count("@@IBVERBS_1.0")), (9, 33));
    assert_eq!((count("@@IBVERBS_1.1"), count("ibv_register_driver@IBVERBS_1.1")), (47, 1));
    for (minor, names) in [(5, 1), (6, 1), (7, 1), (8, 1), (9, 1), (10, 7), (11, 2), (12, 1), (13, 3), (14, 1)] {
        assert_eq!(count(&format!("@@IBVERBS_1.{minor}")), names, "1.{minor}");
    }
    for (minor, names) in [(15, 3), (16, 2), (17, 3), (18, 11)] {
        assert_eq!(count(&format!("@@IBVERBS_1.{minor}")), names, "1.{minor}");
    }
    for (number, names) in [(17, 54), (18, 61), (19, 64), (20, 66), (21, 66), (22, 67), (25, 71), (33, 70)] {
        assert_eq!(count(&format!("@IBVERBS_PRIVATE_{number}")), names, "PRIVATE_{number}");
    }
    for (number, names) in [(34, 74), (57, 73), (59, 78), (64, 82), (65, 92)] {
        assert_eq!(count(&format!("@IBVERBS_PRIVATE_{number}")), names, "PRIVATE_{number}");
    }
}

#[test]
fn the_documents_name_every_public_function() {
    let document = include_str!("../../../docs/VERBS.md");
    let public = LIST.lines().filter(|line| !line.starts_with('#') && !line.contains("@IBVERBS_PRIVATE_"));
    let missing: Vec<_> = public
        .filter_map(|line| line.split('@').next())
        .filter(|name| !document.contains(&format!("`{name}`")))
        .collect();
    assert!(missing.is_empty(), "docs/VERBS.md lacks {missing:?}");
}

#[test]
fn nccl_finds_its_names_by_version() {
    let Some(library) = library() else { return };
    let loaded = Loaded::open(&library);
    for name in NCCL_NEEDS {
        assert!(!loaded.find(name, "IBVERBS_1.1").is_null(), "{name}@IBVERBS_1.1");
    }
    for (name, version) in NCCL_WANTS {
        assert!(!loaded.find(name, version).is_null(), "{name}@{version}");
    }
    assert!(loaded.find("ibv_reg_mr", "IBVERBS_1.2").is_null(), "there is no node 1.2");
}

#[test]
fn the_names_of_2006_refuse_and_the_real_ones_are_others() {
    let Some(library) = library() else { return };
    let loaded = Loaded::open(&library);
    let (old, new) = (loaded.find("ibv_open_device", "IBVERBS_1.0"), loaded.find("ibv_open_device", "IBVERBS_1.1"));
    assert!(!old.is_null() && !new.is_null() && old != new);
    // SAFETY: the 1.0 name ignores its argument, and has this signature.
    let context = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void) -> *mut c_void>(old) };
    assert!(context(core::ptr::null_mut()).is_null());
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
    let mut count: c_int = 7;
    let list = loaded.find("ibv_get_device_list", "IBVERBS_1.0");
    // SAFETY: the 1.0 name writes a count and has this signature.
    let list = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(*mut c_int) -> *mut c_void>(list) };
    assert!(list(&raw mut count).is_null());
    assert_eq!(count, 0);
}

#[test]
fn private_names_refuse_in_every_node() {
    let Some(library) = library() else { return };
    let loaded = Loaded::open(&library);
    for number in [17, 18, 19, 20, 21, 22, 25, 33, 34, 57, 59, 64, 65] {
        let node = format!("IBVERBS_PRIVATE_{number}");
        let register = loaded.find(&format!("verbs_register_driver_{number}"), &node);
        // SAFETY: the registration ignores its argument.
        let register = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(*const c_void)>(register) };
        register(core::ptr::null());
        let command = loaded.find("ibv_cmd_alloc_pd", &node);
        // SAFETY: the stub ignores its arguments.
        let command = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void) -> c_int>(command) };
        assert_eq!(command(core::ptr::null_mut()), libc::EOPNOTSUPP);
        if number < 20 {
            continue; // the names below are younger
        }
        let flag = loaded.find("verbs_allow_disassociate_destroy", &node).cast::<u8>();
        // SAFETY: the flag is one byte of the library's data.
        assert_eq!(unsafe { flag.read() }, 0);
        if number < 34 {
            continue;
        }
        let opcode = loaded.find("ibv_wr_opcode_str", &node);
        // SAFETY: the function has this signature and returns a static string.
        let opcode = unsafe {
            let name = core::mem::transmute::<*mut c_void, extern "C" fn(u32) -> *const c_char>(opcode);
            CStr::from_ptr(name(2))
        };
        assert_eq!(opcode, c"send");
    }
}

#[test]
fn providers_load() {
    let Some(library) = library() else { return };
    for name in ["libmlx5.so.1", "libmlx4.so.1", "libefa.so.1", "libmana.so.1"] {
        if let Some(path) = installed(&format!("{SYSTEM_LIBRARIES}/{name}"), "ibverbs-providers") {
            assert_loads(&library, &path);
        }
    }
    let Some(drivers) = installed(&format!("{SYSTEM_LIBRARIES}/libibverbs"), "ibverbs-providers") else { return };
    let mut count = 0;
    for entry in std::fs::read_dir(drivers).unwrap() {
        assert_loads(&library, &entry.unwrap().path());
        count += 1;
    }
    assert!(count >= 10, "only {count} providers installed");
}

#[test]
fn the_real_librdmacm_loads() {
    let Some(library) = library() else { return };
    if let Some(path) = installed(&format!("{SYSTEM_LIBRARIES}/librdmacm.so.1"), "librdmacm1") {
        assert_loads(&library, &path);
    }
}

#[test]
fn perftest_loads_and_starts() {
    let Some(library) = library() else { return };
    for verb in ["send", "write", "read", "atomic"] {
        for measure in ["bw", "lat"] {
            let Some(path) = installed(&format!("/usr/bin/ib_{verb}_{measure}"), "perftest") else { continue };
            assert_loads(&library, &path);
            let output = with_library(&library, &path).env("LD_BIND_NOW", "1").arg("--version").output().unwrap();
            // It prints its version, and then exits with a failure on purpose.
            assert!(text(&output).contains("Version: "), "{}", text(&output));
        }
    }
}

#[test]
fn the_tools_load() {
    let Some(library) = library() else { return };
    for tool in ["ibv_devices", "ibv_devinfo", "ibv_asyncwatch", "ibv_rc_pingpong", "ibv_ud_pingpong"] {
        if let Some(path) = installed(&format!("/usr/bin/{tool}"), "ibverbs-utils") {
            assert_loads(&library, &path);
        }
    }
}

/// A program that is built now gets the default versions.
#[test]
fn a_program_links_against_it() {
    let Some(library) = library() else { return };
    if installed("/usr/include/infiniband/verbs.h", "libibverbs-dev").is_none() {
        return;
    }
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (code, program) = (directory.join("links.c"), directory.join("links"));
    let source = "#include <infiniband/verbs.h>\n#include <stdio.h>\nint main(void) {\n\
                  printf(\"%s %d %d\\n\", ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR), ibv_rate_to_mbps(IBV_RATE_100_GBPS),\n\
                  ibv_resolve_eth_l2_from_gid(NULL, NULL, NULL, NULL));\nreturn 0; }\n";
    std::fs::write(&code, source).unwrap();
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&code).arg(&library).output().unwrap();
    assert!(compiled.status.success(), "{}", text(&compiled));
    let output = with_library(&library, &program).output().unwrap();
    assert_eq!(text(&output), "Work Request Flushed Error 103125 -95\n");
}
