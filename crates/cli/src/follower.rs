//! The process that follows the cluster for a host: what is declared for all hosts it applies here, the other hosts it
//! writes into the peers file, and it says how far it has come. The router enforces all of that, and goes on without
//! it, and without etcd.
use crate::cluster::{Claims, Directory, Memory, Own, note_problems, note_state, record, renew_if_due, rotate_log};
use crate::control::api::{Api, BASE, encoded};
use crate::failure::{Failure, Result, fail};
use crate::output;
use crate::peers;
use crate::publisher::Publisher;
use freeflow_cluster::mirror::{Target, Wanted, carry_out, own_objects, present_of};
use freeflow_cluster::{
    Admission, ClusterFile, Controller, Follow, Followed, Holdings, HostRecord, Identity, Mesh, Named, News, Pace,
    Peer, PeersOf, Pending, Problem, Reclaimed, Report, There, View, named, place_vnics,
};
use freeflow_hostnet::run_dir::{RunDir, Settings};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, parse_object};
use freeflow_orchestrator::{Revision, State, is_clusters};
use freeflow_shm::boottime_ns;
use serde_json::json;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

mod announcing;
mod lease;
mod mesh;
mod vnics;

/// The channel between routers, as the peers file has it by default.
const CONTROL_PORT: u16 = 4790;
/// Longest wait for news, until what failed is tried again.
const ROUND: Duration = Duration::from_secs(2);
/// The same while containers wait for other hosts.
const MEETING_ROUND: Duration = Duration::from_millis(25);
/// The same while a vNIC comes or goes.
const SHORT_ROUND: Duration = Duration::from_millis(200);
/// All is compared, also where nothing has changed: somebody may have restarted the router with an older state.
const WHOLE: Duration = Duration::from_secs(30);
/// The same where something could not be followed that this host's router has refused.
const AGAIN: Duration = Duration::from_secs(3);
/// etcd may be silent so long without being away: its members elect another leader.
const ELECTION_TIME: Duration = Duration::from_secs(5);
/// etcd is asked by a new connection, with the files' certificates as they are then.
const RENEWAL: Duration = Duration::from_secs(60);

/// Between two looks at the names of others' vNICs.
const NAMES_PAUSE: Duration = Duration::from_millis(500);
/// Hosts are admitted so often at most, some at a time: whoever has a token can ask without end.
const ADMISSION: Duration = Duration::from_millis(200);
/// Tokens by which nobody joins any more lose their rights so soon.
const SWEEP: Duration = Duration::from_secs(30);

/// The router of this host, as what is to be changed.
struct Host<'a> {
    api: &'a Api,
    /// The lease that the router has, as far as this process knows: another router is not to make vNICs without it.
    lease_s: Option<u64>,
}

impl<'a> Host<'a> {
    fn of(api: &'a Api, lease: &lease::OwnLease) -> Self {
        Self { api, lease_s: lease.after_s() }
    }
}

impl Target for Host<'_> {
    fn present(&mut self, kind: ObjectKind) -> std::result::Result<Vec<AnyObject>, String> {
        let text = |failure: Failure| failure.to_string();
        let only = if kind == ObjectKind::Vnic { "?floating=true" } else { "" };
        let answer =
            self.api.get(&format!("{BASE}/{}{only}", kind.plural())).map_err(|trouble| text(trouble.into()))?;
        let items = answer["items"].as_array().cloned().unwrap_or_default();
        items.iter().map(|item| parse_object(item).map_err(|invalid| invalid.to_string())).collect()
    }

    fn apply(&mut self, objects: &[AnyObject]) -> std::result::Result<(), String> {
        let lease = self.lease_s.map_or_else(|| "none".into(), |seconds| seconds.to_string());
        let done = self.api.post(&format!("{BASE}/apply?follow=true&lease={lease}"), &json!({"items": objects}));
        done.map(drop).map_err(|trouble| Failure::from(trouble).to_string())
    }

    fn delete(&mut self, kind: ObjectKind, name: &str) -> std::result::Result<(), String> {
        let done = self.api.delete(&format!("{BASE}/{}/{}?follow=true", kind.plural(), encoded(name)));
        done.map(drop).map_err(|trouble| Failure::from(trouble).to_string())
    }
}

