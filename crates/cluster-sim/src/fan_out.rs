//! A real etcd: how much processor time and memory of it a watcher costs, and how long it takes until the last one has
//! heard of a transaction. The watchers are the cluster's own, in this process, and share its processors with etcd.
use crate::words;
use freeflow_cluster::{
    ClusterFile, DEFAULT_ROOT, Follow, Followed, Holdings, HostRecord, News, Report, Scope, There, Wire,
};
use serde::Serialize;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// Transactions that all watchers are told of.
const COUNT: usize = 40;
/// Longest wait for any of them.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clock ticks of `/proc/PID/stat`, on all platforms that there are.
const TICKS_PER_S: f64 = 100.0;
/// Problems of the word that is written: it is so long that it takes some room.
const TEXT_CHARS: usize = 300;

#[derive(Clone, Debug, Serialize)]
pub struct FanOut {
    pub watchers: usize,
    pub transactions: usize,
    /// etcd's processor time for each event that one watcher is told, TLS not counted: the connections are plain.
    pub event_us: f64,
    /// etcd's memory for each watcher.
    pub watcher_bytes: f64,
    /// From the beginning of a write until the last watcher has it: the median.
    pub last_ms: f64,
}

fn failed(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// Processor time in seconds, and bytes in memory.
fn used(pid: u32) -> io::Result<(f64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> =
        stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    let field = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).ok_or(failed("no such field"));
    // Counted from the third one: utime, stime and rss.
    let (ticks, pages) = (field(11)? + field(12)?, field(21)?);
    Ok((ticks as f64 / TICKS_PER_S, pages << 12))
}

/// Waits until a watcher has heard of a word of the host with this revision in it.
fn hear(follow: &Follow, revision: u64) -> io::Result<()> {
    let (end, key) = (Instant::now() + PATIENCE, format!("{DEFAULT_ROOT}/said/{}/data/followed", words::host_name(1)));
    while Instant::now() < end {
        let entries: Vec<_> = match follow.next(Duration::from_secs(1)) {
            Some(News::Listed(_, entries)) => entries,
            Some(News::Changed(_, changes)) => changes.into_iter().filter_map(|(_, entry)| entry).collect(),
            Some(News::Behind(error)) => return Err(failed(error)),
            _ => continue,
        };
        let read = |bytes: &[u8]| serde_json::from_slice::<Followed>(bytes).is_ok_and(|said| said.revision == revision);
        if entries.iter().any(|entry| entry.key == key && read(&entry.value)) {
            return Ok(());
        }
    }
    Err(failed("a watcher has not heard of it"))
}

/// Measures an etcd without certificates that nothing else uses.
///
/// # Errors
/// It does not answer, or `pid` is nobody's.
pub fn measure(endpoint: &str, pid: u32, watchers: usize) -> io::Result<FanOut> {
    let file = ClusterFile {
        etcd: vec![endpoint.into()],
        cacert: None,
        cert: None,
        key: None,
        root: DEFAULT_ROOT.into(),
        wire: Wire::Plain,
        controller: false,
        authority: None,
    };
    let mut report = Report::start(&file, &words::host_name(1), || 0).map_err(failed)?;
    let word = |revision| Followed { revision, release: "x".repeat(TEXT_CHARS), ..Followed::default() };
    // Another watcher of its own finds the revision on which later words stand.
    let record: HostRecord = words::record(1);
    report.say(Some(record), Holdings::default(), word(0), There::default());
    let follow = || Follow::start_of(&file, Scope::Said).map_err(failed);
    let own = follow()?;
    let before = loop {
        match own.next(PATIENCE) {
            Some(News::Listed(_, entries)) => {
                if let Some(entry) = entries.into_iter().find(|entry| entry.key.ends_with("/data/record")) {
                    break entry.modified;
                }
            }
            Some(News::Changed(_, changes)) => {
                let found = changes.into_iter().find(|(key, _)| key.ends_with("/data/record"));
                if let Some(entry) = found.and_then(|(_, entry)| entry) {
                    break entry.modified;
                }
            }
            Some(_) => {}
            None => return Err(failed(report.error().unwrap_or("no record was written"))),
        }
    };
    let (_, alone_bytes) = used(pid)?;
    let follows: Vec<Follow> = (0..watchers).map(|_| follow()).collect::<io::Result<_>>()?;
    let there = || There { record: Some(before), holdings: Some((before, Holdings::default())) };
    report.say(None, Holdings::default(), word(1), there());
    follows.iter().try_for_each(|follow| hear(follow, 1))?;
    let (begin_s, with_bytes) = used(pid)?;
    let mut times = Vec::new();
    for number in 0..COUNT {
        let (begin, revision) = (Instant::now(), 2 + number as u64);
        report.say(None, Holdings::default(), word(revision), there());
        follows.iter().try_for_each(|follow| hear(follow, revision))?;
        times.push(begin.elapsed().as_secs_f64() * 1000.0);
    }
    times.sort_by(f64::total_cmp);
    let events = (COUNT * watchers) as f64;
    Ok(FanOut {
        watchers,
        transactions: COUNT,
        event_us: (used(pid)?.0 - begin_s) * 1e6 / events,
        watcher_bytes: with_bytes.saturating_sub(alone_bytes) as f64 / watchers as f64,
        last_ms: times[COUNT / 2],
    })
}
