//! The authority of a cluster: its key signs the certificates by which etcd and the hosts know each other, and the
//! answers to hosts that join.
//!
//! etcd's members know each other by an authority of their own. Whoever has a certificate that a member takes from
//! another one is etcd's root, whatever name is in it: members ask each other for no rights.
use crate::ClusterError;
use crate::file::{AuthorityFile, ClusterFile, Wire};
use crate::records::now_s;
use crate::x509::{Issuer, Key, Subject};
use serde_json::json;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

const COMMON_NAME: &str = "FreeFlow cluster authority";
const PEER_COMMON_NAME: &str = "FreeFlow etcd peer authority";
/// Names of their files.
const OWN: &str = "ca";
const OF_PEERS: &str = "peer-ca";
/// etcd's user that may do everything, and those of FreeFlow.
pub(crate) const ROOT_USER: &str = "root";
pub(crate) const OPERATOR_USER: &str = "operator";

const DAY_S: u64 = 86_400;
const YEAR_S: u64 = 365 * DAY_S;
/// Of the authority, and of etcd's members and operators, whom nobody renews by himself.
const AUTHORITY_S: u64 = 20 * YEAR_S;
const OWN_S: u64 = 10 * YEAR_S;
/// Of a host.
pub(crate) const HOST_S: u64 = YEAR_S;

/// Signs.
pub(crate) struct Authority {
    issuer: Issuer,
    key: Key,
}

impl Authority {
    /// By its files.
    pub fn open(certificate: &Path, key: &Path) -> Result<Self, ClusterError> {
        let bad = |path: &Path, why: &str| ClusterError::File(format!("{}: {why}", path.display()));
        let read = |path: &Path| fs::read_to_string(path).map_err(|error| bad(path, &error.to_string()));
        let issuer = Issuer::of_pem(&read(certificate)?)
            .ok_or_else(|| bad(certificate, "it is no certificate of a key of the kind P-256"))?;
        check_secret(key)?;
        let signing = Key::from_pem(&read(key)?).map_err(|error| bad(key, &error.to_string()))?;
        if signing.public() != issuer.public_key {
            return Err(bad(key, &format!("it is not the key of {}", certificate.display())));
        }
        Ok(Self { issuer, key: signing })
    }

    /// A new one, with its files in a directory: `NAME.key` and `NAME.pem`.
    fn make(directory: &Path, name: &str, common_name: &str, now: u64) -> Result<Self, ClusterError> {
        let key = Key::generate()?;
        let issuer = Issuer::new(common_name, &key);
        let subject = Subject {
            common_name,
            public_key: key.public(),
            is_authority: true,
            addresses: &[],
            from_s: now,
            until_s: now + AUTHORITY_S,
        };
        let own = issuer.issue(&key, &subject)?;
        put(&directory.join(format!("{name}.key")), &key.pem(), 0o600)?;
        put(&directory.join(format!("{name}.pem")), &own, 0o644)?;
        Ok(Self { issuer, key })
    }

    /// A client's certificate, for a public key.
    pub fn client(&self, common_name: &str, public_key: &[u8], until_s: u64) -> Result<String, ClusterError> {
        self.issue(common_name, public_key, &[], until_s)
    }

    fn issue(
        &self,
        common_name: &str,
        public_key: &[u8],
        addresses: &[IpAddr],
        until_s: u64,
    ) -> Result<String, ClusterError> {
        let subject = Subject { common_name, public_key, is_authority: false, addresses, from_s: now_s(), until_s };
        self.issuer.issue(&self.key, &subject)
    }

    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, ClusterError> {
        self.key.sign(message)
    }
}

/// Whether the file of a private key is its owner's alone.
pub(crate) fn check_secret(path: &Path) -> Result<(), ClusterError> {
    let bad = |why: &str| ClusterError::File(format!("{}: {why}", path.display()));
    match fs::metadata(path).map_err(|error| bad(&error.to_string()))?.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(bad("others may read or write it, so it is no secret: chmod 600")),
    }
}

