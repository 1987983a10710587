//! The paths, and what is answered on each.
use super::caller::Caller;
use super::failure::Failure;
use super::link::Link;
use super::permission::FOLLOW;
use super::plane::{BeginWatch, ChangeObjects, Done, GetObject, NotDone, Page, PageObjects, ReadLease};
use super::query::{Named, flag, parameters};
use super::users::Place;
use super::watch::{Filter, History, Listed, Reader, WatchBody, added};
use super::{BASE, health, host, json_header, live, metrics, openapi};
use crate::audit::{Audit, Entry, Who};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Extension, RawQuery, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use freeflow_orchestrator::objects::{API_VERSION, AnyObject, Cause, Invalid, ObjectKind, parse_object};
use freeflow_orchestrator::{Command, Reason, Refusal, Revision, Selector, Writer};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, MutexGuard, OwnedSemaphorePermit};
use tokio::time::timeout;

/// Longest body, and objects of one `apply`, of the admin and of others.
const BODY_BYTES_MAX: [usize; 2] = [8 << 20, 1 << 20];
const ITEM_COUNT_MAX: [usize; 2] = [10_000, 1000];
/// How long a body may take to come.
const BODY_TIME_MAX: Duration = Duration::from_secs(10);
/// A change is answered when it is stored: a disk that is slow, or frozen for a while, fails nobody.
const STORED_TIME_MAX: Duration = Duration::from_secs(600);
/// The verb of changes in a manager's place.
const TAKE_OVER: &str = "take-over";
/// Of the body of `apply`: `items`, and what else a list has, which is not looked at.
const LIST_FIELDS: [&str; 4] = ["items", "apiVersion", "kind", "metadata"];
/// Unknown ones that a refusal names.
const CAUSE_COUNT_MAX: usize = 16;
/// A list longer than this is refused: a selector makes it shorter.
const LIST_BYTES_MAX: usize = 128 << 20;

/// State that all requests share.
pub struct Server {
    pub link: Link,
    pub history: Arc<History>,
    pub audit: Audit,
    /// Changes by others than the admin are made one after the other.
    pub lane: Mutex<()>,
    /// And so are their reads that need a look at all vNICs.
    pub reads: Mutex<()>,
    pub probes: health::Probes,
    /// The name of the Host.
    pub host: String,
    /// Written by one request at a time.
    pub lease_file: Arc<Mutex<LeaseFile>>,
}

/// The file of the lease.
#[derive(Default)]
pub struct LeaseFile {
    pub directory: PathBuf,
    /// It may be another lease than the router has.
    pub is_stale: bool,
}

type Shared = State<Arc<Server>>;
pub type Answer<T = Response> = Result<T, Failure>;

/// The caller of a request, and its place.
#[derive(Clone)]
pub struct Asking {
    pub caller: Caller,
    pub place: Arc<Place>,
}

pub fn router(server: Arc<Server>) -> Router {
    let objects = format!("{BASE}/{{plural}}");
    Router::new()
        .route(&objects, get(list))
        .route(&format!("{objects}/{{name}}"), get(get_one).put(put_one).delete(delete_one))
        .merge(subresources())
        .route(&format!("{BASE}/apply"), post(apply))
        .route(&format!("{BASE}/live"), get(live::live))
        .route("/metrics", get(scrape))
        .route("/openapi/v3", get(description))
        .route("/version", get(version))
        .route("/livez", get(health::livez))
        .route("/readyz", get(health::readyz))
        .method_not_allowed_fallback(async || Failure::bad_method())
        .fallback(async || Failure::not_found("there is no such path; /openapi/v3 lists them"))
        .with_state(server)
}

fn subresources() -> Router<Arc<Server>> {
    let of_host = |part: &str| format!("{BASE}/hosts/{{name}}/{part}");
    Router::new()
        .route(&of_host("router"), get(host::router))
        .route(&of_host("vnics"), get(host::vnics))
        .route(&of_host("networks"), get(host::networks))
        .route(&of_host("qps"), get(host::qps))
        .route(&of_host("wire"), get(host::wire))
        .route(&of_host("wire/faults"), put(host::put_faults).delete(host::delete_faults))
        .route(&of_host("cm"), get(host::connections))
        .route(&of_host("peers"), get(host::peers))
        .route(&of_host("peers/reload"), post(host::reload_peers))
        .route(&of_host("cluster"), put(host::put_cluster))
        .route(&of_host("lease"), get(host::lease).put(host::put_lease))
        .route(&format!("{BASE}/networks/{{name}}/dataPath"), put(host::put_data_path))
}

