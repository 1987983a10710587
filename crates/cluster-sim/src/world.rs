//! Hosts and a controller that follow a cluster, under virtual time.
//!
//! *Sampled hosts*, the first one of all, which is the controller, and the last one that hears of anything, have a
//! real view, and decide by the real functions. The others do as the last one would: they carry out when there is
//! something to do for hosts, and say how far they have come, with the ranges and problems that such a host has. They
//! hear of each revision at a time of their own. So nothing is left out of what goes to etcd and from there, and
//! thousands of views need not be in one memory.
use crate::control::Control;
use crate::etcd::{Counts, Etcd, Lane, Model, Told, Writes};
use crate::follower::{Carried, Follower, timed};
use crate::words::{self, Declaration, Networks, OwnVnics};
use freeflow_cluster::{FULL_MESH_COUNT, HEARTBEAT, News, Pace as WordPace, Problem, Scope, View, WRITE_COUNT_MAX};
use freeflow_orchestrator::Pool;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

pub const SECOND: u64 = 1_000_000_000;
/// As the follower has them: all is compared so often, and where something could not be followed.
const WHOLE: u64 = 30 * SECOND;
const AGAIN: u64 = 3 * SECOND;
/// Problems of a host that others are told.
const PROBLEM_COUNT_MAX: usize = 64;
/// It looks so often whether that is due, where no news come.
const ROUND: u64 = 2 * SECOND;
/// The publisher looks so often.
const REST: u64 = SECOND;
const BEAT: u64 = HEARTBEAT.as_secs() * SECOND;
/// Seconds of Unix time at the beginning.
const EPOCH_S: u64 = 1_790_000_000;
/// A sampled host of more hosts carries out really so often in this time at most, and does as it did else.
const LOOK: u64 = SECOND;
const LOOK_COUNT: u64 = 2;
const ALWAYS_LOOKED_AT: usize = 512;

/// How long it takes a host to carry out.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// As long as it took a sampled one on this machine.
    Measured,
    /// Always this: a run is the same to the last message.
    Fixed(u64),
}

impl Pace {
    pub fn of(self, measured_ns: u64) -> u64 {
        if let Self::Fixed(took) = self { took } else { measured_ns }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub hosts: usize,
    /// The first of them; one admits hosts and gives blocks.
    pub controllers: usize,
    /// Of each host.
    pub vnics: usize,
    pub rules: usize,
    /// Other hosts with vNICs of the same tenant, which has one network; 0: all are of one.
    pub sharing: usize,
    /// Of each host a vNIC goes in this time, and another one comes; 0: none does.
    pub churn_s: u64,
    pub etcd: Model,
    pub pace: Pace,
    /// As if a router took any number of hosts in its peers file: no host has that for a problem.
    pub any_peer_count: bool,
}

impl Default for Setting {
    /// A thousand hosts of a hundred vNICs each, all of one tenant.
    fn default() -> Self {
        let (etcd, pace) = (Model::default(), Pace::Measured);
        let (sharing, churn_s) = (0, 0);
        Self {
            hosts: 1000,
            controllers: 3,
            vnics: 100,
            rules: 100,
            sharing,
            churn_s,
            etcd,
            pace,
            any_peer_count: false,
        }
    }
}

impl Setting {
    /// Tenants, each with a network.
    ///
    /// # Errors
    /// There are no addresses for so many.
    pub fn networks(&self) -> Result<Networks, String> {
        let count = if self.sharing == 0 { 1 } else { self.hosts.div_ceil(self.sharing + 1) };
        Networks::of(count, self.hosts, self.vnics)
    }

    /// The network in which a host has vNICs.
    pub fn network_of(&self, host: usize) -> usize {
        // The last ones have a whole tenant, as they are looked at.
        if self.sharing == 0 { 0 } else { (self.hosts - 1 - host) / (self.sharing + 1) }
    }

