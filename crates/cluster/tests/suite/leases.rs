//! Leases: hosts that are silent for too long lose their blocks and vNICs, and no address is ever two hosts'.
use crate::given::{Given, ROOT, network, object, record};
use freeflow_cluster::{Followed, News, Place, View, due_blocks, due_places, due_reclaims, lease_time};
use freeflow_orchestrator::store::Entry;
use freeflow_orchestrator::{Pool, Revision};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const AFTER_S: u64 = 20;
const MS: u64 = 1000;

fn says(after_s: Option<u64>) -> Followed {
    Followed { reclaim_after_s: after_s, ..Followed::default() }
}

/// Two hosts, of which the first has a block and a vNIC; it was heard so long ago.
fn silent(asked: &str, said: Option<u64>, ago_s: u64) -> View {
    let vnic = object("Vnic", "database", json!({"network": "red"}));
    let red = json!({"tenant": "red", "cidrs": ["10.50.0.0/24"], "floating": "10.50.0.224/27"});
    let place = Place {
        host: "h1".into(),
        next: None,
        moved: false,
        addresses: vec!["10.50.0.226".parse().expect("an address")],
    };
    let given = Given::new()
        .key("cluster/data/reclaimAfter", asked.as_bytes())
        .declared(vec![object("Network", "red", red), vnic])
        .host("h1", &record(1))
        .host("h2", &record(2))
        .block("default", "h1", "10.111.1.0/24")
        .block("red", "h1", "10.50.0.0/28")
        .followed("h1", &says(said))
        .followed("h2", &says(said));
    given.place("database", &place).0.view_of(Duration::from_secs(ago_s))
}

fn due(view: &View) -> Vec<String> {
    due_reclaims(view, Instant::now()).into_iter().map(|due| due.host).collect()
}

fn change(view: &mut View, revision: u64, key: &str, value: Option<&[u8]>) {
    view.take(News::Changed(Revision(revision), vec![entry(revision, key, value)]));
}

fn entry(revision: u64, key: &str, value: Option<&[u8]>) -> (String, Option<Entry>) {
    let (key, at) = (format!("{ROOT}/{key}"), Revision(revision));
    let entry =
        value.map(|value| Entry { key: key.clone(), value: value.to_vec(), created: at, modified: at, lease: None });
    (key, entry)
}

#[test]
fn a_host_loses_what_it_has_after_the_longer_of_the_two_times() {
    let is_due = |asked: &str, said, ago_s| due(&silent(asked, said, ago_s)) == ["h1"];
    assert!(is_due("20", Some(20), 21) && !is_due("20", Some(20), 19));
    // An operator has lowered it, and the host may not have heard; or raised it.
    assert!(is_due("20", Some(30), 31) && !is_due("20", Some(30), 29));
    assert!(is_due("30", Some(20), 31) && !is_due("30", Some(20), 29));
    for (asked, said) in [("never", Some(20)), ("20", None), ("5", Some(20)), ("nonsense", Some(20))] {
        assert!(!is_due(asked, said, 60), "{asked} {said:?}");
    }
}

