//! `freeflow-kubernetes`: FreeFlow's parts of a Kubernetes cluster.
#![forbid(unsafe_code)]
use clap::{Args, CommandFactory, Parser, Subcommand};
use freeflow_kubernetes::api::{ApiError, Client, Configuration};
use freeflow_kubernetes::controller::{self, Declares, Settings};
use freeflow_kubernetes::declared::crds;
use freeflow_kubernetes::install::install;
use freeflow_kubernetes::{log, node};
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;

/// FreeFlow in a Kubernetes cluster.
#[derive(Parser)]
#[command(name = "freeflow-kubernetes", version)]
struct Arguments {
    #[command(flatten)]
    server: Server,
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct Server {
    /// The API server and our identity [default: those of the pod that this runs in]
    #[arg(long, global = true, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Print the API server's version, to show that it can be reached
    Check,
    /// Give pods of this node their vNICs: the DRA driver and device plugins, beside the router
    Node(node::Options),
    /// Declare to FreeFlow what Kubernetes has; of several, one does
    Controller(ControllerArguments),
    /// Copy FreeFlow's programs and libraries onto the node, for the hook and for containers
    Install {
        /// The node's directory; it gets bin and lib/freeflow
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        /// The directory that has them
        #[arg(long, value_name = "DIR", default_value = "/usr")]
        from: PathBuf,
    },
    /// Print the definitions of the custom resources, for `kubectl apply -f -`
    Crds,
    /// Write man pages into a directory
    #[command(hide = true)]
    Generate { directory: PathBuf },
}

#[derive(Args)]
struct ControllerArguments {
    /// Declare to one host, by the socket of its router's API
    #[arg(long, value_name = "PATH", default_value = "/run/freeflow/api.sock", conflicts_with = "cluster")]
    socket: PathBuf,
    /// Declare to all hosts of a cluster, by an operator's file
    #[arg(long, value_name = "FILE", env = "FREEFLOW_CLUSTER")]
    cluster: Option<PathBuf>,
    /// Namespace of the lease by which one of several leads [default: that of the pod or of the kubeconfig file]
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Name in the lease [default: the host's name and the process' number]
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    identity: Option<String>,
}

impl ControllerArguments {
    fn settings(&self, configuration: &Configuration) -> Settings {
        let declares = match &self.cluster {
            Some(file) => Declares::Cluster(file.clone()),
            None => Declares::Host(self.socket.clone()),
        };
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let own = || format!("{}-{}", host.trim(), std::process::id());
        Settings {
            declares,
            namespace: self.namespace.clone().unwrap_or_else(|| configuration.namespace().to_owned()),
            identity: self.identity.clone().unwrap_or_else(own),
        }
    }
}

fn main() -> ExitCode {
    match dispatch(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(&format!("freeflow-kubernetes: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    match &arguments.command {
        Command::Crds => {
            print!("{}", crds::yaml());
            return Ok(());
        }
        Command::Install { to, from } => {
            let count = install(from, to)?;
            log::line(&format!("{}: {count} files were copied", to.display()));
            return Ok(());
        }
        Command::Generate { directory } => {
            clap_mangen::generate_to(Arguments::command(), directory)?;
            return Ok(());
        }
        Command::Check | Command::Node(_) | Command::Controller(_) => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let configuration = Configuration::find(arguments.server.kubeconfig.as_deref())?;
    runtime.block_on(async {
        let client = Client::new(configuration.clone());
        match &arguments.command {
            Command::Check => check(&client).await?,
            Command::Node(options) => node::run(options, client).await?,
            Command::Controller(arguments) => controller::run(&client, &arguments.settings(&configuration)).await?,
            Command::Crds | Command::Install { .. } | Command::Generate { .. } => {}
        }
        Ok(())
    })
}

async fn check(client: &Client) -> Result<(), ApiError> {
    let version: Value = client.get("/version").await?;
    println!("Kubernetes {}", version["gitVersion"].as_str().unwrap_or("of an unknown version"));
    Ok(())
}