/// This host may speak under its name.
struct Standing {
    /// Its record has to be written.
    is_other: bool,
    /// When that was written which is there.
    before: Option<Revision>,
}

struct Follower {
    run_dir: RunDir,
    file: ClusterFile,
    host: String,
    record: HostRecord,
    directory: Directory,
    memory: Memory,
    api: Api,
    follow: Follow,
    report: Report,
    pace: Pace,
    publisher: Publisher,
    view: View,
    standing: Option<Standing>,
    /// Its record was there, and is not any more.
    is_removed: bool,
    /// Up to which revision all was carried out, and the ranges that the host has of networks.
    carried: (u64, BTreeMap<String, String>),
    /// The version of the view by which blocks were given.
    controlled: Option<u64>,
    /// Hosts that want to join, and since when they were last looked at.
    pending: Pending,
    admitted_at: Instant,
    /// When tokens by which nobody joins any more were last looked for.
    swept_at: Option<Instant>,
    /// The last words of the part that admits them, where it could not.
    admission_said: Option<String>,
    /// When the certificate was last looked at, and why it could not be renewed.
    renewed_at: Instant,
    renewal_said: Option<String>,
    /// The last words of the part that gives blocks.
    control_said: Option<String>,
    /// And of the part that takes back what silent hosts have.
    reclaim_said: Option<String>,
    /// The router has not read the peers file as it is.
    is_reload_due: bool,
    /// News that were not carried out.
    is_due: bool,
    whole_at: Instant,
    /// Since when etcd does not answer, and why.
    behind: Option<(Instant, String)>,
    /// The router has noted that.
    noted_away: bool,
    connected_at: Instant,
    /// When it last did, by CLOCK_MONOTONIC.
    heard_ns: u64,
    said: Vec<Problem>,
    /// No problem is of the kind that may be gone when it is tried again, though no news have come.
    waits_for_news: bool,
    /// The last that others were told.
    reported: Vec<Problem>,
    /// All that is declared, as it was last carried out, and the peers.
    declared: Option<State>,
    believed: Vec<Peer>,
    peers: mesh::Peers,
    /// The version of all members that containers here have the names of, and those.
    named: (Option<u64>, Option<Vec<Named>>),
    named_at: Option<Instant>,
    vnics: vnics::OwnVnics,
    announcements: announcing::Announcements,
    lease: lease::OwnLease,
    claims: Claims,
}

/// The range of each network that a host has.
fn ranges_of(target: &mut Host<'_>) -> Result<BTreeMap<String, String>> {
    let present = target.present(ObjectKind::Network).map_err(Failure::new)?;
    let range = |object: AnyObject| match object {
        AnyObject::Network(network) if is_clusters(ObjectKind::Network, &network.metadata.name) => {
            Some((network.metadata.name, network.spec.range?))
        }
        _ => None,
    };
    Ok(present.into_iter().filter_map(range).collect())
}

/// Follows until it is ended.
pub fn follow(run_dir: &RunDir) -> Result<()> {
    // Problems of a process that was killed are not this one's, which notes its own where they are others than before.
    note_problems(run_dir, &[]);
    record(run_dir)?;
    let settings = run_dir.settings().ok_or_else(|| Failure::new("this host is not up"))?;
    let mut follower = Follower::new(run_dir, &settings)?;
    log(&format!("follows the cluster in {} as host {}", follower.file.etcd.join(","), follower.host));
    loop {
        follower.round();
        rotate_log(run_dir);
        if follower.behind.is_none() && follower.view.revision().0 != 0 {
            follower.heard_ns = freeflow_shm::monotonic_ns();
        }
        note_state(run_dir, follower.heard_ns, follower.said.len());
        if !run_dir.path().exists() {
            fail!("the run directory is gone");
        }
    }
}

fn log(text: &str) {
    output::line(format!("{} {text}", humantime()));
}

