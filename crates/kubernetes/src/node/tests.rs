//! The agent against an API server, a router and a kubelet of this process.
use super::claim::DRIVER;
use super::driver::TURN_COUNT;
use super::grpc::{self, Boxed, HttpRequest, HttpResponse, Methods, unary, unknown};
use super::messages::{
    AllocateRequest, AllocateResponse, Claim, ClaimsRequest, ContainerAllocateRequest, Empty, ListAndWatchResponse,
    PluginInfo, PrepareResponse, Prepared, RegisterRequest, UnprepareResponse,
};
use super::{Options, start};
use crate::api::test_server::{Seen, TestServer, at_socket};
use clap::Parser;
use freeflow_hostnet::run_dir::RunDir;
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic_prost::ProstCodec;

const UID: &str = "3f0e8a52-6c0f-4d0c-9c52-1f2d7ee3f7a1";
const DRA: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
const DRA_UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";
const DRA_OLD: &str = "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources";
/// An object by which the server knows no path of what it does not have.
const NOWHERE: &str = "nowhere";
/// Options of an agent whose claims need no Network.
const SHARED: [&str; 3] = ["--no-device-plugin", "--shared-network", "default"];
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

/// Objects of the API server by their paths.
type Objects = Arc<Mutex<BTreeMap<String, Value>>>;

/// An agent and all that it speaks to; ends with the test.
struct Node {
    directory: PathBuf,
    objects: Objects,
    options: Options,
    server: TestServer,
    parts: JoinSet<Infallible>,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn answer(objects: &Objects, seen: &Seen) -> (u16, String) {
    let path = seen.path.split('?').next().unwrap();
    let objects = objects.lock().unwrap();
    match (seen.method.as_str(), objects.get(path)) {
        ("GET", Some(object)) => (200, object.to_string()),
        ("GET", None) if path.ends_with("/resourceslices") => match seen.path.contains("watch=true") {
            true => (200, String::new()),
            false => (200, json!({"metadata": {"resourceVersion": "1"}, "items": []}).to_string()),
        },
        ("PATCH", _) => (200, seen.body.clone()),
        // As of a server without the kind, or of a proxy whose server is away.
        _ if objects.contains_key(NOWHERE) => (404, "404 page not found\n".into()),
        _ => (404, json!({"code": 404, "reason": "NotFound", "message": format!("{path} is not there")}).to_string()),
    }
}

/// A router with these networks.
fn router(run_dir: &Path, networks: &'static [&'static str]) {
    at_socket(&run_dir.join("api.sock"), move |seen: &Seen| match seen.path.rsplit_once('/') {
        Some((_, "version")) => (200, "{}".into()),
        Some((base, name)) if base.ends_with("networks") && networks.contains(&name) => (200, "{}".into()),
        Some((base, "database")) if base.ends_with("vnics") => (200, "{}".into()),
        _ => (404, json!({"code": 404, "message": "no"}).to_string()),
    });
}

