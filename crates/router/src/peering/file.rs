//! The peers file: which hosts there are, by what keys they are known, and whose addresses they may have.
//!
//! JSON, every field as [`PeersFile`] and [`PeerEntry`] say; unknown fields are errors. [`PeersFile::parse`] is pure;
//! [`PeersFile::load`] reads the file and the private key beside it.
use super::prefix::{Prefix, Prefixes};
use freeflow_protocol::peer::HOST_NAME_BYTES_MAX;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Hosts of one file.
pub const PEER_COUNT_MAX: usize = 1024;
/// Of one host: its ranges, and single addresses that came to it from other hosts' vNICs.
pub const PREFIX_COUNT_MAX: usize = 4096;
/// Of all hosts.
const ALL_PREFIX_COUNT_MAX: usize = 65_536;
const ALLOW_COUNT_MAX: usize = 64;
pub const EXTERNAL_COUNT_MAX: usize = 256;
const FILE_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Bytes of a key; it is written as twice as many hexadecimal digits.
pub const KEY_BYTES: usize = 32;
pub const DEFAULT_CONTROL_PORT: u16 = 4790;
/// Differentiated services code points have six bits (RFC 2474).
const DSCP_MAX: u8 = 63;

pub type Key = [u8; KEY_BYTES];

/// A peers file, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct PeersFile {
    /// Name of this host.
    pub host: String,
    /// Its address for the packets between hosts, and for the control channel.
    pub address: IpAddr,
    pub control_port: u16,
    /// The private key's file; one with a relative name is beside the peers file.
    pub key_file: PathBuf,
    /// Whether packets shall have an ICRC. They have if both hosts want it. Default: true.
    pub icrc: bool,
    /// Whether packets of RC shall be frames, whose payload has the UDP checksum in the place of the ICRC. They are if
    /// both hosts want it. Default: true.
    pub frames: bool,
    /// Whether packets to and from all peers are sealed; they have to say so, too. Default: false.
    pub sealed: bool,
    pub peers: Vec<PeerEntry>,
    pub external: Vec<External>,
    /// DSCP of the packets that FreeFlow sends. Default: 0.
    pub dscp: u8,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PeerEntry {
    pub host: String,
    pub address: IpAddr,
    pub control_port: u16,
    pub public_key: Key,
    /// Prefixes that its vNICs' addresses may have.
    pub prefixes: Prefixes,
}

/// RDMA machines without FreeFlow that vNICs of a network may talk to.
#[derive(Clone, Debug, PartialEq)]
pub struct External {
    pub network: String,
    pub allow: Vec<Prefix>,
}

/// Error of a peers file, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}: {what}", file.display())]
pub struct FileError {
    file: PathBuf,
    what: String,
}

/// The private key of this host. Never printed.
#[derive(Clone)]
pub struct PrivateKey(pub Key);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    host: String,
    address: String,
    key_file: PathBuf,
    #[serde(default = "default_port")]
    control_port: u16,
    #[serde(default = "default_true")]
    icrc: bool,
    #[serde(default = "default_true")]
    frames: bool,
    #[serde(default)]
    wire: RawWire,
    peers: Vec<RawPeer>,
    #[serde(default)]
    external: Vec<RawExternal>,
    #[serde(default)]
    dscp: u8,
}