    fn is_controller(&self, host: usize) -> bool {
        host < self.controllers
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// A host's follower has news, or its time for a look has come.
    Round(usize),
    /// It has carried out.
    Carried(usize),
    /// Its report is written.
    Written(usize),
    /// Its report is due again, unless it was written since this time.
    Beat(usize, u64),
    /// Its word need not wait any more.
    Word(usize),
    /// Its publisher speaks, unless it has spoken more often than this.
    Vnics(usize, u64),
    /// A vNIC goes, and another one comes.
    Churn(usize),
    /// A host asks to be let in; it has its answer; it has the list of all.
    Asks(usize),
    Answered(usize),
    Begins(usize),
    Admit,
    /// The controller looks for blocks to give, and then asks for this.
    Control,
    Blocks,
}

pub const NEVER: u64 = u64::MAX;

#[derive(Clone, Debug, Default)]
pub struct Host {
    pub is_up: bool,
    /// It has got its record into etcd.
    is_recorded: bool,
    /// Of the rounds that are planned, the first one: others are void; `NEVER`: none is.
    round_at: u64,
    busy_until: u64,
    whole_at: u64,
    /// Up to this revision it has carried out; and is doing so.
    carried: u64,
    carrying: u64,
    /// News up to this revision are for this host, if not for all.
    due: u64,
    is_writing: bool,
    is_to_write: bool,
    /// Its word waits, since it says nothing but a later revision; blocks and problems that it has last said.
    is_waiting: bool,
    said: Option<(usize, usize)>,
    said_at: u64,
    written_at: u64,
    spoke: u64,
    /// vNICs that have gone, and how many of them had when it last said which ones it has.
    gone: usize,
    members_of: Option<usize>,
    members_written: u64,
    /// Of the values that say which vNICs it has, once they were written.
    vnics_lengths: Vec<usize>,
    /// When it has been told what it missed.
    caught_up_at: u64,
    /// By network, each with the revision by which it was given.
    pub blocks: BTreeMap<usize, (u64, Pool)>,
}

/// A host that is really there.
pub struct Sampled {
    pub follower: Follower,
    /// News up to this revision.
    pub taken: u64,
    /// Since when it looks so often.
    looked_at: u64,
    looks: u64,
}

pub struct World {
    pub setting: Setting,
    pub networks: Networks,
    pub now: u64,
    pub etcd: Etcd,
    pub declaration: Declaration,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    queued: u64,
    pub hosts: Vec<Host>,
    pub sampled: BTreeMap<usize, Sampled>,
    /// Revisions for which hosts have something to do.
    for_hosts: Vec<u64>,
    /// Of those, as they are called here, the ones for which a real view has nothing to do, or the other way round.
    mistaken: u64,
    /// The last that a sampled host has found, and how often the last one has looked.
    like: Carried,
    pub problem_count: usize,
    looks: u64,
    pub control: Control,
    random: u64,
}

impl World {
    /// All hosts are there; the time in which they have followed all, `None`: not within ten minutes.
    ///
    /// # Errors
    /// There are no addresses for so many networks.
    pub fn settled(setting: Setting) -> Result<(Self, Option<u64>), String> {
        let mut world = Self::empty(setting)?;
        for host in 0..setting.hosts {
            let record = words::record(host);
            let followed = words::has_followed(0, BTreeMap::new(), Vec::new(), EPOCH_S);
            world.commit(words::begins(host, &record), false);
            world.commit(words::followed(host, followed), false);
        }
        world.control.host_count = setting.hosts;
        world.give_all();
        for host in 0..setting.hosts {
            world.say_vnics(host);
        }
        world.for_hosts.push(world.etcd.hosts.last());
        // As if etcd had been there for long.
        world.now = world.etcd.behind_ns(0);
        // Their beats are spread, as they are where hosts came up one by one.
        for host in 0..setting.hosts {
            world.begin(host);
            world.hosts[host].is_recorded = true;
            let at = world.draw(BEAT);
            world.plan(at, Event::Vnics(host, world.hosts[host].spoke));
            if setting.churn_s > 0 {
                let at = world.draw(setting.churn_s * SECOND);
                world.plan(at, Event::Churn(host));
            }
        }
        let settled = world.settle(600 * SECOND);
        for host in 0..setting.hosts {
            let back = world.draw(WHOLE);
            world.hosts[host].whole_at = world.now.saturating_sub(back);
            world.plan_round(host, world.now);
        }
        world.run_for(BEAT);
        world.etcd.take_counts();
        Ok((world, settled))
    }