/// Records a request that is refused before it is a command.
pub fn note_refusal(audit: &Audit, who: Who, verb: &'static str, path: &str, reason: &str) {
    audit
        .note_some(who.originator(), |left_out| Entry::refused(who, verb, ("", path), ("Forbidden", reason), left_out));
}

/// For who has no role.
pub fn closed_router(server: Arc<Server>) -> Router {
    Router::new().fallback(refuse).with_state(server)
}

async fn refuse(State(server): Shared, Extension(asking): Extension<Asking>, request: Request) -> Failure {
    let message =
        "only root, and members of the groups freeflow-admin, freeflow-tenant-NAME and freeflow-viewer, may ask that";
    let (who, path) = (asking.caller.who, request.uri().path());
    note_refusal(&server.audit, who, "connect", path, "no role");
    Failure::forbidden(message)
}

async fn description(Extension(asking): Extension<Asking>) -> Answer {
    let permit = admitted(&asking).await?;
    Ok(held(openapi::document().to_string().into_bytes(), permit))
}

async fn version(State(server): Shared, Extension(asking): Extension<Asking>) -> Answer {
    let permit = admitted(&asking).await?;
    let mut version = json!({"version": env!("CARGO_PKG_VERSION"), "apiVersion": API_VERSION});
    // Hosts are not tenants'.
    if asking.caller.role.reads_all() {
        version["host"] = server.host.as_str().into();
    }
    let text = version.to_string();
    Ok(held(text.into_bytes(), permit))
}

async fn scrape(State(server): Shared, Extension(asking): Extension<Asking>) -> Answer {
    if !asking.caller.role.reads_all() {
        let message = "metrics are of all tenants: only an admin or a viewer may read them";
        note_refusal(&server.audit, asking.caller.who, "get", "/metrics", message);
        return Err(Failure::forbidden(message));
    }
    let permit = admitted(&asking).await?;
    let text = metrics::text(&server.link, server.probes.follower().await).await?;
    Ok((metrics::HEADER, Body::new(super::held::Held::new(text.into(), permit))).into_response())
}

/// Waits for this request's turn among its user's.
pub async fn admitted(asking: &Asking) -> Result<OwnedSemaphorePermit, Failure> {
    let user = &asking.place.user;
    let permit = user.requests.clone().acquire_owned().await;
    user.pace().await;
    permit.map_err(|_| Failure::internal("the router ends"))
}

fn kind_of(plural: &str) -> Result<ObjectKind, Failure> {
    let kind = ObjectKind::ALL.iter().find(|kind| kind.plural() == plural);
    kind.copied().ok_or_else(|| Failure::not_found(format!("there are no {plural}; /openapi/v3 lists what there is")))
}

fn absent(kind: ObjectKind, name: &str) -> Failure {
    Failure::not_found(format!("{kind} {name}: there is none")).about(kind.name(), name)
}

/// An answer that keeps its request's permit until it is read, so that unread answers are few.
pub fn held(bytes: Vec<u8>, permit: OwnedSemaphorePermit) -> Response {
    (json_header(), Body::new(super::held::Held::new(bytes.into(), permit))).into_response()
}

async fn list(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named(plural): Named<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = admitted(&asking).await?;
    let kind = kind_of(&plural)?;
    let query = parameters(query.as_deref(), &["labelSelector", "watch", "resourceVersion", "floating"])?;
    let floating = flag(&query, "floating")?;
    let selector =
        Selector::parse(query.get("labelSelector").map_or("", String::as_str)).map_err(Failure::bad_request)?;
    if flag(&query, "watch")? {
        if floating {
            return Err(Failure::bad_request("floating is for lists, not for watches"));
        }
        return begin_watch(&server, &asking, (kind, None), selector, &query).await;
    }
    let selector = Arc::new(selector);
    let mut page = ask_page(&server, &asking, kind, None, (&selector, floating)).await?;
    let mut text = format!(
        "{{\"apiVersion\":\"{API_VERSION}\",\"kind\":\"{kind}List\",\"metadata\":{{\"resourceVersion\":{}}},\"items\":[",
        page.revision
    )
    .into_bytes();
    let mut is_first = true;
    loop {
        for object in &page.objects {
            if !std::mem::replace(&mut is_first, false) {
                text.push(b',');
            }
            serde_json::to_writer(&mut text, object).map_err(|error| Failure::internal(error.to_string()))?;
        }
        if text.len() > LIST_BYTES_MAX {
            return Err(Failure::bad_request("the list is too long; choose with labelSelector"));
        }
        let Some(next) = page.next else { break };
        page = ask_page(&server, &asking, kind, Some(next), (&selector, floating)).await?;
    }
    text.extend_from_slice(b"]}");
    Ok(held(text, permit))
}