/// Files of a cluster that is to be.
pub struct AuthorityFiles<'a> {
    /// A member of etcd on each.
    pub members: &'a [IpAddr],
    /// Before all keys.
    pub root: &'a str,
    /// Of packets between the hosts.
    pub wire: Wire,
}

/// Where clients find etcd.
const CLIENT_PORT: u16 = 2379;

/// A file that is not there yet.
fn put(path: &Path, text: &str, mode: u32) -> Result<(), ClusterError> {
    let done = File::options().write(true).create_new(true).mode(mode).open(path);
    let done = done.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
    done.map_err(|error| ClusterError::File(format!("{}: {error}", path.display())))
}

impl AuthorityFiles<'_> {
    /// Makes the directory with all of them. It must not be there.
    ///
    /// # Errors
    /// `File`: it is there, or can't be written; then nothing of it is left.
    pub fn make(&self, directory: &Path) -> Result<(), ClusterError> {
        DirBuilder::new().mode(0o700).create(directory).map_err(|error| {
            let why = match error.kind() {
                io::ErrorKind::AlreadyExists => "it is there already, and another authority is not this one".into(),
                _ => error.to_string(),
            };
            ClusterError::File(format!("{}: {why}", directory.display()))
        })?;
        self.fill(directory).inspect_err(|_| {
            // It was made here a moment ago.
            let _ = fs::remove_dir_all(directory);
        })
    }

    fn fill(&self, directory: &Path) -> Result<(), ClusterError> {
        let now = now_s();
        let authority = Authority::make(directory, OWN, COMMON_NAME, now)?;
        let of_peers = Authority::make(directory, OF_PEERS, PEER_COMMON_NAME, now)?;
        let pair = |authority: &Authority, name: &str, common_name: &str, addresses: &[IpAddr]| {
            let key = Key::generate()?;
            put(&directory.join(format!("{name}.key")), &key.pem(), 0o600)?;
            let certificate = authority.issue(common_name, key.public(), addresses, now + OWN_S)?;
            put(&directory.join(format!("{name}.pem")), &certificate, 0o644)
        };
        for address in self.members {
            let name = member_name(*address);
            pair(&authority, &name, &name, &[*address])?;
            pair(&of_peers, &format!("{name}-peer"), &name, &[*address])?;
        }
        pair(&authority, ROOT_USER, ROOT_USER, &[])?;
        pair(&authority, OPERATOR_USER, OPERATOR_USER, &[])?;
        let mut file = json!({"etcd": self.urls(), "cacert": "ca.pem", "root": self.root, "wire": self.wire});
        let write = |name: &str, file: &serde_json::Value| put(&directory.join(name), &format!("{file:#}\n"), 0o600);
        let with = |fields: serde_json::Value, file: &mut serde_json::Value| {
            let fields = fields.as_object().cloned().unwrap_or_default();
            file.as_object_mut().into_iter().for_each(|file| file.extend(fields.clone()));
        };
        let mut operator = file.clone();
        with(json!({"cert": "operator.pem", "key": "operator.key"}), &mut operator);
        write("operator.json", &operator)?;
        let authority = json!({"cert": "ca.pem", "key": "ca.key", "root_cert": "root.pem", "root_key": "root.key"});
        with(json!({"controller": true, "authority": authority}), &mut file);
        write(CONTROLLER_FILE, &file)
    }

    fn urls(&self) -> Vec<String> {
        let url = |address: &IpAddr| match address {
            IpAddr::V4(address) => format!("https://{address}:{CLIENT_PORT}"),
            IpAddr::V6(address) => format!("https://[{address}]:{CLIENT_PORT}"),
        };
        self.members.iter().map(url).collect()
    }
}

/// The file that a controller is brought up by.
pub const CONTROLLER_FILE: &str = "controller.json";