    /// No host is up.
    ///
    /// # Errors
    /// There are no addresses for so many networks.
    pub fn empty(setting: Setting) -> Result<Self, String> {
        // The last one is told as hosts are.
        let setting = Setting { controllers: setting.controllers.clamp(1, setting.hosts - 1), ..setting };
        let mut world = Self {
            setting,
            networks: setting.networks()?,
            now: 0,
            etcd: Etcd::new(setting.etcd, words::watched),
            declaration: Declaration::new(),
            queue: BinaryHeap::new(),
            queued: 0,
            hosts: vec![Host::default(); setting.hosts],
            sampled: BTreeMap::new(),
            for_hosts: Vec::new(),
            mistaken: 0,
            like: Carried { took_ns: 1_000_000, waits_for_news: true, ..Carried::default() },
            problem_count: 0,
            looks: 0,
            control: Control::default(),
            random: 7,
        };
        world.commit(words::identity(), true);
        let declared = world.declaration.begin(world.networks, setting.rules);
        world.commit(declared, true);
        Ok(world)
    }

    /// The controllers' blocks for all hosts of which there are records, as one that is up would give them.
    fn give_all(&mut self) {
        let mut follower = Follower::new(0, self.record(0), Scope::Said);
        follower.take(self.etcd.listed(true));
        let (due, _) = follower.control();
        let writes: Vec<_> =
            due.writes.into_iter().map(|(at, block)| (at, block.map(|block| block.to_string()))).collect();
        for some in writes.chunks(WRITE_COUNT_MAX) {
            self.give(some);
        }
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 11) % below.max(1)
    }

    fn now_s(&self) -> u64 {
        EPOCH_S + self.now / SECOND
    }

    pub fn plan(&mut self, after: u64, event: Event) {
        self.queued += 1;
        self.queue.push(Reverse((self.now + after, self.queued, event)));
    }

    /// A round of a host at this time, or earlier if one is planned for then.
    pub fn plan_round(&mut self, host: usize, at: u64) {
        let at = at.max(self.now).max(self.hosts[host].busy_until);
        if at < self.hosts[host].round_at {
            self.hosts[host].round_at = at;
            self.plan(at - self.now, Event::Round(host));
        }
    }

    /// How a host is told, and the watchers of its member that are told before it.
    fn lane(&self, host: usize) -> (&Lane, u64) {
        let members = self.setting.etcd.members;
        match host.checked_sub(self.setting.controllers) {
            None => (&self.etcd.controllers, host as u64 / members),
            Some(host) => (&self.etcd.hosts, host as u64 / members),
        }
    }

    fn heard(&self, host: usize) -> u64 {
        let (lane, others) = self.lane(host);
        lane.heard(self.now, others)
    }

    fn heard_ns(&self, host: usize, revision: u64) -> u64 {
        let (lane, others) = self.lane(host);
        // One that is not there any more was heard of.
        lane.heard_ns(revision, others).unwrap_or(self.now)
    }

    /// The time of the answer, and the revision. `is_for_hosts`: they have something to do for it.
    pub fn commit(&mut self, writes: Writes, is_for_hosts: bool) -> (u64, u64) {
        let (done, revision) = self.etcd.commit(self.now, writes);
        if is_for_hosts {
            self.for_hosts.push(revision.0);
            for host in 0..self.hosts.len() {
                if self.hosts[host].is_up && self.hosts[host].round_at > done {
                    self.plan_round(host, self.heard_ns(host, revision.0));
                }
            }
        }
        (done, revision.0)
    }

    fn watchers(&mut self, host: usize) -> &mut u64 {
        let is_controller = self.setting.is_controller(host);
        &mut if is_controller { &mut self.etcd.controllers } else { &mut self.etcd.hosts }.watchers
    }

