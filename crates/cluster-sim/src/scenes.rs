//! Scenes that are tried, each in a world of its own.
use crate::words;
use crate::world::{SECOND, Setting, World};
use serde::Serialize;

/// Virtual time over which a quiet cluster is watched.
const IDLE: u64 = 120 * SECOND;
/// Hosts join within this time.
const STORM: u64 = 60 * SECOND;
/// A tenth of the hosts is away for so long.
const AWAY: u64 = 300 * SECOND;
/// Nothing is waited for longer.
const PATIENCE: u64 = 3600 * SECOND;

fn seconds(ns: u64) -> f64 {
    ns as f64 / SECOND as f64
}

/// Nobody does anything: hosts say that they are there.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub hosts: usize,
    pub vnics: usize,
    pub over_s: f64,
    pub transactions: u64,
    /// Of all keys that hosts write.
    pub written_bytes: u64,
    /// Events and bytes that each host is told, and those to all hosts and controllers.
    pub told_events: u64,
    pub told_bytes: u64,
    pub sent_events: u64,
    pub sent_bytes: u64,
    pub keys: u64,
    pub key_bytes: u64,
    /// How far behind etcd's members are with telling watchers, at the end.
    pub behind_s: f64,
    /// In which all had followed all, at the beginning.
    pub settled_s: Option<f64>,
    pub problems_of_each: usize,
    pub peers_of_each: usize,
    pub hosts_without_block: usize,
    /// Real time on this machine: a host compares all; a controller looks whether anything is due; an average
    /// transaction of another host is taken in.
    pub carry_out_us: f64,
    pub control_us: f64,
    pub take_us: f64,
}

/// Watches a quiet cluster.
pub fn idle(setting: Setting) -> Idle {
    let (mut world, settled) = World::settled(setting);
    let taken_before = (world.last().taking_ns, world.etcd.revision());
    world.run_for(IDLE);
    let counts = world.counts();
    let (keys, key_bytes) = world.etcd.size();
    let taken = world.last().taking_ns - taken_before.0;
    let revisions = world.etcd.revision() - taken_before.1;
    Idle {
        hosts: setting.hosts,
        vnics: setting.vnics,
        over_s: seconds(IDLE),
        transactions: counts.transactions,
        written_bytes: counts.written_bytes,
        told_events: counts.events,
        told_bytes: counts.bytes,
        sent_events: counts.sent_events,
        sent_bytes: counts.sent_bytes,
        keys,
        key_bytes,
        behind_s: seconds(world.etcd.behind_ns(world.now)),
        settled_s: settled.map(seconds),
        problems_of_each: world.like().problems.len(),
        peers_of_each: world.like().peer_count,
        hosts_without_block: world.without_block,
        carry_out_us: world.like().took_ns as f64 / 1000.0,
        control_us: world.controller().control().1 as f64 / 1000.0,
        take_us: taken as f64 / 1000.0 / revisions.max(1) as f64,
    }
}

/// An operator declares one more rule.
#[derive(Clone, Debug, Serialize)]
pub struct Changed {
    pub hosts: usize,
    /// From etcd's answer to the operator until hosts have it: half of them, and the last one. `None`: not all of them
    /// within the time that is waited.
    pub median_s: Option<f64>,
    pub last_s: Option<f64>,
    pub followed_by: usize,
    /// Until a second after the last one has it, beyond what a quiet cluster says in that time: that hosts have
    /// followed. Their next words are due so much later.
    pub transactions: u64,
    pub sent_events: u64,
    pub sent_bytes: u64,
}

/// Waits for the change.
pub fn changed(setting: Setting) -> Changed {
    let (mut world, _) = World::settled(setting);
    let window = 30 * SECOND;
    world.run_for(window);
    let quiet = world.counts();
    let (writes, before) = (world.declaration.add_rule(setting.rules), world.now);
    let (done, revision) = world.commit(writes, true);
    let all = world.enforced(revision, PATIENCE.min(120 * SECOND));
    let since = |ns: &u64| seconds(ns.saturating_sub(done - before));
    world.run_for(SECOND);
    let (counts, took) = (world.counts(), world.now - before);
    let is_all = all.len() == setting.hosts;
    if is_all {
        assert_eq!(world.last().rule_count(), setting.rules + 1, "the last host enforces it");
    }
    let over = |with: u64, without: u64| with.saturating_sub((without as f64 * took as f64 / window as f64) as u64);
    Changed {
        hosts: setting.hosts,
        median_s: all.get(setting.hosts / 2).map(since),
        last_s: all.last().filter(|_| is_all).map(since),
        followed_by: all.len(),
        transactions: over(counts.transactions, quiet.transactions),
        sent_events: over(counts.sent_events, quiet.sent_events),
        sent_bytes: over(counts.sent_bytes, quiet.sent_bytes),
    }
}

