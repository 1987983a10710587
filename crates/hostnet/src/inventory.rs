//! The networks and vNICs of a host at one time: what its bridges, interfaces and CDI files are compared with.

use freeflow_protocol::admin::{NetworkStatus, VnicStatus};
use serde::{Deserialize, Serialize};

/// The label of a vNIC that a container engine, or `freeflow run`, has attached for a container.
const ENGINE_LABEL: &str = "engine";

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Inventory {
    pub networks: Vec<NetworkStatus>,
    pub vnics: Vec<Vnic>,
}

/// A vNIC, as far as its host's interfaces go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vnic {
    pub id: String,
    /// The name of its network.
    pub network: String,
    /// By an operator; the others come and go with their container.
    pub is_declared: bool,
}

impl Vnic {
    pub fn new(id: &str, network: &str, labels: &[(String, String)]) -> Self {
        let is_declared = !labels.iter().any(|(key, _)| key == ENGINE_LABEL);
        Self { id: id.into(), network: network.into(), is_declared }
    }
}

impl From<&VnicStatus> for Vnic {
    fn from(vnic: &VnicStatus) -> Self {
        Self::new(&vnic.id, &vnic.network, &vnic.labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vnic_is_declared_unless_an_engine_has_attached_it() {
        let label = |key: &str| (key.to_string(), "x".to_string());
        assert!(Vnic::new("web", "red", &[label("tier")]).is_declared);
        assert!(!Vnic::new("web", "red", &[label("tier"), label("engine")]).is_declared);
    }
}