/// The words of one part, where they are others than its last ones.
fn log_other(last: &mut Option<String>, said: Option<String>) {
    if let Some(text) = said.as_ref().filter(|_| said != *last) {
        log(text);
    }
    *last = said;
}

/// Seconds of Unix time: it is in a log that has nothing else.
fn humantime() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:03}", since.as_secs(), since.subsec_millis())
}

impl Follower {
    fn new(run_dir: &RunDir, settings: &Settings) -> Result<Self> {
        let (Some(path), Some(address), Some(range)) =
            (settings.cluster.as_deref(), settings.address, settings.range.clone())
        else {
            fail!(
                "this host follows no cluster; it is brought up so: freeflow up --cluster FILE --address IP --range CIDR"
            );
        };
        let file = ClusterFile::read(path)?;
        let directory = Directory::of(run_dir, settings);
        let record = HostRecord {
            address,
            control_port: CONTROL_PORT,
            public_key: directory.public_key()?,
            default_range: range,
        };
        if !record.is_sound() {
            fail!(
                "--address {address}, or --range {}: other hosts can't take them; see docs/CLUSTER.md",
                record.default_range
            );
        }
        let (follow, claims) = (Follow::start(&file)?, Claims::listen(run_dir)?);
        claims.set_waker(follow.waker());
        Ok(Self {
            memory: directory.memory(),
            api: Api::of(run_dir)?,
            follow,
            claims,
            waits_for_news: true,
            reported: Vec::new(),
            declared: None,
            vnics: Default::default(),
            announcements: Default::default(),
            lease: lease::OwnLease::new(),
            report: Report::start(&file, &settings.host, boottime_ns)?,
            pace: Pace::default(),
            publisher: Publisher::start(run_dir, &settings.host)?,
            view: View::new(&file.root, file.scope()),
            pending: Pending::new(&file.root),
            admitted_at: Instant::now(),
            swept_at: None,
            admission_said: None,
            renewed_at: Instant::now(),
            renewal_said: None,
            standing: None,
            is_removed: false,
            carried: Default::default(),
            controlled: None,
            control_said: None,
            reclaim_said: None,
            run_dir: RunDir::new(run_dir.path())?,
            host: settings.host.clone(),
            is_reload_due: true,
            is_due: false,
            whole_at: Instant::now(),
            behind: None,
            noted_away: false,
            connected_at: Instant::now(),
            heard_ns: freeflow_shm::monotonic_ns(),
            said: Vec::new(),
            believed: Vec::new(),
            peers: Default::default(),
            named: Default::default(),
            named_at: None,
            file,
            record,
            directory,
        })
    }

    /// Takes news, and does what follows from them.
    fn round(&mut self) {
        let mut wait = match () {
            () if !self.claims.meetings().is_empty() => MEETING_ROUND,
            () if self.vnics.is_busy() || self.announcements.is_busy() || self.is_look_due() => SHORT_ROUND,
            () => self.word_wait().map_or(ROUND, |word| word.min(ROUND)),
        };
        while let Some(news) = self.follow.next(wait) {
            wait = Duration::ZERO;
            self.behind = match (&news, self.behind.take()) {
                (News::Behind(_), Some(before)) => Some(before),
                (News::Behind(error), None) => Some((Instant::now(), error.to_string())),
                _ => None,
            };
            self.pending.take(&news);
            self.is_due |= self.view.take(news);
        }
        self.note_away();
        if self.behind.is_some() && self.connected_at.elapsed() > RENEWAL {
            self.connect_anew();
        }
        if self.view.revision().0 == 0 {
            self.answer_claims();
            self.meet_others();
            let why = self.behind.as_ref().map_or("no answer yet", |(_, why)| why);
            return self.say(vec![Problem::new(format!("etcd does not answer: {why}"))]);
        }
        if let Some(declared) = &self.declared {
            let is_urgent = !self.claims.meetings().is_empty();
            self.is_due |= self.peers.look(&self.host, &self.view, declared, is_urgent);
        }
        self.is_due |= self.is_lease_due();
        let after = if self.waits_for_news { WHOLE } else { AGAIN };
        let has_news = self.let_go().unwrap_or_else(|failure| {
            log(&failure.to_string());
            false
        });
        if self.is_due || self.vnics.is_stopping() || self.whole_at.elapsed() > after {
            self.whole_at = Instant::now();
            self.waits_for_news = false;
            let problems = self.carry_out();
            self.waits_for_news |= problems.as_ref().is_ok_and(Vec::is_empty);
            self.is_due = problems.is_err();
            let problems = problems.unwrap_or_else(|failure| vec![Problem::new(failure.to_string())]);
            self.reported = problems;
            self.tell();
        } else if self.report.is_void() {
            self.pace.forget();
            self.tell();
        } else if has_news || self.word_wait().is_some_and(|wait| wait.is_zero()) {
            self.tell();
        }
        self.extend_lease();
        let behind = self.behind.as_ref().filter(|(since, _)| since.elapsed() > ELECTION_TIME);
        let away = behind.map(|(_, why)| Problem::new(format!("etcd does not answer: {why}")));
        self.say(self.reported.iter().cloned().chain(away).chain(self.lease.problem()).collect());
        self.answer_claims();
        let declared = self.declared.as_ref();
        let address_of = |vnic: &str| declared?.vnic(vnic).map(|entry| IpAddr::V4(entry.address));
        self.announcements.run(&self.run_dir, address_of);
        self.name_others();
        self.meet_others();
        self.control();
        self.reclaim();
        self.admit();
        self.renew();
    }