async fn ask_page(
    server: &Server,
    asking: &Asking,
    kind: ObjectKind,
    after: Option<String>,
    (selector, floating): (&Arc<Selector>, bool),
) -> Result<Page, Failure> {
    let (role, selector) = (asking.caller.role.clone(), selector.clone());
    look_at_health(server, kind).await;
    let turn = read_turn(server, asking, is_costly(kind)).await;
    let page = server.link.ask(PageObjects { role, kind, after, selector, floating }).await;
    turn.give_back().await;
    page
}

/// The health in a Host's status is of now.
async fn look_at_health(server: &Server, kind: ObjectKind) {
    if kind == ObjectKind::Host {
        server.probes.look(&server.link).await;
    }
}

/// A read's turn, if it needs one.
pub struct ReadTurn<'a>(Option<MutexGuard<'a, ()>>, Instant);

impl ReadTurn<'_> {
    /// Half of the control thread's time stays for others.
    pub async fn give_back(self) {
        if self.0.is_some() {
            tokio::time::sleep(self.1.elapsed()).await;
        }
    }
}

/// Those that need a look at all vNICs.
fn is_costly(kind: ObjectKind) -> bool {
    matches!(kind, ObjectKind::Group | ObjectKind::QosClass | ObjectKind::Quota)
}

pub async fn read_turn<'a>(server: &'a Server, asking: &Asking, is_costly: bool) -> ReadTurn<'a> {
    let waits = is_costly && !asking.caller.role.is_admin;
    let guard = if waits { Some(server.reads.lock().await) } else { None };
    ReadTurn(guard, Instant::now())
}

fn version_of(query: &BTreeMap<String, String>) -> Result<Option<u64>, Failure> {
    let given = query.get("resourceVersion").map(|text| text.parse::<u64>());
    given.transpose().map_err(|_| Failure::bad_request("resourceVersion is a number"))
}

/// All that there is, for a watch to begin with.
async fn listed(
    server: &Server,
    asking: &Asking,
    (kind, name): (ObjectKind, Option<&str>),
    selector: &Selector,
) -> Result<Listed, Failure> {
    let selector = Arc::new(selector.clone());
    let mut listed = Listed { lines: VecDeque::new(), pages: Vec::new() };
    let (mut next, mut bytes) = (None, 0);
    loop {
        let page = ask_page(server, asking, kind, next, (&selector, false)).await?;
        for object in page.objects.iter().filter(|object| name.is_none_or(|name| name == object.name())) {
            let line = added(object);
            bytes += line.len();
            listed.lines.push_back(line);
        }
        if bytes > LIST_BYTES_MAX / 8 {
            return Err(Failure::bad_request("too many objects to begin with; list them, and watch from there"));
        }
        listed.pages.push((page.next.clone(), page.revision));
        next = page.next;
        if next.is_none() {
            return Ok(listed);
        }
    }
}

async fn begin_watch(
    server: &Server,
    asking: &Asking,
    (kind, name): (ObjectKind, Option<String>),
    selector: Selector,
    query: &BTreeMap<String, String>,
) -> Answer {
    let given = version_of(query)?;
    let beginning = server.link.ask(BeginWatch { role: asking.caller.role.clone(), kind }).await?;
    let (after, listed) = match given {
        Some(revision) if revision > beginning.revision.0 => return Err(Failure::expired()),
        Some(revision) if revision > 0 => (Revision(revision), None),
        _ => (beginning.revision, Some(listed(server, asking, (kind, name.as_deref()), &selector).await?)),
    };
    let role = &asking.caller.role;
    let filter = Filter { kind, name, selector, tenants: role.read_tenants(), names: beginning.names };
    let reader = Reader::new(server.history.clone(), filter, after, listed)?;
    Ok((json_header(), Body::new(WatchBody::new(reader))).into_response())
}

async fn get_one(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named((plural, name)): Named<(String, String)>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = admitted(&asking).await?;
    let kind = kind_of(&plural)?;
    let query = parameters(query.as_deref(), &["watch", "resourceVersion"])?;
    if flag(&query, "watch")? {
        return begin_watch(&server, &asking, (kind, Some(name)), Selector::default(), &query).await;
    }
    let call = GetObject { role: asking.caller.role.clone(), kind, name: name.clone() };
    look_at_health(&server, kind).await;
    let turn = read_turn(&server, &asking, is_costly(kind)).await;
    let found = server.link.ask(call).await;
    turn.give_back().await;
    let object = found?.ok_or_else(|| absent(kind, &name))?;
    Ok(held(serde_json::to_vec(&object).map_err(|error| Failure::internal(error.to_string()))?, permit))
}

