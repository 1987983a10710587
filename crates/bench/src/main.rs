//! `freeflow-bench`: see `--help` and docs/performance/METHOD.md.
use freeflow_bench::host::{Freeflow, MODES};
use freeflow_bench::journal::Journal;
use freeflow_bench::limits::handoff::Handoff;
use freeflow_bench::limits::{self, Effort, Limit};
use freeflow_bench::report::{Report, idle_table, limits_table, machine, measured_table, perftest_table};
use freeflow_bench::suite::{Pair, Plan, idle};
use freeflow_bench::verbs::{Job, Memory, Operation, Traffic, agent};
use freeflow_bench::{
    beside_tcp, cluster, cm, direct, instructions, memory, mpi, neighbours, perftest, programs, qos, results, sys,
    wire, workers,
};
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
freeflow-bench: what this machine can do, what FreeFlow makes of it, and the ratio of the two

usage: freeflow-bench [options]
       freeflow-bench handoff   one hand-off between two cores, and nothing else
       freeflow-bench instructions FREEFLOW TABLE
                                instructions of each call of the data path, beside those in a table (scripts/instructions)

  --quick            about six minutes instead of half an hour; fewer sizes, shorter runs
  --only LIST        of limits, latency, bandwidth, idle, perftest, memory, workers, direct, wire, cm, programs, qos,
                     neighbours, cluster (default: all; the ratios of latency and bandwidth need limits; direct, wire, cm and qos have their own)
  --tables TEXT      of direct, wire, cm, programs and qos, only tables with this in their title: streams, trips, loss, flows ...
  --modes LIST       of fastpath, lowcpu, adaptive (default: all)
  --freeflow PATH    the freeflow program (default: dist/bin/freeflow)
  --programs DIR     the C test programs, of which neighbours are (default: target/test-programs)
  --simulate PATH    freeflow-cluster-sim, which simulates the hosts of cluster (default: target/release/freeflow-cluster-sim)
  --out DIR          where JSON and plots go (default: target/bench)
  --write-results FILE
                     put the tables of this run between the markers of this Markdown file (docs/performance/RESULTS.md)
  --one-group        put router and containers into one cpu cgroup (an experiment: it can starve the machine)
  --strict           exit with 1 when an expectation is missed or a limit is suspect
";

struct Options {
    quick: bool,
    strict: bool,
    one_group: bool,
    parts: Vec<String>,
    modes: Vec<String>,
    tables: String,
    freeflow: PathBuf,
    programs: PathBuf,
    simulate: PathBuf,
    out: PathBuf,
    results: Option<PathBuf>,
}

const PARTS: [&str; 14] = [
    "limits",
    "latency",
    "bandwidth",
    "idle",
    "perftest",
    "memory",
    "workers",
    "direct",
    "wire",
    "cm",
    "programs",
    "qos",
    "neighbours",
    "cluster",
];

fn list(text: &str, known: &[&str]) -> Result<Vec<String>, String> {
    let words: Vec<String> = text.split(',').map(str::to_owned).collect();
    match words.iter().find(|word| !known.contains(&word.as_str())) {
        Some(word) => Err(format!("{word}: not one of {}", known.join(", "))),
        None => Ok(words),
    }
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let all = |known: &[&str]| known.iter().map(|&word| word.to_owned()).collect();
    let mut options = Options {
        quick: false,
        strict: false,
        one_group: false,
        parts: all(&PARTS),
        modes: all(&MODES),
        tables: String::new(),
        freeflow: "dist/bin/freeflow".into(),
        programs: "target/test-programs".into(),
        simulate: "target/release/freeflow-cluster-sim".into(),
        out: "target/bench".into(),
        results: None,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} wants a value"));
        match argument.as_str() {
            "--quick" => options.quick = true,
            "--strict" => options.strict = true,
            "--one-group" => options.one_group = true,
            "--only" => options.parts = list(&value()?, &PARTS)?,
            "--modes" => options.modes = list(&value()?, &MODES)?,
            "--tables" => options.tables = value()?,
            "--freeflow" => options.freeflow = value()?.into(),
            "--programs" => options.programs = value()?.into(),
            "--simulate" => options.simulate = value()?.into(),
            "--out" => options.out = value()?.into(),
            "--write-results" => options.results = Some(value()?.into()),
            _ => return Err(format!("{argument}: no such option")),
        }
    }
    Ok(options)
}