    /// It follows from now on, by a new list.
    pub fn begin(&mut self, number: usize) {
        *self.watchers(number) += 1;
        let before = std::mem::take(&mut self.hosts[number]);
        self.hosts[number] = Host { is_up: true, whole_at: self.now, round_at: NEVER, ..before };
        if number == 0 || number == self.setting.hosts - 1 {
            let is_controller = self.setting.is_controller(number);
            let scope = if is_controller { Scope::Said } else { Scope::Host };
            let mut follower = Follower::new(number, self.record(number), scope);
            follower.take(self.etcd.listed(is_controller));
            self.sampled.insert(number, Sampled { follower, taken: self.etcd.revision(), looked_at: NEVER, looks: 0 });
        }
        self.plan_round(number, self.now);
    }

    /// Hosts are lost: they neither hear nor say anything.
    pub fn lose(&mut self, lost: std::ops::Range<usize>) {
        for number in lost {
            self.hosts[number].is_up = false;
            *self.watchers(number) -= 1;
        }
    }

    /// They are back, and are told what they missed: events and bytes of each.
    pub fn find(&mut self, lost: std::ops::Range<usize>, since: u64) -> Told {
        let missed = self.etcd.hosts.missed(since);
        for number in lost {
            let at = self.etcd.send_missed(self.now, missed);
            let host = &mut self.hosts[number];
            (host.is_up, host.is_writing, host.is_to_write) = (true, false, true);
            (host.caught_up_at, host.busy_until) = (at, at);
            (host.round_at, host.carrying) = (NEVER, host.carried);
            *self.watchers(number) += 1;
            self.plan_round(number, at);
            let after = at - self.now + self.draw(REST);
            self.plan(after, Event::Vnics(number, self.hosts[number].spoke));
        }
        missed
    }

    /// A host asks to be let in after this time.
    pub fn ask_to_join(&mut self, host: usize, after: u64) {
        self.control.joining += 1;
        self.plan(after, Event::Asks(host));
    }

    /// The controllers are there already.
    pub fn begin_controllers(&mut self) {
        for host in 0..self.setting.controllers {
            self.begin(host);
            self.plan(BEAT, Event::Vnics(host, 0));
        }
    }

