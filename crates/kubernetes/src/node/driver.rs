//! The DRA driver: the kubelet has it prepare claims before a pod's containers start, and undo that after them.
use crate::api::objects::Object;
use crate::api::{ApiError, Client, Collection, Kind};
use crate::log;
use crate::node::claim::{AllocatedDevice, DRIVER, ResourceClaim, base_request};
use crate::node::grpc::{Boxed, HttpRequest, HttpResponse, Methods, unary, unknown};
use crate::node::host::Host;
use crate::node::messages::{
    Claim, ClaimsRequest, PrepareResponse, Prepared, PreparedDevice, UnprepareResponse, Unprepared,
};
use crate::node::parameters::{Parameters, check_label, check_labels};
use crate::node::prepared::{PreparedClaims, Record, check_uid};
use crate::node::rules::Rules;
use crate::node::slices::is_device;
use freeflow_hostnet::cdi::{self, CLAIM_KIND, ClaimDevice, Labels};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{Mutex, Semaphore};

const PODS: Kind = Kind::new("", "v1", "pods");
/// The network of claims that name none.
const DEFAULT_NETWORK: &str = "default";
/// Claims of one request.
const CLAIM_COUNT_MAX: usize = 1024;
/// Claims that are prepared at once. Each is a tenant's text of up to 1.5 MiB, and the agent's memory is small.
pub const TURN_COUNT: usize = 8;

/// See the module.
pub struct Driver<R> {
    pub client: Client,
    /// `ResourceClaim`, in the version that the server has.
    pub claims: Kind,
    pub node: String,
    pub host: Host,
    pub rules: R,
    pub prepared: PreparedClaims,
    /// Held while files of claims come or go.
    pub files: Mutex<()>,
    /// [`TURN_COUNT`]: one is held while a claim is prepared.
    pub turns: Semaphore,
}

/// A vNIC's device, its network or itself, and its labels.
#[derive(Clone)]
struct Resolved {
    kind: cdi::Kind,
    of: String,
    labels: Labels,
}

impl<R: Rules> Driver<R> {
    /// The claim, and its devices of ours with their parameters. Parameters are a tenant's text: they are read before
    /// anybody is waited for, so that no more than what is used of them stays in memory.
    async fn allocated(&self, claim: &Claim) -> Result<(ResourceClaim, Vec<(AllocatedDevice, Parameters)>), String> {
        let all = Collection::<ResourceClaim>::of_namespace(&self.client, &self.claims, &claim.namespace);
        let found = all.find(&claim.name).await.map_err(|error| format!("the claim can't be read: {error}"))?;
        let Some(mut found) = found.filter(|found| found.metadata.uid == claim.uid) else {
            return Err(format!("the claim {}/{} with the uid {} is gone", claim.namespace, claim.name, claim.uid));
        };
        let allocated = found.status.allocation.take().ok_or("the claim has no devices yet")?.devices;
        let mut devices = Vec::new();
        for device in allocated.results.into_iter().filter(|device| device.driver == DRIVER) {
            self.check_device(&device)?;
            let parameters = Parameters::of(&allocated.config, &device.request, &claim.namespace)?;
            devices.push((device, parameters));
        }
        if devices.is_empty() {
            return Err(format!("the claim has no device of {DRIVER}"));
        }
        Ok((found, devices))
    }

    fn check_device(&self, device: &AllocatedDevice) -> Result<(), String> {
        if device.admin_access == Some(true) {
            return Err("a vNIC has no access for administrators: take adminAccess out of the claim".into());
        }
        if device.pool != self.node || !is_device(&device.device) {
            return Err(format!("{}/{} is no device of the node {}", device.pool, device.device, self.node));
        }
        Ok(())
    }

    /// The labels of the claim's pod that its vNIC may have.
    async fn pod_labels(&self, claim: &ResourceClaim, keys: &BTreeSet<String>) -> Result<Labels, String> {
        let Some((name, uid)) = claim.pod().filter(|_| !keys.is_empty()) else { return Ok(Labels::new()) };
        let pods = Collection::<Object>::of_namespace(&self.client, &PODS, &claim.metadata.namespace);
        let pod = pods.find(name).await.map_err(|error: ApiError| format!("the claim's pod can't be read: {error}"))?;
        let pod = pod.filter(|pod| pod.metadata.uid == uid).ok_or("the claim's pod is gone")?;
        Ok(pod.metadata.labels.into_iter().filter(|(key, _)| keys.contains(key)).collect())
    }

