//! vNICs of the cluster's on this host: which it has, asks for, lets go to others, and has to give away.
use super::{ELECTION_TIME, Follower, Host, log};
use crate::cluster::{Answer, why_drained};
use crate::control::api::{BASE, Trouble, encoded};
use crate::failure::{Failure, Result};
use crate::record::Records;
use crate::tools;
use freeflow_cluster::mirror::{Target, Wanted};
use freeflow_cluster::{ClaimsOf, Held, Place, RefusedClaims};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, Typed, Vnic};
use freeflow_orchestrator::{DEFAULT_NETWORK, State};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A container has so long to end when its vNIC is moved to another host.
const STOP_TIME: Duration = Duration::from_secs(20);
/// Claims of others for a vNIC that is in use are looked at again after this time.
const CLAIM_AGAIN: Duration = Duration::from_secs(1);

/// A vNIC that could not be made here is asked for again after this time.
const ABLE_AGAIN: Duration = Duration::from_secs(30);

/// Of the vNICs that this host has, what need not outlive the process.
#[derive(Default)]
pub struct OwnVnics {
    /// The cluster's vNICs that the router has.
    present: BTreeSet<String>,
    /// Claims of others that were refused, with the number and the reason.
    refused: BTreeMap<String, RefusedClaims>,
    looked_at: BTreeMap<String, Instant>,
    /// Containers that are being stopped, by their vNIC.
    stops: BTreeMap<String, Stop>,
    /// Claims that this host has spoken of.
    claimed: BTreeMap<String, u64>,
    /// vNICs that could not be made here: for a while they are not asked for again.
    unable: BTreeMap<String, Instant>,
}

struct Stop {
    since: Instant,
    child: Option<Child>,
}

impl Stop {
    /// Of a container of this host.
    fn begin(run_dir: &Path, container: &str) -> Self {
        let mut command = Command::new(tools::own_path().unwrap_or_default());
        command.arg("--run-dir").arg(run_dir).args(["stop", container]).stdin(Stdio::null());
        Self { since: Instant::now(), child: command.stdout(Stdio::null()).spawn().ok() }
    }
}

impl OwnVnics {
    /// Whether something is to be looked at again soon.
    pub fn is_busy(&self) -> bool {
        !self.stops.is_empty() || !self.claimed.is_empty() || !self.refused.is_empty()
    }

    pub fn is_stopping(&self) -> bool {
        !self.stops.is_empty()
    }
}

/// A vNIC that another host asks for.
struct Asked {
    name: String,
    at: u64,
    place: Place,
    /// The number of each host's claim.
    claims: BTreeMap<String, u64>,
}

impl Follower {
    pub(super) fn look_at_vnics(&mut self) -> Result<()> {
        self.vnics.present = self.present_vnics()?;
        Ok(())
    }

    fn declared_vnic(&self, name: &str) -> Option<&Typed<Vnic>> {
        Some(&self.declared.as_ref()?.vnic(name)?.object)
    }

    fn present_vnics(&self) -> Result<BTreeSet<String>> {
        let present = Host::of(&self.api, &self.lease).present(ObjectKind::Vnic).map_err(Failure::new)?;
        Ok(present.iter().map(|object| object.name().to_owned()).collect())
    }

    /// Places on this host, with their revisions.
    fn own_places(&self) -> Vec<(String, u64, Place)> {
        let places = self.view.places().iter().filter(|(_, (_, place))| place.host == self.host);
        places.map(|(name, (at, place))| (name.clone(), at.0, place.clone())).collect()
    }