    pub fn run_for(&mut self, time: u64) {
        let end = self.now + time;
        while self.queue.peek().is_some_and(|Reverse((at, ..))| *at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// A host does nothing else for so long.
    pub fn busy_for(&mut self, number: usize, time: u64) {
        self.hosts[number].busy_until = self.hosts[number].busy_until.max(self.now + time);
        self.hosts[number].round_at = NEVER;
        self.plan_round(number, self.now);
    }

    /// A sampled host takes a list of all; the time of this machine for it.
    pub fn list_anew(&mut self, number: usize) -> u64 {
        let listed = self.etcd.listed(self.setting.is_controller(number));
        let revision = self.etcd.revision();
        let sampled = self.sampled.get_mut(&number).expect("it is sampled");
        sampled.taken = revision;
        timed(|| sampled.follower.take(listed)).1
    }

    /// Until each host that is up has carried out all that there is to do for hosts; how long after now the last one
    /// had, `None`: not within this time.
    pub fn settle(&mut self, within: u64) -> Option<u64> {
        let begin = self.now;
        loop {
            let last = self.for_hosts.last().copied().unwrap_or(0);
            let is_done = |host: &Host| !host.is_up || (host.is_recorded && host.carried >= last);
            let is_given = self.control.joining == 0 && self.control.has_given(self.setting.hosts, self.networks.count);
            if is_given && self.hosts.iter().all(is_done) {
                return Some(self.now - begin);
            }
            // A look for each of many steps is enough: all of a moment are done then.
            for _ in 0..self.setting.hosts.div_ceil(50) {
                if self.queue.peek().is_none_or(|Reverse((at, ..))| *at > begin + within) {
                    self.now = begin + within;
                    return None;
                }
                self.step();
            }
        }
    }

    /// Time from now on at which each host has done what this revision says, in order; as far as they have.
    pub fn enforced(&mut self, revision: u64, within: u64) -> Vec<u64> {
        let (begin, mut all) = (self.now, Vec::new());
        let mut missing: Vec<bool> = self.hosts.iter().map(|host| host.is_up && host.carried < revision).collect();
        let mut left = missing.iter().filter(|is_missing| **is_missing).count();
        while left > 0 && self.queue.peek().is_some_and(|Reverse((at, ..))| *at <= begin + within) {
            let event = self.step();
            if let Event::Carried(host) = event
                && missing[host]
                && self.hosts[host].carried >= revision
            {
                (missing[host], left) = (false, left - 1);
                all.push(self.now - begin);
            }
        }
        all
    }

    fn step(&mut self) -> Event {
        let Reverse((at, _, event)) = self.queue.pop().expect("there is one");
        self.now = at;
        match event {
            Event::Round(host) if self.hosts[host].is_up && self.hosts[host].round_at == at => self.round(host),
            Event::Carried(host) if self.hosts[host].is_up => {
                self.hosts[host].carried = self.hosts[host].carrying;
                self.tell(host);
            }
            Event::Written(host) => self.written(host),
            Event::Word(host) => {
                if std::mem::take(&mut self.hosts[host].is_waiting) && self.hosts[host].is_up {
                    self.tell(host);
                }
            }
            Event::Beat(host, since) if self.hosts[host].is_up && self.hosts[host].written_at == since => {
                self.tell(host);
            }
            Event::Vnics(host, spoke) if self.hosts[host].is_up && self.hosts[host].spoke == spoke => {
                self.publish(host);
            }
            Event::Churn(host) => self.churn(host),
            Event::Asks(host) => self.asks(host),
            Event::Answered(host) => {
                let at = self.etcd.send_list(self.now, self.setting.is_controller(host));
                self.plan(at - self.now, Event::Begins(host));
            }
            Event::Begins(host) => {
                self.control.joining -= 1;
                self.begin(host);
                let after = BEAT + self.draw(BEAT);
                self.plan(after, Event::Vnics(host, 0));
            }
            Event::Admit => self.admit(),
            Event::Control => self.look_for_blocks(),
            Event::Blocks => self.give_due(),
            Event::Round(_) | Event::Carried(_) | Event::Beat(..) | Event::Vnics(..) => {}
        }
        event
    }

    /// The follower takes all that it has heard of, and does what there is to do.
    fn round(&mut self, number: usize) {
        self.hosts[number].round_at = NEVER;
        if number == 0 && self.control.is_in_batch() {
            // It admits hosts, and its round comes after that.
            return;
        }
        let heard = match self.hosts[number].caught_up_at > self.now {
            true => self.hosts[number].carried,
            false => self.heard(number),
        };
        self.take_news(number, heard);
        let host = &self.hosts[number];
        let last = self.for_hosts[..self.for_hosts.partition_point(|revision| *revision <= heard)].last().copied();
        let after = if self.like.waits_for_news { WHOLE } else { AGAIN };
        let last = last.unwrap_or(0).max(if host.due <= heard { host.due } else { 0 });
        let has_news = last > host.carrying;
        if !(has_news || self.now >= host.whole_at + after) {
            let at = host.whole_at + after + ROUND / 2;
            return self.plan_next(number, heard, at);
        }
        let took = self.carry_out(number);
        let after = if self.like.waits_for_news { WHOLE } else { AGAIN };
        let host = &mut self.hosts[number];
        (host.whole_at, host.carrying, host.busy_until) = (self.now, heard, self.now + took);
        self.plan(took, Event::Carried(number));
        if number == 0 {
            self.plan(took, Event::Control);
        }
        self.plan_next(number, heard, self.now + after);
    }

    /// How long it takes.
    fn carry_out(&mut self, number: usize) -> u64 {
        let hosts = self.setting.hosts;
        self.looks += u64::from(number == hosts - 1);
        if let Some(Sampled { follower, looked_at, looks, .. }) = self.sampled.get_mut(&number) {
            if *looked_at == NEVER || self.now >= *looked_at + LOOK {
                (*looked_at, *looks) = (self.now, 0);
            }
            *looks += 1;
            if hosts <= ALWAYS_LOOKED_AT || *looks <= LOOK_COUNT {
                let mut carried = follower.carry_out();
                if self.setting.any_peer_count {
                    carried.problems.retain(|problem| !is_of_count(problem));
                }
                if number > 0 {
                    self.problem_count = carried.problems.len();
                    carried.problems.truncate(PROBLEM_COUNT_MAX);
                    self.like = carried;
                }
            }
        }
        self.setting.pace.of(self.like.took_ns)
    }

    /// As a host like the last one has them; that it has no block is no problem of one that has.
    fn problems_of(&self, number: usize) -> impl Iterator<Item = &Problem> {
        let blocks = &self.hosts[number].blocks;
        let is_own = |problem: &&Problem| {
            let network = problem.name.as_deref().and_then(words::network_number);
            !(problem.kind.as_deref() == Some("Network")
                && network.is_some_and(|network| blocks.contains_key(&network)))
        };
        self.like.problems.iter().filter(is_own)
    }

    /// The round after this one: when the next news come that are for hosts, or all is to be compared.
    fn plan_next(&mut self, number: usize, heard: u64, whole_at: u64) {
        let next = self.for_hosts.get(self.for_hosts.partition_point(|revision| *revision <= heard)).copied();
        let at = next.map_or(whole_at, |next| whole_at.min(self.heard_ns(number, next)));
        self.plan_round(number, at.max(self.now + 1));
    }

    fn take_news(&mut self, number: usize, heard: u64) {
        let Some(mut sampled) = self.sampled.remove(&number) else { return };
        if heard > sampled.taken {
            let news = self.lane(number).0.news(sampled.taken, heard);
            let from = self.for_hosts.partition_point(|revision| *revision <= sampled.taken);
            let is_for_hosts = self.for_hosts.get(from).is_some_and(|revision| *revision <= heard);
            let is_none = matches!(&news, News::Changed(_, changes) if changes.is_empty());
            let is_due = sampled.follower.take(news);
            // A list may have had all of it already.
            self.mistaken += u64::from(!is_none && is_due && !is_for_hosts);
            sampled.taken = heard;
        }
        let taken = sampled.taken;
        self.sampled.insert(number, sampled);
        match self.setting.is_controller(number) {
            true => self.etcd.controllers.drop_until(taken),
            false => self.etcd.hosts.forget(taken),
        }
    }

    /// Its report is written: it has one transaction on the way at most.
    fn tell(&mut self, number: usize) {
        if self.hosts[number].is_writing {
            self.hosts[number].is_to_write = true;
            return;
        }
        if !self.hosts[number].is_recorded {
            // How far it has followed is written after this.
            let (done, _) = self.commit(words::begins(number, &self.record(number)), true);
            self.control.host_count += 1;
            (self.hosts[number].is_writing, self.hosts[number].is_to_write) = (true, true);
            return self.plan(done - self.now, Event::Written(number));
        }
        let host = &self.hosts[number];
        let carried = host.carried;
        let given = host.blocks.iter().filter(|(_, (at, _))| *at <= carried);
        let is_said = host.said == Some((given.clone().count(), self.problems_of(number).count()));
        let may_say_at = host.said_at + WordPace::pause(self.control.host_count).as_nanos() as u64;
        if is_said && self.now < may_say_at {
            if !std::mem::replace(&mut self.hosts[number].is_waiting, true) {
                self.plan(may_say_at - self.now, Event::Word(number));
            }
            return;
        }
        let ranges = given.map(|(network, (_, block))| (words::network_name(*network), block.to_string())).collect();
        let problems: Vec<Problem> = self.problems_of(number).cloned().collect();
        let said = (host.blocks.values().filter(|(at, _)| *at <= carried).count(), problems.len());
        let followed = words::has_followed(carried, ranges, problems, self.now_s());
        let host = &mut self.hosts[number];
        (host.said, host.said_at, host.is_waiting) = (Some(said), self.now, false);
        let writes = words::followed(number, followed);
        let (done, _) = self.commit(writes, false);
        self.hosts[number].is_writing = true;
        self.plan(done - self.now, Event::Written(number));
    }

    fn written(&mut self, number: usize) {
        let host = &mut self.hosts[number];
        let is_to_write = std::mem::take(&mut host.is_to_write);
        (host.is_writing, host.written_at, host.is_recorded) = (false, self.now, true);
        match is_to_write && host.is_up {
            true => self.tell(number),
            false => self.plan(BEAT, Event::Beat(number, self.now)),
        }
    }

    /// The vNICs that it has, to all hosts where they are others than before, and what they do, to nobody.
    fn say_vnics(&mut self, number: usize) {
        let (network, now_s, count) = (self.setting.network_of(number), self.now_s(), self.setting.vnics);
        let host = &mut self.hosts[number];
        host.spoke += 1;
        // Without a block it has no addresses for any.
        let Some((_, block)) = host.blocks.get(&network) else { return };
        let own = OwnVnics { count, first: host.gone, block: *block, network };
        let is_new = host.members_of != Some(host.gone);
        let members = is_new.then(|| {
            host.members_of = Some(host.gone);
            host.members_written += 1;
            words::members(number, &own)
        });
        let vnics = match host.vnics_lengths.is_empty() {
            true => words::vnics(number, &own, now_s),
            false => words::vnics_again(number, &host.vnics_lengths),
        };
        let values = vnics.iter().take(words::PARTS_OF_VNICS).filter_map(|(_, value)| value.as_ref());
        host.vnics_lengths = values.map(Vec::len).collect();
        let is_first = host.members_written == 1 && is_new;
        if let Some(writes) = members {
            let (_, revision) = self.commit(writes, false);
            if is_first && self.setting.hosts > FULL_MESH_COUNT as usize {
                self.meet(number, revision);
            }
        }
        self.commit(vnics, false);
    }

    /// A host has come into a network: those of the tenant have another peer, and look at all.
    fn meet(&mut self, number: usize, revision: u64) {
        let network = self.setting.network_of(number);
        for other in 0..self.setting.hosts {
            if self.setting.network_of(other) == network {
                self.hosts[other].due = revision;
                if self.hosts[other].is_up {
                    self.plan_round(other, self.heard_ns(other, revision));
                }
            }
        }
    }

    fn publish(&mut self, number: usize) {
        self.say_vnics(number);
        let after = BEAT + self.draw(REST);
        self.plan(after, Event::Vnics(number, self.hosts[number].spoke));
    }

    fn churn(&mut self, number: usize) {
        if self.hosts[number].is_up {
            self.hosts[number].gone += 1;
            self.publish(number);
        }
        let after = self.draw(2 * self.setting.churn_s * SECOND);
        self.plan(after, Event::Churn(number));
    }

    /// Of the last host, at all that there is.
    pub fn looks(&self) -> u64 {
        self.looks
    }

    pub fn counts(&mut self) -> Counts {
        self.etcd.take_counts()
    }

    /// The view of the last host.
    pub fn view(&self) -> &View {
        &self.last().view
    }

    pub fn last(&self) -> &Follower {
        &self.sampled[&(self.setting.hosts - 1)].follower
    }

    pub fn controller(&self) -> &Follower {
        &self.sampled[&0].follower
    }

    /// As the last host has found it.
    pub fn like(&self) -> &Carried {
        &self.like
    }

    /// Whether a host that is sampled says of itself what it would be taken to say if it were not.
    ///
    /// # Errors
    /// The difference.
    pub fn check(&self) -> Result<(), String> {
        let last = self.setting.hosts - 1;
        for number in [0, last] {
            let name = words::host_name(number);
            let said = self.controller().view.followed().get(&name).ok_or(format!("{name} has said nothing"))?;
            for network in (0..self.networks.count).map(words::network_name) {
                let block = self.view().block(&network, &name).map(|block| block.to_string());
                if said.ranges.get(&network) != block.as_ref() {
                    return Err(format!("{name} is said to have {:?}, and its block is {block:?}", said.ranges));
                }
            }
        }
        let given = self.hosts[last].blocks.iter();
        let given = given.map(|(network, (_, block))| (words::network_name(*network), block.to_string()));
        let (real, given) = (&self.like.ranges, given.collect::<BTreeMap<_, _>>());
        if *real != given {
            return Err(format!("the last host has {real:?}, and was given {given:?}"));
        }
        match self.mistaken {
            0 => Ok(()),
            count => Err(format!("{count} times hosts had to do something, and did not")),
        }
    }
}

/// The problem of hosts that are too many for a peers file.
fn is_of_count(problem: &Problem) -> bool {
    problem.message.contains("there are more than")
}