impl Node {
    /// `name` is the test's: tests run side by side.
    async fn new(name: &str, more: &[&str]) -> Self {
        let directory = std::env::temp_dir().join(format!("ffk-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        for part in ["run", "kubelet/device-plugins"] {
            fs::create_dir_all(directory.join(part)).unwrap();
        }
        let path = |part: &str| directory.join(part).display().to_string();
        let line = [
            "node",
            "--node-name",
            "n1",
            "--run-dir",
            &path("run"),
            "--cdi-dir",
            &path("cdi"),
            "--kubelet-dir",
            &path("kubelet"),
            "--vnics",
            "4",
        ];
        let options = Line::parse_from(line.iter().chain(more)).options;
        let objects: Objects = Arc::default();
        let kept = objects.clone();
        let server = TestServer::start(move |seen: &Seen| answer(&kept, seen)).await;
        let mut node = Self { directory, objects, options, server, parts: JoinSet::new() };
        node.put("/apis/resource.k8s.io", json!({"versions": [{"version": "v1"}]}));
        node.put("/api/v1/nodes/n1", json!({"metadata": {"name": "n1", "uid": "N"}}));
        node.restart().await;
        node
    }

    async fn restart(&mut self) {
        self.parts.shutdown().await;
        let run_dir = RunDir::new(&self.options.run_dir).unwrap();
        self.parts = start(&self.options, &run_dir, self.server.client());
    }

    fn put(&self, path: &str, object: Value) {
        self.objects.lock().unwrap().insert(path.into(), object);
    }

    /// A claim `c` of the namespace `team-a` that was given these devices.
    fn claim(&self, results: &Value, config: &Value) {
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "P", "controller": true});
        let object = json!({
            "metadata": {"name": "c", "namespace": "team-a", "uid": UID, "ownerReferences": [owner]},
            "status": {"allocation": {"devices": {"results": results, "config": config}}},
        });
        self.put("/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c", object);
    }

    async fn call<Q, A>(&self, path: &'static str, message: Q) -> A
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let socket = self.options.dra_socket();
        until(|| socket.exists()).await;
        grpc::call(&socket, path, message).await.unwrap()
    }

    async fn prepare(&self) -> Prepared {
        let mut response: PrepareResponse = self.call(DRA, request(UID)).await;
        response.claims.remove(UID).unwrap()
    }

    fn cdi(&self) -> Option<Value> {
        let path = self.options.cdi_dir.join(format!("freeflow-claim-{UID}.json"));
        Some(serde_json::from_slice(&fs::read(path).ok()?).unwrap())
    }

    async fn refused(&self, reason: &str) {
        let prepared = self.prepare().await;
        assert!(prepared.error.contains(reason) && prepared.devices.is_empty(), "{prepared:?} lacks {reason}");
        assert!(self.cdi().is_none(), "{reason}");
    }
}

fn request(uid: &str) -> ClaimsRequest {
    ClaimsRequest { claims: vec![Claim { namespace: "team-a".into(), uid: uid.into(), name: "c".into() }] }
}

async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, wait).await.expect("it happens");
}

fn device(name: &str, request: &str) -> Value {
    json!({"request": request, "driver": DRIVER, "pool": "n1", "device": name})
}

fn config(source: &str, mut parameters: Value) -> Value {
    parameters["apiVersion"] = json!("freeflow.io/v1alpha1");
    parameters["kind"] = json!("VnicParameters");
    json!({"source": source, "requests": [], "opaque": {"driver": DRIVER, "parameters": parameters}})
}

fn hook_words(cdi: &Value, device: usize) -> Vec<String> {
    let words = cdi["devices"][device]["containerEdits"]["hooks"][0]["args"].as_array().unwrap();
    words.iter().map(|word| word.as_str().unwrap().to_string()).collect()
}

#[tokio::test]
async fn a_claim_is_prepared_and_taken_back() {
    let node = Node::new("claim", &SHARED).await;
    router(&node.options.run_dir, &["default", "red"]);
    let other = json!({"request": "gpu", "driver": "gpu.example.com", "pool": "x", "device": "y"});
    node.claim(
        &json!([device("vnic-2", "a"), other, device("vnic-3", "b/fast")]),
        &json!([
            config("FromClass", json!({"labels": {"zone": "1"}, "tenantLabels": ["tier", "mine"]})),
            config("FromClaim", json!({"labels": {"mine": "x"}}))
        ]),
    );
    let labels = json!({"tier": "web", "secret": "no", "mine": "pod's"});
    node.put("/api/v1/namespaces/team-a/pods/web", json!({"metadata": {"name": "web", "uid": "P", "labels": labels}}));
    let prepared = node.prepare().await;
    assert_eq!(prepared.error, "");
    let ids: Vec<_> =
        prepared.devices.iter().map(|one| (one.request_names[0].as_str(), one.cdi_device_ids[0].clone())).collect();
    assert_eq!(
        ids,
        [("a", format!("freeflow.io/claim={UID}-vnic-2")), ("b", format!("freeflow.io/claim={UID}-vnic-3"))]
    );
    let cdi = node.cdi().unwrap();
    let words = hook_words(&cdi, 0);
    assert_eq!(
        words[3..],
        ["hook", "--network", "default", "--label=mine=x", "--label=tier=web", "--label=zone=1", "createRuntime"]
    );
    assert_eq!(cdi["devices"][1]["name"], format!("{UID}-vnic-3"));
    // The same once more, and by an older kubelet.
    assert_eq!(node.prepare().await, prepared);
    let older: PrepareResponse = node.call(DRA_OLD, request(UID)).await;
    assert_eq!(older.claims[UID], prepared);
    for _ in 0..2 {
        let response: UnprepareResponse = node.call(DRA_UNPREPARE, request(UID)).await;
        assert_eq!(response.claims[UID].error, "");
        assert!(node.cdi().is_none());
    }
}

