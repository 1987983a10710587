//! A program's control verbs and routed messages while a neighbour in another container plays
//! tricks with its own processes and memory, beside a neighbour that only burns processor time.
//!
//! The tricks are the C programs of the tests. What counts is what a trick adds to plain load: the
//! median over the windows' longest with it, less the median with as many busy loops.
use crate::expectation::Expectation;
use crate::host::{Freeflow, REPLY_MAX};
use crate::journal::Journal;
use crate::stats::{Summary, median};
use crate::suite::Pair;
use crate::table::{Table, figure};
use crate::verbs::{Job, Memory, Operation, Reply, Request, Traffic, Watched};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// Most time that a neighbour may add to a control verb, and to a routed message.
const CONTROL_ADDED_MS_MAX: f64 = 50.0;
const MESSAGE_ADDED_MS_MAX: f64 = 5.0;
const JOB: Job = Job { traffic: Traffic::Latency, operation: Operation::Write, bytes: 64, slots: 64, duration_ms: 0 };
/// A container has it only where its owner says so.
const FUSE: &str = "/dev/fuse";
const BUSY: &str = "while :; do :; done";

/// A program of tests/programs with its arguments, and how many processors it keeps busy.
struct Trick {
    name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    busy: usize,
}

const TRICKS: [Trick; 6] = [
    Trick { name: "idle", program: "stalls", arguments: &["idle"], busy: 0 },
    Trick { name: "execve under a held mmap lock", program: "stalls", arguments: &["mprotect", "8"], busy: 2 },
    Trick { name: "execve while FUSE does not answer", program: "stalls", arguments: &["fuse", "8"], busy: 0 },
    Trick { name: "execve in a loop", program: "stalls", arguments: &["exec-loop", "100"], busy: 1 },
    Trick { name: "connects and dies in a loop", program: "stalls", arguments: &["dies", "100"], busy: 1 },
    Trick { name: "holes punched under WRITEs", program: "memory", arguments: &["punch", "1000000"], busy: 2 },
];

/// The victim beside one neighbour.
#[derive(Clone, Debug, Serialize)]
pub struct Neighbour {
    pub trick: &'static str,
    /// Beside as many busy loops as the trick keeps processors busy.
    pub busy: Vec<Watched>,
    pub beside: Vec<Watched>,
    pub failure: Option<String>,
}

fn longest(runs: &[Watched], of: impl Fn(&Watched) -> &Vec<f64>) -> Option<Summary> {
    Summary::of(&mut runs.iter().flat_map(|run| of(run).iter().copied()).collect::<Vec<_>>())
}

impl Neighbour {
    fn added(&self, of: fn(&Watched) -> &Vec<f64>) -> Option<f64> {
        let middle =
            |runs: &[Watched]| median(&runs.iter().flat_map(|run| of(run).iter().copied()).collect::<Vec<_>>());
        Some(middle(&self.beside)? - middle(&self.busy)?).filter(|_| self.failure.is_none())
    }

    pub fn expectations(&self) -> Vec<Expectation> {
        type Part = (&'static str, fn(&Watched) -> &Vec<f64>, f64);
        let parts: [Part; 2] = [
            ("control verb", |watched| &watched.control_ms, CONTROL_ADDED_MS_MAX),
            ("routed message", |watched| &watched.message_ms, MESSAGE_ADDED_MS_MAX),
        ];
        let one = |(what, of, bound): Part| {
            Some(Expectation {
                what: format!("neighbours: {}, longest {what}, ms above busy loops", self.trick),
                value: self.added(of)?,
                at_least: None,
                at_most: Some(bound),
                aim: None,
            })
        };
        parts.into_iter().filter_map(one).collect()
    }
}

struct Bench<'a> {
    host: &'a Freeflow,
    programs: &'a Path,
    victim: Pair<'a>,
    duration_ms: u64,
}

