//! Hosts and a controller that follow a cluster, under virtual time.
//!
//! *Sampled hosts*, the first one of all, which is the controller, and the last one that hears of anything, have a
//! real view, and decide by the real functions. The others do as the last one would: they carry out when there is
//! something to do for hosts, and say how far they have come, with the ranges and problems that such a host has. They
//! hear of each revision at a time of their own. So nothing is left out of what goes to etcd and from there, and a
//! thousand views need not be in one memory.
use crate::etcd::{Counts, Etcd, Model, Writes};
use crate::follower::{Carried, Follower};
use crate::words::{self, Declaration, NETWORK};
use freeflow_cluster::{DEFAULT_ROOT, HEARTBEAT, Problem, Scope, View, WRITE_COUNT_MAX};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

pub const SECOND: u64 = 1_000_000_000;
/// As the follower has them: all is compared so often, and where something could not be followed.
const WHOLE: u64 = 30 * SECOND;
const AGAIN: u64 = 3 * SECOND;
/// It looks so often whether that is due, where no news come.
const ROUND: u64 = 2 * SECOND;
/// The publisher looks so often.
const REST: u64 = SECOND;
const BEAT: u64 = HEARTBEAT.as_secs() * SECOND;
/// Seconds of Unix time at the beginning.
const EPOCH_S: u64 = 1_790_000_000;
/// Calls of etcd's one after another, by which a controller admits a host: four are reads.
const ADMISSION_CALLS: u64 = 9;
const ADMISSION_READS: u64 = 4;
/// A controller looks for requests so often, and answers so many then.
const ADMISSION: u64 = 200 * SECOND / 1000;
const ANSWER_COUNT: usize = 32;

/// How long it takes a host to carry out.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// As long as it took a sampled one on this machine.
    Measured,
    /// Always this: a run is the same to the last message.
    Fixed(u64),
}

#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub hosts: usize,
    /// Of each host.
    pub vnics: usize,
    pub rules: usize,
    pub etcd: Model,
    pub pace: Pace,
    /// As if a router took any number of hosts in its peers file: no host has that for a problem.
    pub any_peer_count: bool,
}

