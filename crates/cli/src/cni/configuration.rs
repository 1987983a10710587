//! The plugin's network configuration, an administrator's file in `/etc/cni/net.d` with the runtime's own keys.
//!
//! Invariant: a pod chooses no network. Its Kubernetes namespace, which the runtime names, does, by the list in the
//! configuration.

use crate::cni::answer::{CniError, CniResult, Code, Coded, Version, addresses_of, refuse};
use crate::cni::call::{Call, Pod, is_identifier};
use freeflow_protocol::admin::OWN_LABELS;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Keys of the specification, and those that runtimes add. The plugin's own are the rest of [`Configuration`].
const STANDARD: [&str; 9] =
    ["cniVersion", "name", "type", "capabilities", "runtimeConfig", "prevResult", "dns", "ipMasq", "ipam"];
/// Reserved for runtimes.
const RUNTIME_PREFIX: &str = "cni.dev/";
const RUNTIME_ARGUMENTS: &str = "args";
/// The capability by which a runtime asks for addresses.
const ADDRESSES_CAPABILITY: &str = "ips";
const VALID_ATTACHMENTS: &str = "cni.dev/valid-attachments";
/// Before CNI 1.1 was final.
const VALID_ATTACHMENTS_FORMER: &str = "cni.dev/attachments";

/// The part that every command reads.
#[derive(Debug)]
pub struct Base {
    pub version: Version,
    pub name: String,
    fields: Map<String, Value>,
}

/// Source of a vNIC's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressSource {
    /// The pod's, which the plugin before gave it.
    Pod,
    /// One of the network's.
    Own,
}

/// All of it, for `ADD`, `CHECK` and `STATUS`.
#[derive(Debug)]
pub struct Configuration {
    pub version: Version,
    pub name: String,
    /// Network of pods whose namespace is not listed.
    pub network: Option<String>,
    namespaces: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    pub source: AddressSource,
    pub previous: Option<Value>,
    pub dns: Option<Value>,
    /// Addresses that the runtime asks for.
    asked: Vec<IpAddr>,
}

/// An attachment that is still there, of `GC`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Valid {
    #[serde(rename = "containerID")]
    pub container: String,
    #[serde(rename = "ifname")]
    pub interface: String,
}

/// The version of a configuration that may be wrong otherwise.
pub fn version_of(text: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(text).ok()?;
    Some(value["cniVersion"].as_str()?.to_string())
}

impl Base {
    /// # Errors
    /// It is no configuration, or of a version that the plugin does not speak.
    pub fn read(text: &[u8]) -> CniResult<Self> {
        let value: Value = serde_json::from_slice(text).coded(Code::Decoding)?;
        let Value::Object(fields) = value else {
            refuse!(Code::Decoding, "the network configuration is no object");
        };
        // Without a version it is 0.1.0 or 0.2.0.
        let version = match fields.get("cniVersion") {
            None => "",
            Some(version) => version.as_str().unwrap_or("?"),
        };
        let Some(version) = Version::parse(version) else {
            let supported = crate::cni::answer::VERSIONS.join(", ");
            refuse!(Code::IncompatibleVersion, "cniVersion {version:?} is none of {supported}");
        };
        let name = fields.get("name").and_then(Value::as_str).unwrap_or_default().to_string();
        if !is_identifier(&name) {
            refuse!(Code::Configuration, "name {name:?} can't be a network configuration's");
        }
        Ok(Self { version, name, fields })
    }

    /// # Errors
    /// The version is older than one that has the command.
    pub fn check_version(&self, command: &str, since: Version) -> CniResult<()> {
        if self.version < since {
            let (version, since) = (self.version.name(), since.name());
            refuse!(Code::IncompatibleVersion, "cniVersion {version} has no {command}: {since} is the first");
        }
        Ok(())
    }

    /// Attachments that are still there. `None`: the runtime does not say, as cnitool does not.
    ///
    /// # Errors
    /// It is no list of attachments.
    pub fn valid_attachments(&self) -> CniResult<Option<Vec<Valid>>> {
        let list = self.fields.get(VALID_ATTACHMENTS).or_else(|| self.fields.get(VALID_ATTACHMENTS_FORMER));
        match list {
            None => Ok(None),
            // As runtimes in Go write an empty list.
            Some(Value::Null) => Ok(Some(Vec::new())),
            Some(list) => Vec::deserialize(list)
                .map(Some)
                .map_err(|error| CniError::new(Code::Decoding, format!("{VALID_ATTACHMENTS}: {error}"))),
        }
    }
}

