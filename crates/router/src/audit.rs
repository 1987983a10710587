//! `RUN_DIR/audit.log`: who changed what, and what was refused, a line of JSON each. Thread `ff-audit` writes it.
//!
//! Nobody waits for that thread. What finds the queue full is counted, and the next line that is
//! written says how many are missing. Files are rotated by size. Whoever can cause refusals as
//! often as it likes (a container, a local user) gets a few lines and then one now and then, which
//! says how many were left out: else it could push the record of changes out of the files.
use crate::base::log::{timestamp, warning};
use crate::base::log_file::numbered;
use crate::base::privileges::{self, ThreadKind};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

const FILE_BYTES_MAX: u64 = 16 << 20;
/// `audit.log`, `audit.log.1`, …
const FILE_COUNT: usize = 4;
/// Entries that wait to be written.
const QUEUE_COUNT: usize = 4096;
/// Of a refusal's line.
const NAME_BYTES_MAX: usize = 256;
const REASON_BYTES_MAX: usize = 1024;
/// Refusals that one originator has lines for at once, and then one in this time.
const REFUSALS_AT_ONCE: u64 = 20;
const REFUSAL_INTERVAL_NS: u64 = 10_000_000_000;
/// Originators share these: a few hundred lines a minute at most, whoever and however many they are.
const ORIGINATOR_COUNT: usize = 64;

/// The role of who has none.
pub const NO_ROLE: &str = "none";

/// The caller, at the API or the admin socket.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Who {
    pub uid: u32,
    pub pid: i32,
    /// `admin`, `tenant-admin:NAME,…`, `viewer`, `none`.
    pub role: String,
}

impl Who {
    /// Key of the originator's allowance of audit lines. Root of another PID namespace, which has no
    /// role here, has a key of its own and does not use up root's.
    pub fn originator(&self) -> u64 {
        u64::from(self.uid) | u64::from(self.role == NO_ROLE) << 32
    }
}

/// More of a change, where there is more to say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct About {
    /// Of a vNIC.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub network: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// The container that it is for, by its name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container: String,
    /// Words for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// Kind of an entry.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Entry {
    /// By the API, or by the admin socket.
    Change {
        #[serde(flatten)]
        who: Who,
        verb: &'static str,
        kind: String,
        name: String,
        /// `created`, `configured`, `deleted`; of what is no object: `attached`, `detached`, `begun`, `ended`, `done`.
        outcome: &'static str,
        #[serde(rename = "resourceVersion", skip_serializing_if = "Option::is_none")]
        revision: Option<u64>,
        #[serde(flatten)]
        about: Box<About>,
    },
    /// The same.
    Refused {
        #[serde(flatten)]
        who: Who,
        verb: &'static str,
        kind: String,
        name: String,
        /// `Forbidden`, `Invalid`, …, and what was said.
        outcome: &'static str,
        reason: String,
        #[serde(skip_serializing_if = "is_zero")]
        left_out: u64,
    },
    /// A container was kept from something.
    Enforced {
        /// `connection refused`, `datagram refused`, `message to nobody`, `remote key refused`, `connection cut`, …
        what: &'static str,
        tenant: String,
        vnic: String,
        #[serde(skip_serializing_if = "String::is_empty")]
        peer: String,
        /// The name of the rule, or what else decided.
        rule: String,
        /// The resource that a quota had no more of.
        #[serde(rename = "ranOut", skip_serializing_if = "str::is_empty")]
        ran_out: &'static str,
        /// The other network whose the peer is, if it was named and is known.
        #[serde(rename = "targetNetwork", skip_serializing_if = "String::is_empty")]
        target_network: String,
        /// How often since it was last noted.
        count: u64,
        #[serde(skip_serializing_if = "is_zero")]
        left_out: u64,
    },
    /// The router itself.
    Router { what: &'static str },
}

