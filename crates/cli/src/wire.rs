//! `freeflow wire status`, `wire faults`, `capture`.

use crate::admin::Admin;
use crate::arguments::{Capture, FaultArguments, Format, WireAction};
use crate::failure::{Context, Failure, Result, fail};
use crate::output;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::{Named, WireFaults, WireStatus};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::net::IpAddr;
use std::path::Path;

/// Passed on at once, bytes.
const COPY_BYTES: usize = 1 << 16;

pub fn wire(run_dir: &RunDir, action: WireAction) -> Result<()> {
    match action {
        WireAction::Status { output } => status(run_dir, output.format),
        WireAction::Faults(arguments) => faults(run_dir, &arguments),
    }
}

/// Counts by name, as JSON has them.
type Counts<'a> = BTreeMap<&'a str, u64>;

fn counts(named: &[Named]) -> Counts<'_> {
    named.iter().map(|(name, count)| (name.as_str(), *count)).collect()
}

#[derive(Serialize)]
struct Host<'a> {
    number: u32,
    address: IpAddr,
    external: bool,
    mtu: u16,
    frame_bytes: u16,
    sealed: bool,
    qp_count: u32,
    counters: Counts<'a>,
}

#[derive(Serialize)]
struct Qp<'a> {
    qpn: u32,
    dest_qpn: u32,
    host: u32,
    window_bytes: u64,
    in_flight_bytes: u64,
    smoothed_rtt_ns: u64,
    counters: Counts<'a>,
}

/// The JSON form of `freeflow wire status`.
#[derive(Serialize)]
struct Wire<'a> {
    open: bool,
    address: Option<IpAddr>,
    hosts: Vec<Host<'a>>,
    counters: Counts<'a>,
    drops: Counts<'a>,
    faults: Option<WireFaults>,
    qps: Vec<Qp<'a>>,
}

impl<'a> Wire<'a> {
    fn of(status: &'a WireStatus) -> Self {
        let hosts = status.hosts.iter().map(|host| Host {
            number: host.number,
            address: host.address,
            external: host.external,
            mtu: host.mtu,
            frame_bytes: host.frame_bytes,
            sealed: host.sealed,
            qp_count: host.qp_count,
            counters: counts(&host.counters),
        });
        let qps = status.qps.iter().map(|qp| Qp {
            qpn: qp.qpn,
            dest_qpn: qp.dest_qpn,
            host: qp.host,
            window_bytes: qp.window_bytes,
            in_flight_bytes: qp.in_flight_bytes,
            smoothed_rtt_ns: qp.smoothed_rtt_ns,
            counters: counts(&qp.counters),
        });
        Self {
            open: status.open,
            address: status.address,
            hosts: hosts.collect(),
            counters: counts(&status.counters),
            drops: counts(&status.drops),
            faults: status.faults,
            qps: qps.collect(),
        }
    }
}

fn status(run_dir: &RunDir, format: Format) -> Result<()> {
    let status = Admin::connect(run_dir)?.wire_status()?;
    let wire = Wire::of(&status);
    if format == Format::Json {
        output::json(&wire);
        return Ok(());
    }
    let Some(address) = wire.address.filter(|_| wire.open) else {
        output::line("No other hosts: the host was brought up without --peers");
        return Ok(());
    };
    let of = |counts: &Counts<'_>, name| counts.get(name).copied().unwrap_or(0);
    output::line(format!(
        "Address {address}: {} packets out ({}), {} in ({})",
        of(&wire.counters, "packets_sent"),
        output::bytes(of(&wire.counters, "bytes_sent")),
        of(&wire.counters, "packets_received"),
        output::bytes(of(&wire.counters, "bytes_received")),
    ));
    let bad = [
        "bad_icrc",
        "unsealed",
        "unknown_key",
        "wrong_shard",
        "replayed",
        "bad_tag",
        "truncated",
        "unknown_source",
        "receive_overflow",
        "no_key",
        "send_dropped",
    ];
    let drops = wire.drops.iter().map(|(name, count)| (*name, *count));
    let drops: Vec<String> = drops
        .chain(bad.map(|name| (name, of(&wire.counters, name))))
        .filter(|&(_, count)| count != 0)
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    output::line(format!("Dropped: {}", if drops.is_empty() { "nothing".into() } else { drops.join(", ") }));
    if let Some(faults) = &wire.faults {
        output::line(format!("Faults injected: {}", describe(faults)));
    }
    let mut rows = vec![
        ["HOST", "ADDRESS", "KIND", "WIRE", "MTU", "FRAMES", "QPS", "OUT", "IN", "AGAIN"].map(String::from).to_vec(),
    ];
    rows.extend(wire.hosts.iter().map(|host| {
        vec![
            host.number.to_string(),
            host.address.to_string(),
            if host.external { "external" } else { "freeflow" }.into(),
            if host.sealed { "sealed" } else { "plain" }.into(),
            host.mtu.to_string(),
            if host.frame_bytes == 0 { "-".into() } else { host.frame_bytes.to_string() },
            host.qp_count.to_string(),
            output::bytes(of(&host.counters, "sent_bytes")),
            output::bytes(of(&host.counters, "rcvd_bytes")),
            of(&host.counters, "retransmitted_pkts").to_string(),
        ]
    }));
    if rows.len() > 1 {
        output::line("");
        output::table(&rows);
    }
    Ok(())
}

