//! Answers of the plugin on standard output: results in the form of the configuration's CNI version, and errors.

use crate::failure::Failure;
use serde_json::{Map, Value, json};
use std::fmt;
use std::net::IpAddr;

/// Versions of the specification, in order.
pub const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];
pub const NEWEST: &str = VERSIONS[VERSIONS.len() - 1];

/// A version of the specification that the plugin speaks: its place in [`VERSIONS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(usize);

impl Version {
    pub const V0_4: Self = Self(1);
    const V1_0: Self = Self(2);
    pub const V1_1: Self = Self(3);

    pub fn parse(text: &str) -> Option<Self> {
        VERSIONS.iter().position(|version| *version == text).map(Self)
    }

    pub fn name(self) -> &'static str {
        VERSIONS[self.0]
    }
}

/// Error codes: those of the specification, and the plugin's own from 100 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    IncompatibleVersion = 1,
    UnsupportedField = 2,
    Environment = 4,
    Io = 5,
    Decoding = 6,
    Configuration = 7,
    TryAgainLater = 11,
    /// Of `STATUS`: no `ADD` would succeed.
    NotAvailable = 50,
    /// FreeFlow or the kernel refused it.
    Refused = 100,
    /// Of `CHECK`: a part of the attachment is missing, or another one is in its place.
    NotAsAdded = 101,
}

impl Code {
    fn message(self) -> &'static str {
        match self {
            Self::IncompatibleVersion => "incompatible CNI version",
            Self::UnsupportedField => "unsupported field in network configuration",
            Self::Environment => "invalid environment variable",
            Self::Io => "I/O failure",
            Self::Decoding => "content can't be decoded",
            Self::Configuration => "invalid network configuration",
            Self::TryAgainLater => "try again later",
            Self::NotAvailable => "the plugin is not available",
            Self::Refused => "refused",
            Self::NotAsAdded => "the attachment is not as it was added",
        }
    }
}

#[derive(Debug)]
pub struct CniError {
    pub code: Code,
    details: String,
}

pub type CniResult<T> = Result<T, CniError>;

impl CniError {
    pub fn new(code: Code, details: impl fmt::Display) -> Self {
        Self { code, details: details.to_string() }
    }

    /// As the runtime reads it.
    pub fn text(&self, version: Option<&str>) -> String {
        let message = match self.code {
            // The message itself has to name key and value.
            Code::UnsupportedField => format!("{}: {}", self.code.message(), self.details),
            code => code.message().to_string(),
        };
        let version = version.unwrap_or(NEWEST);
        json!({"cniVersion": version, "code": self.code as u32, "msg": message, "details": self.details}).to_string()
    }
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.message(), self.details)
    }
}

impl From<Failure> for CniError {
    fn from(failure: Failure) -> Self {
        Self::new(Code::Refused, failure)
    }
}

/// Gives a failure the code that runtimes act on.
pub trait Coded<T> {
    fn coded(self, code: Code) -> CniResult<T>;
}

impl<T, E: fmt::Display> Coded<T> for Result<T, E> {
    fn coded(self, code: Code) -> CniResult<T> {
        self.map_err(|error| CniError::new(code, error))
    }
}

/// Shorthand for `Err(CniError::new(code, format!(…)))`.
macro_rules! refuse {
    ($code:expr, $($argument:tt)*) => {
        return Err($crate::cni::answer::CniError::new($code, format!($($argument)*)))
    };
}
pub(crate) use refuse;

/// An interface of a result.
#[derive(Clone, Debug)]
pub struct Interface {
    pub name: String,
    pub mac: Vec<u8>,
    pub mtu_bytes: u32,
    /// Path of the network namespace; `None`: the host's.
    pub sandbox: Option<String>,
}

impl Interface {
    fn value(&self, version: Version) -> Value {
        let mac: Vec<String> = self.mac.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut value = json!({"name": self.name, "mac": mac.join(":")});
        if version >= Version::V1_1 {
            value["mtu"] = json!(self.mtu_bytes);
        }
        if let Some(sandbox) = &self.sandbox {
            value["sandbox"] = json!(sandbox);
        }
        value
    }
}

