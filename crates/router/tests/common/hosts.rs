//! Two routers in this process, on two addresses of the loopback interface.
use super::{Directory, Host, config, part, until};
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
}

fn address_of(host: usize) -> String {
    format!("127.0.0.{}", 2 + host)
}

fn start(host: usize, keys: &[snow::Keypair; 2], wire: WireOptions, external: &str) -> Host {
    let directory = Directory::new();
    let other = 1 - host;
    let key_file = directory.0.join("host.key");
    let own: [u8; 32] = keys[host].private.as_slice().try_into().unwrap();
    std::fs::write(&key_file, key_text(&own)).unwrap();
    std::fs::set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    let public: [u8; 32] = keys[other].public.as_slice().try_into().unwrap();
    let peers = directory.0.join("peers.json");
    let text = format!(
        r#"{{"host": "h{host}", "address": "{}", "key_file": "host.key", "peers": [
            {{"host": "h{other}", "address": "{}", "public_key": "{}", "prefixes": ["10.111.{other}.0/24", "10.112.{other}.0/24"]}}],
            "external": [{external}]}}"#,
        address_of(host),
        address_of(other),
        key_text(&public)
    );
    std::fs::write(&peers, text).unwrap();
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
        Self::start(&WireOptions::default(), &external)
    }

    pub fn with(wire: &WireOptions) -> Self {
        Self::start(wire, "")
    }

    fn start(wire: &WireOptions, external: &str) -> Self {
        let keypair = || {
            let pattern = "Noise_KK_25519_ChaChaPoly_BLAKE2s".parse().unwrap();
            snow::Builder::new(pattern).generate_keypair().unwrap()
        };
        let keys = [keypair(), keypair()];
        let hosts = Self { hosts: [start(0, &keys, wire.clone(), external), start(1, &keys, wire.clone(), "")] };
        for host in 0..2 {
            until("the hosts to find each other", || {
                (!hosts.wire(host).hosts.iter().all(|host| host.external)).then_some(())
            });
        }
        hosts
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