/// All hosts join by tokens within a minute; the first one, a controller, is there.
#[derive(Clone, Debug, Serialize)]
pub struct Storm {
    pub hosts: usize,
    /// After the last has asked, until all are in, have blocks and know all others. `None`: not within an hour.
    pub settled_s: Option<f64>,
    /// In that hour, or until then.
    pub transactions: u64,
    pub sent_events: u64,
    pub sent_bytes: u64,
    pub blocks: usize,
    /// The longest look of the controller's for blocks to give, real time on this machine.
    pub control_ms: f64,
}

/// Lets them in.
pub fn storm(setting: Setting) -> Storm {
    let mut world = World::empty(setting);
    world.begin_controller();
    world.run_for(5 * SECOND);
    world.counts();
    let gap = STORM / setting.hosts as u64;
    // The last one is sampled, and shows the others what such a host does: so it comes first.
    for (turn, host) in (1..setting.hosts).rev().enumerate() {
        world.ask_to_join(host, turn as u64 * gap);
    }
    world.run_for(STORM);
    let settled = world.settle(PATIENCE);
    let counts = world.counts();
    Storm {
        hosts: setting.hosts,
        settled_s: settled.map(seconds),
        transactions: counts.transactions,
        sent_events: counts.sent_events,
        sent_bytes: counts.sent_bytes,
        blocks: world.blocks_given(),
        control_ms: world.control_ns as f64 / 1e6,
    }
}

/// A tenth of the hosts is cut off for five minutes.
#[derive(Clone, Debug, Serialize)]
pub struct Loss {
    pub hosts: usize,
    pub lost: usize,
    /// Transactions of the others in these minutes, beyond what they say anyway.
    pub more_transactions: i64,
    /// Each of them that comes back is told so many events and bytes that it missed.
    pub missed_events: u64,
    pub missed_bytes: u64,
    /// Until all have followed, after they are back: with a change that was made meanwhile.
    pub settled_s: Option<f64>,
}

/// Loses them, and finds them again.
pub fn loss(setting: Setting) -> Loss {
    let (mut world, _) = World::settled(setting);
    let lost = setting.hosts / 2..setting.hosts / 2 + setting.hosts.div_ceil(10);
    let rest = (setting.hosts - lost.len()) as f64 / setting.hosts as f64;
    world.run_for(AWAY);
    let quiet = world.counts().transactions as f64;
    let since = world.etcd.revision();
    world.lose(lost.clone());
    world.run_for(AWAY / 2);
    let writes = world.declaration.add_rule(setting.rules);
    world.commit(writes, true);
    world.run_for(AWAY / 2);
    let with = world.counts().transactions as f64;
    let (missed_events, missed_bytes) = world.find(lost.clone(), since);
    let settled = world.settle(PATIENCE / 6);
    Loss {
        hosts: setting.hosts,
        lost: lost.len(),
        more_transactions: (with - quiet * rest) as i64,
        missed_events,
        missed_bytes,
        settled_s: settled.map(seconds),
    }
}

/// Bytes that a host writes into etcd's file in an hour, by what it says: etcd keeps them until it is compacted.
pub fn bytes_per_host_and_hour(idle: &Idle) -> f64 {
    idle.written_bytes as f64 / idle.hosts as f64 / idle.over_s * 3600.0
}

/// Whether what sampled hosts do is what the others are taken to do.
///
/// # Errors
/// The difference.
pub fn check(setting: Setting) -> Result<(), String> {
    let (mut world, settled) = World::settled(setting);
    settled.ok_or("it does not settle")?;
    let writes = world.declaration.add_rule(setting.rules);
    world.commit(writes, true);
    world.settle(PATIENCE).ok_or("the change does not settle")?;
    // The words of the last ones are on their way.
    world.run_for(60 * SECOND);
    let listed = world.etcd.size();
    let view = world.view_of_all();
    if world.view().hosts().len() != setting.hosts || view.vnics().len() != setting.hosts {
        return Err(format!("{} hosts in the view, of {listed:?} keys and bytes", world.view().hosts().len()));
    }
    let first = words::host_name(0);
    let member_count = world.view().members(&first).map(|(_, members)| members.len()).sum::<usize>();
    if member_count != setting.vnics || !world.view().followed().is_empty() {
        return Err(format!("the last host knows {member_count} members of the first one, or more than it follows"));
    }
    if let Some((_, vnics)) = view.vnics().first_key_value() {
        let said = vnics.vnics.len();
        (said == setting.vnics).then_some(()).ok_or(format!("{said} vNICs of a host"))?;
    }
    view.followed().get(&first).ok_or(format!("{first} has said nothing"))?;
    world.check()
}
