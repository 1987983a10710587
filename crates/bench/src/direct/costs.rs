//! Costs of an idle connected pair: CPU time, and memory.
use super::Effort;
use crate::expectation::Expectation;
use crate::host::{Agent, Freeflow};
use crate::suite::{Pair, connect, ended};
use crate::svg::{Plot, Row};
use crate::sys;
use crate::table::{Table, figure};
use crate::verbs::objects::Kind;
use crate::verbs::{Address, Job, Memory, Operation, Reply, Request, Traffic, Usage};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// An idle pair and its router together use less than this share of a core.
const IDLE_SHARE_MAX: f64 = 0.01;
const IDLE_SHARE_AIM: f64 = 0.001;
/// No object takes more, bytes.
const OBJECT_BYTES_MAX: f64 = 48.0 * 1024.0;
const OBJECT_BYTES_AIM: f64 = 24.0 * 1024.0;
/// Time to fall asleep.
const SETTLE: Duration = Duration::from_millis(500);

/// CPU time of a pair that is connected, was used, and is silent now; as shares of a core.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct IdlePair {
    pub seconds: f64,
    pub runner: f64,
    pub server: f64,
    pub router: f64,
}

impl IdlePair {
    fn total(&self) -> f64 {
        self.runner + self.server + self.router
    }
}

