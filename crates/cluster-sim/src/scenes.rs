//! Scenes that are tried, each in a world of its own.
use crate::etcd::{Counts, Told};
use crate::words;
use crate::world::{SECOND, Setting, World};
use freeflow_cluster::Pace;
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

/// Nobody does anything: hosts say that they are there. Or vNICs come and go, if the setting has that.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub hosts: usize,
    pub vnics: usize,
    pub networks: usize,
    pub over_s: f64,
    pub transactions: u64,
    /// Events and bytes that are written, that a host and a controller are told, and all that are sent.
    pub written: Told,
    pub to_host: Told,
    pub to_controller: Told,
    pub sent: Told,
    pub keys: u64,
    pub key_bytes: u64,
    /// Of these, those that a host lists when it begins, and a controller.
    pub host_list_bytes: u64,
    pub controller_list_bytes: u64,
    /// How far behind etcd's members are with telling watchers, at the end.
    pub behind_s: f64,
    /// In which all had followed all, at the beginning.
    pub settled_s: Option<f64>,
    pub problems_of_each: usize,
    pub peers_of_each: usize,
    /// vNICs of them that containers of the last host know by name.
    pub names_of_each: usize,
    pub hosts_without_block: usize,
    /// Looks at all by the last host.
    pub looks: u64,
    /// Real time on this machine: a host compares all; it finds out what vNICs are called, where others' are others; a
    /// controller looks whether anything is due.
    pub carry_out_us: f64,
    pub names_us: f64,
    pub control_us: f64,
    /// Parts of a core: of one of etcd's members, for telling watchers; of a host; of a controller. More than all of
    /// one: it does what it can, and several news at once.
    pub member_core: f64,
    pub host_core: f64,
    pub controller_core: f64,
}

/// Watches a quiet cluster.
///
/// # Errors
/// There are no addresses for so many networks.
pub fn idle(setting: Setting) -> Result<Idle, String> {
    let (mut world, settled) = World::settled(setting)?;
    let before = (world.last().taking_ns, world.controller().taking_ns, world.looks());
    let versions = |world: &World| (world.view().members_version(), world.controller().view.control_version());
    let (members_before, control_before) = versions(&world);
    world.run_for(IDLE);
    let (members_after, control_after) = versions(&world);
    let counts = world.counts();
    let (keys, key_bytes) = world.etcd.size();
    let looks = world.looks() - before.2;
    let took_ns = setting.pace.of(world.like().took_ns);
    let (_, control_ns) = world.controller().control();
    let (names_of_each, names_ns) = world.last().names();
    // Each time that any host has other members.
    let of_all_ns = looks * took_ns + (members_after - members_before) * names_ns;
    let host_ns = world.last().taking_ns - before.0 + of_all_ns;
    let controller_ns =
        world.controller().taking_ns - before.1 + of_all_ns + (control_after - control_before) * control_ns;
    let Counts { transactions, written, to_host, to_controller, sent, .. } = counts;
    Ok(Idle {
        hosts: setting.hosts,
        vnics: setting.vnics,
        networks: world.networks.count,
        over_s: seconds(IDLE),
        transactions,
        written,
        to_host,
        to_controller,
        sent,
        keys,
        key_bytes,
        host_list_bytes: world.etcd.listed_bytes(false),
        controller_list_bytes: world.etcd.listed_bytes(true),
        behind_s: seconds(world.etcd.behind_ns(world.now)),
        settled_s: settled.map(seconds),
        problems_of_each: world.problem_count,
        peers_of_each: world.like().peer_count,
        names_of_each,
        hosts_without_block: setting.hosts * world.networks.count - world.control.given,
        looks,
        carry_out_us: world.like().took_ns as f64 / 1000.0,
        names_us: names_ns as f64 / 1000.0,
        control_us: control_ns as f64 / 1000.0,
        member_core: seconds(sent.events * setting.etcd.event_ns / setting.etcd.members) / seconds(IDLE),
        host_core: seconds(host_ns) / seconds(IDLE),
        controller_core: seconds(controller_ns) / seconds(IDLE),
    })
}

/// An operator declares one more rule.
#[derive(Clone, Debug, Serialize)]
pub struct Changed {
    pub hosts: usize,
    /// From etcd's answer to the operator until hosts have it: the first one, half of them, and the last one. `None`:
    /// not all of them within the time that is waited.
    pub first_s: Option<f64>,
    pub median_s: Option<f64>,
    pub last_s: Option<f64>,
    pub followed_by: usize,
    /// Until the last one has said so, beyond what a quiet cluster says in that time. Their next words are due so much
    /// later.
    pub transactions: u64,
    pub sent: Told,
}

