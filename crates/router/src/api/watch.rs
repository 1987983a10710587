//! Watches: the history of changes, and readers that follow it at their own pace.
//!
//! There is one history, bounded in events and bytes, and a reader is a place in it. So a reader
//! that is slow costs nothing: once what it has not read is forgotten, it is answered that its
//! resourceVersion has expired, as one that comes with an old one is.
//!
//! Objects that were changed together have one resourceVersion, so that of an event does not say
//! that all of them were sent. A BOOKMARK does: one follows what a watch begins with, and each
//! revision of which something was sent. A reader that was cut off goes on from there.
//!
//! A change of a vNIC's phase is an event of the revision that is there at the time, behind all
//! that this revision changed. A watch that begins at that revision gets it, perhaps once more: it
//! may have come later than what that reader knows.
use super::failure::Failure;
use super::feed::{Change, Side};
use axum::body::Bytes;
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::Selector;
use freeflow_orchestrator::objects::{API_VERSION, AnyObject, Labels, ObjectKind};
use hyper::body::{Body, Frame};
use serde_json::json;
use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

const EVENT_COUNT_MAX: usize = 4096;
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Lines that go out at a time, bytes.
const CHUNK_BYTES: usize = 64 << 10;
/// A reader with nothing to read hears this often how far it has come.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(30);
/// Then it has to ask again.
const WATCH_TIME_MAX: Duration = Duration::from_secs(3600);

/// Properties that decide who reads an object, and what they read.
struct Face {
    labels: Labels,
    tenant: Option<String>,
    json: Bytes,
    /// For tenants' readers, if that is something else.
    json_of_tenants: Option<Bytes>,
}

/// Statuses of classes and quotas name the networks of all tenants: a tenant's reader gets its
/// own by asking for the object.
fn without_status(object: &AnyObject) -> Option<AnyObject> {
    let mut object = object.clone();
    match &mut object {
        AnyObject::QosClass(class) => class.status = None,
        AnyObject::Quota(quota) => quota.status = None,
        _ => return None,
    }
    Some(object)
}

impl Face {
    fn of(side: &Side) -> Self {
        Self {
            labels: side.object.metadata().labels.clone(),
            tenant: side.tenant.clone(),
            json: serde_json::to_vec(&side.object).unwrap_or_default().into(),
            json_of_tenants: without_status(&side.object)
                .map(|object| serde_json::to_vec(&object).unwrap_or_default().into()),
        }
    }

    fn bytes(&self) -> usize {
        self.json.len() + self.json_of_tenants.as_ref().map_or(0, Bytes::len) + 256
    }
}

struct Event {
    revision: u64,
    kind: ObjectKind,
    name: String,
    before: Option<Face>,
    after: Option<Face>,
    is_status: bool,
    /// The view of tenants' readers of QosClasses and Quotas has changed for this tenant.
    renames: Option<String>,
}

impl Event {
    fn bytes(&self) -> usize {
        let bytes = |face: &Option<Face>| face.as_ref().map_or(0, Face::bytes);
        bytes(&self.before) + bytes(&self.after)
    }

    /// A reader that has seen a revision knows this.
    fn is_known_at(&self, revision: u64) -> bool {
        if self.is_status { self.revision < revision } else { self.revision <= revision }
    }
}

/// The names of classes and quotas that a network gives its tenant to read.
fn names_of(side: Option<&Side>) -> Option<(Option<&str>, Option<&str>)> {
    match side.map(|side| &side.object) {
        Some(AnyObject::Network(network)) => Some((network.spec.qos_class.as_deref(), network.spec.quota.as_deref())),
        _ => None,
    }
}

struct Past {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// Of the first event that is kept, counted from the beginning.
    first: u64,
    /// The last revision of which something is forgotten.
    forgotten: u64,
    /// The last revision of all.
    revision: u64,
}

/// The history.
pub struct History {
    past: Mutex<Past>,
    /// Number of events so far: changes when there are more.
    count: watch::Sender<u64>,
}

impl History {
    /// Begins at a revision: what was before is not known.
    pub fn new(revision: Revision) -> Arc<Self> {
        let (events, bytes, first) = (VecDeque::new(), 0, 0);
        let past = Past { events, bytes, first, forgotten: revision.0, revision: revision.0 };
        Arc::new(Self { past: Mutex::new(past), count: watch::Sender::new(0) })
    }

