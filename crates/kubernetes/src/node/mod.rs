//! The node's agent: `freeflow-kubernetes node`, on each node, beside the router.
//!
//! - [`driver`]: the DRA driver, which prepares claims; [`claim`], [`parameters`] and [`rules`] say what they get,
//!   [`networks`] which of them a namespace has, [`prepared`] what is on disk of them, [`slices`] what the scheduler
//!   sees.
//! - [`device_plugin`]: the same for clusters without DRA.
//! - [`registration`], [`sockets`], [`grpc`], [`messages`]: how the kubelet is spoken to.
//! - [`host`]: the router.
//!
//! The agent keeps nothing in memory that a restart could lose. While it is away no claim is prepared, and pods that
//! run are unaffected.

pub mod claim;
pub mod device_plugin;
pub mod driver;
pub mod grpc;
pub mod host;
pub mod messages;
pub mod networks;
pub mod parameters;
pub mod prepared;
pub mod registration;
pub mod rules;
pub mod slices;
pub mod sockets;

#[cfg(test)]
mod tests;

use crate::api::{Client, Kind};
use crate::declared::rules::Lookup;
use crate::log;
use crate::termination::termination;
use claim::DRIVER;
use device_plugin::DevicePlugin;
use driver::{Driver, TURN_COUNT};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::name_is_good;
use host::Host;
use messages::PluginInfo;
use networks::NamespaceNetworks;
use prepared::PreparedClaims;
use rules::{Rules, SharedNetworks};
use slices::{GROUP, Slices, VERSIONS, VNIC_COUNT_MAX};
use sockets::Socket;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// How often sockets and the router are looked at.
const LOOK_TIME: Duration = Duration::from_secs(1);
/// After something that failed.
const PAUSE: Duration = Duration::from_secs(5);
/// Between two looks which version of DRA the API server has.
const VERSION_PAUSE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });
/// Between two sweeps for claims that are no more.
const SWEEP_TIME: Duration = Duration::from_secs(300);
const REGISTRATION_CONNECTION_MAX: usize = 16;

/// Settings of the node's agent.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// This node, as Kubernetes calls it
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: String,
    /// The router's directory, which has to have the same path on the host
    #[arg(long, value_name = "DIR", default_value = "/run/freeflow", env = "FREEFLOW_RUN_DIR")]
    pub run_dir: PathBuf,
    /// The freeflow command as the host has it: container engines run it as a hook
    #[arg(long, value_name = "PROGRAM", default_value = "/usr/bin/freeflow")]
    pub freeflow: PathBuf,
    /// Where container engines look for CDI files
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// The kubelet's directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// vNICs that this node offers
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_vnic_count)]
    pub vnics: usize,
    /// A network of this host in which pods of all namespaces may be, together, and a device plugin's resource; given
    /// again: another one [default: none]
    #[arg(long, value_name = "NETWORK", value_parser = parse_network)]
    pub shared_network: Vec<String>,
    /// Prepare no resource claims
    #[arg(long, conflicts_with = "no_device_plugin", requires = "shared_network")]
    pub no_dra: bool,
    /// Offer no device plugin's resources
    #[arg(long)]
    pub no_device_plugin: bool,
    /// Give vNICs of the device plugin to the engine by annotations, too: for kubelets before 1.29
    #[arg(long)]
    pub cdi_annotations: bool,
}

fn parse_vnic_count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=VNIC_COUNT_MAX).contains(count));
    count.ok_or_else(|| format!("a number from 1 to {VNIC_COUNT_MAX} is wanted"))
}

fn parse_network(text: &str) -> Result<String, String> {
    name_is_good(text).then(|| text.to_string()).ok_or_else(|| "no name of a network".into())
}

/// Why the agent ends by itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NodeError(String);

impl Options {
    fn shared(&self) -> BTreeSet<String> {
        self.shared_network.iter().cloned().collect()
    }

    fn plugin_directory(&self) -> PathBuf {
        self.kubelet_dir.join("plugins").join(DRIVER)
    }

