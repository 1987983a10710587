//! Everything measured in one run: printed as tables, kept as JSON.
use crate::cm;
use crate::direct::{self, Costs};
use crate::expectation::Expectation;
use crate::journal::Journal;
use crate::limits::handoff::Handoff;
use crate::limits::{Limit, Limits, SUSPECT_FACTOR};
use crate::memory::{self, Footprint, Registered};
use crate::neighbours::Neighbour;
use crate::perftest;
use crate::qos;
use crate::suite::{Idle, Measured};
use crate::svg::{Plot, Row};
use crate::table::{Table, bytes, figure};
use crate::verbs::{Memory, Operation, Traffic};
use crate::wire;
use crate::workers::{self, Scaling};
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A 64-byte round trip takes at most so many times the bare relay's.
const ROUND_TRIP_TIMES_MAX: f64 = 2.0;
/// A stream of this size or more, from shared memory, has at least this share of the bare relay's bandwidth.
const STREAM_BYTES_MIN: usize = 64 << 10;
const STREAM_SHARE_MIN: f64 = 0.6;
/// An idle router that sleeps uses less than this share of a core.
const IDLE_SHARE_MAX: f64 = 0.01;

#[derive(Default)]
pub struct Report {
    pub quick: bool,
    pub one_group: bool,
    pub limits: Limits,
    pub measured: Vec<Measured>,
    pub idle: Vec<Idle>,
    pub perftest: Vec<perftest::Figure>,
    pub registrations: Vec<Registered>,
    pub footprints: Vec<Footprint>,
    pub wire: Vec<wire::Series>,
    pub direct: Vec<direct::Series>,
    pub cm: Vec<cm::Series>,
    pub programs: Vec<cm::Series>,
    pub qos: Vec<qos::Series>,
    pub neighbours: Vec<Neighbour>,
    pub costs: Costs,
    pub workers: Vec<Scaling>,
    /// As its script gives them.
    pub cluster: Value,
    pub journal: Journal,
}

impl Report {
    /// Expectations in the modes that poll while there is work. LowCPU pays a wake-up for each
    /// message by design.
    pub fn expectations(&self) -> Vec<Expectation> {
        let mut list = Vec::new();
        for one in &self.measured {
            let Some(ratio) = one.ratio else { continue };
            if one.mode == "lowcpu" || one.memory != Memory::Shared {
                continue;
            }
            let (operation, size) = (one.job.operation, bytes(one.job.bytes));
            match one.job.traffic {
                Traffic::Latency if operation == Operation::Send && one.job.bytes == 64 => list.push(Expectation {
                    what: format!("{}: {size} SEND round trip, times the bare relay", one.mode),
                    value: ratio,
                    at_least: None,
                    at_most: Some(ROUND_TRIP_TIMES_MAX),
                    aim: None,
                }),
                Traffic::Bandwidth if one.job.bytes >= STREAM_BYTES_MIN => list.push(Expectation {
                    what: format!("{}: {size} {} stream, share of the bare relay", one.mode, operation.name()),
                    value: ratio,
                    at_least: Some(STREAM_SHARE_MIN),
                    at_most: None,
                    aim: None,
                }),
                Traffic::Latency | Traffic::Bandwidth | Traffic::BandwidthRead => {}
            }
        }
        for idle in self.idle.iter().filter(|idle| idle.mode != "fastpath") {
            list.push(Expectation {
                what: format!("{}: idle router, {}, share of a core", idle.mode, idle.what),
                value: idle.share,
                at_least: None,
                at_most: Some(IDLE_SHARE_MAX),
                aim: None,
            });
        }
        list.extend(self.direct.iter().filter_map(direct::Series::expectation));
        list.extend(self.cm.iter().chain(&self.programs).filter_map(cm::Series::expectation));
        list.extend(self.qos.iter().filter_map(qos::Series::expectation));
        list.extend(self.neighbours.iter().flat_map(Neighbour::expectations));
        list.extend(self.costs.expectations());
        list.extend(self.workers.iter().filter_map(Scaling::expectation));
        list.extend(wire::ratios(&self.wire).into_iter().map(|ratio| {
            let less = ratio.less_is_better();
            Expectation {
                what: format!("two hosts: {}", ratio.what),
                value: ratio.value,
                at_least: (!less).then_some(ratio.floor),
                at_most: less.then_some(ratio.floor),
                aim: Some(ratio.aim),
            }
        }));
        list
    }