    fn past(&self) -> std::sync::MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, changes: &[Change]) {
        let mut past = self.past();
        for change in changes {
            let Some(one) = change.after.as_ref().or(change.before.as_ref()) else { continue };
            let (before, after) = (names_of(change.before.as_ref()), names_of(change.after.as_ref()));
            let mut last = change.before.clone();
            if let Some(side) = &mut last {
                // It is shown as deleted, if at all, and who goes on from there must not see that again.
                side.object.metadata_mut().resource_version = Some(change.revision.0);
            }
            let event = Event {
                revision: change.revision.0,
                kind: one.object.kind(),
                name: one.object.name().to_owned(),
                renames: if before == after { None } else { one.tenant.clone() },
                before: last.as_ref().map(Face::of),
                after: change.after.as_ref().map(Face::of),
                is_status: change.is_status,
            };
            past.bytes += event.bytes();
            past.revision = past.revision.max(event.revision);
            past.events.push_back(Arc::new(event));
        }
        while past.events.len() > EVENT_COUNT_MAX || past.bytes > EVENT_BYTES_MAX {
            let Some(gone) = past.events.pop_front() else { break };
            past.bytes -= gone.bytes();
            past.first += 1;
            past.forgotten = gone.revision;
        }
        let count = past.first + past.events.len() as u64;
        drop(past);
        self.count.send_replace(count);
    }
}

/// Which events somebody wants, and may have.
pub struct Filter {
    pub kind: ObjectKind,
    pub name: Option<String>,
    pub selector: Selector,
    /// `None`: all that is.
    pub tenants: Option<BTreeSet<String>>,
    /// Of this kind, of those tenants' networks, see [`super::permission::View::names`].
    pub names: BTreeSet<String>,
}

impl Filter {
    fn wants(&self, event: &Event, face: &Face) -> bool {
        let may = match (&self.tenants, self.kind) {
            (None, _) => true,
            (Some(_), ObjectKind::QosClass | ObjectKind::Quota) => self.names.contains(&event.name),
            (Some(_), ObjectKind::Host) => false,
            (Some(tenants), _) => face.tenant.as_ref().is_some_and(|tenant| tenants.contains(tenant)),
        };
        may && self.selector.fits(&face.labels)
    }

    /// An object that is not wanted any more is as good as deleted.
    fn line(&self, event: &Event) -> Option<Bytes> {
        if event.kind != self.kind || self.name.as_ref().is_some_and(|name| *name != event.name) {
            return None;
        }
        let before = event.before.as_ref().filter(|face| self.wants(event, face));
        let after = event.after.as_ref().filter(|face| self.wants(event, face));
        let of = |face: &Face| {
            let of_tenants = face.json_of_tenants.as_ref().filter(|_| self.tenants.is_some());
            of_tenants.unwrap_or(&face.json).clone()
        };
        match (before, after) {
            (None, Some(after)) => Some(line("ADDED", &of(after))),
            (Some(_), Some(after)) => Some(line("MODIFIED", &of(after))),
            (Some(before), None) => Some(line("DELETED", &of(before))),
            (None, None) => None,
        }
    }

    /// A change here affects what this reader may see.
    fn is_upset_by(&self, event: &Event) -> bool {
        let by_name = matches!(self.kind, ObjectKind::QosClass | ObjectKind::Quota);
        by_name
            && event
                .renames
                .as_ref()
                .is_some_and(|tenant| self.tenants.as_ref().is_some_and(|all| all.contains(tenant)))
    }
}

fn line(what: &str, json: &[u8]) -> Bytes {
    [b"{\"type\":\"", what.as_bytes(), b"\",\"object\":", json, b"}\n"].concat().into()
}

/// A line for an object of a list, by which a watch begins that brings no resourceVersion.
pub fn added(object: &AnyObject) -> Bytes {
    line("ADDED", &serde_json::to_vec(object).unwrap_or_default())
}

fn bookmark(kind: ObjectKind, revision: u64) -> Bytes {
    let object = json!({"apiVersion": API_VERSION, "kind": kind.name(), "metadata": {"resourceVersion": revision}});
    line("BOOKMARK", object.to_string().as_bytes())
}

/// Listing with which a watch begins that brings no resourceVersion.
pub struct Listed {
    /// A line for each object.
    pub lines: VecDeque<Bytes>,
    /// It was read in pages, in order of name: the last name of each (`None`: all that follow), and
    /// the revision that it shows.
    pub pages: Vec<(Option<String>, Revision)>,
}

