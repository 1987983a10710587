//! `freeflow-cluster-sim SCENE [options]`: one scene, as JSON. scripts/bench-cluster makes tables of many.
#![forbid(unsafe_code)]
use freeflow_cluster_sim::costs::{self, Size};
use freeflow_cluster_sim::world::{Pace, Setting};
use freeflow_cluster_sim::{fan_out, scenes};
use serde::Serialize;
use std::io;
use std::process::ExitCode;

const USAGE: &str = "\
usage: freeflow-cluster-sim SCENE [options]

scenes under virtual time:
  idle      nobody does anything
  change    one more rule is declared
  storm     all hosts join within a minute
  loss      a tenth of the hosts is cut off for five minutes
of this machine:
  cost      time and memory of a host's view
  fan-out   --etcd URL --pid PID: what a watcher costs a real etcd

  --hosts N  --vnics N (of each host)  --rules N  --declared N (vNICs, of cost)
  --sharing N        other hosts with vNICs of the same tenant, in a network of its own (default: all)
  --churn-s N        a vNIC of each host goes in this time, and another one comes (default: none does)
  --controllers N    (default 3)
  --controller       of cost: a controller's view
  --any-peer-count   as if a peers file took any number of hosts
  --carry-out-us N   a host takes so long to carry out, instead of as long as it took one here
  --watchers N       of fan-out
";

struct Asked {
    scene: String,
    setting: Setting,
    declared_vnics: usize,
    is_controller: bool,
    etcd: String,
    pid: u32,
    watchers: usize,
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Asked> {
    let scene = arguments.next()?;
    let mut asked = Asked {
        scene,
        setting: Setting::default(),
        declared_vnics: 0,
        is_controller: false,
        etcd: String::new(),
        pid: 0,
        watchers: 100,
    };
    while let Some(argument) = arguments.next() {
        let setting = &mut asked.setting;
        match argument.as_str() {
            "--hosts" => setting.hosts = arguments.next()?.parse().ok().filter(|count| (2..=65_536).contains(count))?,
            "--vnics" => setting.vnics = arguments.next()?.parse().ok()?,
            "--rules" => setting.rules = arguments.next()?.parse().ok()?,
            "--declared" => asked.declared_vnics = arguments.next()?.parse().ok()?,
            "--sharing" => setting.sharing = arguments.next()?.parse().ok()?,
            "--churn-s" => setting.churn_s = arguments.next()?.parse().ok()?,
            "--controllers" => setting.controllers = arguments.next()?.parse().ok()?,
            "--controller" => asked.is_controller = true,
            "--any-peer-count" => setting.any_peer_count = true,
            "--carry-out-us" => setting.pace = Pace::Fixed(arguments.next()?.parse::<u64>().ok()? * 1000),
            "--etcd" => asked.etcd = arguments.next()?,
            "--pid" => asked.pid = arguments.next()?.parse().ok()?,
            "--watchers" => asked.watchers = arguments.next()?.parse().ok()?,
            _ => return None,
        }
    }
    Some(asked)
}

fn print(result: &impl Serialize) -> io::Result<bool> {
    println!("{}", serde_json::to_string(result)?);
    Ok(true)
}

fn run(asked: &Asked) -> io::Result<bool> {
    match asked.scene.as_str() {
        "idle" => print(&scenes::idle(asked.setting).map_err(io::Error::other)?),
        "change" => print(&scenes::changed(asked.setting).map_err(io::Error::other)?),
        "storm" => print(&scenes::storm(asked.setting).map_err(io::Error::other)?),
        "loss" => print(&scenes::loss(asked.setting).map_err(io::Error::other)?),
        "cost" => print(&costs::measure(Size {
            setting: asked.setting,
            declared_vnics: asked.declared_vnics,
            is_controller: asked.is_controller,
        })?),
        "fan-out" => print(&fan_out::measure(&asked.etcd, asked.pid, asked.watchers)?),
        _ => Ok(false),
    }
}

fn main() -> ExitCode {
    let done = parse(std::env::args().skip(1)).map(|asked| run(&asked));
    match done {
        Some(Ok(true)) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("freeflow-cluster-sim: {error}");
            ExitCode::FAILURE
        }
        Some(Ok(false)) | None => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