pub async fn body_of(asking: &Asking, request: Request) -> Result<Value, Failure> {
    let max = BODY_BYTES_MAX[usize::from(!asking.caller.role.is_admin)];
    let bytes = match timeout(BODY_TIME_MAX, to_bytes(request.into_body(), max)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(_)) => {
            return Err(Failure::bad_request(format!("the body did not come, or is longer than {max} bytes")));
        }
        Err(_) => return Err(Failure::bad_request("the body took too long")),
    };
    serde_json::from_slice(&bytes).map_err(|error| Failure::bad_request(format!("the body is no JSON: {error}")))
}

/// Has a command done, with its turn among the others.
pub async fn change(
    server: &Server,
    asking: &Asking,
    (verb, writer): (&'static str, Writer),
    command: Command,
    (dry_run, only_unused): (bool, bool),
) -> Result<Done, Failure> {
    let caller = asking.caller.clone();
    let is_admin = caller.role.is_admin;
    let lane = if is_admin { None } else { Some(server.lane.lock().await) };
    let begin = Instant::now();
    let call = ChangeObjects { caller, verb, writer, command, dry_run, only_unused };
    let done = server.link.ask_within(STORED_TIME_MAX, call).await;
    if lane.is_some() {
        // Half of the control thread's time stays for all that is not done for tenants' admins.
        tokio::time::sleep(begin.elapsed()).await;
    }
    done?.map_err(|not_done| match not_done {
        NotDone::Busy => Failure::busy("too many changes wait for the store"),
        NotDone::Refused(refusal) => refusal.into(),
    })
}

/// The object that was sent: its place in the path says what it doesn't say itself, and nothing else.
fn object_at(kind: ObjectKind, name: &str, mut body: Value) -> Result<AnyObject, Failure> {
    let mismatch = |field: &str, expected: &str| {
        let causes = vec![Cause::new(field, format!("the path says {expected}"))];
        Failure::invalid(Invalid { causes }, None).about(kind.name(), name)
    };
    if let Some(fields) = body.as_object_mut() {
        fields.entry("apiVersion").or_insert_with(|| API_VERSION.into());
        if *fields.entry("kind").or_insert_with(|| kind.name().into()) != kind.name() {
            return Err(mismatch("kind", kind.name()));
        }
        if let Some(metadata) = fields.entry("metadata").or_insert_with(|| json!({})).as_object_mut()
            && *metadata.entry("name").or_insert_with(|| name.into()) != name
        {
            return Err(mismatch("metadata.name", name));
        }
    }
    parse_object(&body).map_err(|invalid| Failure::invalid(invalid, None).about(kind.name(), name))
}

async fn put_one(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named((plural, name)): Named<(String, String)>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    let permit = admitted(&asking).await?;
    // All of it first: many clients listen for an answer only when they have sent everything.
    let body = body_of(&asking, request).await;
    let kind = kind_of(&plural)?;
    let query = parameters(query.as_deref(), &["dryRun", "manager", "takeOver"])?;
    let (dry_run, by) = (flag(&query, "dryRun")?, writer_of(&asking, "put", &query)?);
    let object = object_at(kind, &name, body?)?;
    let done = change(&server, &asking, by, Command::Apply { objects: vec![object] }, (dry_run, false)).await?;
    let outcome = done.outcomes.into_iter().next().ok_or_else(|| Failure::internal("nothing came of it"))?;
    let is_new = outcome.what == freeflow_orchestrator::Change::Created;
    let bytes = serde_json::to_vec(&outcome.object).map_err(|error| Failure::internal(error.to_string()))?;
    let code = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((code, held(bytes, permit)).into_response())
}

fn results(done: &Done) -> Value {
    let item = |outcome: &freeflow_orchestrator::Outcome| json!({"kind": outcome.kind.name(), "name": outcome.name, "result": outcome.what, "object": outcome.object});
    let items: Vec<Value> = done.outcomes.iter().map(item).collect();
    json!({"apiVersion": API_VERSION, "metadata": {"resourceVersion": done.revision}, "items": items})
}

async fn delete_one(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    Named((plural, name)): Named<(String, String)>,
    RawQuery(query): RawQuery,
) -> Answer {
    let permit = admitted(&asking).await?;
    let kind = kind_of(&plural)?;
    let query =
        parameters(query.as_deref(), &["dryRun", "follow", "manager", "resourceVersion", "takeOver", "unused"])?;
    let only_unused = flag(&query, "unused")?;
    let (dry_run, version) = (flag(&query, "dryRun")?, version_of(&query)?);
    let by = writer_of(&asking, "delete", &query)?;
    let done = change(&server, &asking, by, Command::Delete { kind, name, version }, (dry_run, only_unused)).await;
    // A caller of a dry run may mean to delete those first.
    let done = done.map_err(|failure| if dry_run { failure } else { failure.without_users() })?;
    Ok(held(results(&done).to_string().into_bytes(), permit))
}

/// The verb for the audit log, and the writer whom a request names: a cluster's follower, a manager, an operator in a
/// manager's place. All of them are admins.
fn writer_of(
    asking: &Asking,
    verb: &'static str,
    query: &BTreeMap<String, String>,
) -> Result<(&'static str, Writer), Failure> {
    let (follow, take_over) = (flag(query, "follow")?, flag(query, "takeOver")?);
    let manager = query.get("manager");
    if usize::from(follow) + usize::from(take_over) + usize::from(manager.is_some()) > 1 {
        return Err(Failure::bad_request("follow, manager and takeOver do not go together"));
    }
    if (take_over || manager.is_some()) && !asking.caller.role.is_admin {
        return Err(Failure::forbidden("only an admin may be a manager, or take objects over from one"));
    }
    Ok(match manager {
        _ if follow && !asking.caller.role.is_admin => {
            return Err(Failure::forbidden("only an admin may change what a cluster has declared"));
        }
        _ if follow => (FOLLOW, Writer::Copy),
        _ if take_over => (TAKE_OVER, Writer::TakeOver),
        Some(name) => (verb, Writer::Manager(name.clone())),
        None => (verb, Writer::Hand),
    })
}

/// A list has no other fields: a `dryRun` that is put here must not change anything.
fn check_list(body: &Value) -> Result<(), Failure> {
    let unknown = body
        .as_object()
        .into_iter()
        .flat_map(|fields| fields.keys())
        .filter(|key| !LIST_FIELDS.contains(&key.as_str()));
    let message =
        |key: &String| format!("unknown field `{key}`, expected {}; dryRun is a parameter", LIST_FIELDS.join(", "));
    let causes: Vec<Cause> = unknown.take(CAUSE_COUNT_MAX).map(|key| Cause::new(key, message(key))).collect();
    if causes.is_empty() { Ok(()) } else { Err(Failure::invalid(Invalid { causes }, None)) }
}

/// A follower says which lease it knows this router to have. One that was started without the files of the router
/// before it has none, and would make vNICs that never end.
async fn check_lease(server: &Server, query: &BTreeMap<String, String>) -> Result<(), Failure> {
    let Some(given) = query.get("lease") else { return Ok(()) };
    let known = match given.as_str() {
        "none" => None,
        text => Some(text.parse::<u64>().map_err(|_| Failure::bad_request("lease is a number of seconds, or none"))?),
    };
    match server.link.ask(ReadLease {}).await?.after_s {
        there if there == known => Ok(()),
        _ => Err(Refusal::new(Reason::Conflict, "the router has another lease than the follower knows of").into()),
    }
}

async fn apply(
    State(server): Shared,
    Extension(asking): Extension<Asking>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    let permit = admitted(&asking).await?;
    let body = body_of(&asking, request).await;
    let query = parameters(query.as_deref(), &["dryRun", "follow", "lease", "manager", "takeOver"])?;
    let (dry_run, by) = (flag(&query, "dryRun")?, writer_of(&asking, "apply", &query)?);
    let body = body?;
    check_lease(&server, &query).await?;
    let items = body.get("items").and_then(Value::as_array);
    let items = items.ok_or_else(|| Failure::bad_request("the body is {\"items\": [objects]}"))?;
    check_list(&body)?;
    let max = ITEM_COUNT_MAX[usize::from(!asking.caller.role.is_admin)];
    if items.len() > max {
        return Err(Failure::bad_request(format!("{} objects; {max} may be applied at once", items.len())));
    }
    let mut objects = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        objects.push(parse_object(item).map_err(|invalid| {
            let failure = Failure::invalid(invalid, Some(index));
            match (item["kind"].as_str(), item["metadata"]["name"].as_str()) {
                (Some(kind), Some(name)) => failure.about(kind, name),
                _ => failure,
            }
        })?);
    }
    drop(body);
    let command = if by.0 == FOLLOW { Command::ApplyForCluster { objects } } else { Command::Apply { objects } };
    let done = change(&server, &asking, by, command, (dry_run, false)).await?;
    Ok(held(results(&done).to_string().into_bytes(), permit))
}
