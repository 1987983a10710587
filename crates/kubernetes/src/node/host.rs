//! The router of this node, by its REST API.
use crate::api::{ApiError, Client};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const SOCKET: &str = "api.sock";
const BASE: &str = "/apis/freeflow.io/v1";
/// The kubelet waits for us meanwhile.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Clone)]
pub struct Host {
    client: Client,
    socket: String,
}

impl Host {
    pub fn of(run_dir: &Path) -> Self {
        let socket = run_dir.join(SOCKET);
        Self { client: Client::at_socket(&socket).answer_time(ANSWER_TIME), socket: socket.display().to_string() }
    }

    fn explain(&self, error: &ApiError, what: &str) -> String {
        match error {
            ApiError::Refused(_) if error.is_not_found() => format!("FreeFlow on this node has no {what}"),
            ApiError::Refused(refusal) => format!("FreeFlow's router on this node: {refusal}"),
            ApiError::Unreachable(why) => {
                format!("FreeFlow's router on this node is not up ({why}): see its pod, or systemctl status freeflow")
            }
            _ => format!("FreeFlow's router on this node does not answer at {}", self.socket),
        }
    }

    async fn object(&self, plural: &str, what: &str, name: &str) -> Result<(), String> {
        // Names were checked: nothing in them is a path's.
        let found: Result<Value, _> = self.client.get(&format!("{BASE}/{plural}/{name}")).await;
        found.map(|_| ()).map_err(|error| self.explain(&error, &format!("{what} {name}")))
    }

    /// # Errors
    /// For the pod's events: there is none of that name, or no router.
    pub async fn check_network(&self, name: &str) -> Result<(), String> {
        self.object("networks", "network", name).await
    }

    /// # Errors
    /// For the pod's events: there is none of that name, or no router.
    pub async fn check_vnic(&self, name: &str) -> Result<(), String> {
        self.object("vnics", "declared vNIC", name).await
    }

    /// # Errors
    /// Why not.
    pub async fn check_up(&self) -> Result<(), String> {
        let found: Result<Value, _> = self.client.get("/version").await;
        found.map(|_| ()).map_err(|error| self.explain(&error, "version"))
    }
}