    /// The router's audit log says when this host loses its cluster, and has it again.
    fn note_away(&mut self) {
        let is_away = self.behind.as_ref().is_some_and(|(since, _)| since.elapsed() > ELECTION_TIME);
        if is_away == self.noted_away {
            return;
        }
        let path = format!("{BASE}/hosts/{}/cluster", encoded(&self.host));
        // A router that does not answer is told in the next round.
        if self.api.put(&path, &json!({"isAway": is_away})).is_ok() {
            self.noted_away = is_away;
        }
    }

    /// Whether others have changed their networks, or members of them, and that was too early to be looked at.
    fn is_look_due(&self) -> bool {
        let is_known = self.peers.knows(self.view.mesh_version()) && self.named.0 == Some(self.view.members_version());
        self.declared.is_some() && !is_known
    }

    fn meet_others(&mut self) {
        let is_away = self.behind.is_some() || self.standing.is_none() || self.check_identity().is_err();
        let with = mesh::Meeting {
            run_dir: &self.run_dir,
            host: &self.host,
            view: &self.view,
            declared: self.declared.as_ref(),
            claims: &self.claims,
            publisher: &self.publisher,
            is_away,
        };
        self.peers.meet(&with);
    }

    /// Others' vNICs have names here as far as their hosts are believed to have their addresses.
    fn name_others(&mut self) {
        let Some(declared) = &self.declared else { return };
        let version = self.view.members_version();
        // Others may change theirs all the time.
        let is_early = self.named_at.is_some_and(|at| at.elapsed() < NAMES_PAUSE) && self.claims.meetings().is_empty();
        if self.named.0 == Some(version) || (is_early && self.named.0.is_some()) {
            return;
        }
        (self.named.0, self.named_at) = (Some(version), Some(Instant::now()));
        self.publisher.note_there(self.view.members_there(&self.host));
        let mesh = Mesh::of(&self.host, &self.view, declared);
        let others = named(&self.view, declared, &mesh, &self.believed);
        if self.named.1.as_ref() != Some(&others) {
            self.named.1 = Some(others.clone());
            self.publisher.name_others(others);
        }
    }

    fn connect_anew(&mut self) {
        self.connected_at = Instant::now();
        let renewed =
            ClusterFile::read(self.run_dir.settings().and_then(|last| last.cluster).unwrap_or_default().as_path())
                .and_then(|file| Ok((Follow::start(&file)?, Report::start(&file, &self.host, boottime_ns)?, file)));
        match renewed {
            Ok(renewed) => {
                (self.follow, self.report, self.file) = renewed;
                self.pace.forget();
                if self.view.scope() != self.file.scope() {
                    // Keys that were not followed until now are not in it.
                    self.view = View::new(&self.file.root, self.file.scope());
                    self.controlled = None;
                }
                self.claims.set_waker(self.follow.waker());
            }
            Err(error) => self.behind = self.behind.take().or_else(|| Some((Instant::now(), error.to_string()))),
        }
    }