#[tokio::test]
async fn a_class_binds_the_network_and_its_vnic() {
    let node = Node::new("class", &["--no-device-plugin"]).await;
    router(&node.options.run_dir, &["default", "red"]);
    let class =
        |parameters: Value| node.claim(&json!([device("vnic-0", "a")]), &json!([config("FromClass", parameters)]));
    class(json!({"network": "red"}));
    assert_eq!(node.prepare().await.error, "");
    assert_eq!(hook_words(&node.cdi().unwrap(), 0)[4..6], ["--network", "red"]);
    // A claim that was deallocated and allocated once more has other parameters.
    class(json!({"vnic": "database"}));
    assert_eq!(node.prepare().await.error, "");
    assert_eq!(hook_words(&node.cdi().unwrap(), 0)[4..6], ["--vnic", "database"]);
}

#[tokio::test]
async fn what_a_tenant_may_not_is_refused_with_a_reason() {
    let node = Node::new("refused", &SHARED).await;
    let one = json!([device("vnic-0", "a")]);
    let claim = |parameters: Value| node.claim(&one, &json!([config("FromClaim", parameters)]));
    node.refused("is gone").await;
    node.claim(&one, &json!([]));
    node.refused("router on this node is not up").await;
    router(&node.options.run_dir, &["default", "red"]);
    for (parameters, reason) in [
        (json!({"network": "red"}), "the namespace team-a has no network red"),
        (json!({"vnic": "database"}), "the namespace team-a has no declared vNIC database"),
        (json!({"network": "../red"}), "is no name"),
        (json!({"labels": {"tier": "web"}}), "does not let a claim set the label tier"),
        (json!({"labels": {"engine": "oci"}}), "FreeFlow itself uses"),
        (json!({"namespaces": ["team-a"]}), "a device class's alone"),
    ] {
        claim(parameters);
        node.refused(reason).await;
    }
    for (results, reason) in [
        (json!([]), "no device of freeflow.io"),
        (json!([{"request": "a", "driver": DRIVER, "pool": "n2", "device": "vnic-0"}]), "no device of the node"),
        (json!([device("../../x", "a")]), "no device of the node"),
        (
            json!([{"request": "a", "driver": DRIVER, "pool": "n1", "device": "vnic-0", "adminAccess": true}]),
            "adminAccess",
        ),
    ] {
        node.claim(&results, &json!([]));
        node.refused(reason).await;
    }
    node.claim(&one, &json!([config("FromClass", json!({"network": "absent"}))]));
    node.refused("has no network absent").await;
    node.claim(&one, &json!([]));
    let other: PrepareResponse = node.call(DRA, request("another-uid")).await;
    assert!(other.claims["another-uid"].error.contains("is gone"));
    let bad: PrepareResponse = node.call(DRA, request("../../etc/x")).await;
    assert!(bad.claims["../../etc/x"].error.contains("no uid"));
    assert!(fs::read_dir(&node.options.cdi_dir).map_or(true, |mut all| all.next().is_none()));
}