/// A reader's place.
pub struct Reader {
    history: Arc<History>,
    filter: Filter,
    /// The next event, and the revision from which on it counts.
    next: u64,
    after: u64,
    /// Of the event before.
    revision: u64,
    count: watch::Receiver<u64>,
    /// To be said first.
    listed: Listed,
    /// The last revision of those pages: some of what came until then is sent.
    listed_until: u64,
    owes_bookmark: bool,
    end: Instant,
    is_over: bool,
}

impl Reader {
    /// From a revision on. Errors: some of what came after it is forgotten. What is to come has not
    /// been there: a store before.
    pub fn new(
        history: Arc<History>,
        filter: Filter,
        after: Revision,
        listed: Option<Listed>,
    ) -> Result<Self, Failure> {
        let count = history.count.subscribe();
        let past = history.past();
        if after.0 < past.forgotten {
            return Err(Failure::expired());
        }
        let skipped = past.events.partition_point(|event| event.is_known_at(after.0));
        let next = past.first + skipped as u64;
        drop(past);
        let end = Instant::now() + WATCH_TIME_MAX;
        let owes_bookmark = listed.is_some();
        let listed = listed.unwrap_or_else(|| Listed { lines: VecDeque::new(), pages: Vec::new() });
        let listed_until = listed.pages.iter().map(|(_, revision)| revision.0).max().unwrap_or(0);
        let (after, revision, is_over) = (after.0, after.0, false);
        Ok(Self { history, filter, next, after, revision, count, listed, listed_until, owes_bookmark, end, is_over })
    }

    /// The page with this object has shown the event already.
    fn is_listed(&self, event: &Event) -> bool {
        let has = |last: &Option<String>| last.as_ref().is_none_or(|last| event.name <= *last);
        event.revision <= self.listed_until
            && event.kind == self.filter.kind
            && self
                .listed
                .pages
                .iter()
                .find(|(last, _)| has(last))
                .is_some_and(|(_, revision)| event.is_known_at(revision.0))
    }

    /// All up to this revision is sent, if it is not one of those that only some of the pages show.
    fn send_bookmark(&mut self, revision: u64, bytes: &mut Vec<u8>) {
        if self.owes_bookmark && revision >= self.listed_until {
            bytes.extend_from_slice(&bookmark(self.filter.kind, revision));
            self.owes_bookmark = false;
        }
    }

    /// Takes what there is. True: no more will come.
    fn take(&mut self, bytes: &mut Vec<u8>) -> bool {
        let history = self.history.clone();
        let past = history.past();
        if self.next < past.first {
            bytes.extend_from_slice(&line("ERROR", Failure::expired().to_json().to_string().as_bytes()));
            return true;
        }
        while bytes.len() < CHUNK_BYTES {
            // Events of a revision come together.
            let Some(event) = past.events.get((self.next - past.first) as usize) else {
                self.send_bookmark(past.revision.max(self.after), bytes);
                break;
            };
            if event.revision != self.revision {
                self.send_bookmark(self.revision, bytes);
                self.revision = event.revision;
            }
            self.next += 1;
            if event.is_known_at(self.after) {
                continue;
            }
            if self.filter.is_upset_by(event) {
                bytes.extend_from_slice(&line("ERROR", Failure::expired().to_json().to_string().as_bytes()));
                return true;
            }
            if self.is_listed(event) {
                continue;
            }
            if let Some(line) = self.filter.line(event) {
                bytes.extend_from_slice(&line);
                self.owes_bookmark = true;
            }
        }
        false
    }

    /// The next piece; `None`: that was all.
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(bytes) = self.listed.lines.pop_front() {
            return Some(bytes);
        }
        while !self.is_over {
            // Before the look at the history: what comes after it is noticed.
            self.count.borrow_and_update();
            let mut bytes = Vec::new();
            self.is_over = self.take(&mut bytes);
            if !bytes.is_empty() {
                return Some(bytes.into());
            }
            let now = Instant::now();
            if now >= self.end {
                self.is_over = true;
                break;
            }
            let until = self.end.min(now + BOOKMARK_INTERVAL);
            match timeout_at(until, self.count.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => self.is_over = true,
                Err(_) => {
                    let revision = self.history.past().revision.max(self.after);
                    // All up to there was looked at, unless something has come just now.
                    if self.next == *self.count.borrow() && revision >= self.listed_until {
                        return Some(bookmark(self.filter.kind, revision));
                    }
                }
            }
        }
        None
    }
}

type Step = Pin<Box<dyn Future<Output = (Reader, Option<Bytes>)> + Send>>;