    /// Whether this host may do a controller's work, where it is one: what it knows is what etcd has. One that is no
    /// host of the cluster any more may know less than others: etcd may be as it was before this host joined.
    fn may_control(&self) -> bool {
        self.behind.is_none() && !self.is_removed && self.check_identity().is_ok()
    }

    /// Blocks of addresses for all hosts, where this one gives them, and only of the cluster that it follows.
    fn control(&mut self) {
        let is_new = self.controlled != Some(self.view.control_version());
        if !self.file.controller || !is_new || !self.may_control() {
            return;
        }
        let done =
            Controller::run(&self.file, &self.view).and_then(|full| place_vnics(&self.file, &self.view).map(|()| full));
        // After a failure it is tried again in the next round.
        self.controlled = done.is_ok().then(|| self.view.control_version());
        let said = match done {
            Ok(full) if full.is_empty() => None,
            Ok(full) => Some(format!("no block of addresses is left for each host in: {}", full.join(", "))),
            Err(error) => Some(format!("can't give blocks of addresses and vNICs: {error}")),
        };
        log_other(&mut self.control_said, said);
    }

    /// Blocks and vNICs of hosts that are silent for too long are taken back, where this one gives them.
    fn reclaim(&mut self) {
        if !self.file.controller || !self.may_control() {
            return;
        }
        let done = Controller::reclaim(&self.file, &self.view, Instant::now());
        let error = done.as_ref().err().map(|error| format!("can't take back what silent hosts have: {error}"));
        for Reclaimed { host, blocks, vnics } in done.unwrap_or_default() {
            log(&format!("the host {host} is silent for too long: {blocks} blocks and {vnics} vNICs are taken back"));
        }
        log_other(&mut self.reclaim_said, error);
    }

    /// The certificate of a host that has joined, when it is time.
    fn renew(&mut self) {
        if self.renewed_at.elapsed() < ROUND || self.behind.is_some() || self.check_identity().is_err() {
            return;
        }
        self.renewed_at = Instant::now();
        let done = renew_if_due(&self.directory, &self.file);
        if let Ok(true) = done {
            log("this host has another certificate");
            self.connect_anew();
        }
        let error = done.err().map(|failure| failure.to_string());
        log_other(&mut self.renewal_said, error);
    }

    /// Hosts that want to join, where this one admits them.
    fn admit(&mut self) {
        let is_due = !self.pending.is_empty() || self.swept_at.is_none_or(|at| at.elapsed() > SWEEP);
        let is_time = self.admitted_at.elapsed() > ADMISSION && is_due;
        if !self.file.admits() || !is_time || !self.may_control() {
            return;
        }
        self.admitted_at = Instant::now();
        let is_sweep_due = self.swept_at.is_none_or(|at| at.elapsed() > SWEEP);
        let error = match Admission::open(&self.file, &self.view) {
            Ok(mut admission) => {
                let (mut said, mut error) = admission.run(&mut self.pending, &self.host);
                // Also where an answer can't be written: an etcd that is full deletes users still.
                if is_sweep_due {
                    self.swept_at = Some(Instant::now());
                    match admission.sweep(&self.pending) {
                        Ok(texts) => said.extend(texts),
                        Err(failure) => error = error.or(Some(failure)),
                    }
                }
                said.iter().for_each(|text| log(text));
                error
            }
            Err(error) => Some(error),
        };
        let error = error.map(|error| format!("can't admit hosts: {error}"));
        log_other(&mut self.admission_said, error);
        if self.pending.is_list_due() {
            self.connect_anew();
        }
    }