    pub fn show_expectations(&mut self) {
        let mut table = Table::new("Expected on two cores", &["what", "value", "bound", "aim", ""]);
        for one in self.expectations() {
            let bound = match (one.at_least, one.at_most) {
                (Some(least), Some(most)) => format!("{} to {}", figure(least), figure(most)),
                (Some(bound), None) => format!(">= {}", figure(bound)),
                (None, Some(bound)) => format!("<= {}", figure(bound)),
                (None, None) => String::new(),
            };
            let met = match (one.met(), one.reached()) {
                (false, _) => "MISSED",
                (true, true) => "aim reached",
                (true, false) => "met",
            };
            let aim = one.aim.map_or_else(String::new, figure);
            table.row(vec![one.what.clone(), figure(one.value), bound, aim, met.to_owned()]);
        }
        if !table.is_empty() {
            self.journal.show(table);
        }
    }

    pub fn to_json(&self) -> Value {
        let handoff = |(when, handoff): &(String, Handoff)| json!({ "when": when, "handoff": handoff.to_json() });
        let handoffs: Vec<Value> = self.journal.handoffs.iter().map(handoff).collect();
        let expectations: Vec<Value> =
            self.expectations().iter().map(|one| json!({ "expectation": one, "met": one.met() })).collect();
        json!({
            "format": 1, "quick": self.quick, "one_group": self.one_group, "unix_time_s": unix_time_s(), "machine": machine(),
            "handoffs": handoffs,
            "limits": self.limits.list.iter().map(Limit::to_json).collect::<Vec<_>>(),
            "measured": self.measured, "idle": self.idle, "perftest": self.perftest,
            "registrations": self.registrations, "footprints": self.footprints, "wire": self.wire,
            "direct": self.direct, "cm": self.cm, "programs": self.programs, "qos": self.qos, "neighbours": self.neighbours, "costs": self.costs, "workers": self.workers, "cluster": self.cluster,
            "expectations": expectations, "failures": self.journal.failures,
        })
    }

    /// One for each table of ratios.
    pub fn plots(&self) -> Vec<Plot> {
        let mut plots = direct::plots(&self.direct);
        plots.extend(cm::plots(&self.cm));
        plots.extend(cm::plots(&self.programs));
        plots.extend(qos::plots(&self.qos));
        plots.extend(self.costs.plots());
        for traffic in [Traffic::Latency, Traffic::Bandwidth] {
            plots.extend(measured_plots(&self.measured, traffic));
        }
        for less in [true, false] {
            let ratios = wire::ratios(&self.wire).into_iter().filter(|ratio| ratio.less_is_better() == less);
            let row = |ratio: wire::Ratio| Row {
                group: ratio.what.to_owned(),
                label: ratio.what.to_owned(),
                value: Some(ratio.value),
                least: None,
                most: None,
                floor: Some(ratio.floor),
                aim: Some(ratio.aim),
            };
            let rows: Vec<Row> = ratios.map(row).collect();
            let (title, better) = if less { ("Two hosts: durations", "less") } else { ("Two hosts: rates", "more") };
            if !rows.is_empty() {
                plots.push(Plot { title: title.to_owned(), axis: format!("ratio: {better} is better"), rows });
            }
        }
        plots.extend(workers::plot(&self.workers));
        plots.extend(memory::registrations_plot(&self.registrations));
        plots.extend(memory::footprints_plot(&self.footprints));
        plots
    }