impl Entry {
    /// [`Self::Refused`], with no more of what was sent than a line needs: a few long ones would
    /// push all others out of the files.
    pub fn refused(
        who: Who,
        verb: &'static str,
        (kind, name): (&str, &str),
        (outcome, reason): (&'static str, &str),
        left_out: u64,
    ) -> Self {
        let (name, reason) = (shortened(name, NAME_BYTES_MAX), shortened(reason, REASON_BYTES_MAX));
        Self::Refused { who, verb, kind: kind.into(), name, outcome, reason, left_out }
    }
}

fn shortened(text: &str, bytes_max: usize) -> String {
    text[..text.floor_char_boundary(bytes_max)].into()
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A refusal by policy for a container, see [`Entry::Enforced`].
#[derive(Clone, Debug, Default)]
pub struct Refusal {
    pub what: &'static str,
    pub tenant: String,
    pub vnic: String,
    pub peer: String,
    pub rule: String,
    pub ran_out: &'static str,
    pub target_network: String,
    pub count: u64,
}

impl Refusal {
    fn entry(self, left_out: u64) -> Entry {
        let Self { what, tenant, vnic, peer, rule, ran_out, target_network, count } = self;
        Entry::Enforced { what, tenant, vnic, peer, rule, ran_out, target_network, count, left_out }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    entry: &'a Entry,
    /// Entries before this one that found the queue full.
    #[serde(skip_serializing_if = "is_zero")]
    lost: u64,
}

enum Message {
    Entry(SystemTime, Entry),
    End,
}

/// Classes of refusals. Each class has lines of its own, so that cheap ones of one class hide none
/// of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// At the API or the admin socket.
    Request,
    /// By an access rule, or a network's `access`.
    Rule,
    /// Towards nobody who is known.
    Nobody,
    /// Towards what another network has.
    Others,
    Quota,
    /// Connections that are disconnected by policy, which nobody can have done to it as often as it likes.
    Disconnection,
}

const CLASS_COUNT: usize = 6;

/// One originator's allowance: the time at which it is as if nothing had been said, and what was left out.
#[derive(Default)]
struct Allowance {
    clear_ns: AtomicU64,
    left_out: AtomicU64,
}

impl Allowance {
    /// `None`: not now. Else how many were left out since the last one.
    fn take(&self, now_ns: u64) -> Option<u64> {
        let may = |clear_ns: u64| {
            let begin = clear_ns.max(now_ns);
            (begin - now_ns < REFUSALS_AT_ONCE * REFUSAL_INTERVAL_NS).then(|| begin + REFUSAL_INTERVAL_NS)
        };
        if self.clear_ns.fetch_update(Relaxed, Relaxed, may).is_err() {
            self.left_out.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Relaxed))
    }
}

struct Shared {
    sender: SyncSender<Message>,
    lost: AtomicU64,
    /// All that were ever lost: `lost` is counted down when it is reported.
    lost_total: AtomicU64,
    allowances: [[Allowance; ORIGINATOR_COUNT]; CLASS_COUNT],
}

/// The way to the log; the default leads nowhere. No call waits.
#[derive(Clone, Default)]
pub struct Audit {
    shared: Option<Arc<Shared>>,
}

impl Audit {
    pub fn note(&self, entry: Entry) {
        let Some(shared) = &self.shared else { return };
        if shared.sender.try_send(Message::Entry(SystemTime::now(), entry)).is_err() {
            shared.lost.fetch_add(1, Relaxed);
            shared.lost_total.fetch_add(1, Relaxed);
        }
    }

    /// Lines that found the queue full, or the disk.
    pub fn lost_lines(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.lost_total.load(Relaxed))
    }

    /// Notes what `entry` makes of the number of those left out, or nothing if this originator has had its share: then
    /// nothing is allocated either.
    pub fn note_some(&self, originator: u64, entry: impl FnOnce(u64) -> Entry) {
        self.note_of(Class::Request, originator, entry);
    }

