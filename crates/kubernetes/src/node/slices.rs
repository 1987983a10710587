//! The node's vNICs as `ResourceSlice`s, by which the scheduler knows how many claims the node can take.
//!
//! One pool for the node, of the node's name. The kubelet deletes slices when it restarts, and administrators may: a
//! watch sees that, and they are published once more.
use crate::api::objects::Metadata;
use crate::api::{ApiError, Client, Collection, Kind, News, Preconditions, Selection, Watcher};
use crate::log;
use crate::node::claim::DRIVER;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The group of all of DRA's objects.
pub const GROUP: &str = "resource.k8s.io";
/// Versions that are understood, the best first.
pub const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1beta1"];
/// The version in which a device's attributes lie one level deeper.
const VERSION_WITH_BASIC: &str = "v1beta1";
/// Devices of one slice, as the API has it.
const DEVICES_OF_SLICE_MAX: usize = 128;
/// vNICs that a node can offer.
pub const VNIC_COUNT_MAX: usize = 4096;
const DEVICE_PREFIX: &str = "vnic-";
const DEVICE_DIGITS_MAX: usize = 4;
const NODES: Kind = Kind::new("", "v1", "nodes");
const MANAGER: &str = "freeflow-kubernetes-node";
/// After an error, and between corrections: another agent that disagrees must not make the two busy.
const PAUSE: Duration = Duration::from_secs(5);

/// Whether a device is one of ours by its name.
pub fn is_device(name: &str) -> bool {
    let digits = name.strip_prefix(DEVICE_PREFIX).unwrap_or_default();
    (1..=DEVICE_DIGITS_MAX).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit())
}