impl Configuration {
    /// # Errors
    /// It has a key that the plugin does not know, or one that can't be.
    pub fn of(mut base: Base) -> CniResult<Self> {
        let mut standard = Map::new();
        for key in STANDARD {
            standard.extend(base.fields.remove(key).filter(|value| !value.is_null()).map(|value| (key.into(), value)));
        }
        base.fields.retain(|key, _| !key.starts_with(RUNTIME_PREFIX) && key != RUNTIME_ARGUMENTS);
        check_unused(&standard)?;
        let (network, namespaces) = (own(&mut base.fields, "network")?, own(&mut base.fields, "namespaces")?);
        let labels = own(&mut base.fields, "labels")?;
        let source: Option<AddressSource> = own(&mut base.fields, "address")?;
        if let Some((key, value)) = base.fields.iter().next() {
            refuse!(Code::UnsupportedField, "{key}={value}");
        }
        let previous = standard.remove("prevResult");
        check_previous(base.version, previous.as_ref())?;
        let source = source.unwrap_or(if previous.is_some() { AddressSource::Pod } else { AddressSource::Own });
        let asked = asked_addresses(standard.get("runtimeConfig"), source)?;
        let this = Self {
            version: base.version,
            name: base.name,
            network,
            namespaces,
            labels,
            source,
            previous,
            dns: standard.remove("dns"),
            asked,
        };
        this.check()?;
        Ok(this)
    }

    fn check(&self) -> CniResult<()> {
        if self.network.is_none() && self.namespaces.is_empty() {
            refuse!(Code::Configuration, "network is missing: the network of FreeFlow that pods are to be in");
        }
        if let Some(key) = self.labels.keys().find(|key| OWN_LABELS.contains(&key.as_str())) {
            refuse!(Code::Configuration, "labels.{key}: freeflow itself uses this label");
        }
        if self.source == AddressSource::Pod && self.previous.is_none() {
            refuse!(
                Code::Configuration,
                "address is pod, and prevResult is missing: another plugin has to come before in the list"
            );
        }
        Ok(())
    }

    /// The network of a pod.
    ///
    /// # Errors
    /// Its namespace has none.
    pub fn network_of(&self, pod: &Pod) -> CniResult<&str> {
        let listed = pod.namespace.as_ref().and_then(|namespace| self.namespaces.get(namespace));
        match (listed.or(self.network.as_ref()), &pod.namespace) {
            (Some(network), _) => Ok(network),
            (None, Some(namespace)) => {
                refuse!(Code::Configuration, "namespaces has no network for the namespace {namespace}")
            }
            (None, None) => {
                refuse!(Code::Environment, "CNI_ARGS has no K8S_POD_NAMESPACE, by which namespaces gives the network")
            }
        }
    }

    /// The address that the vNIC is to have; `None`: one that the network has free.
    ///
    /// # Errors
    /// The plugin before gave the pod none that a vNIC can have.
    pub fn address(&self, call: &Call) -> CniResult<Option<IpAddr>> {
        let Some(previous) = self.previous.as_ref().filter(|_| self.source == AddressSource::Pod) else {
            return Ok(self.asked.first().copied());
        };
        let address = addresses_of(previous, &call.interface)?.into_iter().find(IpAddr::is_ipv4);
        match address {
            Some(address) => Ok(Some(address)),
            None => refuse!(
                Code::Configuration,
                "prevResult has no IPv4 address of {}, which the vNIC needs; with \"address\": \"own\" it has one of \
                 the network's",
                call.interface
            ),
        }
    }
}

/// Takes one of the plugin's own keys, which may be absent.
fn own<T: DeserializeOwned + Default>(fields: &mut Map<String, Value>, key: &str) -> CniResult<T> {
    let value = fields.remove(key).filter(|value| !value.is_null());
    let Some(value) = value else { return Ok(T::default()) };
    serde_json::from_value(value).map_err(|error| CniError::new(Code::Configuration, format!("{key}: {error}")))
}

