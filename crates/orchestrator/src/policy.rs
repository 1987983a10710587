//! Consequences of the declared objects for each vNIC: limits of its requests, and of the objects
//! that it may hold.
use crate::objects::{LimitSpec, Quota, QuotaAmounts, Typed};
use crate::state::{ClassEntry, NetworkEntry, State, VnicEntry};
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use freeflow_protocol::admin::DataPath;
use freeflow_verbs::{NetworkId, RateLimit, Shaping, TenantId, VnicLimits};

impl From<LimitSpec> for RateLimit {
    fn from(limit: LimitSpec) -> Self {
        Self {
            bits_per_s: limit.rate.map(|rate| rate.0),
            burst_bytes: limit.burst.map(|burst| burst.0),
            messages_per_s: limit.message_rate.map(|rate| rate.0),
            burst_messages: limit.message_burst,
        }
    }
}

/// Whether it is the vNIC's own class or quota, or its network's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Vnic,
    Network,
}

impl Origin {
    fn of(own: bool) -> Self {
        if own { Self::Vnic } else { Self::Network }
    }

    fn text(self, network: &str) -> String {
        match self {
            Self::Vnic => "of the vNIC itself".into(),
            Self::Network => format!("of network {network}"),
        }
    }
}

/// A tenant's vNICs of one class have their limit together.
fn tenant_id(network: &NetworkEntry, class: &ClassEntry) -> TenantId {
    TenantId(u32::from(network.tenant_number) << 16 | u32::from(class.number))
}

impl State {
    fn class_of(&self, vnic: &VnicEntry) -> Option<(&ClassEntry, Origin)> {
        let own = vnic.object.spec.qos_class.as_ref();
        let network = self.networks.get(vnic.network())?;
        let name = own.or(network.object.spec.qos_class.as_ref())?;
        Some((self.classes.get(name)?, Origin::of(own.is_some())))
    }

    /// The quota that says what a vNIC may hold: its own, or its network's.
    pub fn quota_name_of(&self, vnic: &VnicEntry) -> Option<&str> {
        self.quota_of(vnic).map(|(quota, _)| quota.metadata.name.as_str())
    }

    fn quota_of(&self, vnic: &VnicEntry) -> Option<(&Typed<Quota>, Origin)> {
        let own = vnic.object.spec.quota.as_ref();
        let network = self.networks.get(vnic.network())?;
        let name = own.or(network.object.spec.quota.as_ref())?;
        Some((self.quotas.get(name)?, Origin::of(own.is_some())))
    }

    /// Rates, priority and weight of a vNIC's requests.
    pub fn shaping_of(&self, vnic: &VnicEntry) -> Shaping {
        let (Some((class, _)), Some(network)) = (self.class_of(vnic), self.networks.get(vnic.network())) else {
            return Shaping::default();
        };
        let spec = &class.object.spec;
        Shaping {
            qp: spec.qp.into(),
            vnic: spec.vnic.into(),
            tenant: (!RateLimit::from(spec.tenant).is_none()).then(|| tenant_id(network, class)),
            priority: spec.priority,
            weight: spec.weight,
        }
    }

    /// The limits of all tenants that have some, by what [`Shaping::tenant`] names: a tenant and a class.
    pub fn tenant_limits(&self) -> Vec<(TenantId, RateLimit)> {
        let of_networks = self.networks.values().filter_map(|network| {
            let class = network.object.spec.qos_class.as_ref()?;
            Some((network, class))
        });
        let of_vnics =
            self.own_classes.keys().filter_map(|(network, class)| Some((self.networks.get(network)?, class)));
        let mut seen = BTreeSet::new();
        let mut limits = Vec::new();
        for (network, class) in of_networks.chain(of_vnics) {
            let Some(class) = self.classes.get(class) else { continue };
            let (id, limit) = (tenant_id(network, class), RateLimit::from(class.object.spec.tenant));
            if !limit.is_none() && seen.insert(id) {
                limits.push((id, limit));
            }
        }
        limits
    }

    /// The tenant that such a limit is of.
    pub fn tenant_of_limit(&self, id: TenantId) -> Option<&str> {
        let is_its = |network: &&NetworkEntry| u32::from(network.tenant_number) == id.0 >> 16;
        self.networks.values().find(is_its).map(NetworkEntry::tenant)
    }

    /// Whether all vNICs of a network on this host have a quota together.
    pub fn has_network_quota(&self, network: &NetworkEntry) -> bool {
        self.network_amounts(network) != QuotaAmounts::default()
    }

