//! The hosts file of a network: the names of its vNICs, as its containers read them at `/etc/hosts`.
//!
//! Containers have the file itself, so it is rewritten in place. Programs read it a page at a time, so no line lies on
//! two pages: who reads while it is written finds old lines or new ones, and no piece of one.

use freeflow_cluster::Named;
use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

const PAGE_BYTES: usize = 4096;
/// Of the host's own hosts file.
const BASE_BYTES_MAX: usize = 64 << 10;
/// Lines of vNICs.
const LINE_COUNT_MAX: usize = 8192;
/// As in DNS.
const NAME_BYTES_MAX: usize = 63;

/// Whether other programs can take it for a name: others' hosts say what they like. One label, without dots, so that no
/// container takes the place of a name of the DNS.
fn is_name(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let rest = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    first && rest && name.len() <= NAME_BYTES_MAX && name.parse::<IpAddr>().is_err()
}

/// The whole lines of a hosts file that there is room for.
fn lines_of(base: &str) -> Vec<&str> {
    let mut bytes = 0;
    let fits = |line: &&str| {
        bytes += line.len() + 1;
        bytes <= BASE_BYTES_MAX
    };
    let is_line = |line: &&str| line.len() < PAGE_BYTES && !line.bytes().any(|byte| byte == 0);
    base.lines().filter(is_line).take_while(fits).collect()
}

/// The file of a network, from the host's own and its vNICs: of so many, the oldest first. A name that the host's own
/// file has stays what it is there.
pub fn text(base: &str, network: &str, mut vnics: Vec<&Named>) -> Vec<u8> {
    let base = lines_of(base);
    let words = base.iter().flat_map(|line| line.split('#').next().unwrap_or_default().split_whitespace().skip(1));
    let taken: BTreeSet<String> = words.map(str::to_ascii_lowercase).chain(["localhost".into()]).collect();
    vnics.sort_by(|one, other| {
        (one.since_s, &one.names, &one.addresses).cmp(&(other.since_s, &other.names, &other.addresses))
    });
    let mut line_count = 0;
    vnics.retain(|vnic| {
        line_count += vnic.addresses.len();
        line_count <= LINE_COUNT_MAX
    });
    let lines = vnics.iter().flat_map(|vnic| {
        let is_good = |name: &&String| is_name(name) && !taken.contains(&name.to_ascii_lowercase());
        let names: Vec<&str> = vnic.names.iter().filter(is_good).map(String::as_str).collect();
        let addresses = if names.is_empty() { &[] } else { vnic.addresses.as_slice() };
        addresses.iter().map(|address| format!("{address} {}", names.join(" "))).collect::<Vec<_>>()
    });
    let title = format!("# FreeFlow: vNICs of the network {network}");
    let mut bytes = Vec::new();
    let whole = base.into_iter().map(str::to_owned).chain([title]).chain(lines);
    for line in whole {
        let room = PAGE_BYTES - bytes.len() % PAGE_BYTES;
        if line.len() + 1 > room {
            bytes.resize(bytes.len() + room, b'\n');
        }
        bytes.extend(line.into_bytes());
        bytes.push(b'\n');
    }
    bytes
}

