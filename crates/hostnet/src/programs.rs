//! Programs of the host that do what netlink alone can't: `tc`, `iptables`, `nft`.

use crate::error::{Context, Error, Result, fail};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where programs are looked for besides PATH: a hook's PATH is short.
const DIRECTORIES: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// A program in PATH, or else in one of the directories.
pub fn find_in(program: &str, directories: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .chain(directories.iter().map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| is_executable(candidate))
}

/// A program of the network's tools, if it is installed.
pub fn find(program: &str) -> Option<PathBuf> {
    find_in(program, &DIRECTORIES)
}

pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn command(name: &str) -> Result<Command> {
    let program = find(name).ok_or_else(|| {
        let package = match name.trim_end_matches("-restore") {
            "iptables" | "ip6tables" => "iptables",
            "nft" => "nftables",
            _ => "iproute2",
        };
        Error::new(format!("the program {name} is missing; install it, for example: apt-get install {package}"))
    })?;
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stderr(Stdio::piped()).stdout(Stdio::piped());
    Ok(command)
}

/// Runs a program; its output.
pub(crate) fn run(name: &str, arguments: &[&str]) -> Result<String> {
    let output = command(name)?.args(arguments).output().context(format!("can't run {name}"))?;
    if !output.status.success() {
        fail!("{name} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program that reads what to do from its standard input.
pub(crate) fn run_with_input(name: &str, arguments: &[&str], lines: &str) -> Result<()> {
    let what = format!("can't run {name}");
    let mut child = command(name)?.args(arguments).stdin(Stdio::piped()).spawn().context(&what)?;
    let mut input = child.stdin.take().expect("stdin is a pipe");
    let written = input.write_all(format!("{lines}\n").as_bytes());
    drop(input);
    let output = child.wait_with_output().context(&what)?;
    if !output.status.success() {
        fail!("{name} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    written.context(what)
}

/// The word after a keyword in a line that a program has printed.
pub(crate) fn word_after(line: &str, keyword: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    words.find(|&word| word == keyword)?;
    words.next().map(str::to_string)
}