#[derive(Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RawWire {
    #[default]
    Plain,
    Sealed,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPeer {
    host: String,
    address: String,
    #[serde(default = "default_port")]
    control_port: u16,
    public_key: String,
    prefixes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawExternal {
    network: String,
    allow: Vec<String>,
}

fn default_port() -> u16 {
    DEFAULT_CONTROL_PORT
}

fn default_true() -> bool {
    true
}

impl PeersFile {
    /// Checks the text of a peers file. Errors name the field.
    pub fn parse(text: &str) -> Result<Self, String> {
        let raw: RawFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let (peers, prefixes): (Vec<PeerEntry>, Vec<Vec<Prefix>>) =
            list("peers", raw.peers, PEER_COUNT_MAX, PeerEntry::check)?.into_iter().unzip();
        let file = Self {
            host: host_name("host", raw.host)?,
            address: host_address("address", &raw.address)?,
            control_port: port("control_port", raw.control_port)?,
            key_file: raw.key_file,
            icrc: raw.icrc,
            frames: raw.frames,
            sealed: raw.wire == RawWire::Sealed,
            peers,
            external: list("external", raw.external, EXTERNAL_COUNT_MAX, External::check)?,
            dscp: raw.dscp,
        };
        if file.dscp > DSCP_MAX {
            return Err(format!("dscp: {} is more than {DSCP_MAX}", file.dscp));
        }
        if file.key_file.as_os_str().is_empty() {
            return Err("key_file: no name".into());
        }
        file.check_distinct()?;
        Self::check_prefixes(&prefixes)?;
        Ok(file)
    }

    fn check_distinct(&self) -> Result<(), String> {
        let mut hosts = BTreeMap::from([(self.host.as_str(), "host".to_owned())]);
        let mut addresses = BTreeMap::from([(self.address, "address".to_owned())]);
        let mut keys = BTreeMap::new();
        for (number, peer) in self.peers.iter().enumerate() {
            let fields = ["host", "address", "public_key"].map(|field| format!("peers[{number}].{field}"));
            let [host, address, key] = fields;
            if let Some(other) = hosts.insert(&peer.host, host.clone()) {
                return Err(format!("{host}: {:?} is {other} already", peer.host));
            }
            // The host that a packet comes from is known by its address.
            if let Some(other) = addresses.insert(peer.address, address.clone()) {
                return Err(format!("{address}: {} is {other} already", peer.address));
            }
            if peer.address.is_ipv4() != self.address.is_ipv4() {
                return Err(format!("{address}: {} is of another IP version than {}", peer.address, self.address));
            }
            if let Some(other) = keys.insert(peer.public_key, key.clone()) {
                return Err(format!("{key}: the same as {other}"));
            }
        }
        Ok(())
    }

    /// No address may belong to two hosts.
    fn check_prefixes(peers: &[Vec<Prefix>]) -> Result<(), String> {
        let mut all: Vec<(Prefix, usize, usize)> = (peers.iter().enumerate())
            .flat_map(|(peer, prefixes)| prefixes.iter().enumerate().map(move |(at, &prefix)| (prefix, peer, at)))
            .collect();
        if all.len() > ALL_PREFIX_COUNT_MAX {
            return Err(format!("peers: {} prefixes; at most {ALL_PREFIX_COUNT_MAX} are possible", all.len()));
        }
        all.sort_unstable();
        // In this order one that overlaps another overlaps the next.
        let overlapping = all.windows(2).find(|pair| pair[0].0.overlaps(pair[1].0));
        let Some([one, other]) = overlapping else { return Ok(()) };
        let [(with, first, first_at), (prefix, second, second_at)] =
            if (one.1, one.2) < (other.1, other.2) { [*one, *other] } else { [*other, *one] };
        Err(format!(
            "peers[{second}].prefixes[{second_at}]: {prefix} overlaps peers[{first}].prefixes[{first_at}], {with}"
        ))
    }

    /// Reads the file and the private key that it names. Blocks on the file system only.
    ///
    /// Errors name the file and the field. Neither file may be writable by others than its owner, and the key not even
    /// readable.
    pub fn load(path: &Path) -> Result<(Self, PrivateKey), FileError> {
        let text = read(path, 0o022)?;
        let text = String::from_utf8(text).map_err(|_| error_in(path, "not UTF-8"))?;
        let mut file = Self::parse(&text).map_err(|what| error_in(path, what))?;
        file.key_file = path.parent().unwrap_or(Path::new("")).join(&file.key_file);
        let key = read(&file.key_file, 0o077).map_err(|error| error_in(path, format!("key_file: {error}")))?;
        let key = std::str::from_utf8(&key).ok().and_then(|text| parse_key(text.trim_ascii()).ok());
        let what = || format!("key_file: {} holds no key; make one with freeflow peers key", file.key_file.display());
        let key = key.ok_or_else(|| error_in(path, what()))?;
        Ok((file, PrivateKey(key)))
    }
}

impl PeerEntry {
    /// And its prefixes as the file has them.
    fn check(place: &str, raw: RawPeer) -> Result<(Self, Vec<Prefix>), String> {
        if raw.prefixes.is_empty() {
            return Err(format!("{place}.prefixes: empty: the host could announce nothing"));
        }
        let prefixes = list(&format!("{place}.prefixes"), raw.prefixes, PREFIX_COUNT_MAX, prefix)?;
        let entry = Self {
            host: host_name(&format!("{place}.host"), raw.host)?,
            address: host_address(&format!("{place}.address"), &raw.address)?,
            control_port: port(&format!("{place}.control_port"), raw.control_port)?,
            public_key: parse_key(&raw.public_key).map_err(|what| format!("{place}.public_key: {what}"))?,
            prefixes: prefixes.iter().copied().collect(),
        };
        Ok((entry, prefixes))
    }

    /// Whether it is the same host, at the same place: its prefixes alone may be others.
    pub fn is_same_host(&self, other: &Self) -> bool {
        let Self { host, address, control_port, public_key, prefixes: _ } = self;
        (host, address, control_port, public_key)
            == (&other.host, &other.address, &other.control_port, &other.public_key)
    }

    pub fn control(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.control_port)
    }
}