/// Keys that runtimes and administrators may write, and which say nothing to this plugin.
fn check_unused(standard: &Map<String, Value>) -> CniResult<()> {
    let is_empty = |value: &Value| value.as_object().is_some_and(Map::is_empty);
    for (key, why, is_bad) in [
        ("ipam", "FreeFlow gives the addresses itself", standard.get("ipam").is_some_and(|value| !is_empty(value))),
        ("ipMasq", "it translates no addresses", standard.get("ipMasq").is_some_and(|value| *value != false)),
    ] {
        if is_bad {
            refuse!(Code::UnsupportedField, "{key}={}: {why}", standard[key]);
        }
    }
    let no_capabilities = Map::new();
    let capabilities = standard.get("capabilities").map_or(Some(&no_capabilities), Value::as_object);
    let Some(capabilities) = capabilities else {
        refuse!(Code::Configuration, "capabilities is no object");
    };
    match capabilities.iter().find(|(key, is_wanted)| *key != ADDRESSES_CAPABILITY && **is_wanted != false) {
        Some((key, value)) => refuse!(Code::UnsupportedField, "capabilities.{key}={value}"),
        None => Ok(()),
    }
}

fn check_previous(version: Version, previous: Option<&Value>) -> CniResult<()> {
    let Some(previous) = previous else { return Ok(()) };
    if !previous.is_object() {
        refuse!(Code::Decoding, "prevResult is no object");
    }
    match &previous["cniVersion"] {
        Value::Null => Ok(()),
        Value::String(text) if text == version.name() => Ok(()),
        other => refuse!(Code::Decoding, "prevResult is of cniVersion {other}, and the configuration of another one"),
    }
}