    fn note_of(&self, class: Class, originator: u64, entry: impl FnOnce(u64) -> Entry) {
        let Some(shared) = &self.shared else { return };
        let index = (originator.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % ORIGINATOR_COUNT;
        if let Some(left_out) = shared.allowances[class as usize][index].take(freeflow_shm::monotonic_ns()) {
            self.note(entry(left_out));
        }
    }

    /// A container was kept from something. `originator`: a number of the vNIC that caused it.
    pub fn refusal(&self, class: Class, originator: u64, refusal: impl FnOnce() -> Refusal) {
        self.note_of(class, originator, |left_out| refusal().entry(left_out));
    }
}

/// The thread. It ends, with all that was noted before written, when this is dropped.
pub struct AuditThread {
    thread: Option<JoinHandle<()>>,
    audit: Audit,
}

impl AuditThread {
    /// Errors: the file can't be opened, no thread could be made.
    pub fn start(run_dir: &Path) -> io::Result<(Self, Audit)> {
        let (sender, receiver) = sync_channel(QUEUE_COUNT);
        let allowances = std::array::from_fn(|_| std::array::from_fn(|_| Allowance::default()));
        let (lost, lost_total) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared = Arc::new(Shared { sender, lost, lost_total, allowances });
        let mut files = Files::open(run_dir.join("audit.log"), FILE_BYTES_MAX)?;
        let writer_shared = shared.clone();
        let body = move || {
            privileges::enter(ThreadKind::Audit);
            write_all(&receiver, &mut files, &writer_shared);
        };
        let thread = std::thread::Builder::new().name("ff-audit".into()).spawn(body)?;
        let audit = Audit { shared: Some(shared) };
        Ok((Self { thread: Some(thread), audit: audit.clone() }, audit))
    }
}

impl Drop for AuditThread {
    fn drop(&mut self) {
        if let Some(shared) = &self.audit.shared {
            // Waits for room: the thread makes some. It fails only if the thread is gone.
            let _ = shared.sender.send(Message::End);
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warning!("the audit thread panicked");
        }
    }
}

fn write_all(receiver: &Receiver<Message>, files: &mut Files, shared: &Shared) {
    let mut failing = false;
    while let Ok(first) = receiver.recv() {
        // Lines that have piled up are written and synced together.
        let mut bytes = Vec::new();
        let mut next = Some(first);
        let mut is_end = false;
        while let Some(message) = next {
            match message {
                Message::Entry(time, entry) => push_line(&mut bytes, time, &entry, shared.lost.swap(0, Relaxed)),
                Message::End => is_end = true,
            }
            next = if bytes.len() < 64 * 1024 { receiver.try_recv().ok() } else { None };
        }
        match files.append(&bytes) {
            Ok(()) => failing = false,
            Err(error) => {
                let lines = bytes.iter().filter(|&&byte| byte == b'\n').count();
                shared.lost.fetch_add(lines as u64, Relaxed);
                shared.lost_total.fetch_add(lines as u64, Relaxed);
                if !std::mem::replace(&mut failing, true) {
                    warning!("can't write the audit log", error = error);
                }
            }
        }
        if is_end {
            return;
        }
    }
}

fn push_line(bytes: &mut Vec<u8>, time: SystemTime, entry: &Entry, lost: u64) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = Line { time: timestamp(since.as_secs(), since.subsec_millis()), entry, lost };
    if serde_json::to_writer(&mut *bytes, &line).is_ok() {
        bytes.push(b'\n');
    }
}

/// The file that is written, and those before it.
struct Files {
    path: PathBuf,
    file: Option<File>,
    bytes: u64,
    bytes_max: u64,
}

impl Files {
    fn open(path: PathBuf, bytes_max: u64) -> io::Result<Self> {
        let mut files = Self { path, file: None, bytes: 0, bytes_max };
        files.reopen()?;
        Ok(files)
    }

    fn reopen(&mut self) -> io::Result<()> {
        let options = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path);
        let file = options?;
        self.bytes = file.metadata()?.len();
        self.file = Some(file);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.bytes > 0 && self.bytes + bytes.len() as u64 > self.bytes_max {
            self.file = None;
            self.rotate()?;
        }
        if self.file.is_none() {
            self.reopen()?;
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        let written = file.write_all(bytes).and_then(|()| file.sync_data());
        match &written {
            Ok(()) => self.bytes += bytes.len() as u64,
            // Maybe a part of it is there: a fresh look at the next attempt.
            Err(_) => self.file = None,
        }
        written
    }