/// Waits for the change.
///
/// # Errors
/// There are no addresses for so many networks.
pub fn changed(setting: Setting) -> Result<Changed, String> {
    let (mut world, _) = World::settled(setting)?;
    let window = 30 * SECOND;
    world.run_for(window);
    let quiet = world.counts();
    let (writes, before) = (world.declaration.add_rule(setting.rules), world.now);
    let (done, revision) = world.commit(writes, true);
    let all = world.enforced(revision, 120 * SECOND);
    let since = |ns: &u64| seconds(ns.saturating_sub(done - before));
    // All have said so by then.
    world.run_for(SECOND + Pace::pause(setting.hosts).as_nanos() as u64);
    let (counts, took) = (world.counts(), world.now - before);
    let is_all = all.len() == setting.hosts;
    if is_all {
        assert_eq!(world.last().rule_count(), setting.rules + 1, "the last host enforces it");
    }
    let over = |with: u64, without: u64| with.saturating_sub((without as f64 * took as f64 / window as f64) as u64);
    Ok(Changed {
        hosts: setting.hosts,
        first_s: all.first().map(since),
        median_s: all.get(setting.hosts / 2).map(since),
        last_s: all.last().filter(|_| is_all).map(since),
        followed_by: all.len(),
        transactions: over(counts.transactions, quiet.transactions),
        sent: Told {
            events: over(counts.sent.events, quiet.sent.events),
            bytes: over(counts.sent.bytes, quiet.sent.bytes),
        },
    })
}

/// All hosts join by tokens within a minute; the controllers are there.
#[derive(Clone, Debug, Serialize)]
pub struct Storm {
    pub hosts: usize,
    /// After the last has asked, until all are in, have blocks and know all others. `None`: not within an hour.
    pub settled_s: Option<f64>,
    /// Hosts for which there was no block of `default`; of the networks, blocks that were given, and are lacking.
    pub refused: usize,
    pub blocks: usize,
    pub without_block: usize,
    /// In that hour, or until then.
    pub transactions: u64,
    pub written: Told,
    pub sent: Told,
    pub listed_bytes: u64,
    /// The controller's longest decisions, real time on this machine: which blocks to give; and whom to admit.
    pub control_ms: f64,
    pub admit_ms: f64,
}

/// Lets them in.
///
/// # Errors
/// There are no addresses for so many networks.
pub fn storm(setting: Setting) -> Result<Storm, String> {
    let mut world = World::empty(setting)?;
    world.begin_controllers();
    world.run_for(5 * SECOND);
    world.counts();
    let gap = STORM / setting.hosts as u64;
    // The last one is sampled, and shows the others what such a host does: so it comes first.
    for (turn, host) in (world.setting.controllers..setting.hosts).rev().enumerate() {
        world.ask_to_join(host, turn as u64 * gap);
    }
    world.run_for(STORM);
    let settled = world.settle(PATIENCE);
    let counts = world.counts();
    Ok(Storm {
        hosts: setting.hosts,
        settled_s: settled.map(seconds),
        refused: world.control.refused,
        blocks: world.control.given,
        without_block: world.control.without_block,
        transactions: counts.transactions,
        written: counts.written,
        sent: counts.sent,
        listed_bytes: counts.listed_bytes,
        control_ms: world.control.look_ns as f64 / 1e6,
        admit_ms: world.control.admit_ns as f64 / 1e6,
    })
}

/// A tenth of the hosts is cut off for five minutes.
#[derive(Clone, Debug, Serialize)]
pub struct Loss {
    pub hosts: usize,
    pub lost: usize,
    /// Transactions of the others in these minutes, beyond what they say anyway.
    pub more_transactions: i64,
    /// Each of them that comes back is told so much that it missed.
    pub missed: Told,
    /// Until all have followed, after they are back: with a change that was made meanwhile.
    pub settled_s: Option<f64>,
}

/// Loses them, and finds them again.
///
/// # Errors
/// There are no addresses for so many networks.
pub fn loss(setting: Setting) -> Result<Loss, String> {
    let (mut world, _) = World::settled(setting)?;
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
    let missed = world.find(lost.clone(), since);
    let settled = world.settle(PATIENCE / 6);
    Ok(Loss {
        hosts: setting.hosts,
        lost: lost.len(),
        more_transactions: (with - quiet * rest) as i64,
        missed,
        settled_s: settled.map(seconds),
    })
}

/// Bytes that a host writes into etcd's file in an hour, by what it says: etcd keeps them until it is compacted.
pub fn bytes_per_host_and_hour(idle: &Idle) -> f64 {
    idle.written.bytes as f64 / idle.hosts as f64 / idle.over_s * 3600.0
}

/// Whether what sampled hosts do is what the others are taken to do.
///
/// # Errors
/// The difference.
pub fn check(setting: Setting) -> Result<(), String> {
    let (mut world, settled) = World::settled(setting)?;
    settled.ok_or("it does not settle")?;
    let writes = world.declaration.add_rule(setting.rules);
    world.commit(writes, true);
    world.settle(PATIENCE).ok_or("the change does not settle")?;
    // The words of the last ones are on their way.
    world.run_for(60 * SECOND);
    let listed = world.etcd.size();
    if world.view().hosts().len() != setting.hosts || world.controller().view.followed().len() != setting.hosts {
        return Err(format!("{} hosts in the view, of {listed:?} keys and bytes", world.view().hosts().len()));
    }
    let first = words::host_name(0);
    let members = world.view().members(&first).map(|(_, members)| members.len()).sum::<usize>();
    if members != setting.vnics || !world.view().followed().is_empty() {
        return Err(format!("the last host knows {members} members of the first one, or more than it follows"));
    }
    let named = world.last().names().0;
    let known = if setting.sharing == 0 { setting.hosts - 1 } else { world.like().peer_count };
    if named != known * setting.vnics {
        return Err(format!("containers of the last host know {named} vNICs of {known} hosts"));
    }
    world.check()
}