impl External {
    fn check(place: &str, raw: RawExternal) -> Result<Self, String> {
        if !freeflow_orchestrator::name_is_good(&raw.network) {
            return Err(format!("{place}.network: {:?} can't be a network's name", raw.network));
        }
        let allow = list(&format!("{place}.allow"), raw.allow, ALLOW_COUNT_MAX, prefix)?;
        Ok(Self { network: raw.network, allow })
    }
}

fn list<R, T>(
    place: &str,
    raw: Vec<R>,
    count_max: usize,
    mut check: impl FnMut(&str, R) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    if raw.len() > count_max {
        return Err(format!("{place}: {} of them; at most {count_max} are possible", raw.len()));
    }
    raw.into_iter().enumerate().map(|(number, raw)| check(&format!("{place}[{number}]"), raw)).collect()
}

fn prefix(place: &str, text: String) -> Result<Prefix, String> {
    text.parse().map_err(|error| format!("{place}: {text:?}: {error}"))
}

fn host_name(place: &str, name: String) -> Result<String, String> {
    let good = !name.is_empty()
        && name.len() <= HOST_NAME_BYTES_MAX
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if good {
        return Ok(name);
    }
    Err(format!(
        "{place}: {name:?} is no name of a host: 1 to {HOST_NAME_BYTES_MAX} letters, digits, hyphens, dots, underscores"
    ))
}

fn host_address(place: &str, text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text.parse().map_err(|_| format!("{place}: {text:?} is no IP address"))?;
    let address = address.to_canonical();
    if address.is_unspecified() || address.is_multicast() {
        return Err(format!("{place}: {address} can't be a host's address"));
    }
    Ok(address)
}

fn port(place: &str, port: u16) -> Result<u16, String> {
    if port == 0 { Err(format!("{place}: 0 is no port")) } else { Ok(port) }
}

/// A key in hexadecimal digits.
pub fn parse_key(text: &str) -> Result<Key, String> {
    let digits = text.as_bytes();
    if digits.len() != 2 * KEY_BYTES {
        return Err(format!("a key has {} hexadecimal digits, this has {} characters", 2 * KEY_BYTES, digits.len()));
    }
    let mut key = [0; KEY_BYTES];
    for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16).ok_or("a key has hexadecimal digits only");
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Ok(key)
}