/// An address of the last interface of a result.
#[derive(Clone, Debug)]
pub struct Address {
    pub address: IpAddr,
    pub prefix_length: u8,
    pub gateway: Option<IpAddr>,
}

/// Parts that the plugin adds to a result.
#[derive(Clone, Debug, Default)]
pub struct Added {
    /// The last one has the addresses.
    pub interfaces: Vec<Interface>,
    pub addresses: Vec<Address>,
    /// The default route goes by this gateway.
    pub default_route: Option<IpAddr>,
}

/// The result of `ADD`: the previous one of the chain as it is, with the plugin's own parts behind.
///
/// # Errors
/// The previous result is not of the form that the version has.
pub fn result(version: Version, previous: Option<&Value>, added: &Added, dns: Option<&Value>) -> CniResult<Value> {
    let mut result = previous.and_then(Value::as_object).cloned().unwrap_or_default();
    result.insert("cniVersion".into(), json!(version.name()));
    if !added.interfaces.is_empty() {
        let interfaces = list(&mut result, "interfaces")?;
        interfaces.extend(added.interfaces.iter().map(|interface| interface.value(version)));
        let last = interfaces.len() - 1;
        list(&mut result, "ips")?.extend(added.addresses.iter().map(|one| {
            let mut value = json!({"address": format!("{}/{}", one.address, one.prefix_length), "interface": last});
            if version < Version::V1_0 {
                value["version"] = json!(if one.address.is_ipv4() { "4" } else { "6" });
            }
            if let Some(gateway) = one.gateway {
                value["gateway"] = json!(gateway);
            }
            value
        }));
    }
    if let Some(gateway) = added.default_route {
        list(&mut result, "routes")?.push(json!({"dst": "0.0.0.0/0", "gw": gateway}));
    }
    if previous.is_none() {
        result.insert("dns".into(), dns.cloned().unwrap_or_else(|| json!({})));
    }
    Ok(Value::Object(result))
}

fn list<'a>(result: &'a mut Map<String, Value>, name: &str) -> CniResult<&'a mut Vec<Value>> {
    let value = result.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = json!([]);
    }
    value.as_array_mut().ok_or_else(|| CniError::new(Code::Decoding, format!("prevResult.{name} is no list")))
}