    fn rotate(&mut self) -> io::Result<()> {
        for number in (0..FILE_COUNT - 1).rev() {
            match std::fs::rename(numbered(&self.path, number), numbered(&self.path, number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ff-audit-{name}-{}", std::process::id()));
            // A killed run with this number may have left one.
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_are_rotated_and_the_oldest_goes() {
        let directory = Directory::new("rotate");
        let path = directory.0.join("audit.log");
        let mut files = Files::open(path.clone(), 100).unwrap();
        for number in 0..50 {
            files.append(format!("{number:039}\n").as_bytes()).unwrap();
        }
        let read = |name: &str| std::fs::read_to_string(directory.0.join(name)).unwrap();
        let all = ["audit.log.3", "audit.log.2", "audit.log.1", "audit.log"].map(read).concat();
        let numbers: Vec<u32> = all.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers, (42..50).collect::<Vec<_>>());
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), FILE_COUNT);
        // Another router goes on where this one was.
        drop(files);
        let mut files = Files::open(path, 100).unwrap();
        files.append(&[b'x'; 30]).unwrap();
        assert_eq!(read("audit.log").len(), 30);
    }

    #[test]
    fn all_that_was_noted_is_written_at_the_end() {
        let directory = Directory::new("all");
        let (thread, audit) = AuditThread::start(&directory.0).unwrap();
        for number in 0..100 {
            let name = format!("tricky \"name\"\n{number}");
            let (kind, outcome) = ("Network".to_owned(), "created");
            let (who, revision, about) = (Who::default(), Some(number), Box::default());
            audit.note(Entry::Change { who, verb: "apply", kind, name, outcome, revision, about });
        }
        drop(thread);
        audit.note(Entry::Router { what: "too late" });
        let text = std::fs::read_to_string(directory.0.join("audit.log")).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 100);
        assert_eq!(lines[7]["name"], "tricky \"name\"\n7");
        assert_eq!((&lines[7]["event"], &lines[7]["resourceVersion"]), (&"change".into(), &7.into()));
    }

    #[test]
    fn refusals_are_short_whatever_was_sent() {
        let (name, reason) = ("ä".repeat(1 << 19), "x€".repeat(1 << 18));
        let entry = Entry::refused(Who::default(), "apply", ("Group", &name), ("Forbidden", &reason), 7);
        let Entry::Refused { name: short, reason: why, .. } = &entry else { panic!("a refusal") };
        assert!(name.starts_with(short) && short.len() == NAME_BYTES_MAX);
        assert!(reason.starts_with(why) && (REASON_BYTES_MAX - 3..=REASON_BYTES_MAX).contains(&why.len()));
        let mut line = Vec::new();
        push_line(&mut line, UNIX_EPOCH, &entry, 0);
        assert!(line.len() < 4096);
        let entry = Entry::refused(Who::default(), "put", ("Group", "g"), ("Invalid", "why"), 0);
        let Entry::Refused { name, reason, .. } = entry else { panic!("a refusal") };
        assert_eq!((name.as_str(), reason.as_str()), ("g", "why"));
    }

    #[test]
    fn a_refusal_is_noted_whatever_of_another_class_there_is_beside_it() {
        let directory = Directory::new("cuts");
        let (thread, audit) = AuditThread::start(&directory.0).unwrap();
        let refusal = |what| move || Refusal { what, vnic: "v".into(), count: 1, ..Refusal::default() };
        (0..1000).for_each(|_| audit.refusal(Class::Rule, 7, refusal("connection refused")));
        (0..1000).for_each(|_| audit.refusal(Class::Nobody, 7, refusal("message to nobody")));
        (0..2 * REFUSALS_AT_ONCE).for_each(|_| audit.refusal(Class::Disconnection, 7, refusal("connection cut")));
        (0..2 * REFUSALS_AT_ONCE).for_each(|_| audit.refusal(Class::Others, 7, refusal("remote key refused")));
        drop(thread);
        let text = std::fs::read_to_string(directory.0.join("audit.log")).unwrap();
        let lines_of = |what| text.lines().filter(|line| line.contains(what)).count() as u64;
        // One more, as time goes on meanwhile.
        let is_share = |count| (REFUSALS_AT_ONCE..=REFUSALS_AT_ONCE + 1).contains(&count);
        for what in ["connection refused", "message to nobody", "connection cut", "remote key refused"] {
            assert!(is_share(lines_of(what)), "{what}: {text}");
        }
    }

    #[test]
    fn one_originator_cant_fill_the_log() {
        let allowance = Allowance::default();
        let start = 1_000_000_000_000;
        let taken = (0..1000).filter(|_| allowance.take(start).is_some()).count() as u64;
        assert_eq!(taken, REFUSALS_AT_ONCE);
        assert_eq!(allowance.take(start + REFUSAL_INTERVAL_NS), Some(1000 - taken));
        assert_eq!(allowance.take(start + REFUSAL_INTERVAL_NS), None);
        let later = start + 1000 * REFUSAL_INTERVAL_NS;
        assert_eq!(allowance.take(later), Some(1));
        assert_eq!((0..1000).filter(|_| allowance.take(later).is_some()).count() as u64, REFUSALS_AT_ONCE - 1);
    }
}