pub fn key_text(key: &Key) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a regular file that others than its owner don't have the `forbidden` rights on.
fn read(path: &Path, forbidden: u32) -> Result<Vec<u8>, FileError> {
    let wrong = |what: &dyn fmt::Display| error_in(path, what.to_string());
    // Not blocked by a FIFO, which is refused below.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(flags).open(path).map_err(|error| wrong(&error))?;
    let metadata = file.metadata().map_err(|error| wrong(&error))?;
    if !metadata.is_file() {
        return Err(wrong(&"not a regular file"));
    }
    if metadata.mode() & forbidden != 0 {
        let (mode, right) = (metadata.mode() & 0o777, if forbidden & 0o044 == 0 { "write" } else { "read or write" });
        return Err(wrong(&format_args!(
            "only its owner may {right} it, and its mode is {mode:03o}; use chmod go-rwx"
        )));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| wrong(&error))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(wrong(&format_args!("more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

fn error_in(file: &Path, what: impl Into<String>) -> FileError {
    FileError { file: file.into(), what: what.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn whole() -> Value {
        json!({
            "host": "h1", "address": "192.0.2.1", "key_file": "host.key", "control_port": 4790, "icrc": false, "frames": false,
            "wire": "sealed",
            "peers": [
                {"host": "h2", "address": "192.0.2.2", "public_key": "0a".repeat(32), "prefixes": ["10.111.2.0/24"]},
                {"host": "h3", "address": "192.0.2.3", "control_port": 4791, "public_key": "0B".repeat(32),
                 "prefixes": ["10.111.3.0/24", "fd00::/64"]},
            ],
            "external": [{"network": "default", "allow": ["192.0.2.9/32"]}],
            "dscp": 26,
        })
    }

    #[test]
    fn a_good_file_is_understood() {
        let file = PeersFile::parse(&whole().to_string()).unwrap();
        assert_eq!((file.host.as_str(), file.control_port, file.icrc, file.dscp), ("h1", 4790, false, 26));
        assert!(!file.frames && file.sealed);
        assert_eq!(file.peers[0].public_key, [0x0a; 32]);
        assert_eq!(file.peers[0].control_port, DEFAULT_CONTROL_PORT);
        assert_eq!(file.peers[1].public_key, [0x0b; 32]);
        assert_eq!(file.peers[1].control().to_string(), "192.0.2.3:4791");
        assert_eq!(file.external[0].allow[0].to_string(), "192.0.2.9/32");
        let least = r#"{"host": "a", "address": "192.0.2.1", "key_file": "k", "peers": []}"#;
        let least = PeersFile::parse(least).unwrap();
        assert!(least.icrc && least.frames && !least.sealed && least.dscp == 0 && least.external.is_empty());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let key = || "0c".repeat(32);
        for (pointer, value, part) in [
            ("/extra", json!(1), "unknown field `extra`"),
            ("/peers/0/extra", json!(1), "unknown field `extra`"),
            ("/host", json!(""), "host:"),
            ("/host", json!("a b"), "host:"),
            ("/host", json!("x".repeat(65)), "host:"),
            ("/host", json!("h2"), "peers[0].host"),
            ("/address", json!("192.0.2"), "address:"),
            ("/address", json!("0.0.0.0"), "address:"),
            ("/address", json!("224.0.0.1"), "address:"),
            ("/address", json!("192.0.2.2"), "peers[0].address"),
            ("/address", json!("::ffff:192.0.2.2"), "peers[0].address"),
            ("/control_port", json!(0), "control_port"),
            ("/control_port", json!(70_000), "70000"),
            ("/key_file", json!(""), "key_file"),
            ("/dscp", json!(64), "dscp"),
            ("/icrc", json!("yes"), "yes"),
            ("/frames", json!(1), "boolean"),
            ("/wire", json!("sealled"), "unknown variant `sealled`"),
            ("/peers/1/host", json!("h2"), "peers[1].host: \"h2\" is peers[0].host already"),
            ("/peers/1/address", json!("192.0.2.2"), "peers[1].address"),
            ("/peers/1/address", json!("2001:db8::3"), "peers[1].address: 2001:db8::3 is of another IP version"),
            ("/peers/1/control_port", json!(0), "peers[1].control_port"),
            ("/peers/1/public_key", json!("0a".repeat(32)), "peers[1].public_key: the same as peers[0].public_key"),
            ("/peers/1/public_key", json!("0a".repeat(31)), "64 hexadecimal digits"),
            ("/peers/1/public_key", json!("0g".repeat(32)), "peers[1].public_key: a key has hexadecimal digits only"),
            ("/peers/1/prefixes", json!([]), "peers[1].prefixes: empty"),
            ("/peers/1/prefixes/0", json!("10.111.3.1/24"), "peers[1].prefixes[0]"),
            ("/peers/1/prefixes/0", json!("10.111.3.0"), "peers[1].prefixes[0]"),
            ("/peers/1/prefixes/0", json!("10.111.0.0/16"), "overlaps peers[0].prefixes[0], 10.111.2.0/24"),
            ("/peers/1/prefixes/0", json!("fd00::/16"), "peers[1].prefixes[1]"),
            ("/peers", json!(null), "null"),
            ("/peers", json!([{"host": "x", "address": "192.0.2.7", "public_key": key()}]), "missing field `prefixes`"),
            ("/external/0/network", json!(""), "external[0].network"),
            ("/external/0/allow/0", json!("x"), "external[0].allow[0]"),
        ] {
            let mut file = whole();
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            match file.pointer_mut(parent).unwrap() {
                Value::Array(list) => list[field.parse::<usize>().unwrap()] = value.clone(),
                object => object[field] = value.clone(),
            }
            let error = PeersFile::parse(&file.to_string()).unwrap_err();
            assert!(error.contains(part), "{pointer} = {value}: {error}");
        }
        assert!(PeersFile::parse("{").is_err());
        assert!(PeersFile::parse(&format!("{} x", whole())).is_err());
    }

    #[test]
    fn too_many_hosts_are_refused() {
        let mut file = whole();
        file["peers"] = Value::Array(vec![file["peers"][0].clone(); PEER_COUNT_MAX + 1]);
        assert!(PeersFile::parse(&file.to_string()).unwrap_err().starts_with("peers: 1025"));
    }

    #[test]
    fn files_are_read_only_if_they_are_safe() {
        use std::os::unix::fs::PermissionsExt;
        let directory = std::env::temp_dir().join(format!("ff-peers-file-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (path, key) = (directory.join("peers.json"), directory.join("host.key"));
        let chmod = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        std::fs::write(&path, whole().to_string()).unwrap();
        chmod(&path, 0o644);
        let says = |part: &str| {
            let error = PeersFile::load(&path).unwrap_err().to_string();
            assert!(error.contains("peers.json: ") && error.contains(part), "{error}");
        };
        says("key_file: ");
        std::fs::write(&key, format!("{}\n", "0d".repeat(32))).unwrap();
        chmod(&key, 0o640);
        says("only its owner may read or write it");
        chmod(&key, 0o600);
        let (file, private) = PeersFile::load(&path).unwrap();
        assert_eq!((file.key_file, private.0), (key.clone(), [0x0d; 32]));
        chmod(&path, 0o664);
        says("only its owner may write it");
        chmod(&path, 0o644);
        std::fs::write(&key, "x").unwrap();
        says("holds no key");
        std::fs::write(&path, vec![b' '; FILE_BYTES_MAX as usize + 1]).unwrap();
        says("more than");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