    /// Limits of a vNIC's objects: the router's for each vNIC, and no more than its quota.
    pub fn limits_of(&self, vnic: &VnicEntry, base: VnicLimits) -> VnicLimits {
        let quota = self.quota_of(vnic).map_or(QuotaAmounts::default(), |(quota, _)| quota.spec.per_vnic);
        VnicLimits {
            qp_count_max: base.qp_count_max.min(quota.qps.unwrap_or(u32::MAX)),
            cq_count_max: base.cq_count_max.min(quota.cqs.unwrap_or(u32::MAX)),
            mr_count_max: base.mr_count_max.min(quota.mrs.unwrap_or(u32::MAX)),
            registered_bytes_max: base
                .registered_bytes_max
                .min(quota.registered_bytes.map_or(u64::MAX, |bytes| bytes.0)),
            ..base
        }
    }

    /// Most that all vNICs of a network on this host may hold together.
    pub fn network_amounts(&self, network: &NetworkEntry) -> QuotaAmounts {
        let quota = network.object.spec.quota.as_ref().and_then(|name| self.quotas.get(name));
        quota.map_or(QuotaAmounts::default(), |quota| quota.spec.per_network)
    }

    /// The network's id and its data path.
    pub fn data_path_of(&self, network: &NetworkEntry) -> (NetworkId, DataPath) {
        (network.id, network.object.spec.data_path)
    }

    /// Limits of a vNIC and where they come from, for people.
    pub fn conditions_of(&self, vnic: &VnicEntry) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some((class, origin)) = self.class_of(vnic) {
            let spec = &class.object.spec;
            let from = format!("QosClass {} {}", class.object.metadata.name, origin.text(vnic.network()));
            lines.push(format!("priority {}, weight {}: {from}", spec.priority, spec.weight));
            for (what, limit) in [
                ("each QP", &spec.qp),
                ("the vNIC", &spec.vnic),
                ("all vNICs of the tenant and class together", &spec.tenant),
            ] {
                if !limit.is_none() {
                    lines.push(format!("{what}: {}: {from}", limit_text(limit)));
                }
            }
        }
        if let Some((quota, origin)) = self.quota_of(vnic)
            && let Some(text) = amounts_text(&quota.spec.per_vnic)
        {
            lines.push(format!("at most {text}: Quota {} {}", quota.metadata.name, origin.text(vnic.network())));
        }
        let network = self.networks.get(vnic.network());
        if let Some((quota, Origin::Vnic)) = self.quota_of(vnic)
            && (quota.spec.vnics.is_some() || amounts_text(&quota.spec.per_network).is_some())
            && network.is_none_or(|network| network.object.spec.quota != vnic.object.spec.quota)
        {
            let name = &quota.metadata.name;
            lines.push(format!(
                "of Quota {name} only perVnic holds here: vnics and perNetwork are for networks that name it"
            ));
        }
        if let Some(network) = network
            && let Some(text) = amounts_text(&self.network_amounts(network))
        {
            let quota = network.object.spec.quota.as_deref().unwrap_or_default();
            lines.push(format!("all vNICs of network {} together at most {text}: Quota {quota}", network.name()));
        }
        lines
    }

    /// The class that a vNIC is of: its own, or its network's.
    pub fn class_name_of(&self, vnic: &VnicEntry) -> Option<&str> {
        self.class_of(vnic).map(|(class, _)| class.object.metadata.name.as_str())
    }
}

fn limit_text(limit: &LimitSpec) -> String {
    let mut parts = Vec::new();
    parts.extend(limit.rate.map(|rate| format!("{rate}/s")));
    parts.extend(limit.burst.map(|burst| format!("bursts of {burst}")));
    parts.extend(limit.message_rate.map(|rate| format!("{rate} messages/s")));
    parts.extend(limit.message_burst.map(|burst| format!("bursts of {burst} messages")));
    parts.join(", ")
}

fn amounts_text(amounts: &QuotaAmounts) -> Option<String> {
    let mut parts = Vec::new();
    parts.extend(amounts.qps.map(|count| format!("{count} QPs")));
    parts.extend(amounts.cqs.map(|count| format!("{count} CQs")));
    parts.extend(amounts.mrs.map(|count| format!("{count} MRs")));
    parts.extend(amounts.registered_bytes.map(|bytes| format!("{bytes} registered")));
    (!parts.is_empty()).then(|| parts.join(", "))
}