    /// Writes `UNIX_TIME.json` and `latest.json`, and the plots, each in a file named after its
    /// table. Plots of earlier runs, which `latest.json` does not say, are removed.
    pub fn write(&self, directory: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(directory)?;
        let mut text = serde_json::to_string_pretty(&self.to_json())?;
        text.push('\n');
        let path = directory.join(format!("{}.json", unix_time_s()));
        fs::write(&path, &text)?;
        fs::write(directory.join("latest.json"), &text)?;
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "svg") {
                fs::remove_file(path)?;
            }
        }
        for plot in self.plots() {
            fs::write(directory.join(plot.file_name()), plot.to_svg())?;
        }
        Ok(path)
    }
}

pub fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The machine of the figures.
pub fn machine() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "cpu": field("model name"), "cpu_family": field("cpu family"), "cpu_model": field("model"),
        "cpus": crate::sys::cpus().len(), "kernel": kernel.trim(),
    })
}

/// One group of limits.
pub fn limits_table(title: &str, limits: &[Limit]) -> Table {
    let header = ["limit", "size", "p10", "p50", "p99", "unit", "reference", "times worse", ""];
    let mut table = Table::new(title, &header);
    for limit in limits {
        let size = if limit.bytes == 0 { String::new() } else { bytes(limit.bytes) };
        let times = limit.times_worse();
        let reference = match (times, limit.better) {
            (None, _) => None,
            (Some(times), crate::limits::Better::Lower) => Some(limit.summary.p50 / times),
            (Some(times), crate::limits::Better::Higher) => Some(limit.summary.p50 * times),
        };
        let or_nothing = |value: Option<f64>| value.map_or_else(String::new, figure);
        table.row(vec![
            limit.name.clone(),
            size,
            figure(limit.summary.p10),
            figure(limit.summary.p50),
            figure(limit.summary.p99),
            limit.unit.to_owned(),
            or_nothing(reference),
            or_nothing(times),
            if limit.suspect() { format!("over {SUSPECT_FACTOR}!") } else { String::new() },
        ]);
    }
    table
}

fn or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), figure)
}

/// One mode's measurements of one kind of traffic.
pub fn measured_table(title: &str, traffic: Traffic, measured: &[Measured]) -> Table {
    let ratio = match traffic {
        Traffic::Latency => "x limit",
        Traffic::Bandwidth | Traffic::BandwidthRead => "of limit",
    };
    let header = [
        "operation",
        "memory",
        "size",
        "p10",
        "p50",
        "p99",
        "M msg/s",
        "limit",
        ratio,
        "router us",
        "runner us",
        "server us",
        "router CPU",
    ];
    let mut table = Table::new(title, &header);
    for one in measured {
        let figures = one.outcome.and_then(|outcome| outcome.figures);
        let rate = one.outcome.map(|outcome| one.message_count as f64 * 1e3 / outcome.elapsed_ns.max(1) as f64);
        let name = match &one.failure {
            Some(_) => format!("{} FAILED", one.job.operation.name()),
            None => one.job.operation.name().to_owned(),
        };
        table.row(vec![
            name,
            one.memory.name().to_owned(),
            bytes(one.job.bytes),
            or_dash(figures.map(|figures| figures.p10)),
            or_dash(figures.map(|figures| figures.p50)),
            or_dash(figures.map(|figures| figures.p99)),
            or_dash(rate),
            or_dash(one.limit.as_ref().map(|(_, limit)| *limit)),
            or_dash(one.ratio),
            or_dash(one.router_us),
            or_dash(one.runner_us),
            or_dash(one.server_us),
            one.router_share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0)),
        ]);
    }
    table
}