    /// Whether etcd holds the cluster that this host follows, and not as it once was.
    fn check_identity(&self) -> std::result::Result<Identity, Problem> {
        let identity = self.view.identity().map_err(|error| Problem::new(error.to_string()))?.clone();
        let keeps = |why: String| Err(Problem::new(format!("{why}: what this host has, it keeps")));
        match &self.memory.id {
            Some(id) if *id != identity.id => keeps(format!(
                "etcd holds the cluster {}, and this host follows {id} (to join the other one: freeflow{} down, and \
                 remove {})",
                identity.id,
                self.run_dir.option(),
                self.directory.path().display()
            )),
            Some(_) if self.memory.has_gone_back && identity.restored <= self.memory.restored => keeps(format!(
                "etcd was restored from a backup: it was at revision {} before (to follow it nevertheless, an operator \
                 says: freeflow cluster restored)",
                self.memory.revision
            )),
            _ => Ok(identity),
        }
    }

    /// Objects that can't be followed, and other problems; an error: the router does not answer, or the disk is full.
    fn carry_out(&mut self) -> Result<Vec<Problem>> {
        self.note_going_back()?;
        let identity = match self.check_identity() {
            Ok(identity) => identity,
            Err(problem) => {
                self.standing = None;
                if self.memory.has_gone_back {
                    // Its ranges are given to nobody else then.
                    self.carried = (0, ranges_of(&mut Host::of(&self.api, &self.lease))?);
                    self.check_record(self.memory.restored)?;
                    self.look_at_vnics()?;
                    self.standing.iter_mut().for_each(|standing| standing.is_other = false);
                }
                return Ok(vec![problem]);
            }
        };
        if let Some(problem) = self.check_record(identity.restored)? {
            return Ok(vec![problem]);
        }
        let declared = match self.view.declared() {
            Ok(declared) => declared,
            Err(error) => return Ok(vec![Problem::new(format!("what is declared makes no sense here: {error}"))]),
        };
        let mut wanted = Wanted::of(&self.view, &declared, &self.host, &self.memory.released);
        let mut target = Host::of(&self.api, &self.lease);
        if self.memory.id.is_none() {
            let own = own_objects(&wanted, &present_of(&mut target).map_err(Failure::new)?);
            if !own.is_empty() {
                self.standing = None;
                return Ok(own);
            }
            self.memory.id = Some(identity.id);
            self.directory.remember(&self.memory)?;
        }
        self.look_at_lease()?;
        self.await_first_word()?;
        self.stop_leaving(&mut wanted)?;
        self.follow_draining()?;
        let mut target = Host::of(&self.api, &self.lease);
        let mut problems = carry_out(&mut target, &wanted).map_err(Failure::new)?;
        // Beside those that the news alone say, as do those of other hosts, below.
        self.waits_for_news = problems.len() == wanted.problems.len();
        self.carried = (self.view.revision().0, ranges_of(&mut target)?);
        self.note_released(&declared)?;
        let memory = Memory {
            restored: identity.restored,
            revision: self.carried.0,
            declared: self.view.declared_revision().0,
            word: self.view.word(&self.host).unwrap_or_default().0,
            has_gone_back: false,
            ..self.memory.clone()
        };
        if memory != self.memory {
            self.directory.remember(&memory)?;
            self.memory = memory;
        }
        let own = Own { host: &self.host, address: self.record.address, wire: self.file.wire };
        let peers = PeersOf::host(&self.host, &self.record, &self.view, &declared);
        problems.extend(peers.problems);
        let mesh = (self.view.mesh_version(), Mesh::of(&self.host, &self.view, &declared).peers(&self.host));
        self.declared = Some(declared);
        self.is_reload_due |= self.directory.write_peers(&own, &peers.peers)?;
        (self.believed, self.named.0) = (peers.peers, None);
        if self.is_reload_due {
            peers::reload(&self.run_dir)?;
            self.is_reload_due = false;
        }
        self.peers.note_written(mesh, self.believed.iter().map(|peer| &peer.host));
        Ok(problems)
    }

    /// Notes that etcd is as it once was.
    fn note_going_back(&mut self) -> Result<()> {
        let is_ours = self.view.identity().is_ok_and(|identity| Some(&identity.id) == self.memory.id.as_ref());
        let (revision, declared) = (self.view.revision().0, self.view.declared_revision().0);
        let is_word_earlier = self.view.word(&self.host).is_some_and(|word| word.0 < self.memory.word);
        let is_earlier = revision < self.memory.revision || declared < self.memory.declared || is_word_earlier;
        if is_ours && is_earlier && !self.memory.has_gone_back {
            self.memory.has_gone_back = true;
            self.directory.remember(&self.memory)?;
        }
        Ok(())
    }

