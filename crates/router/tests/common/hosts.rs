//! Two routers in this process, on two addresses of the loopback interface.
use super::{Directory, Host, config, host_path, part, rest, until};
use freeflow_protocol::admin::WireStatus;
use freeflow_router::peering::key_text;
use freeflow_router::{Config, Mode, Router, WireOptions};
use freeflow_verbs::VnicLimits;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// UDP port 4791 is there once on each address: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Two hosts that know each other.
pub struct Hosts {
    pub hosts: [Host; 2],
    keys: [snow::Keypair; 2],
}

pub fn address_of(host: usize) -> String {
    format!("127.0.0.{}", 2 + host)
}

/// The peers file of a host: plain or sealed.
fn peers_file(host: usize, keys: &[snow::Keypair; 2], kind: &str, external: &str) -> String {
    let other = 1 - host;
    let public: [u8; 32] = keys[other].public.as_slice().try_into().unwrap();
    format!(
        r#"{{"host": "h{host}", "address": "{}", "key_file": "host.key", "wire": "{kind}", "peers": [
            {{"host": "h{other}", "address": "{}", "public_key": "{}", "prefixes": ["10.111.{other}.0/24", "10.112.{other}.0/24"]}}],
            "external": [{external}]}}"#,
        address_of(host),
        address_of(other),
        key_text(&public)
    )
}

fn start(host: usize, keys: &[snow::Keypair; 2], wire: WireOptions, kind: &str, external: &str) -> Host {
    let directory = Directory::new();
    let key_file = directory.0.join("host.key");
    let own: [u8; 32] = keys[host].private.as_slice().try_into().unwrap();
    std::fs::write(&key_file, key_text(&own)).unwrap();
    std::fs::set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    let peers = directory.0.join("peers.json");
    std::fs::write(&peers, peers_file(host, keys, kind, external)).unwrap();
    std::fs::set_permissions(&peers, Permissions::from_mode(0o600)).unwrap();
    let config = Config {
        mode: Mode::Adaptive,
        range: Some(format!("10.111.{host}.0/24").parse().unwrap()),
        peers: Some(peers),
        wire,
        ..config(&directory.0, VnicLimits::default())
    };
    let router = Router::start(config).unwrap();
    Host { directory, router: Some(router) }
}

impl Hosts {
    pub fn new() -> Self {
        Self::with(&WireOptions::default())
    }

    /// The first may also talk to an external machine at this address.
    pub fn with_external(address: &str) -> Self {
        let external = format!(r#"{{"network": "default", "allow": ["{address}/32"]}}"#);
        let hosts = Self::start(&WireOptions::default(), ["plain"; 2], &external);
        hosts.until_connected();
        hosts
    }

    pub fn with(wire: &WireOptions) -> Self {
        let hosts = Self::start(wire, ["plain"; 2], "");
        hosts.until_connected();
        hosts
    }

    /// Each of them plain or sealed, and maybe not connected.
    pub fn of_kinds(wire: &WireOptions, kinds: [&str; 2]) -> Self {
        Self::start(wire, kinds, "")
    }

    fn start(wire: &WireOptions, kinds: [&str; 2], external: &str) -> Self {
        let keypair = || {
            let pattern = "Noise_KK_25519_ChaChaPoly_BLAKE2s".parse().unwrap();
            snow::Builder::new(pattern).generate_keypair().unwrap()
        };
        let keys = [keypair(), keypair()];
        let first = start(0, &keys, wire.clone(), kinds[0], external);
        let second = start(1, &keys, wire.clone(), kinds[1], "");
        Self { hosts: [first, second], keys }
    }

    pub fn until_connected(&self) {
        for host in 0..2 {
            until("the hosts to find each other", || {
                (!self.wire(host).hosts.iter().all(|host| host.external)).then_some(())
            });
        }
    }

    /// One is plain or sealed from now on.
    pub fn set_kind(&self, host: usize, kind: &str) {
        let (run_dir, text) = (self.hosts[host].run_dir(), peers_file(host, &self.keys, kind, ""));
        std::fs::write(self.hosts[host].directory.0.join("peers.json"), text).unwrap();
        assert_eq!(rest(&run_dir, "POST", &host_path(&run_dir, "peers/reload"), "").0, 200);
    }

    /// Its plain peers file is another from now on.
    pub fn change_file(&self, host: usize, change: impl FnOnce(&mut serde_json::Value)) {
        let run_dir = self.hosts[host].run_dir();
        let mut file = serde_json::from_str(&peers_file(host, &self.keys, "plain", "")).unwrap();
        change(&mut file);
        std::fs::write(self.hosts[host].directory.0.join("peers.json"), file.to_string()).unwrap();
        assert_eq!(rest(&run_dir, "POST", &host_path(&run_dir, "peers/reload"), "").0, 200);
    }

    pub fn wire(&self, host: usize) -> WireStatus {
        part(&self.hosts[host].run_dir(), "wire", "status").0
    }
}

/// In this process and, where the file can be made, on this machine.
pub fn alone() -> Alone {
    let in_process = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let file = File::create(std::env::temp_dir().join("freeflow-test-wire.lock")).ok();
    if let Some(file) = &file {
        file.lock().unwrap();
    }
    Alone { _file: file, _in_process: in_process }
}

/// Parts that [`alone`] makes.
pub struct Alone {
    _file: Option<File>,
    _in_process: MutexGuard<'static, ()>,
}