/// Addresses that a previous result gives to an interface of the pod. One that names no interface counts.
///
/// # Errors
/// It is not of the form that results have.
pub fn addresses_of(previous: &Value, interface: &str) -> CniResult<Vec<IpAddr>> {
    let interfaces = previous["interfaces"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut found = Vec::new();
    for (at, ip) in previous["ips"].as_array().into_iter().flatten().enumerate() {
        let bad = |what: &str| CniError::new(Code::Decoding, format!("prevResult.ips[{at}]: {what}"));
        let text = ip["address"].as_str().ok_or_else(|| bad("there is no address"))?;
        let address = text.split_once('/').map_or(text, |(address, _)| address).parse();
        let address: IpAddr = address.map_err(|_| bad(&format!("{text:?} is no address")))?;
        let of = match &ip["interface"] {
            Value::Null => None,
            index => {
                let place = index.as_u64().and_then(|index| interfaces.get(usize::try_from(index).ok()?));
                Some(place.ok_or_else(|| bad("it names an interface that is not there"))?)
            }
        };
        let is_in_pod = |of: &Value| of["sandbox"].as_str().is_some_and(|sandbox| !sandbox.is_empty());
        if of.is_none_or(|of| of["name"] == interface && is_in_pod(of)) {
            found.push(address);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn previous() -> Value {
        // The specification's example of `bridge`, as `ADD` of the next plugin has it.
        json!({
            "cniVersion": "1.0.0",
            "ips": [{"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 2}],
            "routes": [{"dst": "0.0.0.0/0"}],
            "interfaces": [
                {"name": "cni0", "mac": "00:11:22:33:44:55"},
                {"name": "veth3243", "mac": "55:44:33:22:11:11"},
                {"name": "eth0", "mac": "99:88:77:66:55:44", "sandbox": "/var/run/netns/blue"}],
            "dns": {"nameservers": ["10.1.0.1"]}})
    }

    fn added() -> Added {
        let inside = Interface {
            name: "ff0".into(),
            mac: vec![2, 0, 0, 0, 0, 1],
            mtu_bytes: 1500,
            sandbox: Some("/var/run/netns/blue".into()),
        };
        let host = Interface { name: "ffv1".into(), sandbox: None, ..inside.clone() };
        let addresses = vec![
            Address { address: [10, 50, 0, 2].into(), prefix_length: 24, gateway: Some([10, 50, 0, 1].into()) },
            Address { address: "fd00::2".parse().unwrap(), prefix_length: 64, gateway: None },
        ];
        Added { interfaces: vec![host, inside], addresses, default_route: Some([10, 50, 0, 1].into()) }
    }

    #[test]
    fn a_chained_result_is_passed_through() {
        let passed = result(Version::parse("1.0.0").unwrap(), Some(&previous()), &Added::default(), None).unwrap();
        assert_eq!(passed, previous());
        let own = result(Version::V1_1, Some(&previous()), &added(), None).unwrap();
        assert_eq!(own["ips"][0], previous()["ips"][0]);
        assert_eq!(own["ips"][1], json!({"address": "10.50.0.2/24", "gateway": "10.50.0.1", "interface": 4}));
        assert_eq!((&own["interfaces"][2], &own["dns"]), (&previous()["interfaces"][2], &previous()["dns"]));
        assert!(result(Version::V1_1, Some(&json!({"ips": 7})), &added(), None).is_err());
    }

    #[test]
    fn results_have_the_form_of_their_version() {
        let dns = json!({"domain": "x"});
        let of = |text| result(Version::parse(text).unwrap(), None, &added(), Some(&dns)).unwrap();
        let old = of("0.4.0");
        assert_eq!((&old["ips"][0]["version"], &old["ips"][1]["version"]), (&json!("4"), &json!("6")));
        assert!(old["interfaces"][0].get("mtu").is_none() && old["cniVersion"] == "0.4.0");
        let new = of("1.1.0");
        assert!(new["ips"][0].get("version").is_none());
        assert_eq!(new["interfaces"][1]["mtu"], 1500);
        assert_eq!(new["interfaces"][1]["mac"], "02:00:00:00:00:01");
        assert!(new["interfaces"][0].get("sandbox").is_none());
        assert_eq!(new["routes"], json!([{"dst": "0.0.0.0/0", "gw": "10.50.0.1"}]));
        assert_eq!(new["dns"], dns);
        let bare = result(Version::V0_4, None, &Added::default(), None).unwrap();
        assert_eq!(bare, json!({"cniVersion": "0.4.0", "dns": {}}));
        for bad in ["", "0.2.0", "1.2.0", "1.1"] {
            assert_eq!(Version::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_pods_address_is_that_of_its_interface() {
        let of = |previous: &Value| addresses_of(previous, "eth0");
        assert_eq!(of(&previous()).unwrap(), [IpAddr::from([10, 1, 0, 5])]);
        assert!(addresses_of(&previous(), "eth1").unwrap().is_empty());
        let mut hosts = previous();
        hosts["ips"][0]["interface"] = json!(0);
        assert!(of(&hosts).unwrap().is_empty(), "the host's interface");
        let bare = json!({"ips": [{"version": "4", "address": "10.1.0.5/16"}]});
        assert_eq!(of(&bare).unwrap(), [IpAddr::from([10, 1, 0, 5])]);
        for bad in [
            json!({"ips": [{}]}),
            json!({"ips": [{"address": "x/8"}]}),
            json!({"ips": [{"address": "10.0.0.2/8", "interface": 1}]}),
        ] {
            assert_eq!(of(&bad).unwrap_err().code, Code::Decoding, "{bad}");
        }
    }

    #[test]
    fn an_error_has_the_form_of_the_specification() {
        let error = CniError::new(Code::UnsupportedField, "netwrok=\"red\"");
        let value: Value = serde_json::from_str(&error.text(Some("0.4.0"))).unwrap();
        assert_eq!((&value["cniVersion"], &value["code"]), (&json!("0.4.0"), &json!(2)));
        assert!(value["msg"].as_str().unwrap().contains("netwrok=\"red\""), "{value}");
    }
}