    /// Whether the record of this host's name is its own, or can be. Else nothing is said under it.
    fn check_record(&mut self, restored: u64) -> Result<Option<Problem>> {
        (self.standing, self.is_removed) = (None, false);
        let there = self.view.hosts().get(&self.host).cloned();
        // A backup may be older than the record.
        let is_recorded = self.memory.recorded_as.as_ref() == Some(&self.host) && restored == self.memory.restored;
        match &there {
            None if is_recorded && !self.memory.has_gone_back => {
                self.is_removed = true;
                return Ok(Some(Problem::new(format!(
                    "this host was removed from the cluster: what it has, it keeps, and the other hosts don't know it. To \
                     join again, without vNICs: freeflow{} down, and remove {}",
                    self.run_dir.option(),
                    self.directory.path().display()
                ))));
            }
            Some((_, other)) if other.address != self.record.address => {
                return Ok(Some(Problem::new(format!(
                    "the cluster's host {} is at {}, not at {}: choose another --host, or remove that one",
                    self.host, other.address, self.record.address
                ))));
            }
            Some(_) if !is_recorded => {
                self.memory.recorded_as = Some(self.host.clone());
                self.directory.remember(&self.memory)?;
            }
            _ => {}
        }
        let is_other = there.as_ref().is_none_or(|(_, record)| *record != self.record);
        self.standing = Some(Standing { is_other, before: there.map(|(revision, _)| revision) });
        Ok(None)
    }

    /// For others to see.
    fn tell(&mut self) {
        // Once its record is there, and of itself alone.
        let own = self.standing.as_ref().filter(|standing| !standing.is_other);
        // First: networks that a follower before this one has said are stayed in.
        self.publisher.note_there(self.view.members_there(&self.host));
        self.publisher.speak(own.and_then(|standing| standing.before));
        let Some(standing) = &self.standing else { return };
        let (revision, ranges) = self.carried.clone();
        let release = env!("CARGO_PKG_VERSION").to_owned();
        let (record, before) = (standing.is_other.then(|| self.record.clone()), standing.before);
        let holdings = Holdings { vnics: self.held(), claims: self.claimed() };
        let (problems, reclaim_after_s) = (self.reported.clone(), self.reclaim_after_s());
        let followed = Followed { revision, ranges, reclaim_after_s, release, at_s: 0, problems };
        let there = There { record: before, ..There::of(&self.view, &self.host) };
        let pause = Pace::pause(self.view.hosts().len());
        if record.is_none() && !self.pace.may_say(&holdings, &followed, pause, Instant::now()) {
            return;
        }
        self.report.say(record, holdings, followed, there);
    }

    /// How long the words about this host wait; `None`: none do.
    fn word_wait(&self) -> Option<Duration> {
        self.pace.wait(Pace::pause(self.view.hosts().len()), Instant::now())
    }

    /// In the log, where it is another than before.
    fn say(&mut self, mut problems: Vec<Problem>) {
        if let Some(error) = self.report.error() {
            problems.push(Problem::new(format!("can't say how far this host has come: {error}")));
        } else if let Some(error) = self.publisher.error() {
            problems.push(Problem::new(format!("can't say which vNICs this host has: {error}")));
        }
        if let Some(error) = self.publisher.names_error() {
            problems.push(Problem::new(format!("can't write the names of vNICs: {error}")));
        }
        problems.extend(self.renewal_said.iter().map(Problem::new));
        if problems == self.said {
            return;
        }
        note_problems(&self.run_dir, &problems.iter().map(ToString::to_string).collect::<Vec<_>>());
        match problems.is_empty() {
            true => log(&format!("follows all, up to revision {}", self.view.revision())),
            false => problems.iter().for_each(|problem| log(&problem.to_string())),
        }
        self.said = problems;
    }
}