fn percent(ppm: u32) -> String {
    format!("{}%", f64::from(ppm) / 10_000.0)
}

fn describe(faults: &WireFaults) -> String {
    let kinds = [
        ("loss", faults.loss_ppm),
        ("duplicates", faults.duplicate_ppm),
        ("reordering", faults.reorder_ppm),
        ("corruption", faults.corrupt_ppm),
        ("delay", faults.delay_ppm),
    ];
    let mut all: Vec<String> =
        kinds.iter().filter(|(_, ppm)| *ppm != 0).map(|(name, ppm)| format!("{name} {}", percent(*ppm))).collect();
    if faults.delay_ppm != 0 {
        all.push(format!("of {} us", faults.delay_ns / 1000));
    }
    all.join(", ")
}

fn faults(run_dir: &RunDir, arguments: &FaultArguments) -> Result<()> {
    let FaultArguments { off, loss, duplicate, reorder, corrupt, delay, delayed, seed } = *arguments;
    let faults = WireFaults {
        seed,
        loss_ppm: loss.unwrap_or(0),
        duplicate_ppm: duplicate.unwrap_or(0),
        reorder_ppm: reorder.unwrap_or(0),
        delay_ppm: if delay.is_some() { delayed } else { 0 },
        delay_ns: delay.unwrap_or(0),
        corrupt_ppm: corrupt.unwrap_or(0),
    };
    let is_nothing = WireFaults { seed: 0, ..faults } == WireFaults::default();
    if off.is_none() && is_nothing {
        fail!("say which faults, or off; see freeflow wire faults --help");
    }
    Admin::connect(run_dir)?.set_wire_faults((off.is_none()).then_some(faults))
}

/// Passes what the router captures on to a file, or to standard output.
pub fn capture(run_dir: &RunDir, arguments: &Capture) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    let is_stdout = arguments.write.as_deref().is_none_or(|path| path == Path::new("-"));
    if is_stdout && io::stdout().is_terminal() {
        fail!("packets are no text: name a file (-w FILE), or pipe them on (freeflow capture | wireshark -k -i -)");
    }
    let mut into: Box<dyn Write> = match &arguments.write {
        Some(path) if !is_stdout => Box::new(File::create(path).context(path.display())?),
        _ => Box::new(io::stdout()),
    };
    let (reader, writer) = rustix::pipe::pipe().context("pipe")?;
    admin.begin_capture(writer, arguments.count, arguments.seconds)?;
    copy(File::from(reader), &mut *into).map_err(|error| match &arguments.write {
        Some(path) if !is_stdout => Failure::new(format!("{}: {error}", path.display())),
        _ => Failure::new(format!("standard output: {error}")),
    })?;
    let (packets, lost, error) = admin.end_capture()?;
    if let Some(error) = error {
        fail!("the capture ended early: {error}");
    }
    output::complaint(format!("{packets} packets captured, {lost} lost because they came too fast"));
    Ok(())
}

/// Until the router's end closes. A reader of ours that left is no error.
fn copy(mut from: File, into: &mut dyn Write) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        match into.write_all(&buffer[..count]).and_then(|()| into.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            result => result?,
        }
    }
}
