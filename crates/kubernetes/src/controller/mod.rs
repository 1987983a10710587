//! The controller: what Kubernetes declares becomes FreeFlow's, and what became of it the resources' conditions.
//!
//! It may be killed at any time: the next leader carries out what is left. Several may run; one leads (`leader`). It
//! watches all kinds and carries out differences in rounds (`sync`), of which each begins with all that there is.
//! FreeFlow is one host or a cluster (`target`).
mod conditions;
mod fenced;
mod leader;
mod sync;
mod target;
mod turns;

#[cfg(test)]
mod tests;

use crate::api::{ApiError, Client, Collection, News, Selection, Watcher};
use crate::declared::{DeclaredKind, Resource};
use crate::log;
use crate::termination::termination;
use fenced::Fenced;
use leader::{Candidate, Term};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;
use sync::Sync;
use target::{Cluster, Host, Target};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// News that wait for a round.
const NEWS_COUNT_MAX: usize = 1024;
/// Between two rounds, so that many news are one round.
const REST: Duration = Duration::from_secs(1);
/// News that come together are waited for.
const GATHER: Duration = Duration::from_millis(200);
/// After a round that failed.
const PAUSE_MIN: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The change under way may take so long where the controller is asked to end: a pod has 30 s for all of it.
const LAST_CHANGE_TIME: Duration = Duration::from_secs(15);

/// Where FreeFlow is declared to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Declares {
    /// One host, by the socket of its router's API.
    Host(PathBuf),
    /// All hosts of a cluster, by an operator's file.
    Cluster(PathBuf),
}

/// Parameters of a controller.
#[derive(Clone, Debug)]
pub struct Settings {
    pub declares: Declares,
    /// Of the lease.
    pub namespace: String,
    /// Another one for each process.
    pub identity: String,
}

/// Runs until it is asked to end (SIGTERM, SIGINT): then another one may lead at once.
///
/// # Errors
/// A sentence for people: it leads no more, and whoever started it starts it again.
pub async fn run(client: &Client, settings: &Settings) -> Result<(), String> {
    if settings.namespace.is_empty() {
        return Err("no namespace is known, which the lease needs: give --namespace NAME".into());
    }
    let asked_to_end = termination().map_err(|error| format!("signals: {error}"))?;
    let mut candidate = Candidate::new(client, &settings.namespace, &settings.identity);
    let term = candidate.term();
    let asked = async {
        let _ = asked_to_end.await;
        timeout(LAST_CHANGE_TIME, term.end()).await.is_ok()
    };
    let is_quiet = tokio::select! {
        ended = lead(client, settings, &mut candidate) => return ended,
        is_quiet = asked => is_quiet,
    };
    log::line("ends, as it was asked to");
    // A change that is still under way may come yet: nobody else leads before the lease is over then.
    if is_quiet && let Err(error) = candidate.release().await {
        log::line(&format!("the lease was not given back: {error}"));
    }
    Ok(())
}

async fn lead(client: &Client, settings: &Settings, candidate: &mut Candidate) -> Result<(), String> {
    candidate.lead().await;
    log::line(&format!("{} leads", settings.identity));
    let term = candidate.term();
    let work = async {
        match &settings.declares {
            Declares::Host(socket) => work(client, Host::new(socket), term).await,
            Declares::Cluster(file) => match Cluster::open(file) {
                Ok(cluster) => work(client, cluster, term).await,
                Err(why) => Err(why),
            },
        }
    };
    tokio::select! {
        why = candidate.keep() => Err(why),
        ended = work => ended,
    }
}

type AllNews = mpsc::Receiver<(DeclaredKind, News<Resource>)>;

/// A watch of each kind.
fn watch_all(client: &Client) -> AllNews {
    let (sender, receiver) = mpsc::channel(NEWS_COUNT_MAX);
    for kind in DeclaredKind::ALL {
        let mut watcher = Watcher::<Resource>::new(Collection::all(client, &kind.api()), Selection::default());
        let sender = sender.clone();
        tokio::spawn(async move {
            let mut last = String::new();
            loop {
                match watcher.next().await {
                    Ok(news) => {
                        last.clear();
                        if sender.send((kind, news)).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        let text = explained(kind, &error);
                        if text != last {
                            log::line(&text);
                        }
                        last = text;
                    }
                }
            }
        });
    }
    receiver
}

fn explained(kind: DeclaredKind, error: &ApiError) -> String {
    let hint =
        if error.is_not_found() { "; `freeflow-kubernetes crds | kubectl apply -f -` installs them" } else { "" };
    format!("{}: {error}{hint}", kind.plural())
}

async fn work(client: &Client, target: impl Target, term: Term) -> Result<(), String> {
    let (mut news, mut sync) = (watch_all(client), Sync::new(client.clone(), Fenced { target, term }));
    let mut unknown: BTreeSet<DeclaredKind> = DeclaredKind::ALL.into_iter().collect();
    let (mut due, mut pause, mut last) = (Instant::now(), PAUSE_MIN, String::new());
    loop {
        loop {
            // Without all kinds, what names a missing one would be refused.
            let is_ready = unknown.is_empty();
            tokio::select! {
                one = news.recv() => {
                    let Some((kind, one)) = one else { return Err("the watches have ended".into()) };
                    if matches!(one, News::All(_)) {
                        unknown.remove(&kind);
                    }
                    if sync.take(kind, one) {
                        due = due.min(Instant::now() + GATHER);
                    }
                }
                () = sleep_until(due), if is_ready => break,
            }
        }
        // News that wait already are a part of the round.
        while let Ok((kind, one)) = news.try_recv() {
            sync.take(kind, one);
        }
        match sync.round().await {
            Ok(next) => {
                (pause, due) = (PAUSE_MIN, Instant::now() + next);
                if !last.is_empty() {
                    log::line("FreeFlow answers again");
                    last.clear();
                }
            }
            Err(error) => {
                let text = error.to_string();
                if text != last {
                    log::line(&text);
                }
                last = text;
                due = Instant::now() + pause;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
        sleep(REST).await;
    }
}