impl Options {
    fn part(&self, name: &str) -> bool {
        self.parts.iter().any(|part| part == name)
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        Some("agent") => agent::main().map(|()| ExitCode::SUCCESS),
        Some("wire-end") => limits::wire::main(arguments.get(1).map_or("", String::as_str)).map(|()| ExitCode::SUCCESS),
        Some("handoff") => Handoff::measure().map(|handoff| {
            println!("{}", handoff.to_json());
            ExitCode::SUCCESS
        }),
        Some("instructions") => compare_instructions(&arguments[1..]),
        Some("-h" | "--help") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => match options(arguments.into_iter()) {
            Ok(options) => bench(&options),
            Err(error) => {
                eprintln!("freeflow-bench: {error}; try --help");
                return ExitCode::from(2);
            }
        },
    };
    result.unwrap_or_else(|error| {
        eprintln!("freeflow-bench: {error}");
        ExitCode::FAILURE
    })
}

/// FREEFLOW_PROGRAM TABLE
fn compare_instructions(arguments: &[String]) -> io::Result<ExitCode> {
    let [freeflow, table] = arguments else { return Err(io::Error::other("instructions: a program and a table")) };
    let now = instructions::measure(Path::new(freeflow)).map_err(io::Error::other)?;
    let text = instructions::table(&now);
    print!("{text}");
    if env::var_os("FREEFLOW_UPDATE").is_some() {
        fs::write(table, &text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let wrong = instructions::differences(&now, &fs::read_to_string(table)?);
    wrong.iter().for_each(|one| eprintln!("{one}"));
    if wrong.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("if it is meant: FREEFLOW_UPDATE=1 scripts/instructions");
    Ok(ExitCode::FAILURE)
}

fn bench(options: &Options) -> io::Result<ExitCode> {
    if let Some(file) = &options.results {
        // A wrong file is refused before half an hour of measuring.
        results::check(file)?;
    }
    sys::new_session_first_in_line();
    println!("freeflow-bench on {}", machine());
    let mut report = Report { quick: options.quick, one_group: options.one_group, ..Report::default() };
    measure_parts(options, &mut report)?;
    if !report.idle.is_empty() {
        let table = idle_table(&report.idle);
        report.journal.show(table);
    }
    report.show_expectations();
    let is_suspect = |limit: &&Limit| limit.suspect() || report.limits.is_contradicted(limit);
    let suspects: Vec<&Limit> = report.limits.list.iter().filter(is_suspect).collect();
    for limit in &suspects {
        println!("  suspect limit: {} ({} B); was the machine quiet?", limit.name, limit.bytes);
    }
    let missed = report.expectations().iter().any(|expectation| !expectation.met());
    println!("\n  written: {}", report.write(&options.out)?.display());
    if let Some(file) = &options.results {
        results::write(file, &report)?;
        println!("  written: {}", file.display());
    }
    let bad = !report.journal.failures.is_empty() || (options.strict && (missed || !suspects.is_empty()));
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Measures part by part; a failure is noted in the report, and the next part goes on.
fn measure_parts(options: &Options, report: &mut Report) -> io::Result<()> {
    if options.part("limits") {
        measure_limits(options, report)?;
    }
    if ["latency", "bandwidth", "idle", "perftest"].iter().any(|part| options.part(part)) {
        for mode in &options.modes {
            if let Err(error) = measure_mode(options, mode, report) {
                report.journal.fail(format!("{mode}: {error}"));
            }
        }
    }
    if options.part("memory")
        && let Err(error) = measure_memory(options, report)
    {
        report.journal.fail(format!("memory: {error}"));
    }
    let (freeflow, tables, journal) = (&options.freeflow, &options.tables, &mut report.journal);
    if options.part("workers") {
        let effort = if options.quick { (3, 150) } else { (5, 800) };
        if let Err(error) = workers::measure(freeflow, effort, journal, &mut report.workers) {
            journal.fail(format!("workers: {error}"));
        }
    }
    if options.part("direct") {
        let effort = if options.quick { direct::Effort::QUICK } else { direct::Effort::FULL };
        if let Err(error) = direct::measure(freeflow, effort, tables, journal, (&mut report.direct, &mut report.costs))
        {
            journal.fail(format!("direct: {error}"));
        }
    }
    if options.part("wire") {
        let effort = if options.quick { wire::Effort::QUICK } else { wire::Effort::FULL };
        if let Err(error) = wire::measure(freeflow, effort, tables, journal, &mut report.wire) {
            journal.fail(format!("wire: {error}"));
        }
    }
    if options.part("cm") {
        let effort = if options.quick { cm::Effort::QUICK } else { cm::Effort::FULL };
        if let Err(error) = cm::measure(freeflow, effort, tables, journal, &mut report.cm) {
            journal.fail(format!("cm: {error}"));
        }
    }
    if options.part("programs") {
        measure_programs(freeflow, options.quick, tables, journal, &mut report.programs);
    }
    if options.part("qos") {
        let effort = if options.quick { qos::Effort::QUICK } else { qos::Effort::FULL };
        if let Err(error) = qos::measure(freeflow, effort, tables, journal, &mut report.qos) {
            journal.fail(format!("qos: {error}"));
        }
    }
    if options.part("neighbours") {
        let effort = if options.quick { (1, 3000) } else { (3, 10_000) };
        if let Err(error) = neighbours::measure(freeflow, &options.programs, effort, journal, &mut report.neighbours) {
            journal.fail(format!("neighbours: {error}"));
        }
    }
    if options.part("cluster") {
        match cluster::measure(freeflow, &options.simulate, options.quick, &options.out, journal) {
            Ok(figures) => report.cluster = figures,
            Err(error) => journal.fail(format!("cluster: {error}")),
        }
    }
    Ok(())
}

/// Those with `only` in their titles.
fn measure_programs(freeflow: &Path, is_quick: bool, only: &str, journal: &mut Journal, all: &mut Vec<cm::Series>) {
    type Measure = fn(&Path, bool, &mut Journal, &mut Vec<cm::Series>) -> Result<(), String>;
    let parts: [(&str, Measure); 3] =
        [(programs::TITLE, programs::measure), (beside_tcp::TITLE, beside_tcp::measure), (mpi::TITLE, mpi::measure)];
    for (title, measure) in parts.into_iter().filter(|(title, _)| title.contains(only)) {
        if let Err(error) = measure(freeflow, is_quick, journal, all) {
            journal.fail(format!("{title}: {error}"));
        }
    }
}

type Group = (&'static str, fn(Effort) -> io::Result<Vec<Limit>>);

const GROUPS: [Group; 6] = [
    ("Limit: one cache line from core to core", limits::handoff::limits),
    ("Limit: small messages between two cores", limits::ring::limits),
    ("Limit: copying", limits::copy::limits),
    ("Limit: round trip through a third party", limits::relay::limits),
    ("Limit: bandwidth through a third party", limits::relay_copy::limits),
    ("Limit: waking a sleeper, and small costs", limits::wake::limits),
];

fn measure_limits(options: &Options, report: &mut Report) -> io::Result<()> {
    let effort = if options.quick { Effort::QUICK } else { Effort::FULL };
    for (title, group) in GROUPS {
        println!();
        report.journal.handoff("before")?;
        let limits = group(effort)?;
        report.journal.show(limits_table(title, &limits));
        report.journal.handoff("after")?;
        report.limits.list.extend(limits);
    }
    Ok(())
}

fn plan(options: &Options) -> Plan {
    if options.quick { Plan::quick() } else { Plan::full() }
}

/// A job that only opens a connection.
const NOTHING: Job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 0 };

fn measure_mode(options: &Options, mode: &str, report: &mut Report) -> Result<(), String> {
    let plan = plan(options);
    let host = Freeflow::up(&options.freeflow, mode, options.one_group)?;
    if options.part("idle") {
        report.idle.push(idle(&host, mode, "no program", plan.idle_s)?);
    }
    let mut pair = Pair::new(&host)?;
    for (part, traffic, unit) in
        [("latency", Traffic::Latency, "us a round trip"), ("bandwidth", Traffic::Bandwidth, "Gb/s")]
    {
        if !options.part(part) {
            continue;
        }
        println!();
        report.journal.handoff("before").map_err(|error| error.to_string())?;
        let mut measured = Vec::new();
        for (memory, job) in plan.jobs(traffic) {
            let one = pair.measure(mode, memory, job, &report.limits);
            if let Some(failure) = &one.failure {
                report.journal.fail(format!("{mode}, {part}, {job:?}, {memory:?}: {failure}"));
            }
            measured.push(one);
        }
        report.journal.show(measured_table(&format!("{mode}: {part}, {unit}"), traffic, &measured));
        report.journal.handoff("after").map_err(|error| error.to_string())?;
        report.measured.extend(measured);
    }
    if options.part("idle") {
        pair.connect(Memory::Shared, NOTHING)?;
        report.idle.push(idle(&host, mode, "two programs connected", plan.idle_s)?);
        pair.release()?;
    }
    if options.part("perftest") && (!options.quick || mode == "adaptive") {
        measure_perftest(options, mode, &mut pair, report)?;
    }
    Ok(())
}

/// Costs of registrations and objects do not depend on how the router waits.
fn measure_memory(options: &Options, report: &mut Report) -> Result<(), String> {
    let host = Freeflow::up(&options.freeflow, "adaptive", options.one_group)?;
    let mut pair = Pair::new(&host)?;
    println!();
    report.journal.handoff("before").map_err(|error| error.to_string())?;
    report.registrations = memory::registrations(&mut pair, options.quick);
    report.journal.show(memory::registrations_table(&report.registrations));
    report.footprints = memory::footprints(&mut pair, options.quick);
    report.journal.show(memory::footprints_table(&report.footprints));
    report.journal.handoff("after").map_err(|error| error.to_string())?;
    let failed = report.registrations.iter().filter_map(|one| Some(format!("{one:?}: {}", one.failure.as_ref()?)));
    let failed: Vec<String> = failed
        .chain(report.footprints.iter().filter_map(|one| Some(format!("{one:?}: {}", one.failure.as_ref()?))))
        .collect();
    failed.into_iter().for_each(|failure| report.journal.fail(failure));
    Ok(())
}

fn measure_perftest(options: &Options, mode: &str, pair: &mut Pair<'_>, report: &mut Report) -> Result<(), String> {
    println!();
    report.journal.handoff("before").map_err(|error| error.to_string())?;
    let address = pair.server_address()?;
    let figures = perftest::run(pair, mode, &address, options.quick);
    for one in &figures {
        if let Some(failure) = &one.failure {
            report.journal.fail(format!("{mode}, {}, {} B: {failure}", one.program, one.bytes));
        }
    }
    report.journal.show(perftest_table(&format!("{mode}: unmodified perftest programs"), &figures));
    report.journal.handoff("after").map_err(|error| error.to_string())?;
    report.perftest.extend(figures);
    Ok(())
}
