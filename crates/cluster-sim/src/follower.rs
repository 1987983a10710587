//! A host's follower: the real view and the real decisions, on the state of a router that refuses as a router does.
use crate::words::{DEFAULT_CIDR, host_name, network_number};
use freeflow_cluster::mirror::{Released, Target, Wanted, carry_out};
use freeflow_cluster::{
    DEFAULT_ROOT, DueBlocks, HostRecord, Mesh, News, PeersOf, Problem, Scope, View, due_blocks, due_places, named,
};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Command, Revision, State};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;

/// All of a router that its follower asks for. The way to it, HTTP and its disk, takes time that is not in it.
struct Router(State);

impl Router {
    fn new(host: usize, record: &HostRecord) -> Self {
        let mut state = State::new();
        let pool = DEFAULT_CIDR.parse().expect("a range");
        let range = record.default_range.parse().ok();
        let begin = Command::Begin { host: host_name(host), pool, range, bridge: "ff0".into() };
        run(&mut state, &begin).expect("a router begins");
        Self(state)
    }
}

fn run(state: &mut State, command: &Command) -> Result<(), String> {
    let plan = state.plan(command).map_err(|refusal| refusal.to_string())?;
    let revision = Revision(state.revision().0 + 1);
    state.adopt(&plan, revision);
    Ok(())
}

impl Target for Router {
    fn present(&mut self, kind: ObjectKind) -> Result<Vec<AnyObject>, String> {
        let is_asked = |object: &AnyObject| kind != ObjectKind::Vnic || self.0.is_clusters(kind, object.name());
        Ok(self.0.objects(kind).filter(is_asked).collect())
    }

    fn apply(&mut self, objects: &[AnyObject]) -> Result<(), String> {
        run(&mut self.0, &Command::ApplyForCluster { objects: objects.to_vec() })
    }

    fn delete(&mut self, kind: ObjectKind, name: &str) -> Result<(), String> {
        run(&mut self.0, &Command::Delete { kind, name: name.into(), version: None })
    }
}

/// Result of a round.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    pub ranges: BTreeMap<String, String>,
    pub problems: Vec<Problem>,
    /// All of them stay as they are until news come.
    pub waits_for_news: bool,
    /// Other hosts in its peers file.
    pub peer_count: usize,
    /// Time of this machine that it took.
    pub took_ns: u64,
}

pub struct Follower {
    number: usize,
    record: HostRecord,
    pub view: View,
    router: Router,
    /// Time of this machine for all news so far.
    pub taking_ns: u64,
}

/// Processor time of this thread so far: others on this machine don't count.
fn thread_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Processor time that it takes on this machine.
pub fn timed<T>(body: impl FnOnce() -> T) -> (T, u64) {
    let begin = thread_ns();
    let result = body();
    (result, thread_ns() - begin)
}

impl Follower {
    /// Of a host with this record; one that follows what hosts say is a controller.
    pub fn new(number: usize, record: HostRecord, scope: Scope) -> Self {
        let router = Router::new(number, &record);
        Self { number, record, view: View::new(DEFAULT_ROOT, scope), router, taking_ns: 0 }
    }

    /// Whether it has to do anything for these news.
    pub fn take(&mut self, news: News) -> bool {
        let (is_due, took_ns) = timed(|| self.view.take(news));
        self.taking_ns += took_ns;
        is_due
    }

    /// Has the router do all that is declared, and finds out who the other hosts are.
    pub fn carry_out(&mut self) -> Carried {
        let name = host_name(self.number);
        let begin = thread_ns();
        let declared = self.view.declared().expect("what is declared makes sense");
        let wanted = Wanted::of(&self.view, &declared, &name, &Released::new());
        let mut problems = carry_out(&mut self.router, &wanted).expect("the router answers");
        let waits_for_news = problems.len() == wanted.problems.len();
        let peers = PeersOf::host(&name, &self.record, &self.view, &declared);
        problems.extend(peers.problems);
        let networks = self.router.present(ObjectKind::Network).expect("the router answers");
        let range = |object: AnyObject| match object {
            AnyObject::Network(network) if network_number(&network.metadata.name).is_some() => {
                Some((network.metadata.name, network.spec.range?))
            }
            _ => None,
        };
        let ranges = networks.into_iter().filter_map(range).collect();
        let took_ns = thread_ns() - begin;
        Carried { ranges, problems, waits_for_news, peer_count: peers.peers.len(), took_ns }
    }

    /// How long it takes to find out what vNICs of other hosts are called, and how many those are.
    pub fn names(&self) -> (usize, u64) {
        let declared = self.view.declared().expect("what is declared makes sense");
        let peers = PeersOf::host(&host_name(self.number), &self.record, &self.view, &declared).peers;
        let all = || named(&self.view, &declared, &Mesh::of(&host_name(self.number), &self.view, &declared), &peers);
        let (all, took_ns) = timed(all);
        (all.len(), took_ns)
    }

    /// Rules that its router has.
    pub fn rule_count(&self) -> usize {
        self.router.0.objects(ObjectKind::AccessRule).count()
    }

    /// All that a controller has to do, and how long it takes it to find that out.
    pub fn control(&self) -> (DueBlocks, u64) {
        let decide = || {
            let due = due_blocks(&self.view).expect("what is declared makes sense");
            let declared = self.view.declared().expect("what is declared makes sense");
            let places = due_places(&self.view, &declared, self.view.places());
            assert!(places.is_empty(), "no vNIC moves here");
            due
        };
        timed(decide)
    }
}