/// As it is on the server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Slice {
    pub metadata: Metadata,
    spec: Spec,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Spec {
    driver: String,
    pool: Pool,
    devices: Value,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Pool {
    name: String,
    generation: i64,
    resource_slice_count: i64,
}

/// Whether a value has all that is wanted. The server may add fields that it knows and we don't.
fn has(present: &Value, wanted: &Value) -> bool {
    match (present, wanted) {
        (Value::Array(present), Value::Array(wanted)) => {
            present.len() == wanted.len() && present.iter().zip(wanted).all(|(one, other)| has(one, other))
        }
        (Value::Object(present), Value::Object(wanted)) => {
            wanted.iter().all(|(key, value)| present.get(key).is_some_and(|one| has(one, value)))
        }
        (present, wanted) => present == wanted,
    }
}

/// The node's slices.
pub struct Slices {
    client: Client,
    kind: Kind,
    node: String,
    vnic_count: usize,
}

/// The newest of our versions of DRA's objects that the server has; `None`: it has none. `used` counts as the newest:
/// where servers of several versions answer, as during an upgrade, we don't change between them.
///
/// # Errors
/// The server can't be asked.
pub async fn version(client: &Client, used: Option<&'static str>) -> Result<Option<&'static str>, ApiError> {
    let group: Value = match client.get(&format!("/apis/{GROUP}")).await {
        Err(error) if error.is_not_found() => return Ok(None),
        other => other?,
    };
    let served: Vec<&str> =
        group["versions"].as_array().into_iter().flatten().filter_map(|one| one["version"].as_str()).collect();
    Ok(used.into_iter().chain(VERSIONS).find(|version| served.contains(version)))
}

impl Slices {
    pub fn new(client: &Client, version: &str, node: &str, vnic_count: usize) -> Self {
        let kind = Kind::new(GROUP, VERSIONS[0], "resourceslices").at_version(version);
        Self { client: client.clone(), kind, node: node.into(), vnic_count }
    }

    fn collection(&self) -> Collection<Slice> {
        Collection::all(&self.client, &self.kind)
    }

    fn selection(&self) -> Selection {
        Selection { labels: String::new(), fields: format!("spec.driver={DRIVER},spec.nodeName={}", self.node) }
    }

    fn device(&self, number: usize) -> Value {
        let attributes = json!({
            "type": {"string": "vnic"},
            "freeflowVersion": {"version": env!("CARGO_PKG_VERSION")},
        });
        let name = format!("{DEVICE_PREFIX}{number}");
        match self.kind.version == VERSION_WITH_BASIC {
            true => json!({"name": name, "basic": {"attributes": attributes}}),
            false => json!({"name": name, "attributes": attributes}),
        }
    }

    fn name(&self, number: usize) -> String {
        format!("{}-{DRIVER}-{number}", self.node)
    }

    /// The slices that there should be: their names and devices.
    fn wanted(&self) -> BTreeMap<String, Value> {
        let numbers: Vec<usize> = (0..self.vnic_count).collect();
        let slices = numbers.chunks(DEVICES_OF_SLICE_MAX).enumerate();
        slices.map(|(number, part)| (self.name(number), part.iter().map(|one| self.device(*one)).collect())).collect()
    }

    fn is_right(&self, present: &BTreeMap<String, Slice>) -> bool {
        let wanted = self.wanted();
        let generations: Vec<i64> = present.values().map(|slice| slice.spec.pool.generation).collect();
        let count = i64::try_from(wanted.len()).unwrap_or(i64::MAX);
        let is_ours = |slice: &Slice| {
            let pool = &slice.spec.pool;
            slice.spec.driver == DRIVER
                && pool.name == self.node
                && pool.resource_slice_count == count
                && Some(&pool.generation) == generations.first()
        };
        present.len() == wanted.len()
            && wanted.iter().all(|(name, devices)| {
                present.get(name).is_some_and(|slice| is_ours(slice) && has(&slice.spec.devices, devices))
            })
    }

    /// Makes them right, under a new generation, and removes what does not belong there.
    async fn publish(&self, present: &BTreeMap<String, Slice>) -> Result<(), ApiError> {
        let node: crate::api::objects::Object = Collection::all(&self.client, &NODES).get(&self.node).await?;
        let generation = present.values().map(|slice| slice.spec.pool.generation).max().unwrap_or(0) + 1;
        let wanted = self.wanted();
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": node.metadata.uid});
        for (name, devices) in &wanted {
            let pool = json!({"name": self.node, "generation": generation, "resourceSliceCount": wanted.len()});
            let slice = json!({
                "apiVersion": self.kind.api_version(),
                "kind": "ResourceSlice",
                "metadata": {"name": name, "ownerReferences": [owner]},
                "spec": {"driver": DRIVER, "nodeName": self.node, "pool": pool, "devices": devices},
            });
            self.collection().apply(name, MANAGER, &slice).await?;
        }
        for (name, slice) in present.iter().filter(|(name, _)| !wanted.contains_key(*name)) {
            let only = Preconditions { uid: Some(slice.metadata.uid.clone()), ..Preconditions::default() };
            match self.collection().delete(name, &only).await {
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                other => other?,
            }
        }
        log::line(&format!("published {} vNICs of the node {}", self.vnic_count, self.node));
        Ok(())
    }

    /// Keeps them as they should be, forever.
    pub async fn keep(&self) -> std::convert::Infallible {
        let mut watcher = Watcher::new(self.collection(), self.selection());
        let mut present: Option<BTreeMap<String, Slice>> = None;
        loop {
            match watcher.next().await {
                Ok(news) => take(&mut present, news),
                Err(error) => log::line(&format!("resource slices: {error}")),
            }
            // Of several changes that come together the last one counts.
            while let Ok(Ok(news)) = timeout(Duration::from_millis(100), watcher.next()).await {
                take(&mut present, news);
            }
            let Some(slices) = &present else { continue };
            if !self.is_right(slices) {
                if let Err(error) = self.publish(slices).await {
                    log::line(&format!("resource slices: {error}"));
                    // The next list says how far it went.
                    (watcher, present) = (Watcher::new(self.collection(), self.selection()), None);
                }
                sleep(PAUSE).await;
            }
        }
    }
}

fn take(present: &mut Option<BTreeMap<String, Slice>>, news: News<Slice>) {
    let name = |slice: &Slice| slice.metadata.name.clone();
    match (news, present) {
        (News::All(all), present) => *present = Some(all.into_iter().map(|slice| (name(&slice), slice)).collect()),
        (News::Changed(slice), Some(present)) => {
            present.insert(name(&slice), slice);
        }
        (News::Deleted(slice), Some(present)) => {
            present.remove(&name(&slice));
        }
        (News::Unreadable(name, error), _) => log::line(&format!("resource slice {name}: {error}")),
        (_, None) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::test_server::{Seen, TestServer};
    use std::sync::{Arc, Mutex};

    #[test]
    fn devices_are_known_by_their_names() {
        assert!(is_device("vnic-0") && is_device("vnic-4095"));
        for bad in ["vnic-", "vnic-x", "vnic-1/..", "vnic-12345", "gpu-0", ""] {
            assert!(!is_device(bad), "{bad}");
        }
    }

    /// A server that keeps slices, by merging nothing: an apply replaces.
    async fn server(slices: Arc<Mutex<BTreeMap<String, Value>>>) -> TestServer {
        TestServer::start(move |seen: &Seen| {
            let mut slices = slices.lock().unwrap();
            let path = seen.path.split('?').next().unwrap();
            let name = path.rsplit('/').next().unwrap().to_string();
            match seen.method.as_str() {
                "GET" if path.ends_with("/nodes/n1") => {
                    (200, json!({"metadata": {"name": "n1", "uid": "N"}}).to_string())
                }
                "GET" if path == "/apis/resource.k8s.io" => {
                    (200, json!({"versions": [{"version": "v1beta1"}, {"version": "v1"}]}).to_string())
                }
                "GET" if seen.path.contains("watch=true") => (200, String::new()),
                "GET" => {
                    let items: Vec<_> = slices.values().collect();
                    (200, json!({"metadata": {"resourceVersion": "1"}, "items": items}).to_string())
                }
                "PATCH" => {
                    let mut slice = seen.json();
                    slice["metadata"]["uid"] = json!("u");
                    slices.insert(name, slice);
                    (200, seen.body.clone())
                }
                "DELETE" => {
                    slices.remove(&name);
                    (200, "{}".into())
                }
                _ => (404, "{}".into()),
            }
        })
        .await
    }

    async fn until(condition: impl Fn() -> bool) {
        for _ in 0..400 {
            if condition() {
                return;
            }
            sleep(Duration::from_millis(25)).await;
        }
        panic!("it did not happen");
    }

    #[tokio::test]
    async fn slices_are_published_and_corrected() {
        let kept = Arc::new(Mutex::new(BTreeMap::new()));
        // Of a former version, and of a node with more vNICs.
        let old = json!({"metadata": {"name": "old", "uid": "o"}, "spec": {"driver": DRIVER, "pool": {"name": "n1", "generation": 7}}});
        kept.lock().unwrap().insert("old".to_string(), old);
        let server = server(kept.clone()).await;
        let client = server.client();
        assert_eq!(version(&client, None).await.unwrap(), Some("v1"));
        assert_eq!(version(&client, Some("v1beta1")).await.unwrap(), Some("v1beta1"), "it is there yet");
        assert_eq!(version(&client, Some("v1beta2")).await.unwrap(), Some("v1"));
        let slices = Slices::new(&client, "v1", "n1", 130);
        let keeper = tokio::spawn(async move { slices.keep().await });
        until(|| kept.lock().unwrap().len() == 2 && !kept.lock().unwrap().contains_key("old")).await;
        let found = kept.lock().unwrap().clone();
        let (first, second) = (&found["n1-freeflow.io-0"], &found["n1-freeflow.io-1"]);
        assert_eq!(first["spec"]["devices"].as_array().unwrap().len(), 128);
        assert_eq!(second["spec"]["devices"][1]["name"], "vnic-129");
        assert_eq!(first["spec"]["pool"], json!({"name": "n1", "generation": 8, "resourceSliceCount": 2}));
        assert_eq!(first["metadata"]["ownerReferences"][0]["uid"], "N");
        assert_eq!(first["spec"]["devices"][0]["attributes"]["type"]["string"], "vnic");
        keeper.abort();
    }

    #[test]
    fn older_versions_have_their_own_form() {
        let configuration = crate::api::Client::at_socket(std::path::Path::new("/nonexistent"));
        let slices = Slices::new(&configuration, "v1beta1", "n1", 1);
        assert_eq!(slices.wanted()["n1-freeflow.io-0"][0]["basic"]["attributes"]["type"]["string"], "vnic");
        let mut slice = Slice::default();
        slice.spec.driver = DRIVER.into();
        slice.spec.pool = Pool { name: "n1".into(), generation: 3, resource_slice_count: 1 };
        slice.spec.devices = slices.wanted()["n1-freeflow.io-0"].clone();
        let mut present = BTreeMap::from([("n1-freeflow.io-0".to_string(), slice)]);
        assert!(slices.is_right(&present));
        present.values_mut().next().unwrap().spec.pool.resource_slice_count = 2;
        assert!(!slices.is_right(&present));
    }
}