    /// Before all is carried out: containers whose vNICs go elsewhere are stopped. One that an operator moves keeps its
    /// vNIC until then, as others believe this host so long; one that is another's by now loses it at once.
    pub(super) fn stop_leaving(&mut self, wanted: &mut Wanted) -> Result<()> {
        let names: BTreeSet<&str> =
            (wanted.objects.iter()).filter(|object| object.kind() == ObjectKind::Vnic).map(AnyObject::name).collect();
        let leaves =
            |name: &String| !names.contains(name.as_str()) && !wanted.kept.contains(&(ObjectKind::Vnic, name.clone()));
        let leaving: Vec<String> = self.present_vnics()?.into_iter().filter(leaves).collect();
        self.vnics.stops.retain(|name, stop| {
            // Its exit status is nothing to us, but it is waited for.
            let is_over = stop.child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)));
            leaving.contains(name) || !is_over
        });
        let records = if leaving.is_empty() { Vec::new() } else { Records::of(&self.run_dir).list() };
        for name in leaving {
            let Some(container) = records.iter().find(|record| record.id == name && record.is_live()) else {
                continue;
            };
            let run_dir = self.run_dir.path();
            let stop = self.vnics.stops.entry(name.clone()).or_insert_with(|| {
                log(&format!("the vNIC {name} goes to another host: the container {} is stopped", container.name));
                Stop::begin(run_dir, &container.name)
            });
            let is_moved = self.view.places().get(&name).is_some_and(|(_, place)| place.host == self.host);
            if is_moved && stop.since.elapsed() < STOP_TIME {
                wanted.kept.insert((ObjectKind::Vnic, name));
            }
        }
        Ok(())
    }

    /// A drained host says so to who starts containers, and stops those that run, if an operator wants that.
    pub(super) fn follow_draining(&mut self) -> Result<()> {
        let drained = self.view.drained().get(&self.host).cloned();
        let why = drained.as_ref().map(|drained| why_drained(&self.host, drained));
        self.directory.note_drained(why.as_deref())?;
        if drained.is_none_or(|drained| !drained.stop) {
            return Ok(());
        }
        for record in Records::of(&self.run_dir).list() {
            if record.is_live() && record.networks().any(|network| network != DEFAULT_NETWORK) {
                let run_dir = self.run_dir.path();
                self.vnics.stops.entry(record.id).or_insert_with(|| {
                    log(&format!("this host is drained: the container {} is stopped", record.name));
                    Stop::begin(run_dir, &record.name)
                });
            }
        }
        Ok(())
    }

    fn is_drained(&self) -> bool {
        self.view.drained().contains_key(&self.host)
    }

    /// After that: notes, for ever, which vNICs are not here any more.
    pub(super) fn note_released(&mut self, declared: &State) -> Result<()> {
        self.look_at_vnics()?;
        let mut memory = self.memory.clone();
        let own = self.own_places();
        let is_current = |name: &String, at: &u64| own.iter().any(|(own, own_at, _)| own == name && own_at == at);
        memory.released.retain(|name, at| is_current(name, at));
        memory.served.retain(|name, at| is_current(name, at));
        memory.had.retain(|name, _| self.vnics.present.contains(name));
        for (name, at, place) in &own {
            if self.vnics.present.contains(name) {
                memory.had.insert(name.clone(), (*at).max(memory.had.get(name).copied().unwrap_or_default()));
            }
            if place.moved && !memory.served.contains_key(name) && Records::of(&self.run_dir).user_of(name).is_some() {
                memory.served.insert(name.clone(), *at);
            }
            let is_over = place.next.is_some() || declared.vnic(name).is_none();
            if is_over && !self.vnics.present.contains(name) {
                memory.released.insert(name.clone(), *at);
            }
        }
        self.remember(memory)
    }

    fn remember(&mut self, memory: crate::cluster::Memory) -> Result<()> {
        if memory != self.memory {
            self.directory.remember(&memory)?;
            self.memory = memory;
        }
        Ok(())
    }

    /// For others to see.
    pub(super) fn held(&self) -> BTreeMap<String, Held> {
        let own = self.own_places().into_iter().map(|(name, at, _)| {
            let released = self.memory.released.get(&name) == Some(&at);
            let refused = self.vnics.refused.get(&name).cloned();
            (name, Held { at, released, refused })
        });
        // Those that are here though the place is another's, or nobody's: etcd may be as it once was.
        let had = |name: &String| self.memory.had.get(name).copied().unwrap_or_default();
        let present = self.vnics.present.iter().map(|name| (name.clone(), Held { at: had(name), ..Held::default() }));
        let mut held: BTreeMap<String, Held> = present.collect();
        for (name, mut own) in own {
            // The later place is the one that it has it by.
            own.at = own.at.max(held.get(&name).map_or(0, |held| held.at));
            held.insert(name, own);
        }
        held
    }

    /// Claims of this host that are not served yet.
    pub(super) fn claimed(&self) -> BTreeMap<String, u64> {
        self.vnics.claimed.clone()
    }

    /// vNICs that others ask for and that nobody uses here are let go. Whether there is something new to say.
    pub(super) fn let_go(&mut self) -> Result<bool> {
        let before = self.vnics.refused.clone();
        let mut has_let_go = false;
        self.vnics.unable.retain(|_, since| since.elapsed() < ABLE_AGAIN);
        let is_unable = |name: &String| self.vnics.unable.contains_key(name);
        let wanted = self.claims.wanted().into_iter().filter(|(name, _)| !self.is_here(name) && !is_unable(name));
        // A drained host would have it for nothing.
        let claimed: BTreeMap<String, u64> = wanted.filter(|_| !self.is_drained()).collect();
        let is_other = claimed != self.vnics.claimed;
        self.vnics.claimed = claimed;
        // An etcd that is another cluster's, or as it once was, takes nothing away.
        self.note_going_back()?;
        if self.standing.is_none() || self.memory.has_gone_back || self.check_identity().is_err() {
            return Ok(is_other);
        }
        let asked = self.asked_of_us();
        for Asked { name, at, place, claims } in &asked {
            let is_known = self.vnics.refused.get(name).is_some_and(|refused| refused.claims == *claims);
            let is_early = self.vnics.looked_at.get(name).is_some_and(|at| at.elapsed() < CLAIM_AGAIN);
            if is_known && is_early {
                continue;
            }
            if self.vnics.present.contains(name) && self.claims.is_awaited(name) {
                // A container that starts here is to have it: whether it gets it is known soon.
                continue;
            }
            self.vnics.looked_at.insert(name.clone(), Instant::now());
            match self.give_up(name, *at, place)? {
                None => {
                    let others: Vec<&str> = claims.keys().map(String::as_str).collect();
                    log(&format!("the vNIC {name} is let go: others ask for it: {}", others.join(", ")));
                    if !self.vnics.present.remove(name) {
                        self.vnics.unable.insert(name.clone(), Instant::now());
                    }
                    let mut memory = self.memory.clone();
                    memory.released.insert(name.clone(), *at);
                    // Before anybody hears of it.
                    self.remember(memory)?;
                    self.vnics.refused.remove(name);
                    has_let_go = true;
                }
                Some(why) => {
                    self.vnics.refused.insert(name.clone(), RefusedClaims { claims: claims.clone(), why });
                }
            }
        }
        let is_asked = |name: &String| asked.iter().any(|one| one.name == *name);
        self.vnics.refused.retain(|name, _| is_asked(name));
        self.vnics.looked_at.retain(|name, _| is_asked(name));
        Ok(has_let_go || is_other || before != self.vnics.refused)
    }

    /// vNICs of this host that others ask for.
    fn asked_of_us(&self) -> Vec<Asked> {
        let claims = ClaimsOf::all(&self.view);
        let places = self.own_places().into_iter().filter(|(name, ..)| claims.has(name));
        let asked = |(name, at, place): (String, u64, Place)| {
            let is_free = place.next.is_none() && self.memory.released.get(&name) != Some(&at);
            let vnic = self.declared_vnic(&name).filter(|_| is_free)?;
            let claims = claims.of(vnic, Some(&self.host)).into_iter();
            let claims: BTreeMap<String, u64> = claims.map(|(number, host)| (host.clone(), number)).collect();
            (!claims.is_empty()).then_some(Asked { name, at, place, claims })
        };
        places.filter_map(asked).collect()
    }

    /// Takes a vNIC from the router if nothing uses it; else why not.
    fn give_up(&self, name: &str, at: u64, place: &Place) -> Result<Option<String>> {
        let is_present = self.vnics.present.contains(name);
        let records = Records::of(&self.run_dir);
        // No container gets it meanwhile.
        let _lock = records.lock()?;
        if let Some(container) = records.user_of(name) {
            return Ok(Some(format!("the container {container} has it there")));
        }
        if place.moved && !self.is_drained() && self.memory.served.get(name) != Some(&at) {
            let why =
                format!("an operator has moved it there for a container to come (freeflow move {name} --to HOST)");
            return Ok(Some(why));
        }
        if !is_present {
            return Ok(None);
        }
        match self.api.delete(&format!("{BASE}/vnics/{}?follow=true&unused=true", encoded(name))) {
            Ok(_) => Ok(None),
            Err(Trouble::Refused(refusal)) if refusal.reason == "NotFound" => Ok(None),
            Err(Trouble::Refused(refusal)) => Ok(Some(refusal.message)),
            Err(other) => Err(other.into()),
        }
    }

    /// Whether this host has the vNIC, and its router too.
    fn is_here(&self, name: &str) -> bool {
        let is_placed = self.view.places().get(name).is_some_and(|(at, place)| {
            place.host == self.host && place.next.is_none() && self.memory.released.get(name) != Some(&at.0)
        });
        is_placed && self.vnics.present.contains(name) && !self.lease.is_over()
    }

    /// Says what the claims of this host's callers come to.
    pub(super) fn answer_claims(&mut self) {
        let present = self.claims.present().into_iter().map(|name| (name, None));
        for (name, number) in self.claims.wanted().into_iter().map(|(name, number)| (name, Some(number))).chain(present)
        {
            let answer = match number {
                Some(number) => self.answer_of(&name, number),
                None if self.is_here(&name) => Answer::Here,
                None => Answer::Never("it is not here".into()),
            };
            if answer == Answer::Here {
                self.announcements.begin(&name);
                let mut memory = self.memory.clone();
                let at = self.view.places().get(&name).map(|(at, _)| at.0).unwrap_or_default();
                memory.served.insert(name.clone(), at);
                if let Err(failure) = self.remember(memory) {
                    self.claims.answer(&name, number.is_none(), &Answer::Later(failure.to_string()));
                    continue;
                }
            }
            self.claims.answer(&name, number.is_none(), &answer);
        }
    }

    fn answer_of(&self, name: &str, number: u64) -> Answer {
        if self.is_here(name) {
            return Answer::Here;
        }
        if let Some((since, why)) = &self.behind {
            let why = format!("etcd does not answer, so it is not to be had from another host: {why}");
            let is_brief = since.elapsed() < ELECTION_TIME;
            return if is_brief { Answer::Later(why) } else { Answer::Refused(why) };
        }
        if let Some(drained) = self.view.drained().get(&self.host) {
            return Answer::Never(why_drained(&self.host, drained));
        }
        if let Some(problem) = self.lease.problem() {
            return Answer::Later(problem.message);
        }
        if self.standing.is_none() {
            return Answer::Later("this host does not follow the cluster just now; see freeflow cluster status".into());
        }
        let Some(vnic) = self.declared_vnic(name) else {
            return Answer::Never("neither this host nor the cluster declares one of this name".into());
        };
        if !vnic.spec.hosts.is_empty() && !vnic.spec.hosts.contains(&self.host) {
            return Answer::Never(format!("its spec.hosts has no {}", self.host));
        }
        let Some((_, place)) = self.view.places().get(name) else {
            return Answer::Later("no controller of the cluster has answered".into());
        };
        if let Some(next) = &place.next {
            return Answer::Later(format!("an operator moves it from {} to {next}", place.host));
        }
        if place.host == self.host {
            let of_it = |problem: &&freeflow_cluster::Problem| problem.name.as_deref() == Some(name);
            let problem = self.said.iter().find(of_it);
            return Answer::Later(problem.map_or("its making takes long".into(), ToString::to_string));
        }
        let holdings = self.view.holdings().get(&place.host);
        let refused = holdings.and_then(|(_, holdings)| holdings.vnics.get(name)?.refused.clone());
        match refused.filter(|refused| refused.claims.get(&self.host) == Some(&number)) {
            Some(refused) => Answer::Refused(format!("it is on the host {}: {}", place.host, refused.why)),
            None => Answer::Later(format!(
                "it is on the host {}, which has not let it go; if that host is down (freeflow cluster status): freeflow \
                 move {name} --to {} --force",
                place.host, self.host
            )),
        }
    }
}