/// By the namespace's own network, one of the cluster that allows it, and a declared vNIC.
#[tokio::test]
async fn a_namespace_uses_its_own_networks_and_those_that_allow_it() {
    let node = Node::new("networks", &SHARED).await;
    router(&node.options.run_dir, &["default", "k8s.team-a.red", "k8s._.shared", "k8s._.other", "k8s.team-b.blue"]);
    let base = "/apis/freeflow.io/v1alpha1";
    let put = |path: &str, name: &str, spec: Value| {
        node.put(&format!("{base}/{path}/{name}"), json!({"metadata": {"name": name}, "spec": spec}));
    };
    put("namespaces/team-a/networks", "red", json!({"cidrs": ["10.1.0.0/24"], "podLabels": ["tier"]}));
    put("namespaces/team-b/networks", "blue", json!({"cidrs": ["10.2.0.0/24"]}));
    put("clusternetworks", "shared", json!({"cidrs": ["10.3.0.0/24"], "allowedNamespaces": ["team-a"]}));
    put("clusternetworks", "other", json!({"cidrs": ["10.4.0.0/24"], "allowedNamespaces": ["team-b"]}));
    // One of the whole cluster never stands in front of the namespace's own.
    put("clusternetworks", "red", json!({"cidrs": ["10.5.0.0/24"], "allowedNamespaces": ["*"]}));
    let one = json!([device("vnic-0", "a")]);
    let claim = |parameters: Value| node.claim(&one, &json!([config("FromClaim", parameters)]));
    for name in ["blue", "k8s.team-b.blue", "k8s.team-a.red", "other", "k8s._.shared", "absent"] {
        claim(json!({"network": name}));
        node.refused(&format!("the namespace team-a has no network {name}")).await;
    }
    claim(json!({"network": "shared", "labels": {"tier": "web"}}));
    node.refused("does not let a claim set the label tier").await;
    for (parameters, words) in [
        (json!({"network": "red", "labels": {"tier": "web"}}), ["--network", "k8s.team-a.red", "--label=tier=web"]),
        (json!({"network": "shared"}), ["--network", "k8s._.shared", "createRuntime"]),
        (json!({}), ["--network", "default", "createRuntime"]),
    ] {
        claim(parameters);
        // Of the pod's labels the network allows one, which the claim has, too.
        node.put(
            "/api/v1/namespaces/team-a/pods/web",
            json!({"metadata": {"name": "web", "uid": "P", "labels": {"a": "b"}}}),
        );
        assert_eq!(node.prepare().await.error, "");
        assert_eq!(hook_words(&node.cdi().unwrap(), 0)[4..7], words);
    }
}

#[tokio::test]
async fn devices_with_the_same_parameters_are_looked_up_once() {
    let node = Node::new("once", &SHARED).await;
    router(&node.options.run_dir, &["default", "k8s.team-a.red"]);
    let red = "/apis/freeflow.io/v1alpha1/namespaces/team-a/networks/red";
    node.put(red, json!({"metadata": {"name": "red"}, "spec": {"cidrs": ["10.1.0.0/24"]}}));
    let mut some = config("FromClaim", json!({"network": "red"}));
    some["requests"] = json!(["a"]);
    let devices = json!([device("vnic-0", "a"), device("vnic-1", "a"), device("vnic-2", "b"), device("vnic-3", "a")]);
    node.claim(&devices, &json!([some]));
    assert_eq!(node.prepare().await.error, "");
    let cdi = node.cdi().unwrap();
    let networks: Vec<_> = (0..4).map(|number| hook_words(&cdi, number)[5].clone()).collect();
    assert_eq!(networks, ["k8s.team-a.red", "k8s.team-a.red", "default", "k8s.team-a.red"]);
    assert_eq!(node.server.seen().iter().filter(|seen| seen.path == red).count(), 2);
}

#[tokio::test]
async fn claims_outlive_the_agent_and_go_when_they_are_gone() {
    let mut node = Node::new("sweep", &SHARED).await;
    router(&node.options.run_dir, &["default"]);
    node.claim(&json!([device("vnic-0", "a")]), &json!([]));
    assert_eq!(node.prepare().await.error, "");
    node.restart().await;
    assert_eq!(node.prepare().await.error, "");
    assert!(node.cdi().is_some());
    node.objects.lock().unwrap().remove("/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c");
    node.restart().await;
    until(|| node.cdi().is_none()).await;
}