/// Of a member's files, without what file names don't like.
pub fn member_name(address: IpAddr) -> String {
    format!("etcd-{}", address.to_string().replace(':', "-"))
}

/// The authority that a controller's file names.
pub(crate) fn of_file(file: &ClusterFile) -> Result<Option<Authority>, ClusterError> {
    let open = |files: &AuthorityFile| {
        check_secret(&files.root_key)?;
        Authority::open(&files.cert, &files.key)
    };
    file.authority.as_ref().map(open).transpose()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    /// A directory that goes with this.
    pub struct Directory(pub PathBuf);

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// With the files of two authorities, `one` and `other`.
    pub fn directory() -> Directory {
        let name = format!("freeflow-authority.{}.{:?}", std::process::id(), std::thread::current().id());
        let directory = Directory(std::env::temp_dir().join(name));
        fs::create_dir(&directory.0).expect("a directory");
        for name in ["one", "other"] {
            files().make(&directory.0.join(name)).expect("made");
        }
        directory
    }

    fn files() -> AuthorityFiles<'static> {
        const MEMBERS: [IpAddr; 2] = [
            IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)),
            IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
        ];
        AuthorityFiles { members: &MEMBERS, root: "/other", wire: Wire::Sealed }
    }

    #[test]
    fn the_files_of_an_authority_are_those_of_a_cluster() {
        let directory = directory();
        let one = directory.0.join("one");
        let controller = ClusterFile::read(&one.join(CONTROLLER_FILE)).expect("a cluster file");
        assert_eq!(controller.etcd, ["https://192.0.2.1:2379", "https://[2001:db8::1]:2379"]);
        assert!(controller.controller && controller.cert.is_none() && controller.wire == Wire::Sealed);
        assert_eq!((controller.as_own().cert, controller.root.as_str()), (Some(one.join("root.pem")), "/other"));
        assert!(of_file(&controller).expect("its keys").is_some());
        let operator = ClusterFile::read(&one.join("operator.json")).expect("a cluster file");
        assert_eq!((operator.as_own().cert, operator.authority), (Some(one.join("operator.pem")), None));
        let of_members = ["etcd-192.0.2.1", "etcd-2001-db8--1", "etcd-192.0.2.1-peer", "etcd-2001-db8--1-peer"];
        for name in ["ca", "peer-ca", "root", "operator"].into_iter().chain(of_members) {
            let mode = fs::metadata(one.join(format!("{name}.key"))).expect("its key").permissions().mode();
            assert!(mode & 0o077 == 0 && one.join(format!("{name}.pem")).exists(), "{name}");
        }
        // Another authority is not put in its place.
        let before = fs::read(one.join("ca.key")).expect("read");
        let error = files().make(&one).expect_err("it is there").to_string();
        assert!(error.contains("already") && fs::read(one.join("ca.key")).expect("read") == before, "{error}");
    }

    #[test]
    fn an_authority_has_its_own_key_and_keeps_it() {
        let directory = directory();
        let (one, other) = (directory.0.join("one"), directory.0.join("other"));
        let error = |cert: PathBuf, key: PathBuf| Authority::open(&cert, &key).err().expect("refused").to_string();
        assert!(error(one.join("ca.pem"), other.join("ca.key")).contains("not the key of"));
        assert!(error(one.join("ca.key"), one.join("ca.key")).contains("no certificate"));
        fs::set_permissions(one.join("ca.key"), fs::Permissions::from_mode(0o640)).expect("changed");
        assert!(error(one.join("ca.pem"), one.join("ca.key")).contains("chmod 600"));
        // etcd's root as well.
        let file = ClusterFile::read(&other.join(CONTROLLER_FILE)).expect("a cluster file");
        assert!(of_file(&file).is_ok());
        fs::set_permissions(other.join("root.key"), fs::Permissions::from_mode(0o604)).expect("changed");
        let error = of_file(&file).err().expect("refused").to_string();
        assert!(error.contains("root.key") && error.contains("chmod 600"), "{error}");
    }
}