/// One plot for each mode.
fn measured_plots(measured: &[Measured], traffic: Traffic) -> Vec<Plot> {
    let (name, axis) = match traffic {
        Traffic::Latency => ("latency", "times the limit: less is better"),
        Traffic::Bandwidth | Traffic::BandwidthRead => ("bandwidth", "share of the limit: more is better"),
    };
    let mut plots: Vec<Plot> = Vec::new();
    for one in measured.iter().filter(|one| one.job.traffic == traffic && one.limit.is_some()) {
        let title = format!("{}: {name}", one.mode);
        if plots.last().is_none_or(|plot| plot.title != title) {
            plots.push(Plot { title, axis: axis.to_owned(), rows: Vec::new() });
        }
        let group = format!("{}, {}", one.job.operation.name(), one.memory.name());
        let label = format!("{group}, {}", bytes(one.job.bytes));
        let row = Row { group, label, value: one.ratio, least: None, most: None, floor: None, aim: None };
        if let Some(plot) = plots.last_mut() {
            plot.rows.push(row);
        }
    }
    plots
}

pub fn idle_table(idle: &[Idle]) -> Table {
    let header = ["idle router", "seconds", "all threads, % of a core", "worker, % of a core"];
    let mut table = Table::new("What a router without work costs", &header);
    let percent = |share: f64| format!("{:.2}", share * 100.0);
    for one in idle {
        let worker = one.worker_share.map_or_else(|| "-".to_owned(), percent);
        table.row(vec![format!("{}, {}", one.mode, one.what), figure(one.seconds), percent(one.share), worker]);
    }
    table
}

pub fn perftest_table(title: &str, figures: &[perftest::Figure]) -> Table {
    let mut table = Table::new(title, &["program", "size", "typical us", "p99 us", "Gb/s", "M msg/s"]);
    for one in figures {
        let name = if one.failure.is_some() { format!("{} FAILED", one.program) } else { one.program.to_owned() };
        table.row(vec![
            name,
            bytes(one.bytes),
            or_dash(one.typical_us),
            or_dash(one.p99_us),
            or_dash(one.average_gbit_per_s),
            or_dash(one.million_per_s),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_fastpath_router_is_no_surprise() {
        let idle = |mode: &str| Idle { mode: mode.into(), what: "w", seconds: 5.0, share: 0.99, worker_share: None };
        let report = Report { idle: vec![idle("fastpath"), idle("lowcpu"), idle("adaptive")], ..Report::default() };
        let expectations = report.expectations();
        assert_eq!(expectations.len(), 2);
        assert!(expectations.iter().all(|expectation| !expectation.met()));
    }

    #[test]
    fn each_table_of_ratios_has_a_plot() {
        let failure = Some("failed".to_owned());
        let report = Report {
            workers: vec![Scaling {
                bytes: 4096,
                cores: 8,
                one: vec![10.0, 20.0, 10.0],
                two: vec![15.0, 36.0, 16.0],
                failure: None,
            }],
            registrations: vec![Registered {
                memory: Memory::Ordinary,
                bytes: 4096,
                threads: 0,
                failure: failure.clone(),
                cost: None,
            }],
            footprints: vec![Footprint { kind: crate::verbs::objects::Kind::Cq, count: 9, failure, cost: None }],
            ..Report::default()
        };
        let plots = report.plots();
        let names: Vec<String> = plots.iter().map(Plot::file_name).collect();
        assert_eq!(names, ["workers.svg", "registration.svg", "memory-for-each-object.svg"]);
        let row = &plots[0].rows[0];
        assert_eq!((row.value, row.least, row.most), (Some(1.6), Some(1.5), Some(1.8)));
        assert_eq!([plots[1].rows[0].value, plots[2].rows[0].value], [None, None]);
    }

    #[test]
    fn the_report_is_json() {
        let report = Report::default();
        let directory = std::env::temp_dir().join(format!("freeflow-bench-test.{}", std::process::id()));
        fs::create_dir_all(&directory).expect("made");
        let stale = directory.join("of-an-earlier-run.svg");
        fs::write(&stale, "<svg/>").expect("written");
        let path = report.write(&directory).expect("written");
        let text = fs::read_to_string(path).expect("read");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["format"], json!(1));
        assert_eq!(fs::read_to_string(directory.join("latest.json")).expect("read"), text);
        assert!(!stale.exists());
        fs::remove_dir_all(directory).expect("removed");
    }
}