/// Memory of one object, bytes, in all processes together. A page that several have mapped counts
/// once.
#[derive(Clone, Debug, Serialize)]
pub struct ObjectCost {
    pub what: String,
    pub count: usize,
    pub resident: f64,
    /// Of the segments between router and programs; what nobody touched of them takes no memory.
    pub reserved: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Costs {
    pub idle: Option<IdlePair>,
    pub objects: Vec<ObjectCost>,
}

fn usage(agent: &mut Agent) -> Result<Usage, String> {
    match agent.ask(&Request::Usage)? {
        Reply::Used(usage) => Ok(usage),
        other => Err(format!("unexpected: {other:?}")),
    }
}

/// Each with a router and programs of its own: memory that was freed would serve again, and not be seen.
pub fn measure(freeflow: &Path, effort: Effort) -> Result<Costs, String> {
    let count = effort.objects;
    let idle = with_pair(freeflow, |pair| idle(pair, effort))?;
    let mut objects = Vec::new();
    for kind in [Kind::Cq, Kind::Qp] {
        objects.push(with_pair(freeflow, |pair| alone(pair, kind, count))?);
    }
    objects.extend(with_pair(freeflow, |pair| {
        // Once before, so that what is made only at first use is there already.
        connections(pair, 1)?;
        connections(pair, count)
    })?);
    Ok(Costs { idle: Some(idle), objects })
}

fn with_pair<T>(freeflow: &Path, work: impl FnOnce(&mut Pair<'_>) -> Result<T, String>) -> Result<T, String> {
    let host = Freeflow::up(freeflow, "adaptive", false)?;
    work(&mut Pair::new(&host)?)
}

fn idle(pair: &mut Pair<'_>, effort: Effort) -> Result<IdlePair, String> {
    let (traffic, operation) = (Traffic::Latency, Operation::Send);
    let job = Job { traffic, operation, bytes: 64, slots: 1, duration_ms: effort.duration_ms };
    let Pair { runner, server, host, .. } = pair;
    connect(runner, server, &Request::Prepare { memory: Memory::Ordinary, job })?;
    server.ask(&Request::Serve { job })?;
    ended(runner.ask(&Request::Run { job })?)?;
    ended(server.receive(crate::host::REPLY_MAX)?)?;
    thread::sleep(SETTLE);
    let look = |runner: &mut Agent, server: &mut Agent, host: &Freeflow| -> Result<[u64; 3], String> {
        Ok([usage(runner)?.cpu_ns, usage(server)?.cpu_ns, host.router_cpu_ns()])
    };
    let (begun, before) = (Instant::now(), look(runner, server, host)?);
    thread::sleep(Duration::from_secs_f64(effort.idle_s));
    let after = look(runner, server, host)?;
    let seconds = begun.elapsed().as_secs_f64();
    // The router's threads come and go: one that ended took its time with it.
    let share = |index: usize| after[index].saturating_sub(before[index]) as f64 / 1e9 / seconds;
    pair.release()?;
    Ok(IdlePair { seconds, runner: share(0), server: share(1), router: share(2) })
}

/// Memory in use: resident by all three processes, and reserved in segments.
fn memory(pair: &mut Pair<'_>) -> Result<(f64, f64), String> {
    let router = sys::share_bytes(&pair.host.router_pid.to_string()).ok_or("no smaps_rollup of the router")?;
    let ends = usage(&mut pair.runner)?.share_bytes + usage(&mut pair.server)?.share_bytes;
    let reserved = pair.host.status()?.get("segment_bytes").and_then(Value::as_u64).ok_or("no segment_bytes")?;
    Ok(((router + ends) as f64, reserved as f64))
}

fn hold(agent: &mut Agent, kind: Kind, count: usize) -> Result<(), String> {
    match agent.ask(&Request::Hold { kind, count })? {
        Reply::Held(..) => Ok(()),
        other => Err(format!("unexpected: {other:?}")),
    }
}

fn cost(what: &str, count: usize, (before, after): ((f64, f64), (f64, f64))) -> ObjectCost {
    let each = |after: f64, before: f64| (after - before) / count as f64;
    ObjectCost { what: what.to_owned(), count, resident: each(after.0, before.0), reserved: each(after.1, before.1) }
}

/// Objects of one program, which nobody uses.
fn alone(pair: &mut Pair<'_>, kind: Kind, count: usize) -> Result<ObjectCost, String> {
    hold(&mut pair.runner, kind, 1)?;
    pair.runner.ask(&Request::Release)?;
    let before = memory(pair)?;
    hold(&mut pair.runner, kind, count)?;
    let after = memory(pair)?;
    pair.runner.ask(&Request::Release)?;
    Ok(cost(kind.name(), count, (before, after)))
}

/// So many connections; each is a QP at either end.
fn connections(pair: &mut Pair<'_>, count: usize) -> Result<[ObjectCost; 2], String> {
    let addresses = |agent: &mut Agent| -> Result<Vec<Address>, String> {
        match agent.ask(&Request::HeldAddresses)? {
            Reply::FlowsPrepared(addresses) => Ok(addresses),
            other => Err(format!("unexpected: {other:?}")),
        }
    };
    let before = memory(pair)?;
    for agent in [&mut pair.runner, &mut pair.server] {
        hold(agent, Kind::Connection, count)?;
    }
    let (here, there) = (addresses(&mut pair.runner)?, addresses(&mut pair.server)?);
    pair.runner.ask(&Request::ConnectHeld { peers: there })?;
    pair.server.ask(&Request::ConnectHeld { peers: here })?;
    let connected = memory(pair)?;
    for index in 0..count {
        go_round(&mut pair.runner, &mut pair.server, index)?;
        go_round(&mut pair.server, &mut pair.runner, index)?;
    }
    let used = memory(pair)?;
    pair.release()?;
    let name = Kind::Connection.name();
    Ok([cost(name, 2 * count, (before, connected)), cost(&format!("{name}, all used once"), 2 * count, (before, used))])
}

fn go_round(from: &mut Agent, to: &mut Agent, index: usize) -> Result<(), String> {
    to.send(&Request::UseHeld { index, sends: false })?;
    from.ask(&Request::UseHeld { index, sends: true })?;
    to.receive(crate::host::REPLY_MAX).map(|_| ())
}

impl Costs {
    pub fn expectations(&self) -> Vec<Expectation> {
        let most = |what: String, value, at_most, aim| Expectation { what, value, at_least: None, at_most, aim };
        let idle = self.idle.iter().map(|idle| {
            let what = "direct: idle connected pair and its router, share of a core".to_owned();
            most(what, idle.total(), Some(IDLE_SHARE_MAX), Some(IDLE_SHARE_AIM))
        });
        let objects = self.objects.iter().map(|one| {
            most(
                format!("direct: bytes of a {}", one.what),
                one.resident,
                Some(OBJECT_BYTES_MAX),
                Some(OBJECT_BYTES_AIM),
            )
        });
        idle.chain(objects).collect()
    }

    pub fn tables(&self) -> Vec<Table> {
        let percent = |share: f64| format!("{:.3}", share * 100.0);
        let mut idle = Table::new("An idle connected pair, % of a core", &["seconds", "runner", "server", "router"]);
        if let Some(one) = &self.idle {
            idle.row(vec![figure(one.seconds), percent(one.runner), percent(one.server), percent(one.router)]);
        }
        let header = ["object", "count", "resident B", "bound B", "segments B, reserved"];
        let mut objects = Table::new("Memory for each object, router and both programs together", &header);
        for one in &self.objects {
            let count = one.count.to_string();
            objects.row(vec![
                one.what.clone(),
                count,
                figure(one.resident),
                figure(OBJECT_BYTES_MAX),
                figure(one.reserved),
            ]);
        }
        [idle, objects].into_iter().filter(|table| !table.is_empty()).collect()
    }

    pub fn plots(&self) -> Vec<Plot> {
        let row = |label: &str, value: f64, floor: f64| Row {
            group: label.to_owned(),
            label: label.to_owned(),
            value: Some(value),
            least: None,
            most: None,
            floor: Some(floor),
            aim: None,
        };
        let plot = |title: &str, axis: &str, rows| Plot { title: title.to_owned(), axis: axis.to_owned(), rows };
        let percent = |share: f64| share * 100.0;
        let idle = self.idle.iter().map(|idle| {
            let parts = [("runner", idle.runner), ("server", idle.server), ("router", idle.router)];
            let rows = parts.map(|(label, share)| row(label, percent(share), percent(IDLE_SHARE_MAX)));
            plot("Within a host, direct: an idle connected pair", "% of a core: less is better", rows.to_vec())
        });
        let rows: Vec<Row> =
            self.objects.iter().map(|one| row(&one.what, one.resident / 1024.0, OBJECT_BYTES_MAX / 1024.0)).collect();
        let objects = (!rows.is_empty())
            .then(|| plot("Within a host, direct: memory for each object", "KB resident: less is better", rows));
        idle.chain(objects).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_and_plots_of_costs() {
        let idle = IdlePair { seconds: 5.0, runner: 0.0, server: 0.0005, router: 0.02 };
        let object = ObjectCost { what: "CQ".into(), count: 10, resident: 2048.0, reserved: 16_384.0 };
        let costs = Costs { idle: Some(idle), objects: vec![object] };
        assert_eq!(costs.expectations().iter().map(Expectation::met).collect::<Vec<_>>(), [false, true]);
        assert_eq!(costs.tables().len(), 2);
        assert!(costs.plots().iter().zip([3, 1]).all(|(plot, rows)| plot.rows.len() == rows));
        let none = Costs::default();
        assert!(none.expectations().is_empty() && none.plots().is_empty() && none.tables().is_empty());
    }
}