    fn dra_socket(&self) -> PathBuf {
        self.plugin_directory().join("dra.sock")
    }

    fn registration_socket(&self) -> PathBuf {
        self.kubelet_dir.join("plugins_registry").join(format!("{DRIVER}-reg.sock"))
    }

    fn plugin_info(&self) -> PluginInfo {
        PluginInfo {
            kind: "DRAPlugin".into(),
            name: DRIVER.into(),
            endpoint: self.dra_socket().display().to_string(),
            supported_versions: ["v1.DRAPlugin", "v1beta1.DRAPlugin"].map(String::from).into(),
        }
    }

    fn check(&self) -> Result<RunDir, NodeError> {
        for path in [&self.freeflow, &self.cdi_dir, &self.kubelet_dir, &self.run_dir] {
            if !path.is_absolute() {
                return Err(NodeError(format!("{} is no absolute path", path.display())));
            }
        }
        if let Some(network) = self.shared().iter().find(|network| !device_plugin::is_resource_name(network))
            && !self.no_device_plugin
        {
            return Err(NodeError(format!("the network {network} can't be the name of a resource in Kubernetes")));
        }
        RunDir::new(&self.run_dir).map_err(|error| NodeError(error.to_string()))
    }
}

/// Runs the agent until it is asked to end (SIGTERM, SIGINT).
///
/// # Errors
/// The options can't be used, or a part of it ended.
pub async fn run(options: &Options, client: Client) -> Result<(), NodeError> {
    let run_dir = options.check()?;
    let asked_to_end = termination().map_err(|error| NodeError(format!("signals: {error}")))?;
    let mut parts = start(options, &run_dir, client);
    tokio::select! {
        _ = asked_to_end => {
            log::line("ends, as it was asked to");
            Ok(())
        }
        Some(ended) = parts.join_next() => {
            let Err(error) = ended;
            Err(NodeError(format!("a part of the agent has failed: {error}")))
        }
    }
}

/// Begins all parts. They end when the set is dropped.
pub(crate) fn start(options: &Options, run_dir: &RunDir, client: Client) -> JoinSet<Infallible> {
    let mut parts = JoinSet::new();
    let host = Host::of(run_dir.path());
    if !options.no_device_plugin {
        let (sender, health) = watch::channel(false);
        parts.spawn(watch_host(host.clone(), sender));
        for network in options.shared() {
            let plugin = DevicePlugin {
                directory: options.kubelet_dir.join("device-plugins"),
                network,
                vnic_count: options.vnics,
                health: health.clone(),
                with_annotations: options.cdi_annotations,
            };
            parts.spawn(async move { Arc::new(plugin).keep().await });
        }
    }
    if !options.no_dra {
        parts.spawn(dra(options.clone(), run_dir.clone(), host, client));
    }
    parts
}

/// Follows whether the router is up.
async fn watch_host(host: Host, sender: watch::Sender<bool>) -> Infallible {
    let mut said = None;
    loop {
        let up = host.check_up().await;
        if said.as_ref() != Some(&up) {
            log::line(up.as_ref().err().map_or("the router is up", String::as_str));
            sender.send_replace(up.is_ok());
            said = Some(up);
        }
        sleep(LOOK_TIME).await;
    }
}

async fn dra(options: Options, run_dir: RunDir, host: Host, client: Client) -> Infallible {
    loop {
        let version = served_version(&client).await;
        log::line(&format!("claims are those of {GROUP}/{version}"));
        tokio::select! {
            never = dra_of_version(&options, &run_dir, &host, &client, version) => match never {},
            () = version_left(&client, version) => log::line(&format!("{GROUP}/{version} is served no more")),
        }
    }
}