#[test]
fn a_time_that_was_named_before_a_backup_counts_no_more() {
    let mut view = silent("20", Some(20), 60);
    assert_eq!(due(&view), ["h1"]);
    change(&mut view, 101, "cluster/data/identity", Some(br#"{"id": "c", "version": 1, "restored": 5}"#));
    assert!(view.is_of_backup("red", "h1") && due(&view).is_empty());
    // The host has spoken since, and is silent again.
    let word = serde_json::to_vec(&says(Some(20))).expect("encodable");
    let then = Instant::now().checked_sub(Duration::from_secs(30)).expect("the machine has run for longer");
    view.take_at(News::Changed(Revision(102), vec![entry(102, "said/h1/data/followed", Some(&word))]), then);
    assert_eq!(due(&view), ["h1"]);
}

#[test]
fn a_controller_counts_from_when_its_own_news_are_without_a_gap() {
    let mut view = silent("20", Some(20), 60);
    view.take(News::Behind(freeflow_etcd::EtcdError::Unreachable("away".into())));
    assert!(due(&view).is_empty(), "its news are old");
    view.take(News::Unchanged(Revision(101)));
    assert!(due(&view).is_empty(), "hosts had no time to speak");
    // The host has spoken.
    let mut view = silent("20", Some(20), 60);
    change(&mut view, 101, "said/h1/data/followed", Some(&serde_json::to_vec(&says(Some(20))).expect("encodable")));
    assert!(due(&view).is_empty());
}

#[test]
fn a_host_that_has_lost_its_blocks_gets_none_until_it_speaks() {
    let mut view = silent("20", Some(20), 60);
    let words: Vec<_> = due_reclaims(&view, Instant::now()).into_iter().map(|due| due.word.0.to_string()).collect();
    change(&mut view, 101, "blocks/data/.reclaimed/h1", Some(words[0].as_bytes()));
    assert!(view.is_reclaimed("h1") && due(&view) == ["h1"], "some of it is left");
    change(&mut view, 102, "blocks/data/red/h1", None);
    let given = |view: &View| due_blocks(view).expect("it makes sense").writes;
    let names = |writes: Vec<(String, Option<Pool>)>| writes.into_iter().map(|(key, _)| key).collect::<Vec<_>>();
    assert_eq!(names(given(&view)), ["red/h2"]);
    assert_eq!(due(&view), ["h1"], "its vNIC is left");
    change(&mut view, 103, "places/data/database", None);
    assert!(due(&view).is_empty(), "the block of default stays its");
    // Its old word does not say who has a vNIC.
    assert_eq!(due_places(&view, &view.declared().expect("it makes sense"), view.places()), []);
    change(&mut view, 104, "said/h1/data/followed", Some(&serde_json::to_vec(&says(Some(20))).expect("encodable")));
    assert_eq!(names(given(&view)), ["red/h1", "red/h2", ".reclaimed/h1"]);
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// A word on its way: when it arrives, if it does; when its host hears of that; and what it is.
struct Word {
    commits_ms: u64,
    heard_ms: u64,
    began_ms: u64,
    revision: Option<u64>,
}

#[derive(Default)]
struct Machine {
    /// Of a clock that goes wrong by so many thousandths.
    drift: i64,
    until_ms: u64,
    is_over: bool,
    /// The addresses that containers use.
    uses: Option<Pool>,
    words: Vec<Word>,
    speaks_ms: u64,
    cut_until_ms: u64,
    candidate: Option<(u64, u64)>,
    /// etcd's changes that it has heard of.
    heard: usize,
}

impl Machine {
    /// Its clock at a time.
    fn clock_ms(&self, now_ms: u64) -> u64 {
        now_ms.checked_add_signed(now_ms as i64 * self.drift / 1000).expect("a time")
    }
}

/// etcd: all changes, and what there is.
struct Store {
    changes: Vec<(String, Option<Vec<u8>>)>,
    first: u64,
}

impl Store {
    fn revision(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    fn put(&mut self, key: &str, value: Option<&[u8]>) -> u64 {
        self.changes.push((key.to_owned(), value.map(<[u8]>::to_vec)));
        self.revision()
    }

    /// The last change of a key, or of all below it.
    fn last(&self, prefix: &str) -> u64 {
        let at = self.changes.iter().rposition(|(key, _)| key.starts_with(prefix));
        at.map_or(0, |at| self.first + at as u64 + 1)
    }

    fn tell(&self, view: &mut View, heard: &mut usize, now: Instant) {
        let news = self.changes[*heard..].iter().enumerate();
        for (index, (key, value)) in news {
            let revision = self.first + (*heard + index) as u64 + 1;
            let changed = vec![entry(revision, key, value.as_deref())];
            view.take_at(News::Changed(Revision(revision), changed), now);
        }
        *heard = self.changes.len();
        view.take_at(News::Unchanged(Revision(self.revision())), now);
    }
}

struct Model {
    random: Random,
    store: Store,
    hosts: BTreeMap<String, (Machine, View)>,
    controllers: Vec<(Machine, View)>,
    /// By which all news come.
    epoch: Instant,
    now_ms: u64,
    reclaim_count: usize,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        // Two blocks for three hosts.
        let given = Given::new()
            .key("cluster/data/reclaimAfter", AFTER_S.to_string().as_bytes())
            .declared(vec![network("red", "10.50.0.0/28")]);
        let given = (1..=3).fold(given, |given, number| given.host(&format!("h{number}"), &record(number)));
        let mut machine = || Machine { drift: random.below(9) as i64 - 4, ..Machine::default() };
        let hosts = (1..=3).map(|number| (format!("h{number}"), (machine(), given.clone().view())));
        let hosts = hosts.collect();
        let controllers = (0..2).map(|_| (machine(), given.clone().view())).collect();
        let store = Store { changes: Vec::new(), first: 100 };
        Self { random, store, hosts, controllers, epoch: Instant::now(), now_ms: 100 * MS, reclaim_count: 0 }
    }

    fn lease_ms() -> u64 {
        lease_time(Duration::from_secs(AFTER_S)).as_millis() as u64
    }

    /// A host speaks, its words arrive, and it hears of that; any of it may fail, or be late.
    fn speak(&mut self) {
        let now_ms = self.now_ms;
        for (name, (machine, _)) in &mut self.hosts {
            let is_cut = now_ms < machine.cut_until_ms;
            if self.random.one_in(150) {
                machine.cut_until_ms = now_ms + self.random.below(60 * MS);
            }
            if now_ms >= machine.speaks_ms && !is_cut {
                machine.speaks_ms = now_ms + 3 * MS;
                let commits_ms = now_ms + self.random.below(2 * MS);
                // Its follower may be killed, or stopped for long.
                let slow = if self.random.one_in(10) { 30 * MS } else { MS };
                let heard_ms = if self.random.one_in(5) { u64::MAX } else { commits_ms + self.random.below(slow) };
                let began_ms = machine.clock_ms(now_ms);
                machine.words.push(Word { commits_ms, heard_ms, began_ms, revision: None });
            }
            for word in machine.words.iter_mut().filter(|word| word.revision.is_none() && word.commits_ms <= now_ms) {
                let said = serde_json::to_vec(&says(Some(AFTER_S))).expect("encodable");
                word.revision = Some(self.store.put(&format!("said/{name}/data/followed"), Some(&said)));
            }
        }
    }

    /// As follower and router do.
    fn follow(&mut self) {
        let now_ms = self.now_ms;
        let now = self.epoch + Duration::from_millis(now_ms);
        for (name, (machine, view)) in &mut self.hosts {
            let clock_ms = machine.clock_ms(now_ms);
            if clock_ms >= machine.until_ms {
                (machine.is_over, machine.uses) = (true, None);
            }
            if now_ms >= machine.cut_until_ms && self.random.one_in(3) {
                self.store.tell(view, &mut machine.heard, now);
            }
            let heard: Vec<_> = machine.words.extract_if(.., |word| word.heard_ms <= now_ms).collect();
            for Word { began_ms, revision, .. } in heard {
                let (until_ms, revision) = (began_ms + Self::lease_ms(), revision.expect("it was committed"));
                match machine.is_over {
                    false => machine.until_ms = machine.until_ms.max(until_ms),
                    true => machine.candidate = Some((until_ms, revision)),
                }
            }
            if let Some((until_ms, revision)) = machine.candidate
                && view.revision().0 >= revision
            {
                machine.candidate = None;
                if machine.is_over && until_ms > clock_ms {
                    (machine.is_over, machine.until_ms) = (false, until_ms);
                }
            }
            if !machine.is_over && machine.uses.is_none() {
                machine.uses = view.block("red", name);
            }
        }
    }

    fn control(&mut self) {
        for index in 0..self.controllers.len() {
            let (machine, view) = &mut self.controllers[index];
            if self.random.one_in(300) {
                machine.cut_until_ms = self.now_ms + self.random.below(40 * MS);
                // It may not notice: its process was stopped, say.
                if self.random.one_in(2) {
                    view.take(News::Behind(freeflow_etcd::EtcdError::Unreachable("away".into())));
                }
            }
            let clock = self.epoch + Duration::from_millis(machine.clock_ms(self.now_ms));
            if self.now_ms >= machine.cut_until_ms && self.random.one_in(4) {
                self.store.tell(view, &mut machine.heard, clock);
            }
            // By news that may be old, as in a transaction that is late.
            for due in due_reclaims(view, clock) {
                let word = self.store.last(&format!("said/{}/data/followed", due.host));
                if word == due.word.0 {
                    self.store.put(&format!("blocks/data/.reclaimed/{}", due.host), Some(word.to_string().as_bytes()));
                    self.store.put(&format!("blocks/data/red/{}", due.host), None);
                    self.reclaim_count += 1;
                }
            }
            if self.store.last("blocks/") <= view.revision().0 {
                for (key, block) in due_blocks(view).expect("it makes sense").writes {
                    let block = block.map(|block| block.to_string());
                    self.store.put(&format!("blocks/data/{key}"), block.as_ref().map(String::as_bytes));
                }
            }
        }
    }

    fn check(&self) {
        let mut users = BTreeMap::new();
        for (name, (machine, _)) in &self.hosts {
            if let Some(other) = machine.uses.and_then(|block| users.insert(block.to_string(), name)) {
                panic!("{name} and {other} use one block at {} ms", self.now_ms);
            }
        }
    }
}

#[test]
fn no_block_is_used_by_two_hosts_whatever_is_late() {
    let mut reclaim_count = 0;
    for seed in 0..24 {
        let mut model = Model::new(seed);
        for _ in 0..4000 {
            model.now_ms += 100;
            model.speak();
            model.follow();
            model.control();
            model.check();
        }
        reclaim_count += model.reclaim_count;
    }
    assert!(reclaim_count > 50, "only {reclaim_count} blocks were taken back");
}
