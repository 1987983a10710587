//! Device plugins, for clusters without DRA: a resource for each network that the administrator lists.
//!
//! `freeflow.io/vnic` is the network `default`, `freeflow.io/net-NAME` another one. A device is a vNIC of any container
//! that asks for one: which of the node's it is does not matter. While the router is down the devices are unhealthy, so
//! that no pod is sent here. A resource knows no namespaces, so that pods of all of them meet in its network.
//!
//! The kubelet deletes all sockets of its directory when it starts. Each plugin then makes its own once more, and
//! registers.
use crate::log;
use crate::node::grpc::{self, Boxed, HttpRequest, HttpResponse, Methods, stream, unary, unknown};
use crate::node::messages::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse, DevicePluginOptions, Empty,
    ListAndWatchResponse, PluginDevice, RegisterRequest,
};
use crate::node::sockets::{Socket, instance};
use freeflow_hostnet::cdi::KIND;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

const VERSION: &str = "v1beta1";
const REGISTER: &str = "/v1beta1.Registration/Register";
const SERVICE: &str = "/v1beta1.DevicePlugin/";
const KUBELET: &str = "kubelet.sock";
const DEFAULT_NETWORK: &str = "default";
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";
/// How often the sockets are looked at.
const LOOK_TIME: Duration = Duration::from_secs(1);
const REGISTER_TIME: Duration = Duration::from_secs(10);
/// After a registration that failed.
const PAUSE: Duration = Duration::from_secs(5);
/// Before the name of the CDI device in an annotation's value, and the annotation's name, of engines and kubelets
/// that have no field for it.
const ANNOTATION: &str = "cdi.k8s.io/freeflow_";

/// A resource's plugin.
pub struct DevicePlugin {
    /// The kubelet's directory.
    pub directory: PathBuf,
    pub network: String,
    pub vnic_count: usize,
    /// Whether the router is up.
    pub health: watch::Receiver<bool>,
    /// For kubelets before 1.29: annotations beside the CDI field.
    pub with_annotations: bool,
}

/// The resource's name.
pub fn resource(network: &str) -> String {
    match network {
        DEFAULT_NETWORK => "freeflow.io/vnic".into(),
        other => format!("freeflow.io/net-{other}"),
    }
}

/// Whether a network can be a resource: Kubernetes' names are shorter than ours and have letters at either end.
pub fn is_resource_name(network: &str) -> bool {
    let name = resource(network);
    let (_, name) = name.split_once('/').unwrap_or_default();
    name.len() <= 63 && name.ends_with(|last: char| last.is_ascii_alphanumeric())
}

fn devices(count: usize, is_healthy: bool) -> ListAndWatchResponse {
    let health = if is_healthy { HEALTHY } else { UNHEALTHY };
    let device = |number| PluginDevice { id: format!("vnic-{number}"), health: health.into() };
    ListAndWatchResponse { devices: (0..count).map(device).collect() }
}

impl DevicePlugin {
    fn socket_name(&self) -> String {
        format!("freeflow.io-{}.sock", self.network)
    }

    fn allocated(&self, container: usize) -> ContainerAllocateResponse {
        // One vNIC, however many were asked for: more than one is refused before.
        let name = format!("{KIND}={}", self.network);
        let mut annotations = HashMap::new();
        if self.with_annotations {
            // Of the container's other plugins, too, each has its own: of two of one name the kubelet drops one.
            annotations.insert(format!("{ANNOTATION}{}_{container}", self.network), name.clone());
        }
        ContainerAllocateResponse { annotations, cdi_devices: vec![CdiDevice { name }] }
    }

    async fn allocate(self: Arc<Self>, request: AllocateRequest) -> Result<AllocateResponse, Status> {
        if !*self.health.borrow() {
            return Err(Status::unavailable("FreeFlow's router on this node is not up: see its pod or its log"));
        }
        let mut response = AllocateResponse::default();
        for (number, container) in request.container_requests.iter().enumerate() {
            if container.device_ids.len() != 1 {
                let (count, name) = (container.device_ids.len(), resource(&self.network));
                return Err(Status::invalid_argument(format!(
                    "a container can have one {name}, and {count} are asked for"
                )));
            }
            response.container_responses.push(self.allocated(number));
        }
        Ok(response)
    }

    /// The devices, and again whenever their health changes.
    fn list(&self) -> ReceiverStream<Result<ListAndWatchResponse, Status>> {
        let (sender, receiver) = mpsc::channel(1);
        let (mut health, count) = (self.health.clone(), self.vnic_count);
        tokio::spawn(async move {
            loop {
                let is_healthy = *health.borrow_and_update();
                if sender.send(Ok(devices(count, is_healthy))).await.is_err() {
                    return;
                }
                tokio::select! {
                    changed = health.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
            }
        });
        ReceiverStream::new(receiver)
    }

    async fn register(&self) -> Result<(), Status> {
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: self.socket_name(),
            resource_name: resource(&self.network),
            options: Some(DevicePluginOptions::default()),
        };
        let kubelet = self.directory.join(KUBELET);
        let call = grpc::call::<_, Empty>(&kubelet, REGISTER, request);
        let late = |_| Err(Status::deadline_exceeded("the kubelet does not answer"));
        timeout(REGISTER_TIME, call).await.unwrap_or_else(late).map(|_| ())
    }

    /// Serves one instance of the kubelet, until it restarts or the socket is gone.
    async fn serve(self: &Arc<Self>) -> Result<(), String> {
        let path = self.directory.join(self.socket_name());
        let kubelet = self.directory.join(KUBELET);
        let kubelet_now = instance(&kubelet).ok_or_else(|| format!("no kubelet at {}", kubelet.display()))?;
        let (socket, listener) = Socket::listen(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let served = grpc::serve(listener, self.clone());
        let watched = async {
            self.register().await.map_err(|status| format!("{}: {}", kubelet.display(), status.message()))?;
            log::line(&format!("the kubelet has the resource {}", resource(&self.network)));
            while socket.is_there() && instance(&kubelet) == Some(kubelet_now) {
                sleep(LOOK_TIME).await;
            }
            Ok(())
        };
        tokio::select! {
            result = served => result.map_err(|error| format!("{}: {error}", path.display())),
            result = watched => result,
        }
    }

    /// Forever.
    pub async fn keep(self: Arc<Self>) -> std::convert::Infallible {
        let mut said = String::new();
        loop {
            match self.serve().await {
                Ok(()) => said.clear(),
                Err(error) => {
                    // A kubelet that stays away is worth one line.
                    if error != said {
                        log::line(&format!("resource {}: {error}", resource(&self.network)));
                    }
                    said = error;
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

impl Methods for DevicePlugin {
    fn call(self: Arc<Self>, path: String, request: HttpRequest) -> Boxed<HttpResponse> {
        Box::pin(async move {
            match path.strip_prefix(SERVICE) {
                Some("GetDevicePluginOptions") => {
                    unary(request, |_: Empty| async { Ok(DevicePluginOptions::default()) }).await
                }
                Some("ListAndWatch") => stream::<Empty, _>(request, self.list()).await,
                Some("Allocate") => unary(request, |asked| self.clone().allocate(asked)).await,
                _ => unknown(&path),
            }
        })
    }
}