/// A 404 that is not the API server's word on the object says nothing about it: claims in use keep their devices, and
/// nobody gets a network that is shared in place of his own.
#[tokio::test]
async fn a_server_that_knows_no_path_takes_nothing_away() {
    let mut node = Node::new("nowhere", &SHARED).await;
    router(&node.options.run_dir, &["default"]);
    node.claim(&json!([device("vnic-0", "a")]), &json!([]));
    assert_eq!(node.prepare().await.error, "");
    node.put(NOWHERE, json!({}));
    let prepared = node.prepare().await;
    assert!(prepared.error.contains("not known which networks"), "{prepared:?}");
    let claim = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c";
    node.objects.lock().unwrap().remove(claim);
    let asked = |server: &TestServer| server.seen().iter().filter(|seen| seen.path == claim).count();
    let before = asked(&node.server);
    node.restart().await;
    until(|| asked(&node.server) > before).await;
    // The parts of the agent take turns: this answer comes after the sweep's.
    let prepared = node.prepare().await;
    assert!(prepared.error.contains("can't be read") && node.cdi().is_some(), "{prepared:?}");
    node.objects.lock().unwrap().remove(NOWHERE);
    node.restart().await;
    until(|| node.cdi().is_none()).await;
}

#[tokio::test]
async fn namespaces_share_a_network_only_where_the_administrator_says_so() {
    let node = Node::new("apart", &[]).await;
    assert!(node.options.shared().is_empty(), "there is a device plugin");
    router(&node.options.run_dir, &["default", "k8s.team-a.default"]);
    let one = json!([device("vnic-0", "a")]);
    node.claim(&one, &json!([]));
    node.refused("the namespace team-a has no network default").await;
    node.refused("the claim names none").await;
    node.claim(&one, &json!([config("FromClaim", json!({"network": "default"}))]));
    node.refused("the namespace team-a has no network default").await;
    let own = "/apis/freeflow.io/v1alpha1/namespaces/team-a/networks/default";
    node.put(own, json!({"metadata": {"name": "default"}, "spec": {"cidrs": ["10.1.0.0/24"]}}));
    assert_eq!(node.prepare().await.error, "");
    assert_eq!(hook_words(&node.cdi().unwrap(), 0)[5], "k8s.team-a.default");
}

/// Of more claims the agent has at hand what a few take of its memory.
#[tokio::test]
async fn many_claims_wait_for_their_turns() {
    let node = Node::new("turns", &SHARED).await;
    node.claim(&json!([device("vnic-0", "a")]), &json!([]));
    // A router that answers nobody until it is let.
    let (let_go, gate) = watch::channel(false);
    let listener = UnixListener::bind(node.options.run_dir.join("api.sock")).unwrap();
    let held = Arc::new(AtomicUsize::new(0));
    let counted = held.clone();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let (mut gate, counted) = (gate.clone(), counted.clone());
            tokio::spawn(async move {
                let mut request = vec![0; 4096];
                while connection.read(&mut request).await.is_ok_and(|count| count > 0) {
                    counted.fetch_add(1, Ordering::Relaxed);
                    let _ = gate.wait_for(|is_open| *is_open).await;
                    let _ = connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
                }
            });
        }
    });
    let asked = |server: &TestServer| server.seen().iter().filter(|seen| seen.path.contains("resourceclaims")).count();
    let all = async {
        let mut calls = JoinSet::new();
        for _ in 0..5 * TURN_COUNT {
            let socket = node.options.dra_socket();
            until(|| socket.exists()).await;
            calls.spawn(async move { grpc::call::<_, PrepareResponse>(&socket, DRA, request(UID)).await });
        }
        calls.join_all().await
    };
    let watched = async {
        until(|| held.load(Ordering::Relaxed) == TURN_COUNT).await;
        assert_eq!(asked(&node.server), TURN_COUNT);
        let_go.send_replace(true);
    };
    let (answers, ()) = tokio::join!(all, watched);
    assert_eq!(answers.len(), 5 * TURN_COUNT);
    assert!(answers.into_iter().all(|answer| answer.unwrap().claims[UID].error.is_empty()));
}

