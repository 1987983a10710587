//! The parameters of a claim's device: of its class, which bind, and of the claim itself.
//!
//! A class is the administrator's: it may name every network and declared vNIC of the host and set every label. A claim
//! is a tenant's: it may name networks and vNICs that its namespace may use ([`Rules`](crate::node::rules::Rules)), and
//! set labels that its network or its class allows. Neither may contradict the other.
use crate::node::claim::Config;
use freeflow_orchestrator::{LABEL_BYTES_MAX, LABEL_COUNT_MAX, check_label_name, check_label_value, name_is_good};
use freeflow_protocol::admin::OWN_LABELS;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// `apiVersion` and `kind` of the parameters.
pub const API_VERSION: &str = "freeflow.io/v1alpha1";
pub const KIND: &str = "VnicParameters";
const FROM_CLASS: &str = "FromClass";
const FROM_CLAIM: &str = "FromClaim";

/// As it is written in a class or a claim.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct VnicParameters {
    api_version: String,
    kind: String,
    network: Option<String>,
    vnic: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// Of a class: the namespaces that may use it.
    namespaces: Option<BTreeSet<String>>,
    /// Of a class: labels that a claim, or its pod, may set.
    tenant_labels: Option<BTreeSet<String>>,
}

/// The parameters of one source, a class or a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    pub network: Option<String>,
    pub vnic: Option<String>,
    pub labels: BTreeMap<String, String>,
}

/// Those of both sources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    pub class: Wanted,
    pub claim: Wanted,
    /// Labels that the class lets a claim set.
    pub tenant_labels: BTreeSet<String>,
}

fn parse(value: &Value, source: &str) -> Result<VnicParameters, String> {
    let place = if source == FROM_CLASS { "the device class's parameters" } else { "the claim's parameters" };
    let parameters = VnicParameters::deserialize(value).map_err(|error| format!("{place}: {error}"))?;
    if parameters.api_version != API_VERSION || parameters.kind != KIND {
        return Err(format!("{place}: apiVersion {API_VERSION} and kind {KIND} are wanted"));
    }
    for (field, name) in [("network", &parameters.network), ("vnic", &parameters.vnic)] {
        if let Some(name) = name.as_ref().filter(|name| !name_is_good(name)) {
            return Err(format!("{place}: {field}: {name:?} is no name"));
        }
    }
    for (key, value) in &parameters.labels {
        check_label(key, value).map_err(|error| format!("{place}: {error}"))?;
    }
    if source != FROM_CLASS && (parameters.namespaces.is_some() || parameters.tenant_labels.is_some()) {
        return Err(format!("{place}: namespaces and tenantLabels are a device class's alone"));
    }
    Ok(parameters)
}

/// A label that a vNIC can have and that is not the router's own.
pub fn check_label(key: &str, value: &str) -> Result<(), String> {
    check_label_name(key).map_err(|why| format!("label {key:?}: {why}"))?;
    check_label_value(value).map_err(|why| format!("label {key}: {why}"))?;
    match OWN_LABELS.contains(&key) {
        true => Err(format!("FreeFlow itself uses the label {key}")),
        false => Ok(()),
    }
}

/// All labels of a vNIC.
pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), String> {
    let bytes: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
    if labels.len() > LABEL_COUNT_MAX || bytes > LABEL_BYTES_MAX {
        return Err(format!("a vNIC has at most {LABEL_COUNT_MAX} labels of {LABEL_BYTES_MAX} bytes together"));
    }
    Ok(())
}

fn set(into: &mut Option<String>, value: Option<String>, field: &str) -> Result<(), String> {
    match (&into, value) {
        (Some(one), Some(other)) if *one != other => Err(format!("{field} is set twice, to {one} and {other}")),
        (_, Some(value)) => {
            *into = Some(value);
            Ok(())
        }
        (_, None) => Ok(()),
    }
}

impl Wanted {
    fn add(&mut self, parameters: VnicParameters) -> Result<(), String> {
        set(&mut self.network, parameters.network, "network")?;
        set(&mut self.vnic, parameters.vnic, "vnic")?;
        for (key, value) in parameters.labels {
            match self.labels.get(&key) {
                Some(other) if *other != value => return Err(format!("the label {key} is set twice")),
                _ => self.labels.insert(key, value),
            };
        }
        // Of each source by itself: a claim has many parameters, and each may have labels.
        check_labels(&self.labels)
    }
}

impl Parameters {
    /// Of a claim's request, for its namespace.
    ///
    /// # Errors
    /// One text for the pod's events: they are malformed, contradict each other, or the class is not for the namespace.
    pub fn of(configs: &[Config], request: &str, namespace: &str) -> Result<Self, String> {
        let mut found = Self::default();
        for config in configs.iter().filter(|config| config.is_for(request)) {
            let value = &config.opaque.as_ref().ok_or("parameters of another kind")?.parameters;
            let mut parameters = parse(value, &config.source)?;
            match config.source.as_str() {
                FROM_CLASS => {
                    if parameters.namespaces.take().is_some_and(|namespaces| !namespaces.contains(namespace)) {
                        return Err(format!("the device class is not for the namespace {namespace}"));
                    }
                    found.tenant_labels.extend(parameters.tenant_labels.take().unwrap_or_default());
                    found.class.add(parameters).map_err(|error| format!("the device class's parameters: {error}"))?;
                }
                FROM_CLAIM => {
                    found.claim.add(parameters).map_err(|error| format!("the claim's parameters: {error}"))?;
                }
                other => return Err(format!("parameters of an unknown source {other:?}")),
            }
        }
        found.check()?;
        Ok(found)
    }

