//! Subresources of the Host: what its router, its vNICs, networks and queue pairs, its wire, its
//! connections and its peers do now; the faults of its wire; and the data path of a Network.
//!
//! Those who read everything read these; the admin alone changes something, and each change and each
//! refusal has its line in the audit log.
use super::failure::Failure;
use super::plane::{
    ApiCall, AwaitWorker, ChangeLease, InjectFaults, NoteCluster, PageConnections, PageNetworks, PageQps, PageVnics,
    PageWire, ReadLease, ReadPeers, ReadRouter, ReadWholeLease, ReloadPeers,
};
use super::query::{Named, parameters};
use super::routes::{Answer, Asking, LeaseFile, Server, admitted, body_of, change, held, note_refusal, read_turn};
use crate::base::lease::{Lease, LeaseChange};
use axum::extract::{Extension, RawQuery, Request, State};
use freeflow_orchestrator::objects::{API_VERSION, Cause, Invalid, ObjectKind};
use freeflow_orchestrator::{Command, Writer};
use freeflow_protocol::admin::{DataPath, WireFaults};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};

type Shared = State<Arc<Server>>;

/// Separates the two numbers of a place in the list of identifiers.
const SEPARATOR: char = ':';

/// Names of fields, from `snake_case` to `camelCase`.
fn camel_case(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (camel(&name), camel_case(value))).collect(),
        Value::Array(items) => items.into_iter().map(camel_case).collect(),
        other => other,
    }
}

fn camel(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| {
        let mut letters = word.chars();
        let capital = letters.next().map(|letter| letter.to_ascii_uppercase());
        name + &capital.into_iter().chain(letters).collect::<String>()
    })
}

fn value_of(status: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(status).map(camel_case).map_err(|error| Failure::internal(error.to_string()))
}

/// A caller that may not change or read something gets a refusal, and the audit log has it.
fn check(server: &Server, asking: &Asking, verb: &'static str, path: &str, may: bool, message: &str) -> Answer<()> {
    if may {
        return Ok(());
    }
    note_refusal(&server.audit, asking.caller.who.clone(), verb, path, message);
    Err(Failure::forbidden(message))
}

/// A read of this host. The permit is the request's.
async fn begin_read(
    server: &Server,
    asking: &Asking,
    (name, part): (&str, &str),
) -> Result<OwnedSemaphorePermit, Failure> {
    let message = "it is of all tenants: only an admin or a viewer may read it";
    let path = format!("hosts/{name}/{part}");
    check(server, asking, "get", &path, asking.caller.role.reads_all(), message)?;
    this_host(server, name)?;
    admitted(asking).await
}

/// The same of a change, which is the admin's.
async fn begin_change(
    server: &Server,
    asking: &Asking,
    verb: &'static str,
    (name, part): (&str, &str),
) -> Result<OwnedSemaphorePermit, Failure> {
    let path = format!("hosts/{name}/{part}");
    check(server, asking, verb, &path, asking.caller.role.is_admin, "only an admin may change it")?;
    this_host(server, name)?;
    admitted(asking).await
}

fn this_host(server: &Server, name: &str) -> Result<(), Failure> {
    if name == server.host {
        return Ok(());
    }
    let kind = ObjectKind::Host;
    Err(Failure::not_found(format!("{kind} {name}: there is none")).about(kind.name(), name))
}

/// Asks the control thread, in turn with the reads of others who are not the admin.
async fn ask<C: ApiCall>(server: &Server, asking: &Asking, call: C) -> Result<C::Answer, Failure> {
    let turn = read_turn(server, asking, true).await;
    let answer = server.link.ask(call).await;
    turn.give_back().await;
    answer
}

fn number_after(query: &std::collections::BTreeMap<String, String>) -> Result<Option<u32>, Failure> {
    let given = query.get("continue").filter(|text| !text.is_empty());
    given.map(|text| text.parse().map_err(|_| no_such_place())).transpose()
}

fn no_such_place() -> Failure {
    Failure::bad_request("continue is what an earlier page said")
}

/// Of an answer that is no page, `next` is `None`.
fn document(kind: &str, next: Option<String>, field: &str, status: Value) -> Vec<u8> {
    let mut document = json!({"apiVersion": API_VERSION, "kind": kind, field: status});
    if let Some(next) = next {
        document["metadata"] = json!({"continue": next});
    }
    document.to_string().into_bytes()
}

/// Where the next page begins: after the last of this one, if there are more.
fn next<T>(more: bool, last: Option<T>, place: impl FnOnce(T) -> String) -> Option<String> {
    Some(last.filter(|_| more).map(place).unwrap_or_default())
}