#[tokio::test]
async fn the_agent_follows_the_servers_version() {
    let node = Node::new("version", &SHARED).await;
    router(&node.options.run_dir, &["default"]);
    let published = |version: &str| {
        let path = format!("/apis/resource.k8s.io/{version}/resourceslices/n1");
        node.server.seen().iter().any(|seen| seen.method == "PATCH" && seen.path.starts_with(&path))
    };
    until(|| published("v1")).await;
    node.put("/apis/resource.k8s.io", json!({"versions": [{"version": "v1beta1"}]}));
    until(|| published("v1beta1")).await;
    node.claim(&json!([device("vnic-0", "a")]), &json!([]));
    let claim = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c";
    let moved = node.objects.lock().unwrap().remove(claim).unwrap();
    node.put(&claim.replace("/v1/", "/v1beta1/"), moved);
    assert_eq!(node.prepare().await.error, "");
}

/// GetInfo as the kubelet's client sends it: the socket's path is the authority.
#[tokio::test]
async fn the_kubelet_finds_the_driver_and_the_slices_are_there() {
    let node = Node::new("found", &["--no-device-plugin"]).await;
    let socket = node.options.registration_socket();
    until(|| socket.exists()).await;
    // Somebody clears the directory.
    fs::remove_file(&socket).unwrap();
    until(|| socket.exists()).await;
    let authority = socket.display().to_string();
    let path = "/pluginregistration.Registration/GetInfo";
    let mut head = vec![0x83, 0x86, 0x44, u8::try_from(path.len()).unwrap()];
    head.extend_from_slice(path.as_bytes());
    head.extend_from_slice(&[0x41, u8::try_from(authority.len()).unwrap()]);
    head.extend_from_slice(authority.as_bytes());
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        [&[0, 0, u8::try_from(payload.len()).unwrap(), kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let sent = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &head),
        frame(0, 1, 1, &[0; 5]),
    ];
    let mut connection = UnixStream::connect(&socket).await.unwrap();
    connection.write_all(&sent.concat()).await.unwrap();
    connection.shutdown().await.unwrap();
    let mut received = Vec::new();
    connection.read_to_end(&mut received).await.unwrap();
    // Settings, their acknowledgement, the head, then the message.
    let mut at = 0;
    let payload = loop {
        let length = usize::from(received[at + 1]) << 8 | usize::from(received[at + 2]);
        let payload = &received[at + 9..at + 9 + length];
        if received[at + 3] == 0 {
            break payload;
        }
        at += 9 + length;
    };
    let info = PluginInfo::decode(&payload[5..]).unwrap();
    assert_eq!((info.kind.as_str(), info.name.as_str()), ("DRAPlugin", "freeflow.io"));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    assert_eq!(info.endpoint, node.options.dra_socket().display().to_string());
    let is_published =
        || node.server.seen().iter().any(|seen| seen.method == "PATCH" && seen.path.contains("n1-freeflow.io-0?"));
    until(is_published).await;
}

/// The kubelet's side of device plugins.
struct Kubelet(Mutex<Vec<RegisterRequest>>);

impl Methods for Kubelet {
    fn call(self: Arc<Self>, path: String, request: HttpRequest) -> Boxed<HttpResponse> {
        Box::pin(async move {
            match path.as_str() {
                "/v1beta1.Registration/Register" => {
                    unary(request, |asked: RegisterRequest| {
                        self.0.lock().unwrap().push(asked);
                        async { Ok(Empty {}) }
                    })
                    .await
                }
                _ => unknown(&path),
            }
        })
    }
}