    fn check(&self) -> Result<(), String> {
        let (class, claim) = (&self.class, &self.claim);
        for (field, bound, asked) in [("network", &class.network, &claim.network), ("vnic", &class.vnic, &claim.vnic)] {
            if let (Some(bound), Some(asked)) = (bound, asked)
                && bound != asked
            {
                return Err(format!("the device class sets {field} to {bound}; the claim can't choose {asked}"));
            }
        }
        let (network, vnic) = (class.network.as_ref().or(claim.network.as_ref()), class.vnic.as_ref());
        let vnic = vnic.or(claim.vnic.as_ref());
        if let (Some(network), Some(vnic)) = (network, vnic) {
            return Err(format!(
                "network {network} and vnic {vnic}: one of them is wanted; a declared vNIC has a network"
            ));
        }
        if vnic.is_some() && !(class.labels.is_empty() && claim.labels.is_empty()) {
            return Err("a declared vNIC has its own labels: none can be given".into());
        }
        for (key, value) in &claim.labels {
            if class.labels.get(key).is_some_and(|bound| bound != value) {
                return Err(format!("the device class sets the label {key}; the claim can't choose another value"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::claim::DRIVER;
    use serde_json::json;

    fn config(source: &str, mut parameters: Value) -> Config {
        for (field, value) in [("apiVersion", API_VERSION), ("kind", KIND)] {
            if parameters[field].is_null() {
                parameters[field] = json!(value);
            }
        }
        let opaque = json!({"driver": DRIVER, "parameters": parameters});
        serde_json::from_value(json!({"source": source, "opaque": opaque})).unwrap()
    }

    fn of(configs: &[Config]) -> Result<Parameters, String> {
        Parameters::of(configs, "vnic", "team-a")
    }

    #[test]
    fn classes_and_claims_add_up() {
        let class =
            config(FROM_CLASS, json!({"labels": {"zone": "1"}, "tenantLabels": ["tier"], "namespaces": ["team-a"]}));
        let claim = config(FROM_CLAIM, json!({"network": "red", "labels": {"tier": "web"}}));
        let found = of(&[class, claim]).unwrap();
        assert_eq!((found.class.network, found.claim.network.as_deref()), (None, Some("red")));
        assert_eq!(found.class.labels["zone"], "1");
        assert_eq!(found.claim.labels["tier"], "web");
        assert!(found.tenant_labels.contains("tier"));
        assert_eq!(of(&[]).unwrap(), Parameters::default());
    }

    #[test]
    fn a_class_binds_and_bad_parameters_are_refused() {
        let class = |parameters| config(FROM_CLASS, parameters);
        let claim = |parameters| config(FROM_CLAIM, parameters);
        for (configs, reason) in [
            (vec![class(json!({"network": "red"})), claim(json!({"network": "blue"}))], "can't choose blue"),
            (vec![class(json!({"network": "red"})), claim(json!({"vnic": "database"}))], "one of them"),
            (vec![class(json!({"labels": {"a": "1"}})), claim(json!({"labels": {"a": "2"}}))], "label a"),
            (vec![class(json!({"vnic": "database"})), claim(json!({"labels": {"a": "2"}}))], "own labels"),
            (vec![class(json!({"network": "red"})), class(json!({"network": "blue"}))], "set twice"),
            (vec![class(json!({"namespaces": ["team-b"]}))], "not for the namespace team-a"),
            (vec![claim(json!({"namespaces": ["team-a"]}))], "a device class's alone"),
            (vec![claim(json!({"tenantLabels": ["tier"]}))], "a device class's alone"),
            (vec![claim(json!({"network": "../../etc"}))], "no name"),
            (vec![claim(json!({"network": "--run-dir"}))], "no name"),
            (vec![claim(json!({"network": "red\", \"x"}))], "no name"),
            (vec![claim(json!({"network": ""}))], "no name"),
            (vec![claim(json!({"network": 7}))], "invalid type"),
            (vec![claim(json!({"networks": ["red"]}))], "unknown field"),
            (vec![claim(json!({"kind": "Other"}))], "kind VnicParameters"),
            (vec![claim(json!({"apiVersion": "freeflow.io/v9"}))], "apiVersion"),
            (vec![claim(json!({"labels": {"engine": "oci"}}))], "itself uses"),
            (vec![claim(json!({"labels": {"a=b": ""}}))], "label"),
            (vec![claim(json!({"labels": {"a": "x\n"}}))], "control characters"),
            (vec![config("FromElsewhere", json!({}))], "unknown source"),
        ] {
            let error = of(&configs).expect_err(reason);
            assert!(error.contains(reason), "{error} lacks {reason}");
        }
    }

    #[test]
    fn many_parameters_of_a_claim_have_the_labels_of_one_vnic_at_most() {
        let labels = |part: usize| -> BTreeMap<_, _> { (0..40).map(|n| (format!("k{part}-{n}"), "x")).collect() };
        let claim = |part| config(FROM_CLAIM, json!({"labels": labels(part)}));
        assert!(of(&[claim(0)]).is_ok());
        assert!(of(&[claim(0), claim(1)]).unwrap_err().contains("at most 64 labels"));
    }

    #[test]
    fn the_number_of_labels_is_bounded() {
        let many = |count| (0..count).map(|number| (format!("k{number}"), String::new())).collect();
        assert!(check_labels(&many(LABEL_COUNT_MAX)).is_ok() && check_labels(&many(LABEL_COUNT_MAX + 1)).is_err());
    }
}
