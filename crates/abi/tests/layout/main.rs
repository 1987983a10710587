//! Compares every layout and number with the installed headers (libibverbs-dev, librdmacm-dev), by
//! a C program that prints its own.
//!
//! Headers older than this crate lack its newest fields. Such a field is left out, and its struct
//! may be larger here than there; nothing else may differ. The structs that grow are named in
//! [`GROWN`]. FREEFLOW_VERBS_INCLUDE names another directory to look for `infiniband/verbs.h` in.
mod constants;
mod structs;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct Field {
    pub c_name: &'static str,
    pub offset: usize,
    pub bytes: usize,
}

pub struct Layout {
    pub c_type: &'static str,
    pub bytes: usize,
    pub fields: Vec<Field>,
}

/// Structs that have grown within the releases that programs are built with, and the field by which
/// the newest is known.
const GROWN: [(&str, &str); 4] = [
    ("struct verbs_context", "alloc_buf"),
    ("struct ibv_qp_ex", "wr_flush"),
    ("struct ibv_port_attr", "active_speed_ex"),
    ("struct ibv_mr_init_attr", "buf"),
];

const HEADERS: [&str; 7] = [
    "infiniband/verbs.h",
    "infiniband/ib.h",
    "rdma/rdma_cma.h",
    "infiniband/sa.h",
    "rdma/ib_user_verbs.h",
    "rdma/ib_user_ioctl_verbs.h",
    "infiniband/sa-kern-abi.h",
];

struct Headers {
    include: Option<PathBuf>,
    text: String,
}

impl Headers {
    fn find() -> Self {
        let include = std::env::var_os("FREEFLOW_VERBS_INCLUDE").map(PathBuf::from);
        let mut text = String::new();
        for header in HEADERS {
            let places = include.as_deref().into_iter().chain([Path::new("/usr/include")]);
            let found = places.map(|place| place.join(header)).find(|path| path.exists());
            let path =
                found.unwrap_or_else(|| panic!("{header} is missing: apt-get install libibverbs-dev librdmacm-dev"));
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
        Self { include, text }
    }

    /// Whether the word stands anywhere in the headers.
    fn know(&self, word: &str) -> bool {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        self.text.split(|c| !is_word(c)).any(|found| found == word)
    }

    /// Whether a path of fields (`a.b`) does.
    fn know_field(&self, c_type: &str, path: &str) -> bool {
        let grown = GROWN.iter().any(|(name, _)| *name == c_type);
        !grown || path.split('.').all(|word| self.know(word))
    }

    fn know_type(&self, c_type: &str) -> bool {
        self.text.contains(&format!("{c_type} {{"))
    }
}

/// A C program that prints `name value` lines.
fn probe(headers: &Headers, layouts: &[Layout], constants: &[(&str, i64)]) -> String {
    let mut source = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in HEADERS {
        writeln!(source, "#include <{header}>").unwrap();
    }
    source.push_str("int main(void) {\n");
    for layout in layouts.iter().filter(|layout| headers.know_type(layout.c_type)) {
        let c_type = layout.c_type;
        writeln!(source, "printf(\"{c_type}: %zu\\n\", sizeof({c_type}));").unwrap();
        for name in layout.fields.iter().map(|field| field.c_name).filter(|name| headers.know_field(c_type, name)) {
            writeln!(source, "printf(\"{c_type} {name}: %zu\\n\", offsetof({c_type}, {name}));").unwrap();
            writeln!(source, "printf(\"{c_type} {name} bytes: %zu\\n\", sizeof((({c_type} *)0)->{name}));").unwrap();
        }
    }
    for (name, _) in constants.iter().filter(|(name, _)| headers.know(name)) {
        writeln!(source, "printf(\"{name}: %lld\\n\", (long long){name});").unwrap();
    }
    source.push_str("return 0;\n}\n");
    source
}

/// Compiles and runs the probe: what C says.
fn ask_c(headers: &Headers, source: &str) -> BTreeMap<String, i64> {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("layout-probe");
    std::fs::create_dir_all(&directory).unwrap();
    let (code, program) = (directory.join("probe.c"), directory.join("probe"));
    std::fs::write(&code, source).unwrap();
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compiler.arg("-w").arg("-o").arg(&program).arg(&code);
    if let Some(include) = &headers.include {
        compiler.arg("-I").arg(include);
    }
    assert!(compiler.status().unwrap().success(), "{} does not compile", code.display());
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| {
            let (name, value) = line.rsplit_once(": ").unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// Lines that say where `layout` differs from what C says.
fn differences(headers: &Headers, c: &BTreeMap<String, i64>, layout: &Layout) -> Vec<String> {
    let c_type = layout.c_type;
    let mut found = Vec::new();
    let mut expect = |what: String, ours: i64| match c.get(&what) {
        Some(theirs) if *theirs != ours => found.push(format!("{what}: {ours} here, {theirs} in the header")),
        _ => {}
    };
    let newest = GROWN.iter().find(|(name, _)| *name == c_type).is_none_or(|(_, field)| headers.know(field));
    if newest {
        expect(c_type.to_owned(), layout.bytes as i64);
    }
    // verbs_context grows at its front: places count from the context at its end.
    let shift = if c_type == "struct verbs_context" {
        c.get(c_type).map_or(0, |theirs| layout.bytes as i64 - theirs)
    } else {
        0
    };
    for field in &layout.fields {
        expect(format!("{c_type} {}", field.c_name), field.offset as i64 - shift);
        expect(format!("{c_type} {} bytes", field.c_name), field.bytes as i64);
    }
    found
}

#[test]
fn layouts_and_numbers_are_those_of_the_headers() {
    let headers = Headers::find();
    let (layouts, constants) = (structs::all(), constants::all());
    let c = ask_c(&headers, &probe(&headers, &layouts, &constants));
    let mut found: Vec<String> = layouts.iter().flat_map(|layout| differences(&headers, &c, layout)).collect();
    for (name, ours) in &constants {
        if let Some(theirs) = c.get(*name).filter(|theirs| *theirs != ours) {
            found.push(format!("{name}: {ours} here, {theirs} in the header"));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(c.len() > 900, "only {} facts compared", c.len());
}
