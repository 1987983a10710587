//! Instructions of each call of the data path, beside a table that was reviewed.
//!
//! Time says little on a machine that others use; instructions are the same tomorrow. They are counted in user space by
//! callgrind, which runs one end; the other end and the router run as they are, in fastpath mode, so that nobody
//! has to be woken. Requests are posted one call at a time and each completion is there before it is polled for (see
//! [`crate::verbs::counting`]), so the counts hardly hang on time.
use crate::host::Freeflow;
use crate::suite::connect;
use crate::verbs::counting::Counted;
use crate::verbs::{Job, Memory, Operation, Reply, Request, Traffic};
use std::path::Path;
use std::process;
use std::time::Duration;
use std::{env, fs};

/// More than this away from the reviewed count, either way, is a change.
pub const TOLERANCE: f64 = 0.05;
/// Of one operation, under callgrind.
const WITHIN: Duration = Duration::from_secs(60);

const HEADER: &str = "\
Instructions in user space of one call of the data path, within a host, copying included: counted by callgrind.
scripts/instructions compares with this table (5 %); with FREEFLOW_UPDATE=1 it writes it again.

";

/// The end that is counted posts these; SENDs are answered by SENDs.
const JOBS: [Job; 3] = [
    Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 0 },
    Job { traffic: Traffic::Bandwidth, operation: Operation::Write, bytes: 64, slots: 64, duration_ms: 0 },
    Job { traffic: Traffic::Bandwidth, operation: Operation::Read, bytes: 64, slots: 64, duration_ms: 0 },
];

/// Counts every call.
///
/// # Errors
/// Of the router or an end; no valgrind.
pub fn measure(freeflow: &Path) -> Result<Vec<Counted>, String> {
    // Not in the run directory, which containers do not see.
    let directory = env::temp_dir().join(format!("ffcount.{}", process::id()));
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let list = measure_into(freeflow, &directory.join("callgrind"));
    let _ = fs::remove_dir_all(&directory);
    list
}

fn measure_into(freeflow: &Path, dumps: &Path) -> Result<Vec<Counted>, String> {
    let host = Freeflow::up(freeflow, "fastpath", false)?;
    let out = format!("--callgrind-out-file={}", dumps.display());
    let under = ["valgrind", "--quiet", "--tool=callgrind", "--collect-atstart=no", &out].map(str::to_owned);
    let mut server = host.agent("instructions-server")?;
    let mut runner = host.starting_agent("instructions-runner", &under)?;
    runner.ask(&Request::Hello)?;
    let mut list = Vec::new();
    for job in JOBS {
        connect(&mut runner, &mut server, &Request::Prepare { memory: Memory::Ordinary, job })?;
        let answers = job.traffic == Traffic::Latency;
        if answers {
            server.ask(&Request::Serve { job })?;
        }
        runner.send(&Request::Count { job, dumps: dumps.to_owned() })?;
        match runner.receive(WITHIN)? {
            Reply::Counted(counted) => list.extend(counted),
            other => return Err(format!("unexpected: {other:?}")),
        }
        if answers {
            server.receive(WITHIN)?;
        }
        runner.ask(&Request::Release)?;
        server.ask(&Request::Release)?;
    }
    Ok(list)
}

/// As it is checked in.
pub fn table(list: &[Counted]) -> String {
    let width = list.iter().map(|one| one.call.chars().count()).max().unwrap_or(0);
    let rows = list.iter().map(|one| format!("{:<width$}  {:>6.0}\n", one.call, one.instructions));
    rows.fold(HEADER.to_owned(), |text, row| text + &row)
}

fn parse(text: &str) -> Vec<(&str, f64)> {
    let row = |line: &'_ str| -> Option<(usize, f64)> {
        let (call, number) = line.rsplit_once("  ")?;
        Some((call.trim_end().len(), number.trim().parse().ok()?))
    };
    text.lines().filter_map(|line| row(line).map(|(length, number)| (&line[..length], number))).collect()
}

/// Differences from the reviewed table; none when all is well.
pub fn differences(now: &[Counted], reviewed: &str) -> Vec<String> {
    let reviewed = parse(reviewed);
    let mut wrong = Vec::new();
    for one in now {
        match reviewed.iter().find(|(call, _)| *call == one.call) {
            None => wrong.push(format!("{}: {:.0}, not in the table", one.call, one.instructions)),
            Some((_, before)) if (one.instructions - before).abs() > before * TOLERANCE => {
                wrong.push(format!("{}: {:.0} where {before:.0} was reviewed", one.call, one.instructions));
            }
            Some(_) => {}
        }
    }
    let gone = reviewed.iter().filter(|(call, _)| now.iter().all(|one| one.call != *call));
    wrong.extend(gone.map(|(call, _)| format!("{call}: in the table, but no longer counted")));
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(call: &str, instructions: f64) -> Counted {
        Counted { call: call.to_owned(), instructions }
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let list = [counted("ibv_post_send, SEND 64 B", 411.6), counted("ibv_poll_cq", 99.0)];
        let text = table(&list);
        assert!(text.ends_with("ibv_post_send, SEND 64 B     412\nibv_poll_cq                   99\n"));
        assert_eq!(parse(&text), [("ibv_post_send, SEND 64 B", 412.0), ("ibv_poll_cq", 99.0)]);
        assert!(differences(&list, &text).is_empty());
    }

    #[test]
    fn changes_show() {
        let text = table(&[counted("a", 100.0), counted("b", 100.0), counted("c", 100.0)]);
        let now = [counted("a", 104.0), counted("b", 94.0), counted("d", 1.0)];
        let wrong = differences(&now, &text);
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        assert!(wrong[0].starts_with("b: 94") && wrong[1].starts_with("d: 1") && wrong[2].starts_with("c: in"));
    }
}