impl Bench<'_> {
    fn watch(&mut self) -> Result<Watched, String> {
        let within = REPLY_MAX + Duration::from_millis(self.duration_ms);
        self.victim.connect(Memory::Ordinary, JOB)?;
        self.victim.runner.send(&Request::Watch { duration_ms: self.duration_ms })?;
        let watched = match self.victim.runner.receive(within)? {
            Reply::Watched(watched) => watched,
            other => return Err(format!("{other:?}")),
        };
        self.victim.release()?;
        Ok(watched)
    }

    /// Beside programs in containers of their own, which go with them.
    fn beside(&mut self, programs: &[Vec<String>]) -> Result<Watched, String> {
        let neighbours: Vec<Neighbouring<'_>> = programs
            .iter()
            .enumerate()
            .map(|(number, argv)| Neighbouring::start(self.host, format!("bench-neighbour-{number}"), argv))
            .collect::<Result<_, _>>()?;
        let watched = self.watch()?;
        neighbours.iter().try_for_each(Neighbouring::still_there)?;
        Ok(watched)
    }

    fn run(&mut self, trick: &Trick, result: &mut Neighbour) -> Result<(), String> {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let busy = vec![words(&["sh", "-c", BUSY]); trick.busy];
        result.busy.push(self.beside(&busy)?);
        let program = self.programs.join(trick.program);
        let program = program.to_str().ok_or("a path that is no text")?;
        result.beside.push(self.beside(&[words(&[&[program], trick.arguments].concat())])?);
        Ok(())
    }
}

/// A container with a neighbour's program; removed when dropped.
struct Neighbouring<'a> {
    host: &'a Freeflow,
    name: String,
}

impl<'a> Neighbouring<'a> {
    fn start(host: &'a Freeflow, name: String, argv: &[String]) -> Result<Self, String> {
        let files: &[&str] = if Path::new(FUSE).exists() { &[FUSE] } else { &[] };
        host.start(&name, files, argv)?;
        Ok(Self { host, name })
    }

    /// A neighbour that ended by itself played no trick.
    fn still_there(&self) -> Result<(), String> {
        match self.host.is_running(&self.name)? {
            true => Ok(()),
            false => Err(format!("the neighbour ended: {}", self.host.logs(&self.name)?.trim())),
        }
    }
}

impl Drop for Neighbouring<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.host.remove(&self.name) {
            eprintln!("freeflow-bench: {error}");
        }
    }
}

pub fn measure(
    freeflow: &Path,
    programs: &Path,
    (runs, duration_ms): (usize, u64),
    journal: &mut Journal,
    all: &mut Vec<Neighbour>,
) -> Result<(), String> {
    let host = Freeflow::up(freeflow, "adaptive", false)?;
    host.set_data_path("routed")?;
    let victim = Pair::new(&host)?;
    let mut bench = Bench { host: &host, programs, victim, duration_ms };
    println!();
    journal.handoff("before").map_err(|error| error.to_string())?;
    for trick in &TRICKS {
        let mut result = Neighbour { trick: trick.name, busy: Vec::new(), beside: Vec::new(), failure: None };
        for _ in 0..runs {
            if let Err(error) = bench.run(trick, &mut result) {
                result.failure = Some(error);
                bench.victim.renew()?;
                break;
            }
        }
        all.push(result);
    }
    let table = table(all);
    journal.show(table);
    journal.handoff("after").map_err(|error| error.to_string())?;
    Ok(())
}

fn table(list: &[Neighbour]) -> Table {
    let title = "Neighbours: the longest control verb and routed 64 B WRITE of each half second, ms";
    let mut table = Table::new(
        title,
        &[
            "the neighbour",
            "verb, busy",
            "verb",
            "its most",
            "added",
            "message, busy",
            "message",
            "its most",
            "added",
            "",
        ],
    );
    let shown = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure);
    for one in list {
        let mut row = vec![one.trick.to_owned()];
        for of in [(|w| &w.control_ms) as fn(&Watched) -> &Vec<f64>, |w| &w.message_ms] {
            let (busy, beside) = (longest(&one.busy, of), longest(&one.beside, of));
            row.extend([busy.map(|s| s.p50), beside.map(|s| s.p50), beside.map(|s| s.max)].map(shown));
            row.push(shown(one.added(of)));
        }
        row.push(one.failure.clone().unwrap_or_default());
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_what_a_trick_adds() {
        let watched = |control: f64, message: f64| Watched { control_ms: vec![control], message_ms: vec![message] };
        let mut one = Neighbour {
            trick: "trick",
            busy: vec![watched(4.0, 4.0), watched(5.0, 4.0)],
            beside: vec![watched(60.0, 8.0), watched(61.0, 9.0)],
            failure: None,
        };
        let met: Vec<(f64, bool)> = one.expectations().iter().map(|one| (one.value, one.met())).collect();
        assert_eq!(met, [(56.0, false), (4.0, true)]);
        one.failure = Some("it broke".into());
        assert!(one.expectations().is_empty());
    }
}