impl Default for Setting {
    /// A thousand hosts of a hundred vNICs each.
    fn default() -> Self {
        let (etcd, pace) = (Model::default(), Pace::Measured);
        Self { hosts: 1000, vnics: 100, rules: 100, etcd, pace, any_peer_count: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A host's follower has news, or its time for a look has come.
    Round(usize),
    /// It has carried out.
    Carried(usize),
    /// Its report is written.
    Written(usize),
    /// Its report is due again, unless it was written since this time.
    Beat(usize, u64),
    /// Its publisher speaks.
    Vnics(usize),
    /// A host asks to be let in; it has its answer.
    Asks(usize),
    Begins(usize),
    Admit,
    /// The controller looks for blocks to give, and then asks for this.
    Control,
    Blocks,
}

const NEVER: u64 = u64::MAX;

#[derive(Clone, Debug, Default)]
struct Host {
    is_up: bool,
    /// It has got its record into etcd.
    is_recorded: bool,
    /// Of the rounds that are planned, the first one: others are void; `NEVER`: none is.
    round_at: u64,
    busy_until: u64,
    whole_at: u64,
    /// Up to this revision it has carried out; and is doing so.
    carried: u64,
    carrying: u64,
    has_problems: bool,
    is_writing: bool,
    is_to_write: bool,
    written_at: u64,
    written: u64,
    spoke: u64,
    /// When it has been told what it missed.
    caught_up_at: u64,
}

pub struct World {
    pub setting: Setting,
    pub now: u64,
    pub etcd: Etcd,
    pub declaration: Declaration,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    queued: u64,
    hosts: Vec<Host>,
    /// By number, with the revision up to which each has taken news.
    sampled: BTreeMap<usize, (Follower, u64)>,
    /// Revisions for which hosts have something to do.
    for_hosts: Vec<u64>,
    /// Revision at which each host was given its block, and that.
    blocks: BTreeMap<usize, (u64, String)>,
    /// The last that a sampled host has found.
    like: Carried,
    to_give: Writes,
    is_giving: bool,
    asked: Vec<usize>,
    /// Hosts that want in, or are about to ask.
    joining: usize,
    is_admitting: bool,
    /// Time of this machine for one look of the controller, the longest.
    pub control_ns: u64,
    pub without_block: usize,
    random: u64,
}

impl World {
    /// All hosts are there; the time in which they have followed all, `None`: not within ten minutes.
    pub fn settled(setting: Setting) -> (Self, Option<u64>) {
        let mut world = Self::empty(setting);
        for host in 0..setting.hosts {
            let followed = words::has_followed(0, BTreeMap::new(), Vec::new(), EPOCH_S);
            world.commit(words::record_of(host), false);
            world.commit(words::followed(host, followed, 1), false);
            world.commit(words::members(host, setting.vnics, 1), false);
            world.commit(words::vnics(host, setting.vnics, 1, EPOCH_S), false);
        }
        world.for_hosts.push(world.etcd.revision());
        // As if etcd had been there for long.
        world.now = world.etcd.behind_ns(0);
        // Their beats are spread, as they are where hosts came up one by one.
        for host in 0..setting.hosts {
            world.begin(host);
            (world.hosts[host].is_recorded, world.hosts[host].written, world.hosts[host].spoke) = (true, 1, 1);
            let at = world.draw(BEAT);
            world.plan(at, Event::Vnics(host));
        }
        let settled = world.settle(600 * SECOND);
        for host in 0..setting.hosts {
            let back = world.draw(WHOLE);
            world.hosts[host].whole_at = world.now.saturating_sub(back);
            world.plan_round(host, world.now);
        }
        world.run_for(BEAT);
        world.etcd.take_counts();
        (world, settled)
    }

    /// No host is up.
    pub fn empty(setting: Setting) -> Self {
        let mut world = Self {
            setting,
            now: 0,
            etcd: Etcd::new(setting.etcd),
            declaration: Declaration::new(),
            queue: BinaryHeap::new(),
            queued: 0,
            hosts: vec![Host::default(); setting.hosts],
            sampled: BTreeMap::new(),
            for_hosts: Vec::new(),
            blocks: BTreeMap::new(),
            like: Carried { took_ns: 1_000_000, ..Carried::default() },
            to_give: Vec::new(),
            is_giving: false,
            asked: Vec::new(),
            joining: 0,
            is_admitting: false,
            control_ns: 0,
            without_block: 0,
            random: 7,
        };
        world.commit(words::identity(), true);
        let declared = world.declaration.begin(setting.rules);
        world.commit(declared, true);
        world
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below.max(1)
    }

    fn now_s(&self) -> u64 {
        EPOCH_S + self.now / SECOND
    }

    fn plan(&mut self, after: u64, event: Event) {
        self.queued += 1;
        self.queue.push(Reverse((self.now + after, self.queued, event)));
    }

    /// A round of a host at this time, or earlier if one is planned for then.
    fn plan_round(&mut self, host: usize, at: u64) {
        let at = at.max(self.now).max(self.hosts[host].busy_until);
        if at < self.hosts[host].round_at {
            self.hosts[host].round_at = at;
            self.plan(at - self.now, Event::Round(host));
        }
    }

    /// Watchers of its member that are told before it.
    fn others(&self, host: usize) -> u64 {
        host as u64 / self.setting.etcd.members
    }

    /// The time of the answer, and the revision. `is_for_hosts`: they have something to do for it.
    pub fn commit(&mut self, writes: Writes, is_for_hosts: bool) -> (u64, u64) {
        let (done, revision) = self.etcd.commit(self.now, writes);
        if is_for_hosts {
            self.for_hosts.push(revision.0);
            for host in 0..self.hosts.len() {
                if self.hosts[host].is_up {
                    self.plan_round(host, self.etcd.heard_ns(revision.0, self.others(host)));
                }
            }
        }
        (done, revision.0)
    }

    /// It follows from now on, by a new list.
    fn begin(&mut self, number: usize) {
        let is_controller = number == 0;
        self.etcd.watchers += 1;
        self.etcd.controllers += u64::from(is_controller);
        self.hosts[number] = Host { is_up: true, whole_at: self.now, round_at: NEVER, ..Host::default() };
        if is_controller || number == self.setting.hosts - 1 {
            let mut follower = Follower::new(number, if is_controller { Scope::Said } else { Scope::Host });
            follower.take(self.etcd.listed(is_controller));
            self.sampled.insert(number, (follower, self.etcd.revision()));
        }
        self.plan_round(number, self.now);
    }

    /// Hosts are lost: they neither hear nor say anything.
    pub fn lose(&mut self, lost: std::ops::Range<usize>) {
        for number in lost {
            self.hosts[number].is_up = false;
            self.etcd.watchers -= 1;
        }
    }

    /// They are back, and are told what they missed: events and bytes of each.
    pub fn find(&mut self, lost: std::ops::Range<usize>, since: u64) -> (u64, u64) {
        let missed = self.etcd.missed(since);
        for number in lost {
            let at = self.etcd.send_missed(self.now, missed);
            let host = &mut self.hosts[number];
            (host.is_up, host.is_writing, host.is_to_write) = (true, false, true);
            (host.caught_up_at, host.busy_until) = (at, at);
            (host.round_at, host.carrying) = (NEVER, host.carried);
            self.etcd.watchers += 1;
            self.plan_round(number, at);
            let after = at - self.now + self.draw(REST);
            self.plan(after, Event::Vnics(number));
        }
        missed
    }

    /// A host asks to be let in after this time.
    pub fn ask_to_join(&mut self, host: usize, after: u64) {
        self.joining += 1;
        self.plan(after, Event::Asks(host));
    }

    /// The first host, which is the controller, is there already.
    pub fn begin_controller(&mut self) {
        self.begin(0);
        self.plan(BEAT, Event::Vnics(0));
    }

    pub fn run_for(&mut self, time: u64) {
        let end = self.now + time;
        while self.queue.peek().is_some_and(|Reverse((at, ..))| *at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Until each host that is up has carried out all that there is to do for hosts; how long after now the last one
    /// had, `None`: not within this time.
    pub fn settle(&mut self, within: u64) -> Option<u64> {
        let begin = self.now;
        loop {
            let last = self.for_hosts.last().copied().unwrap_or(0);
            let is_done = |host: &Host| !host.is_up || (host.is_recorded && host.carried >= last);
            let has_blocks = self.blocks.len() + self.without_block >= self.setting.hosts;
            if has_blocks && self.joining == 0 && self.hosts.iter().all(is_done) {
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

    /// Time after `since` at which each host has done what this revision says, in order; as far as they have.
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
            Event::Written(host) => {
                let is_to_write = std::mem::take(&mut self.hosts[host].is_to_write);
                (self.hosts[host].is_writing, self.hosts[host].written_at) = (false, at);
                self.hosts[host].is_recorded = true;
                match is_to_write && self.hosts[host].is_up {
                    true => self.tell(host),
                    false => self.plan(BEAT, Event::Beat(host, at)),
                }
            }
            Event::Beat(host, since) if self.hosts[host].is_up && self.hosts[host].written_at == since => {
                self.tell(host);
            }
            Event::Vnics(host) if self.hosts[host].is_up => self.publish(host),
            Event::Asks(host) => {
                let (done, _) = self.commit(words::join_request(host), false);
                self.asked.push(host);
                self.admit_later(done - self.now);
            }
            Event::Begins(host) => {
                self.joining -= 1;
                self.begin(host);
                let after = BEAT + self.draw(BEAT);
                self.plan(after, Event::Vnics(host));
            }
            Event::Admit => self.admit(),
            Event::Control => self.control(),
            Event::Blocks => self.give(),
            Event::Round(_) | Event::Carried(_) | Event::Beat(..) | Event::Vnics(_) => {}
        }
        event
    }

    /// The follower takes all that it has heard of, and does what there is to do.
    fn round(&mut self, number: usize) {
        self.hosts[number].round_at = NEVER;
        let heard = match self.hosts[number].caught_up_at > self.now {
            true => self.hosts[number].carried,
            false => self.etcd.heard(self.now, self.others(number)),
        };
        self.take_news(number, heard);
        let host = &self.hosts[number];
        let last = self.for_hosts[..self.for_hosts.partition_point(|revision| *revision <= heard)].last().copied();
        let after = if host.has_problems { AGAIN } else { WHOLE };
        let has_news = last.is_some_and(|last| last > host.carrying);
        if !(has_news || self.now >= host.whole_at + after) {
            let at = host.whole_at + after + ROUND / 2;
            return self.plan_next(number, heard, at);
        }
        let carried = match self.sampled.get_mut(&number) {
            Some((follower, _)) => {
                let mut carried = follower.carry_out();
                if self.setting.any_peer_count {
                    carried.problems.retain(|problem| !is_of_count(problem));
                }
                if number > 0 {
                    self.like = carried.clone();
                }
                carried
            }
            None => self.like.clone(),
        };
        let took = match self.setting.pace {
            Pace::Measured => carried.took_ns,
            Pace::Fixed(took) => took,
        };
        let host = &mut self.hosts[number];
        (host.whole_at, host.carrying, host.busy_until) = (self.now, heard, self.now + took);
        host.has_problems = !carried.problems.is_empty();
        self.plan(took, Event::Carried(number));
        if number == 0 {
            self.plan(took, Event::Control);
        }
        let after = if self.hosts[number].has_problems { AGAIN } else { WHOLE };
        self.plan_next(number, heard, self.now + after);
    }

    /// The round after this one: when the next news come that are for hosts, or all is to be compared.
    fn plan_next(&mut self, number: usize, heard: u64, whole_at: u64) {
        let next = self.for_hosts.get(self.for_hosts.partition_point(|revision| *revision <= heard)).copied();
        let at = next.map_or(whole_at, |next| whole_at.min(self.etcd.heard_ns(next, self.others(number))));
        self.plan_round(number, at.max(self.now + 1));
    }

    fn take_news(&mut self, number: usize, heard: u64) {
        let Some((follower, taken)) = self.sampled.get_mut(&number) else { return };
        if heard > *taken {
            follower.take(self.etcd.news(*taken, heard, number == 0));
            *taken = heard;
        }
        let least = self.sampled.values().map(|(_, taken)| *taken).min().expect("there is one");
        if !self.sampled.keys().any(|number| !self.hosts[*number].is_up) && self.sampled.len() > 1 {
            self.etcd.forget(least);
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
            let (done, _) = self.commit(words::record_of(number), true);
            (self.hosts[number].is_writing, self.hosts[number].is_to_write) = (true, true);
            return self.plan(done - self.now, Event::Written(number));
        }
        let carried = self.hosts[number].carried;
        let block = self.blocks.get(&number).filter(|(given, _)| *given <= carried);
        let ranges = block.map(|(_, block)| (NETWORK.to_owned(), block.clone())).into_iter().collect();
        // As a host like it has them; the one that it has itself until it has a block is another one.
        let problems = if self.hosts[number].has_problems { self.like.problems.clone() } else { Vec::new() };
        let followed = words::has_followed(carried, ranges, problems, self.now_s());
        self.hosts[number].written += 1;
        let writes = words::followed(number, followed, self.hosts[number].written);
        let (done, _) = self.commit(writes, false);
        self.hosts[number].is_writing = true;
        self.plan(done - self.now, Event::Written(number));
    }

    fn publish(&mut self, number: usize) {
        self.hosts[number].spoke += 1;
        if self.hosts[number].spoke == 1 {
            self.commit(words::members(number, self.setting.vnics, 1), false);
        }
        let writes = words::vnics(number, self.setting.vnics, self.hosts[number].spoke, self.now_s());
        self.commit(writes, false);
        let after = BEAT + self.draw(REST);
        self.plan(after, Event::Vnics(number));
    }

    fn admit_later(&mut self, after: u64) {
        if !self.is_admitting {
            self.is_admitting = true;
            self.plan(after.max(ADMISSION), Event::Admit);
        }
    }

    /// One after another; a host follows as soon as it has its answer.
    fn admit(&mut self) {
        self.is_admitting = false;
        let count = self.asked.len().min(ANSWER_COUNT);
        let answered: Vec<usize> = self.asked.drain(..count).collect();
        let mut took = 0;
        for host in answered {
            let [noted, block, answer] = words::join_answer(host);
            self.commit(noted, false);
            self.commit(block, true);
            let (done, _) = self.commit(answer, false);
            // A commit that waits for no other takes its usual time.
            let Model { commit_ns, .. } = self.setting.etcd;
            took +=
                (done - self.now).max(commit_ns) + (ADMISSION_CALLS - 1) * commit_ns + ADMISSION_READS * commit_ns / 2;
            self.plan(took, Event::Begins(host));
        }
        if !self.asked.is_empty() {
            self.admit_later(took);
        }
    }

    /// Blocks that are due by what the controller has heard of.
    fn control(&mut self) {
        if self.is_giving {
            return;
        }
        let (follower, _) = &self.sampled[&0];
        let (due, took_ns) = follower.control();
        self.control_ns = self.control_ns.max(took_ns);
        let took = if let Pace::Fixed(took) = self.setting.pace { took } else { took_ns };
        if due.writes.is_empty() {
            self.without_block = if due.full.is_empty() { 0 } else { self.setting.hosts - self.blocks.len() };
            return;
        }
        let blocks = due.writes.into_iter().take(WRITE_COUNT_MAX);
        self.to_give = words::blocks(blocks.map(|(at, block)| (at, block.map(|block| block.to_string()))));
        self.is_giving = true;
        // It reads the blocks and what is declared before it writes.
        self.plan(took + 2 * self.setting.etcd.commit_ns, Event::Blocks);
    }

    fn give(&mut self) {
        let writes = std::mem::take(&mut self.to_give);
        let of_hosts: Vec<(usize, String)> = writes.iter().filter_map(given).collect();
        let (_, revision) = self.commit(writes, true);
        self.blocks.extend(of_hosts.into_iter().map(|(host, block)| (host, (revision, block))));
        self.is_giving = false;
    }

    pub fn counts(&mut self) -> Counts {
        self.etcd.take_counts()
    }

    /// The view of the last host.
    pub fn view(&self) -> &View {
        &self.last().view
    }

    /// As an operator's command sees it.
    pub fn view_of_all(&self) -> View {
        let mut view = View::new(DEFAULT_ROOT, Scope::Vnics);
        view.take(self.etcd.all());
        view
    }

    pub fn controller(&self) -> &Follower {
        &self.sampled[&0].0
    }

    pub fn last(&self) -> &Follower {
        &self.sampled[&(self.setting.hosts - 1)].0
    }

    /// As the last host has found it.
    pub fn like(&self) -> &Carried {
        &self.like
    }

    pub fn blocks_given(&self) -> usize {
        self.blocks.len()
    }

    /// Whether a host that is sampled says of itself what it would be taken to say if it were not.
    pub fn check(&self) -> Result<(), String> {
        let view = self.view_of_all();
        for number in self.sampled.keys() {
            let name = words::host_name(*number);
            let said = view.followed().get(&name).ok_or(format!("{name} has said nothing"))?;
            let block = view.block(NETWORK, &name).map(|block| block.to_string());
            if said.ranges.get(NETWORK) != block.as_ref() {
                return Err(format!("{name} is said to have {:?}, and its block is {block:?}", said.ranges));
            }
        }
        let real = &self.like.ranges;
        let last = self.blocks.get(&(self.setting.hosts - 1)).map(|(_, block)| block);
        (real.get(NETWORK) == last).then_some(()).ok_or(format!("the last host has {real:?}, and was given {last:?}"))
    }
}

/// The problem of hosts that are too many for a peers file.
fn is_of_count(problem: &Problem) -> bool {
    problem.message.contains("there are more than")
}

fn given((key, block): &(String, Option<Vec<u8>>)) -> Option<(usize, String)> {
    let host = key.rsplit_once(&format!("/{NETWORK}/host-"))?.1.parse().ok()?;
    Some((host, String::from_utf8(block.clone()?).ok()?))
}