    async fn resolve(&self, claim: &ResourceClaim, parameters: Parameters) -> Result<Resolved, String> {
        let namespace = &claim.metadata.namespace;
        let (class, own) = (parameters.class, parameters.claim);
        if let Some(vnic) = class.vnic.as_ref().or(own.vnic.as_ref()) {
            // The class binds; a claim that names the same names the host's, too.
            let of = match &class.vnic {
                Some(_) => vnic.clone(),
                None => self.rules.vnic(namespace, vnic).await?.name,
            };
            self.host.check_vnic(&of).await?;
            return Ok(Resolved { kind: cdi::Kind::Vnic, of, labels: Labels::new() });
        }
        let mut keys = parameters.tenant_labels;
        let of = match class.network {
            Some(network) => network,
            None => {
                let name = own.network.as_deref().unwrap_or(DEFAULT_NETWORK);
                let granted = self.rules.network(namespace, name).await.map_err(|error| match &own.network {
                    Some(_) => error,
                    None => format!("{error}; the claim names none, which means {DEFAULT_NETWORK}"),
                })?;
                keys.extend(granted.label_keys);
                granted.name
            }
        };
        let is_set = |key: &String| class.labels.contains_key(key);
        if let Some(key) = own.labels.keys().find(|key| !keys.contains(*key) && !is_set(key)) {
            return Err(format!("the network {of} does not let a claim set the label {key}"));
        }
        // The class' labels come last, since they bind.
        let mut labels = self.pod_labels(claim, &keys).await?;
        labels.extend(own.labels);
        labels.extend(class.labels);
        for (key, value) in &labels {
            check_label(key, value)?;
        }
        check_labels(&labels)?;
        self.host.check_network(&of).await?;
        Ok(Resolved { kind: cdi::Kind::Network, of, labels })
    }

    async fn prepare(&self, claim: &Claim) -> Result<Vec<PreparedDevice>, String> {
        check_uid(&claim.uid)?;
        let _turn = self.turns.acquire().await.map_err(|error| error.to_string())?;
        let (found, allocated) = self.allocated(claim).await?;
        let (mut devices, mut answer) = (Vec::new(), Vec::new());
        // The devices of a request have the same parameters, and are up to 32: servers are asked once.
        let mut last: Option<(Parameters, Resolved)> = None;
        for (device, parameters) in allocated {
            let resolved = match last {
                Some((before, resolved)) if before == parameters => resolved,
                _ => self.resolve(&found, parameters.clone()).await?,
            };
            let Resolved { kind, of, labels } = resolved.clone();
            last = Some((parameters, resolved));
            let name = format!("{}-{}", claim.uid, device.device);
            answer.push(PreparedDevice {
                request_names: vec![base_request(&device.request).to_string()],
                pool_name: device.pool.clone(),
                device_name: device.device.clone(),
                cdi_device_ids: vec![format!("{CLAIM_KIND}={name}")],
            });
            devices.push(ClaimDevice { name, kind, of, labels });
        }
        let record = Record { uid: claim.uid.clone(), namespace: claim.namespace.clone(), name: claim.name.clone() };
        let _files = self.files.lock().await;
        self.prepared.put(&record, &devices)?;
        Ok(answer)
    }

    async fn prepare_all(self: Arc<Self>, request: ClaimsRequest) -> Result<PrepareResponse, tonic::Status> {
        let mut response = PrepareResponse::default();
        for claim in request.claims.iter().take(CLAIM_COUNT_MAX) {
            let prepared = match self.prepare(claim).await {
                Ok(devices) => Prepared { devices, error: String::new() },
                Err(error) => {
                    log::line(&format!("claim {}/{}: {error}", claim.namespace, claim.name));
                    Prepared { devices: Vec::new(), error: log::printable(&error) }
                }
            };
            response.claims.insert(claim.uid.clone(), prepared);
        }
        Ok(response)
    }

    async fn unprepare(&self, uid: &str) -> Result<(), String> {
        check_uid(uid)?;
        let _files = self.files.lock().await;
        self.prepared.remove(uid)
    }

    async fn unprepare_all(self: Arc<Self>, request: ClaimsRequest) -> Result<UnprepareResponse, tonic::Status> {
        let mut response = UnprepareResponse::default();
        for claim in request.claims.iter().take(CLAIM_COUNT_MAX) {
            let error = self.unprepare(&claim.uid).await.err().unwrap_or_default();
            if !error.is_empty() {
                log::line(&format!("claim {}/{}: {error}", claim.namespace, claim.name));
            }
            response.claims.insert(claim.uid.clone(), Unprepared { error });
        }
        Ok(response)
    }

    /// Removes files of claims that are no more: of pods that ended while neither the kubelet nor this was there.
    ///
    /// # Errors
    /// Why some may be left: the API server did not say, or a file can't be removed.
    pub async fn sweep(&self) -> Result<(), String> {
        let records = {
            let _files = self.files.lock().await;
            self.prepared.make_directories()?;
            self.prepared.list()?
        };
        for record in records {
            let all = Collection::<Object>::of_namespace(&self.client, &self.claims, &record.namespace);
            let found = all.find(&record.name).await.map_err(|error| error.to_string())?;
            if found.is_none_or(|found| found.metadata.uid != record.uid) {
                log::line(&format!("claim {}/{} is gone: its device, too", record.namespace, record.name));
                self.unprepare(&record.uid).await?;
            }
        }
        Ok(())
    }
}

impl<R: Rules> Methods for Driver<R> {
    fn call(self: Arc<Self>, path: String, request: HttpRequest) -> Boxed<HttpResponse> {
        Box::pin(async move {
            let method =
                ["k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/"]
                    .iter()
                    .find_map(|service| path.strip_prefix('/')?.strip_prefix(service));
            match method {
                Some("NodePrepareResources") => unary(request, |asked| self.clone().prepare_all(asked)).await,
                Some("NodeUnprepareResources") => unary(request, |asked| self.clone().unprepare_all(asked)).await,
                _ => unknown(&path),
            }
        })
    }
}