pub async fn router(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "router")).await?;
    parameters(query.as_deref(), &[])?;
    let status = ask(&server, &asking, ReadRouter {}).await?;
    Ok(held(document("RouterStatus", None, "status", value_of(&status)?), permit))
}

/// Where a page of names begins.
fn name_after(query: Option<&str>) -> Result<Option<String>, Failure> {
    Ok(parameters(query, &["continue"])?.remove("continue").filter(|text| !text.is_empty()))
}

pub async fn vnics(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "vnics")).await?;
    let after = name_after(query.as_deref())?;
    let (vnics, next) = ask(&server, &asking, PageVnics { after }).await?;
    Ok(held(document("HostVnicList", Some(next.unwrap_or_default()), "items", value_of(&vnics)?), permit))
}

pub async fn networks(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "networks")).await?;
    let after = name_after(query.as_deref())?;
    let (networks, next) = ask(&server, &asking, PageNetworks { after }).await?;
    Ok(held(document("HostNetworkList", Some(next.unwrap_or_default()), "items", value_of(&networks)?), permit))
}

pub async fn qps(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "qps")).await?;
    let query = parameters(query.as_deref(), &["vnic", "continue"])?;
    let call = PageQps { vnic: query.get("vnic").cloned(), after_qpn: number_after(&query)? };
    let Some((qps, more)) = ask(&server, &asking, call).await? else {
        return Err(Failure::not_found("no such vNIC"));
    };
    let next = next(more, qps.last(), |last| last.qpn.to_string());
    Ok(held(document("QpList", next, "items", value_of(&qps)?), permit))
}

pub async fn wire(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "wire")).await?;
    let after_qpn = number_after(&parameters(query.as_deref(), &["continue"])?)?;
    let (status, more) = ask(&server, &asking, PageWire { after_qpn }).await?;
    let next = next(more, status.qps.last(), |last| last.qpn.to_string());
    Ok(held(document("WireStatus", next, "status", value_of(&status)?), permit))
}

/// As [`next`] writes it.
fn parse_position(text: &str) -> Option<(u64, u32)> {
    let (vnic, handle) = text.split_once(SEPARATOR)?;
    Some((vnic.parse().ok()?, handle.parse().ok()?))
}

pub async fn connections(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "cm")).await?;
    let query = parameters(query.as_deref(), &["continue"])?;
    let given = query.get("continue").filter(|text| !text.is_empty());
    let after = given.map(|text| parse_position(text).ok_or_else(no_such_place)).transpose()?;
    let (status, more) = ask(&server, &asking, PageConnections { after }).await?;
    let place = |(vnic, handle): (u64, u32)| format!("{vnic}{SEPARATOR}{handle}");
    let next = next(more, status.ids.last(), |last| place(last.position));
    Ok(held(document("CmStatus", next, "status", value_of(&status)?), permit))
}

pub async fn peers(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, "peers")).await?;
    parameters(query.as_deref(), &[])?;
    let status = ask(&server, &asking, ReadPeers {}).await?;
    Ok(held(document("PeersStatus", None, "status", value_of(&status)?), permit))
}

/// Answer to a change that makes no object.
fn done(permit: OwnedSemaphorePermit) -> axum::response::Response {
    held(json!({"apiVersion": API_VERSION, "kind": "Status", "status": "Success"}).to_string().into_bytes(), permit)
}

pub async fn reload_peers(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_change(&server, &asking, "reload-peers", (&name, "peers/reload")).await?;
    parameters(query.as_deref(), &[])?;
    server.link.ask(ReloadPeers { who: asking.caller.who.clone() }).await??;
    Ok(done(permit))
}

async fn set_faults(server: &Server, asking: &Asking, faults: Option<WireFaults>) -> Result<(), Failure> {
    Ok(server.link.ask(InjectFaults { who: asking.caller.who.clone(), faults }).await??)
}

/// Of a part of the host: its path.
const LEASE: &str = "lease";

pub async fn lease(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_read(&server, &asking, (&name, LEASE)).await?;
    parameters(query.as_deref(), &[])?;
    // Of one that is not on the disk nobody hears: the next router would not know it.
    let file = server.lease_file.clone().lock_owned().await;
    if file.is_stale {
        let lease = server.link.ask(ReadWholeLease {}).await?;
        store_lease(lease, file).await?;
    }
    lease_status(&server, permit).await
}

