//! `freeflow peers`: this host's key, and what it knows of the other hosts.

use crate::admin::Admin;
use crate::arguments::{Format, Peers};
use crate::failure::Result;
use crate::keys;
use crate::output;
use crate::up;
use freeflow_hostnet::bridges;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::PeerStatus;

pub fn peers(run_dir: &RunDir, action: Peers) -> Result<()> {
    match action {
        Peers::Key { file } => output::line(keys::key(&file)?),
        Peers::Ls { output } => list(run_dir, output.format)?,
        Peers::Reload => {
            reload(run_dir)?;
            output::line("The peers file was read again.");
        }
    }
    Ok(())
}

/// Has the router read the peers file again; the IP paths of all networks follow the same file.
pub fn reload(run_dir: &RunDir) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    admin.reload_peers()?;
    let joined = match run_dir.settings() {
        Some(settings) => {
            let _lock = run_dir.lock()?;
            up::join(run_dir, &settings)
        }
        None => Ok(()),
    };
    // The others follow, however it went with the network `default`.
    let refreshed = bridges::refresh(run_dir, || Ok(admin.networks()?));
    joined.and(refreshed.map_err(Into::into))
}

fn list(run_dir: &RunDir, format: Format) -> Result<()> {
    let status = Admin::connect(run_dir)?.peers()?;
    if format == Format::Json {
        output::json(&status);
        return Ok(());
    }
    if status.file.is_empty() {
        output::line(format!(
            "This host knows no others; bring it up with: freeflow{} up --peers FILE",
            run_dir.option()
        ));
        return Ok(());
    }
    let mut rows = vec![
        ["HOST", "ADDRESS", "STATE", "ROUND TRIP", "ADDRESSES", "WIRE", "ICRC", "FRAMES"].map(String::from).to_vec(),
    ];
    rows.extend(status.peers.iter().map(row));
    output::table(&rows);
    status.peers.iter().filter_map(problem).for_each(output::line);
    let refused: u64 = status.peers.iter().map(|peer| peer.counters.refused_announcements).sum();
    let refused_cm: u64 = status.peers.iter().map(|peer| peer.counters.refused_cm).sum();
    if status.unknown_connections + status.refused_handshakes + refused + refused_cm > 0 {
        output::line(format!(
            "Refused: {} connections from unknown addresses, {} without the right key, {refused} announcements, {refused_cm} messages of \
             connection management",
            status.unknown_connections, status.refused_handshakes
        ));
    }
    Ok(())
}

/// Why a host is not connected, if more is known than that it does not answer.
pub fn problem(peer: &PeerStatus) -> Option<String> {
    let problem = peer.problem.as_ref().filter(|_| peer.state != "up")?;
    Some(format!("{} is not connected; its last connection ended: {problem}", peer.host))
}

fn row(peer: &PeerStatus) -> Vec<String> {
    let is_up = peer.state == "up";
    let yes = |yes: bool| if !is_up { "-" } else { ["no", "yes"][usize::from(yes)] }.to_string();
    vec![
        peer.host.clone(),
        peer.address.to_string(),
        format!("{} {}", peer.state, output::duration(peer.state_s)),
        peer.rtt_us.map_or("-".to_string(), |rtt_us| format!("{:.2} ms", rtt_us as f64 / 1000.0)),
        peer.route_count.to_string(),
        if peer.sealed { "sealed" } else { "plain" }.into(),
        yes(peer.icrc),
        yes(peer.frames),
    ]
}
