//! `freeflow-kubernetes`: FreeFlow's parts of a Kubernetes cluster.
#![forbid(unsafe_code)]
use clap::{Args, Parser, Subcommand};
use freeflow_kubernetes::api::{ApiError, Client, Configuration};
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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let configuration = Configuration::find(arguments.server.kubeconfig.as_deref())?;
    runtime.block_on(async {
        let client = Client::new(configuration);
        match &arguments.command {
            Command::Check => check(&client).await?,
            Command::Node(options) => node::run(options, client).await?,
        }
        Ok(())
    })
}

async fn check(client: &Client) -> Result<(), ApiError> {
    let version: Value = client.get("/version").await?;
    println!("Kubernetes {}", version["gitVersion"].as_str().unwrap_or("of an unknown version"));
    Ok(())
}