/// Of `runtimeConfig.ips`: addresses, with a prefix length or without.
fn asked_addresses(runtime: Option<&Value>, source: AddressSource) -> CniResult<Vec<IpAddr>> {
    let Some(runtime) = runtime else { return Ok(Vec::new()) };
    let Some(fields) = runtime.as_object() else {
        refuse!(Code::Decoding, "runtimeConfig is no object");
    };
    if let Some((key, value)) = fields.iter().find(|(key, _)| *key != ADDRESSES_CAPABILITY) {
        refuse!(Code::UnsupportedField, "runtimeConfig.{key}={value}");
    }
    let Some(list) = fields.get(ADDRESSES_CAPABILITY).filter(|list| !list.is_null()) else { return Ok(Vec::new()) };
    let texts: Vec<String> = serde_json::from_value(list.clone()).coded(Code::Decoding)?;
    let mut addresses = Vec::new();
    for text in texts {
        match text.split_once('/').map_or(text.as_str(), |(address, _)| address).parse() {
            Ok(address) => addresses.push(address),
            Err(_) => refuse!(Code::Configuration, "runtimeConfig.ips: {text:?} is no address"),
        }
    }
    if addresses.len() > 1 {
        refuse!(Code::Configuration, "runtimeConfig.ips has {} addresses: a vNIC can ask for one", addresses.len());
    }
    if source == AddressSource::Pod && !addresses.is_empty() {
        refuse!(Code::Configuration, "runtimeConfig.ips: the vNIC has the pod's address, which another plugin gives");
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::call::Command;
    use serde_json::json;

    fn read(value: &Value) -> CniResult<Configuration> {
        Configuration::of(Base::read(value.to_string().as_bytes())?)
    }

    fn with(key: &str, value: Value) -> Value {
        let mut all = json!({"cniVersion": "1.1.0", "name": "pods", "type": "freeflow-cni", "network": "red"});
        all[key] = value;
        all
    }

    fn call() -> Call {
        Call {
            command: Command::Add,
            container: "c".into(),
            interface: "eth0".into(),
            namespace: None,
            pod: Pod::default(),
        }
    }

    fn pod(namespace: &str) -> Pod {
        Pod { namespace: Some(namespace.into()), name: None }
    }

    #[test]
    fn keys_that_nobody_knows_are_refused_by_name() {
        for (key, value, code) in [
            ("netwrok", json!("red"), Code::UnsupportedField),
            ("ipam", json!({"type": "host-local"}), Code::UnsupportedField),
            ("ipMasq", json!(true), Code::UnsupportedField),
            ("capabilities", json!({"portMappings": true}), Code::UnsupportedField),
            ("runtimeConfig", json!({"mac": "02:00:00:00:00:01"}), Code::UnsupportedField),
            ("runtimeConfig", json!({"ips": ["10.0.0.2/8", "fd00::2/64"]}), Code::Configuration),
            ("runtimeConfig", json!({"ips": ["x"]}), Code::Configuration),
            ("labels", json!({"engine": "oci"}), Code::Configuration),
            ("labels", json!({"tier": 7}), Code::Configuration),
            ("address", json!("pod"), Code::Configuration),
            ("address", json!("dhcp"), Code::Configuration),
            ("network", json!(null), Code::Configuration),
            ("network", json!(["red"]), Code::Configuration),
            ("name", json!("../x"), Code::Configuration),
            ("cniVersion", json!("0.2.0"), Code::IncompatibleVersion),
            ("cniVersion", json!("1.2.0"), Code::IncompatibleVersion),
            ("cniVersion", json!(1), Code::IncompatibleVersion),
            ("prevResult", json!([]), Code::Decoding),
            ("prevResult", json!({"cniVersion": "0.4.0"}), Code::Decoding),
        ] {
            let error = read(&with(key, value.clone())).unwrap_err();
            assert_eq!(error.code, code, "{key} {value}: {error}");
            assert!(error.to_string().contains(key), "{error}");
        }
        for text in ["", "{", "[]", "7"] {
            assert_eq!(Base::read(text.as_bytes()).unwrap_err().code, Code::Decoding, "{text:?}");
        }
    }

    #[test]
    fn keys_of_runtimes_are_no_fault() {
        for (key, value) in [
            ("args", json!({"cni": {}})),
            ("cni.dev/future", json!(7)),
            ("ipam", json!({})),
            ("ipMasq", json!(false)),
            ("capabilities", json!({"ips": true, "mac": false})),
            ("prevResult", json!(null)),
        ] {
            assert!(read(&with(key, value)).is_ok(), "{key}");
        }
        let asked = read(&with("runtimeConfig", json!({"ips": ["10.50.0.9/24"]}))).unwrap();
        assert_eq!(asked.address(&call()).unwrap(), Some([10, 50, 0, 9].into()));
        assert_eq!(read(&with("labels", json!({"tier": "web"}))).unwrap().address(&call()).unwrap(), None);
    }

    #[test]
    fn a_namespace_has_the_network_that_is_listed() {
        let mut value = with("namespaces", json!({"team-a": "blue"}));
        let both = read(&value).unwrap();
        assert_eq!(both.network_of(&pod("team-a")).unwrap(), "blue");
        assert_eq!(both.network_of(&pod("team-b")).unwrap(), "red");
        assert_eq!(both.network_of(&Pod::default()).unwrap(), "red");
        value.as_object_mut().unwrap().remove("network");
        let listed = read(&value).unwrap();
        assert_eq!(listed.network_of(&pod("team-b")).unwrap_err().code, Code::Configuration);
        assert_eq!(listed.network_of(&Pod::default()).unwrap_err().code, Code::Environment);
    }

    #[test]
    fn a_chained_vnic_has_the_pods_address_unless_it_is_to_have_its_own() {
        let previous = json!({"cniVersion": "1.1.0", "ips": [{"address": "fd00::5/64"}, {"address": "10.1.0.5/16"}]});
        let mut value = with("prevResult", previous);
        assert_eq!(read(&value).unwrap().address(&call()).unwrap(), Some([10, 1, 0, 5].into()));
        value["address"] = json!("own");
        assert_eq!(read(&value).unwrap().address(&call()).unwrap(), None);
        let none = with("prevResult", json!({"ips": [{"address": "fd00::5/64"}]}));
        assert_eq!(read(&none).unwrap().address(&call()).unwrap_err().code, Code::Configuration);
    }

    #[test]
    fn without_a_list_nothing_is_stale() {
        let valid = |value: Value| Base::read(value.to_string().as_bytes()).unwrap().valid_attachments();
        assert_eq!(valid(with("x", json!(1))).unwrap(), None);
        let list = json!([{"containerID": "c", "ifname": "eth0"}]);
        let expected = [Valid { container: "c".into(), interface: "eth0".into() }];
        assert_eq!(valid(with("cni.dev/valid-attachments", list.clone())).unwrap().unwrap(), expected);
        assert_eq!(valid(with("cni.dev/attachments", list)).unwrap().unwrap(), expected);
        assert_eq!(valid(with("cni.dev/valid-attachments", json!(null))).unwrap(), Some(Vec::new()));
        assert_eq!(valid(with("cni.dev/valid-attachments", json!([7]))).unwrap_err().code, Code::Decoding);
    }
}