/// Makes a file have this text, and empty lines after it; the file stays the same one. Whether it had another one.
pub fn rewrite(path: &Path, text: &[u8]) -> io::Result<bool> {
    let mut file = File::options().read(true).write(true).create(true).truncate(false).mode(0o644).open(path)?;
    // Our umask is no matter: containers' programs may be of any user.
    file.set_permissions(Permissions::from_mode(0o644))?;
    let mut before = Vec::new();
    file.read_to_end(&mut before)?;
    let length = text.len().next_multiple_of(PAGE_BYTES);
    let mut bytes = text.to_vec();
    bytes.resize(length.max(before.len()), b'\n');
    if bytes == before {
        return Ok(false);
    }
    file.write_all_at(&bytes, 0)?;
    // Nothing but empty lines goes.
    file.set_len(length as u64)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vnic(name: &str, addresses: &[&str], since_s: u64) -> Named {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        Named { network: "red".into(), names: vec![name.into()], addresses, since_s }
    }

    fn lines(base: &str, vnics: &[Named]) -> Vec<String> {
        let text = String::from_utf8(text(base, "red", vnics.iter().collect())).unwrap();
        text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn a_file_has_the_hosts_lines_and_the_vnics_the_oldest_first() {
        let vnics = [vnic("web", &["10.50.0.9"], 9), vnic("web", &["10.50.0.2", "fd00:50::2"], 3)];
        let expected = [
            "127.0.0.1 localhost",
            "# FreeFlow: vNICs of the network red",
            "10.50.0.2 web",
            "fd00:50::2 web",
            "10.50.0.9 web",
        ];
        assert_eq!(lines("127.0.0.1 localhost\n", &vnics), expected);
        let both = Named { names: vec!["db".into(), "web-1".into()], ..vnic("", &["10.50.0.2"], 0) };
        assert_eq!(lines("", &[both])[1], "10.50.0.2 db web-1");
    }

    #[test]
    fn no_name_is_anything_but_a_name() {
        let base = "127.0.0.1 localhost\n10.0.0.1 Gateway gw # printer\n";
        let long = "x".repeat(64);
        let bad = [
            "localhost",
            "LOCALHOST",
            "gateway",
            "gw",
            "a b",
            "a\n10.0.0.9 bank",
            "a#",
            "ä",
            "",
            "-a",
            ".a",
            "example.org",
            "localhost.",
            "gw.",
        ];
        let bad = bad.into_iter().chain(["10.0.0.9", "0", &long, "a/b", "a\0b"]).filter(|name| *name != "0");
        for name in bad {
            assert_eq!(lines(base, &[vnic(name, &["10.50.0.2"], 1)]).len(), 3, "{name:?}");
        }
        for good in ["printer", "A-b_c-1", "0", &"x".repeat(63)] {
            assert_eq!(lines(base, &[vnic(good, &["10.50.0.2"], 1)])[3], format!("10.50.0.2 {good}"));
        }
    }

    #[test]
    fn a_flood_is_bounded_and_no_line_lies_on_two_pages() {
        let many: Vec<Named> =
            (0..20_000).map(|number| vnic(&format!("container-{number}"), &["10.50.0.2"], number)).collect();
        let base = format!("{}{}\n", "10.0.0.1 a\n".repeat(10_000), "y".repeat(PAGE_BYTES));
        let text = text(&base, "red", many.iter().collect());
        let lines = text.split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"10.50.0.2 ")).count();
        assert!(lines == LINE_COUNT_MAX && text.len() < (1 << 20), "{lines} {}", text.len());
        for page in text.chunks(PAGE_BYTES) {
            assert_eq!(page.last(), Some(&b'\n'));
            let whole = |line: &[u8]| line.is_empty() || line.starts_with(b"10.") || line.starts_with(b"#");
            assert!(page.split(|&byte| byte == b'\n').all(whole));
        }
    }

    #[test]
    fn a_file_stays_the_same_one_and_keeps_nothing_old() {
        use std::os::unix::fs::MetadataExt;
        let path = std::env::temp_dir().join(format!("freeflow-hosts-file-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let read = || std::fs::read_to_string(&path).unwrap();
        assert!(rewrite(&path, b"one\n").unwrap());
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.mode() & 0o777, metadata.len() as usize), (0o644, PAGE_BYTES));
        assert!(!rewrite(&path, b"one\n").unwrap(), "nothing to write");
        let long = "10.50.0.2 container\n".repeat(1000);
        assert!(rewrite(&path, long.as_bytes()).unwrap() && read().trim_end() == long.trim_end());
        assert!(rewrite(&path, b"two\n").unwrap());
        assert_eq!((read().trim_end(), read().len()), ("two", PAGE_BYTES));
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), metadata.ino());
        std::fs::remove_file(&path).unwrap();
    }
}