async fn dra_of_version(
    options: &Options,
    run_dir: &RunDir,
    host: &Host,
    client: &Client,
    version: &'static str,
) -> Infallible {
    let driver = Arc::new(Driver {
        client: client.clone(),
        claims: Kind::new(GROUP, VERSIONS[0], "resourceclaims").at_version(version),
        node: options.node_name.clone(),
        host: host.clone(),
        rules: NamespaceNetworks { lookup: Lookup::new(client.clone()), shared: SharedNetworks(options.shared()) },
        prepared: PreparedClaims {
            cdi: options.cdi_dir.clone(),
            records: options.plugin_directory().join("claims"),
            run_dir: run_dir.clone(),
            program: options.freeflow.clone(),
        },
        files: Mutex::new(()),
        turns: Semaphore::new(TURN_COUNT),
    });
    let slices = Slices::new(client, version, &options.node_name, options.vnics);
    tokio::select! {
        never = serve_driver(options.dra_socket(), driver.clone()) => never,
        never = serve_registration(options.registration_socket(), options.plugin_info()) => never,
        never = slices.keep() => never,
        never = sweep(&driver) => never,
    }
}

async fn served_version(client: &Client) -> &'static str {
    let mut said = String::new();
    loop {
        let (text, pause) = match slices::version(client, None).await {
            Ok(Some(version)) => return version,
            Ok(None) => (format!("this cluster has no {GROUP}: no claims, device plugins only"), VERSION_PAUSE),
            Err(error) => (error.to_string(), PAUSE),
        };
        if said != text {
            log::line(&text);
            said = text;
        }
        sleep(pause).await;
    }
}

/// Ends when the server has another version and not this one any more: it was upgraded, or the other way round.
async fn version_left(client: &Client, version: &'static str) {
    loop {
        sleep(VERSION_PAUSE).await;
        // A failure, and a server that knows nothing of DRA, may be those of a moment.
        if matches!(slices::version(client, Some(version)).await, Ok(Some(other)) if other != version) {
            return;
        }
    }
}

async fn sweep<R: Rules>(driver: &Driver<R>) -> Infallible {
    loop {
        if let Err(error) = driver.sweep().await {
            log::line(&format!("claims that are gone: {error}"));
        }
        sleep(SWEEP_TIME).await;
    }
}

/// Ends when the socket has lost its name.
async fn lost(socket: &Socket) {
    while socket.is_there() {
        sleep(LOOK_TIME).await;
    }
}

/// Listens at a path, forever; `serve` has each listener until the socket is removed.
async fn keep_socket<F>(path: PathBuf, mut serve: impl FnMut(tokio::net::UnixListener) -> F) -> Infallible
where
    F: Future<Output = String>,
{
    loop {
        match Socket::listen(&path) {
            Ok((socket, listener)) => tokio::select! {
                () = lost(&socket) => log::line(&format!("{} was removed: made once more", path.display())),
                error = serve(listener) => log::line(&format!("{}: {error}", path.display())),
            },
            Err(error) => log::line(&format!("{}: {error}", path.display())),
        }
        sleep(PAUSE).await;
    }
}

async fn serve_driver<R: Rules>(path: PathBuf, driver: Arc<Driver<R>>) -> Infallible {
    let serve = |listener| {
        let served = grpc::serve(listener, driver.clone());
        async { served.await.err().map_or("it has ended".into(), |error| error.to_string()) }
    };
    keep_socket(path, serve).await
}

async fn serve_registration(path: PathBuf, info: PluginInfo) -> Infallible {
    let serve = |listener: tokio::net::UnixListener| {
        let info = info.clone();
        async move {
            let mut connections = JoinSet::new();
            loop {
                let connection = match listener.accept().await {
                    Ok((connection, _)) => connection,
                    Err(error) => return error.to_string(),
                };
                while connections.try_join_next().is_some() {}
                if connections.len() < REGISTRATION_CONNECTION_MAX {
                    let info = info.clone();
                    connections.spawn(async move {
                        if let Err(error) = registration::serve(connection, &info).await {
                            log::line(&format!("registration: {error}"));
                        }
                    });
                }
            }
        }
    };
    keep_socket(path, serve).await
}