/// The answer goes out when the decision is on the disk: a change that asks for a lease, or shortens it, counts for the
/// next router, too. One that extends it may be lost: an earlier end harms nobody else.
pub async fn put_lease(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    let permit = begin_change(&server, &asking, LEASE, (&name, LEASE)).await?;
    let body = body_of(&asking, request).await?;
    parameters(query.as_deref(), &[])?;
    let change: LeaseChange = parse(body)?;
    let mut file = server.lease_file.clone().lock_owned().await;
    // Until it is stored, also where nobody waits for the answer any more.
    let was_stale = std::mem::replace(&mut file.is_stale, true);
    match server.link.ask(ChangeLease { change }).await? {
        Ok(lease) => store_lease(lease, file).await?,
        Err(refusal) => {
            file.is_stale = was_stale;
            return Err(refusal.into());
        }
    }
    lease_status(&server, permit).await
}

async fn store_lease(lease: Option<Lease>, mut file: OwnedMutexGuard<LeaseFile>) -> Result<(), Failure> {
    let store = move || {
        Lease::store(lease.as_ref(), &file.directory)?;
        file.is_stale = false;
        Ok(())
    };
    let stored = tokio::task::spawn_blocking(store).await;
    let stored = stored.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    stored.map_err(|error| Failure::internal(format!("can't keep the lease: {error}")))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SentCluster {
    is_away: bool,
}

/// Of the follower, for the audit log.
pub async fn put_cluster(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    let permit = begin_change(&server, &asking, "cluster", (&name, "cluster")).await?;
    let body = body_of(&asking, request).await?;
    parameters(query.as_deref(), &[])?;
    let SentCluster { is_away } = parse(body)?;
    server.link.ask(NoteCluster { is_away }).await?;
    Ok(done(permit))
}

async fn lease_status(server: &Server, permit: OwnedSemaphorePermit) -> Answer {
    let status = server.link.ask(ReadLease {}).await?;
    Ok(held(document("LeaseStatus", None, "status", value_of(&status)?), permit))
}

/// [`WireFaults`], as they are sent.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct SentFaults {
    seed: u64,
    loss_ppm: u32,
    duplicate_ppm: u32,
    reorder_ppm: u32,
    delay_ppm: u32,
    delay_ns: u64,
    corrupt_ppm: u32,
}

impl From<SentFaults> for WireFaults {
    fn from(sent: SentFaults) -> Self {
        let SentFaults { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm } = sent;
        Self { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SentDataPath {
    data_path: DataPath,
}

fn parse<T: DeserializeOwned>(body: Value) -> Result<T, Failure> {
    serde_json::from_value(body)
        .map_err(|error| Failure::invalid(Invalid { causes: vec![Cause::new("", error.to_string())] }, None))
}

pub async fn put_faults(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    let permit = begin_change(&server, &asking, "wire-faults", (&name, "wire/faults")).await?;
    let body = body_of(&asking, request).await?;
    parameters(query.as_deref(), &[])?;
    set_faults(&server, &asking, Some(parse::<SentFaults>(body)?.into())).await?;
    Ok(done(permit))
}

pub async fn delete_faults(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(name): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = begin_change(&server, &asking, "wire-faults", (&name, "wire/faults")).await?;
    parameters(query.as_deref(), &[])?;
    set_faults(&server, &asking, None).await?;
    Ok(done(permit))
}

/// Answers when the worker has it: QPs at work take the new path from then on. It is stored before that.
pub async fn put_data_path(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(network): Named<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    let permit = admitted(&asking).await?;
    let body = body_of(&asking, request).await?;
    parameters(query.as_deref(), &[])?;
    let SentDataPath { data_path: path } = parse(body)?;
    change(&server, &asking, ("set-data-path", Writer::Hand), Command::SetDataPath { network, path }, (false, false))
        .await?;
    server.link.ask(AwaitWorker {}).await?;
    Ok(done(permit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_the_names_of_the_other_objects() {
        for (snake, expected) in [("qpn", "qpn"), ("sent_messages", "sentMessages"), ("rtt_us", "rttUs")] {
            assert_eq!(camel(snake), expected);
        }
        let value = camel_case(json!({"a_b": [{"c_d": "e_f"}]}));
        assert_eq!(value, json!({"aB": [{"cD": "e_f"}]}));
    }

    #[test]
    fn faults_are_sent_as_they_are_shown() {
        let faults = WireFaults { seed: 1, loss_ppm: 2, delay_ns: 3, ..WireFaults::default() };
        let shown = value_of(&faults).unwrap_or_default();
        assert_eq!(parse::<SentFaults>(shown).map(WireFaults::from).ok(), Some(faults));
        assert!(parse::<SentFaults>(json!({"loss": 1})).is_err());
    }

    #[test]
    fn positions_come_back() {
        assert_eq!(parse_position("7:9"), Some((7, 9)));
        assert!(parse_position("7").is_none() && parse_position("7:x").is_none());
    }
}
