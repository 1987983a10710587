//! Valgrind's *client requests*, by which a program that runs under callgrind says what is to be
//! collected. Anywhere else they do nothing: a request is a few rotations of a register, which
//! together change nothing.
//!
//! Invariant: collection is off but inside [`collected`]; the program is started with `--collect-atstart=no`.
use std::ffi::CStr;
use std::fs;
use std::path::Path;

const RUNNING_ON_VALGRIND: u64 = 0x1001;
/// Callgrind's own begin with its two letters.
const CALLGRIND: u64 = (b'C' as u64) << 24 | (b'T' as u64) << 16;
const ZERO_STATS: u64 = CALLGRIND + 1;
const TOGGLE_COLLECT: u64 = CALLGRIND + 2;
const DUMP_STATS_AT: u64 = CALLGRIND + 3;

/// Zero when there is no valgrind.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn request(code: u64, argument: u64) -> u64 {
    let block = [code, argument, 0, 0, 0, 0];
    let mut result = 0u64;
    // SAFETY: the rotations make 128, so rdi has its value again, and rbx changes places with
    // itself: without valgrind nothing happens. With it, valgrind reads the block at rax, which is
    // alive, and writes rdx.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") &raw const block, inout("rdx") result,
        );
    }
    result
}

/// Known for one processor only.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn request(_code: u64, _argument: u64) -> u64 {
    0
}

pub fn is_there() -> bool {
    request(RUNNING_ON_VALGRIND, 0) > 0
}

/// Runs it; with `COUNTED`, callgrind collects meanwhile.
#[inline(always)]
pub fn collected<const COUNTED: bool, T>(work: impl FnOnce() -> T) -> T {
    if COUNTED {
        request(TOGGLE_COLLECT, 0);
    }
    let result = work();
    if COUNTED {
        request(TOGGLE_COLLECT, 0);
    }
    result
}

/// Instructions that were collected while `work` ran. `dumps` is the file that callgrind was given
/// to write; it adds a number.
pub fn instructions(dumps: &Path, work: impl FnOnce() -> Result<(), String>) -> Result<u64, String> {
    let before = dump_count(dumps);
    request(ZERO_STATS, 0);
    work()?;
    let name: &CStr = c"counted";
    request(DUMP_STATS_AT, name.as_ptr() as u64);
    if dump_count(dumps) != before + 1 {
        return Err("callgrind wrote nothing".to_owned());
    }
    let path = dump_path(dumps, before + 1);
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    total(&text).ok_or_else(|| format!("{}: no totals", path.display()))
}

fn dump_path(dumps: &Path, number: usize) -> std::path::PathBuf {
    let mut path = dumps.as_os_str().to_owned();
    path.push(format!(".{number}"));
    path.into()
}

fn dump_count(dumps: &Path) -> usize {
    (1..).take_while(|&number| dump_path(dumps, number).exists()).count()
}

/// Of one file of callgrind.
fn total(text: &str) -> Option<u64> {
    let of = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse().ok());
    of("totals:").or_else(|| of("summary:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_valgrind_nothing_happens() {
        assert_eq!(collected::<true, _>(|| 7), 7);
        if !is_there() {
            let why = instructions(Path::new("/nonexistent/dump"), || Ok(())).expect_err("no valgrind");
            assert!(why.contains("callgrind"));
        }
    }

    #[test]
    fn totals_are_found() {
        assert_eq!(total("version: 1\nevents: Ir\n\nfn=(1) f\n1 2\n\ntotals: 1234\n"), Some(1234));
        assert_eq!(total("summary: 55\n"), Some(55));
        assert_eq!(total(""), None);
    }
}