/// A watch's answer.
pub struct WatchBody(Option<Step>);

impl WatchBody {
    pub fn new(reader: Reader) -> Self {
        Self(Some(step(reader)))
    }
}

fn step(mut reader: Reader) -> Step {
    Box::pin(async move {
        let bytes = reader.next().await;
        (reader, bytes)
    })
}

impl Body for WatchBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(future) = &mut self.0 else { return Poll::Ready(None) };
        let Poll::Ready((reader, bytes)) = future.as_mut().poll(context) else { return Poll::Pending };
        self.0 = bytes.is_some().then(|| step(reader));
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_orchestrator::objects::{QosClassStatus, parse_object};
    use serde_json::Value;

    fn rule(name: &str, tenant: &str, tier: &str, version: u64) -> Side {
        let value = json!({"apiVersion": API_VERSION, "kind": "AccessRule",
            "metadata": {"name": name, "labels": {"tier": tier}, "resourceVersion": version},
            "spec": {"tenant": tenant, "from": {}, "to": {}, "action": "deny"}});
        Side { object: parse_object(&value).unwrap(), tenant: Some(tenant.into()) }
    }

    fn network(class: Option<&str>) -> Side {
        let mut value = json!({"apiVersion": API_VERSION, "kind": "Network", "metadata": {"name": "n"},
            "spec": {"tenant": "blue", "cidrs": ["10.0.0.0/24"]}});
        if let Some(class) = class {
            value["spec"]["qosClass"] = class.into();
        }
        Side { object: parse_object(&value).unwrap(), tenant: Some("blue".into()) }
    }

    fn change(revision: u64, before: Option<Side>, after: Option<Side>) -> Change {
        Change { revision: Revision(revision), before, after, is_status: false }
    }

    fn filter(kind: ObjectKind, selector: &str, tenant: Option<&str>) -> Filter {
        let tenants = tenant.map(|tenant| BTreeSet::from([tenant.to_owned()]));
        Filter { kind, name: None, selector: Selector::parse(selector).unwrap(), tenants, names: BTreeSet::new() }
    }

    fn reader(history: &Arc<History>, filter: Filter, after: u64) -> Result<Reader, Failure> {
        Reader::new(history.clone(), filter, Revision(after), None)
    }

    /// Events that are there, `TYPE name` each, without bookmarks, and whether that was all for
    /// ever.
    fn read(reader: &mut Reader) -> (Vec<String>, bool) {
        let mut bytes = Vec::new();
        let is_over = reader.take(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let word = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            let name = value["object"]["metadata"]["name"].as_str().or(value["object"]["reason"].as_str());
            format!("{} {}", value["type"].as_str().unwrap(), name.unwrap())
        };
        let lines = text.lines().filter(|line| !line.starts_with("{\"type\":\"BOOKMARK\""));
        (lines.map(word).collect(), is_over)
    }

    /// The next events, `TYPE resourceVersion` each.
    async fn versions(reader: &mut Reader) -> Vec<String> {
        let text = String::from_utf8(reader.next().await.unwrap().to_vec()).unwrap();
        let word = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            format!("{} {}", value["type"].as_str().unwrap(), value["object"]["metadata"]["resourceVersion"])
        };
        text.lines().map(word).collect()
    }

    #[tokio::test]
    async fn a_bookmark_follows_each_revision_once_all_of_it_is_sent() {
        let history = History::new(Revision(0));
        let of = |name: &str, version, tier: &str| change(version, None, Some(rule(name, "blue", tier, version)));
        let long = "w".repeat(CHUNK_BYTES);
        history.push(&[of("a", 1, &long), of("b", 1, "web")]);
        history.push(&[of("c", 2, "web")]);
        history.push(&[change(3, None, Some(network(None)))]);
        let mut all = reader(&history, filter(ObjectKind::AccessRule, "", None), 0).unwrap();
        assert_eq!(versions(&mut all).await, ["ADDED 1"], "not all of the revision");
        assert_eq!(versions(&mut all).await, ["ADDED 1", "BOOKMARK 1", "ADDED 2", "BOOKMARK 2"]);
    }

    #[tokio::test]
    async fn what_a_watch_begins_with_is_not_sent_again() {
        let history = History::new(Revision(9));
        let of = |name: &str, version| rule(name, "blue", "web", version);
        // `a` and `c` are read at revision 10 and 12, with changes around.
        history.push(&[change(10, None, Some(of("a", 10))), change(10, None, Some(of("c", 10)))]);
        history.push(&[change(11, Some(of("a", 10)), Some(of("a", 11))), change(11, None, Some(of("d", 11)))]);
        history.push(&[change(12, Some(of("d", 11)), None)]);
        let pages = vec![(Some("b".into()), Revision(10)), (None, Revision(12))];
        let lines = [of("a", 10), of("c", 10)].map(|side| added(&side.object));
        let listed = Some(Listed { lines: lines.into(), pages });
        let filter = filter(ObjectKind::AccessRule, "", None);
        let mut reader = Reader::new(history.clone(), filter, Revision(9), listed).unwrap();
        assert_eq!(versions(&mut reader).await, ["ADDED 10"]);
        assert_eq!(versions(&mut reader).await, ["ADDED 10"]);
        // Of the others nothing is new, and nobody has to begin between the pages.
        assert_eq!(versions(&mut reader).await, ["MODIFIED 11", "BOOKMARK 12"]);
        history.push(&[change(13, Some(of("c", 10)), None)]);
        assert_eq!(versions(&mut reader).await, ["DELETED 13", "BOOKMARK 13"]);
    }

    #[tokio::test]
    async fn a_bookmark_follows_what_a_watch_begins_with() {
        let history = History::new(Revision(9));
        let listed = Listed { lines: VecDeque::new(), pages: vec![(None, Revision(10))] };
        let filter = filter(ObjectKind::AccessRule, "", None);
        let mut reader = Reader::new(history.clone(), filter, Revision(9), Some(listed)).unwrap();
        // An object of the page may come a moment later than the page.
        let mut bytes = Vec::new();
        assert!(!reader.take(&mut bytes) && bytes.is_empty());
        history.push(&[change(10, None, Some(network(None)))]);
        assert_eq!(versions(&mut reader).await, ["BOOKMARK 10"]);
    }

    #[tokio::test]
    async fn a_status_is_sent_behind_its_revision() {
        let history = History::new(Revision(9));
        let of = |version| rule("a", "blue", "web", version);
        let status = |revision| Change { is_status: true, ..change(revision, Some(of(revision)), Some(of(revision))) };
        let all = || filter(ObjectKind::AccessRule, "", None);
        let mut follower = reader(&history, all(), 9).unwrap();
        history.push(&[change(10, None, Some(of(10)))]);
        assert_eq!(versions(&mut follower).await, ["ADDED 10", "BOOKMARK 10"]);
        history.push(&[status(10)]);
        assert_eq!(versions(&mut follower).await, ["MODIFIED 10", "BOOKMARK 10"]);
        // A reader that goes on from that bookmark may not have seen it; one that has seen more
        // has.
        assert_eq!(read(&mut reader(&history, all(), 10).unwrap()).0, ["MODIFIED a"]);
        history.push(&[change(11, Some(of(10)), None)]);
        assert_eq!(read(&mut reader(&history, all(), 11).unwrap()).0, [""; 0]);
        assert_eq!(read(&mut reader(&history, all(), 10).unwrap()).0, ["MODIFIED a", "DELETED a"]);
        // A list without it is not undone by earlier events.
        let listed = Some(Listed { lines: VecDeque::new(), pages: vec![(None, Revision(11))] });
        let mut late = Reader::new(history.clone(), all(), Revision(10), listed).unwrap();
        assert_eq!(read(&mut late).0, [""; 0]);
    }

    #[tokio::test]
    async fn everybody_reads_what_is_theirs() {
        let history = History::new(Revision(10));
        let one = |tier| rule("one", "blue", tier, 11);
        history.push(&[change(11, None, Some(one("web")))]);
        history.push(&[
            change(12, Some(one("web")), Some(one("db"))),
            change(12, None, Some(rule("two", "red", "web", 12))),
        ]);
        history.push(&[change(13, Some(one("db")), None)]);
        for (selector, tenant, after, expected) in [
            ("", None, 10, &["ADDED one", "MODIFIED one", "ADDED two", "DELETED one"][..]),
            ("", None, 11, &["MODIFIED one", "ADDED two", "DELETED one"]),
            ("", None, 13, &[]),
            ("", Some("blue"), 10, &["ADDED one", "MODIFIED one", "DELETED one"]),
            ("", Some("red"), 10, &["ADDED two"]),
            ("tier=web", None, 10, &["ADDED one", "DELETED one", "ADDED two"]),
            ("tier=db", Some("blue"), 10, &["ADDED one", "DELETED one"]),
        ] {
            let mut reader = reader(&history, filter(ObjectKind::AccessRule, selector, tenant), after).unwrap();
            let (lines, is_over) = read(&mut reader);
            assert_eq!((lines.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), is_over), (expected, false));
            assert!(read(&mut reader).0.is_empty());
        }
        assert!(reader(&history, filter(ObjectKind::AccessRule, "", None), 9).is_err());
        assert!(read(&mut reader(&history, filter(ObjectKind::Group, "", None), 10).unwrap()).0.is_empty());
    }

    #[tokio::test]
    async fn who_is_too_slow_has_to_list_again() {
        let history = History::new(Revision(0));
        let mut slow = reader(&history, filter(ObjectKind::AccessRule, "", None), 0).unwrap();
        for revision in 1..=EVENT_COUNT_MAX as u64 + 1 {
            history.push(&[change(revision, None, Some(rule("x", "blue", "web", revision)))]);
        }
        assert_eq!(read(&mut slow), (vec!["ERROR Expired".into()], true));
        assert!(reader(&history, filter(ObjectKind::AccessRule, "", None), 0).is_err());
        let mut fresh = reader(&history, filter(ObjectKind::AccessRule, "", None), 1).unwrap();
        let mut count = 0;
        while let (lines, false) = read(&mut fresh)
            && !lines.is_empty()
        {
            count += lines.len();
        }
        assert_eq!(count, EVENT_COUNT_MAX);
    }

    #[tokio::test]
    async fn large_objects_are_forgotten_sooner() {
        let history = History::new(Revision(0));
        for revision in 1..=300 {
            history.push(&[change(revision, None, Some(rule("x", "blue", &"w".repeat(100_000), revision)))]);
        }
        let past = history.past();
        assert!(past.bytes <= EVENT_BYTES_MAX && past.events.len() > 100);
        assert_eq!(past.forgotten + past.events.len() as u64, 300);
    }

    #[tokio::test]
    async fn a_tenant_whose_classes_change_has_to_list_again() {
        let history = History::new(Revision(0));
        let of = |kind, tenant| reader(&history, filter(kind, "", tenant), 0).unwrap();
        let mut classes = [of(ObjectKind::QosClass, Some("blue")), of(ObjectKind::QosClass, Some("red"))];
        let mut all = of(ObjectKind::QosClass, None);
        let mut networks = of(ObjectKind::Network, Some("blue"));
        history.push(&[change(1, Some(network(None)), Some(network(Some("slow"))))]);
        assert_eq!(read(&mut classes[0]), (vec!["ERROR Expired".into()], true));
        assert_eq!(read(&mut classes[1]), (vec![], false));
        assert_eq!(read(&mut all), (vec![], false));
        assert_eq!(read(&mut networks), (vec!["MODIFIED n".into()], false));
    }

    #[tokio::test]
    async fn tenants_do_not_see_the_networks_of_others() {
        let history = History::new(Revision(0));
        let value = json!({"apiVersion": API_VERSION, "kind": "QosClass", "metadata": {"name": "gold"}, "spec": {}});
        let mut object = parse_object(&value).unwrap();
        let AnyObject::QosClass(class) = &mut object else { panic!("a class") };
        class.status = Some(QosClassStatus { networks: vec!["red-net".into()], vnic_count: 7 });
        history.push(&[change(1, None, Some(Side { object, tenant: None }))]);
        let mut of_tenant = filter(ObjectKind::QosClass, "", Some("blue"));
        of_tenant.names.insert("gold".into());
        for (filter, is_reported) in [(of_tenant, false), (filter(ObjectKind::QosClass, "", None), true)] {
            let mut bytes = Vec::new();
            reader(&history, filter, 0).unwrap().take(&mut bytes);
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.contains("gold"));
            assert_eq!(text.contains("red-net"), is_reported, "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn readers_are_woken_and_sent_their_position() {
        let history = History::new(Revision(5));
        let mut reader = reader(&history, filter(ObjectKind::AccessRule, "", None), 5).unwrap();
        let text = reader.next().await.unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&value["type"], &value["object"]["metadata"]["resourceVersion"]), (&"BOOKMARK".into(), &5.into()));
        let later = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            history.push(&[change(6, None, Some(rule("x", "blue", "web", 6)))]);
        };
        let (text, ()) = tokio::join!(reader.next(), later);
        assert!(text.unwrap().starts_with(b"{\"type\":\"ADDED\""));
        let mut count = 0;
        while let Some(_bookmark) = reader.next().await {
            count += 1;
        }
        assert_eq!(count, 119);
    }
}