async fn listed(socket: &Path, wanted: &str) -> usize {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    let mut grpc = tonic::client::Grpc::new(endpoint.connect().await.unwrap());
    grpc.ready().await.unwrap();
    let path = tonic::codegen::http::uri::PathAndQuery::from_static("/v1beta1.DevicePlugin/ListAndWatch");
    let codec = ProstCodec::<Empty, ListAndWatchResponse>::default();
    let stream = grpc.server_streaming(tonic::Request::new(Empty {}), path, codec).await.unwrap();
    let mut stream = stream.into_inner();
    let find = async {
        loop {
            let list = stream.message().await.unwrap().expect("a stream that goes on");
            if list.devices.iter().all(|device| device.health == wanted) {
                return list.devices.len();
            }
        }
    };
    timeout(PATIENCE, find).await.expect("their health changes")
}

#[tokio::test]
async fn device_plugins_register_with_each_kubelet() {
    let networks = ["--no-dra", "--shared-network", "default", "--shared-network", "red", "--cdi-annotations"];
    let node = Node::new("plugin", &networks).await;
    let directory = node.options.kubelet_dir.join("device-plugins");
    let (own, socket) = (directory.join("kubelet.sock"), directory.join("freeflow.io-red.sock"));
    let allocate = |count: usize| AllocateRequest {
        container_requests: vec![ContainerAllocateRequest { device_ids: vec!["vnic-1".into(); count] }],
    };
    for round in 0..2 {
        // As a kubelet that starts: all sockets are deleted.
        for entry in fs::read_dir(&directory).unwrap() {
            let _ = fs::remove_file(entry.unwrap().path());
        }
        let kubelet = Arc::new(Kubelet(Mutex::default()));
        let served = tokio::spawn(grpc::serve(UnixListener::bind(&own).unwrap(), kubelet.clone()));
        until(|| kubelet.0.lock().unwrap().len() == 2).await;
        let mut names: Vec<_> = kubelet.0.lock().unwrap().iter().map(|one| one.resource_name.clone()).collect();
        names.sort();
        assert_eq!(names, ["freeflow.io/net-red", "freeflow.io/vnic"]);
        if round == 0 {
            assert_eq!(listed(&socket, "Unhealthy").await, 4);
            let refused =
                grpc::call::<_, AllocateResponse>(&socket, "/v1beta1.DevicePlugin/Allocate", allocate(1)).await;
            assert!(refused.unwrap_err().message().contains("router on this node is not up"));
            router(&node.options.run_dir, &["default", "red"]);
        }
        assert_eq!(listed(&socket, "Healthy").await, 4);
        served.abort();
    }
    let call = |count| grpc::call::<_, AllocateResponse>(&socket, "/v1beta1.DevicePlugin/Allocate", allocate(count));
    let response = call(1).await.unwrap();
    let container = &response.container_responses[0];
    assert_eq!(container.cdi_devices[0].name, "freeflow.io/net=red");
    assert_eq!(container.annotations["cdi.k8s.io/freeflow_red_0"], "freeflow.io/net=red");
    assert!(call(2).await.unwrap_err().message().contains("can have one"));
}

#[test]
fn options_that_make_no_sense_are_refused() {
    for (line, is_good) in [
        (&["--shared-network", "red"][..], true),
        (&["--shared-network", "-x"], false),
        (&["--vnics", "0"], false),
        (&["--vnics", "5000"], false),
        (&["--no-dra", "--no-device-plugin"], false),
        // There would be nothing to do.
        (&["--no-dra"], false),
        (&["--no-dra", "--shared-network", "red"], true),
    ] {
        let all = ["node", "--node-name", "n1"].iter().chain(line);
        assert_eq!(Line::try_parse_from(all).is_ok(), is_good, "{line:?}");
    }
    let options = Line::parse_from(["node", "--node-name", "n1", "--shared-network", "x_"]).options;
    assert!(options.check().unwrap_err().to_string().contains("name of a resource"));
    let options = Line::parse_from(["node", "--node-name", "n1", "--cdi-dir", "cdi"]).options;
    assert!(options.check().unwrap_err().to_string().contains("no absolute path"));
}
