//! Whether the fields of an object make sense by themselves. What needs other objects is checked
//! where a command is planned.
use crate::cidr::{Cidr, Pool6};
use crate::mode::{LATENCY_CLASS_LABEL, LatencyClass};
use crate::objects::{
    AccessRuleSpec, Cause, EndSelector, GroupSpec, Labels, LimitSpec, Metadata, NetworkSpec, QosClassSpec, QuotaSpec,
    VnicSelector, VnicSpec,
};
use crate::pool::{Pool, PoolError};
use crate::{LABEL_BYTES_MAX, LABEL_COUNT_MAX, VNIC_COUNT_MAX, name_is_good};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::{Ipv4Addr, Ipv6Addr};
use freeflow_verbs::{PRIORITY_MAX, WEIGHT_MAX};

pub(crate) const BAD_NAME: &str =
    "a name may have 1 to 128 letters, digits, '.', '_' and '-', and begins with neither '.' nor '-'";
const LABEL_KEY_BYTES_MAX: usize = 256;
const LABEL_VALUE_BYTES_MAX: usize = 1024;
/// Selectors of one group, and entries of each list in one.
const SELECTOR_COUNT_MAX: usize = 16;
const SELECTOR_ENTRY_COUNT_MAX: usize = 64;
/// 1 kbit/s to 10 Tbit/s.
const RATE_MIN_BITS_PER_S: u64 = 1000;
const RATE_MAX_BITS_PER_S: u64 = 10_000_000_000_000;
/// 1 KiB to 16 GiB.
const BURST_MIN_BYTES: u64 = 1 << 10;
const BURST_MAX_BYTES: u64 = 16 << 30;
const MESSAGE_RATE_MAX_PER_S: u64 = 1_000_000_000_000;
const MESSAGE_BURST_MAX: u64 = 1_000_000_000;

/// Checks the name of a label.
///
/// # Errors
/// A sentence for people: why a label can't have this name.
pub fn check_label_name(name: &str) -> Result<(), String> {
    let is_bad = |letter: char| letter.is_control() || letter.is_whitespace() || matches!(letter, '=' | ',' | '!');
    if name.is_empty() || name.len() > LABEL_KEY_BYTES_MAX || name.contains(is_bad) {
        return Err(format!("a label's name has 1 to {LABEL_KEY_BYTES_MAX} bytes, and no blanks, '=', ',' or '!'"));
    }
    Ok(())
}

/// Checks the value of a label.
///
/// # Errors
/// A sentence for people: why a label can't have this value.
pub fn check_label_value(value: &str) -> Result<(), String> {
    let is_bad = |letter: char| letter.is_control() || letter == ',';
    if value.len() > LABEL_VALUE_BYTES_MAX || value.contains(is_bad) {
        return Err(format!(
            "a label's value has up to {LABEL_VALUE_BYTES_MAX} bytes, and no control characters or ','"
        ));
    }
    Ok(())
}

/// Errors of an object, field by field.
#[derive(Default)]
pub(crate) struct Findings(pub Vec<Cause>);

impl Findings {
    pub fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(Cause::new(field, message));
    }

    fn name(&mut self, field: impl Into<String>, name: &str) {
        if !name_is_good(name) {
            self.add(field, BAD_NAME);
        }
    }

    fn reference(&mut self, field: &str, name: Option<&str>) {
        if let Some(name) = name {
            self.name(field, name);
        }
    }

    fn cidr(&mut self, field: impl Into<String>, text: &str) {
        if let Err(error) = text.parse::<Cidr>() {
            self.add(field, error.to_string());
        }
    }

    fn count(&mut self, field: &str, count: usize, max: usize) {
        if count > max {
            self.add(field, format!("{count} entries; {max} are the most"));
        }
    }

    pub fn metadata(&mut self, metadata: &Metadata) {
        self.name("metadata.name", &metadata.name);
    }

    /// Of an object; a selector's are the same without those limits.
    pub fn labels(&mut self, at: &str, labels: &Labels) {
        self.label_size(at, labels);
        for (key, value) in labels {
            for why in [check_label_name(key), check_label_value(value)].into_iter().filter_map(Result::err) {
                self.add(format!("{at}.{key}"), why);
            }
        }
    }

    pub fn label_size(&mut self, at: &str, labels: &Labels) {
        let bytes: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
        if labels.len() > LABEL_COUNT_MAX || bytes > LABEL_BYTES_MAX {
            self.add(at, format!("at most {LABEL_COUNT_MAX} labels of {LABEL_BYTES_MAX} bytes together"));
        }
    }

    /// Of a vNIC. What it had before is no reason to refuse it.
    pub fn latency_class(&mut self, labels: &Labels, old: Option<&Labels>) {
        let Some(given) = labels.get(LATENCY_CLASS_LABEL) else { return };
        let is_kept = old.and_then(|old| old.get(LATENCY_CLASS_LABEL)) == Some(given);
        if !is_kept && !LatencyClass::is_known(given) {
            let names = LatencyClass::ALL.map(LatencyClass::name).join(", ");
            self.add(
                format!("metadata.labels.{LATENCY_CLASS_LABEL}"),
                format!("{given:?} is no latency class; there are {names}"),
            );
        }
    }

    pub fn network(&mut self, spec: &NetworkSpec) {
        self.name("spec.tenant", &spec.tenant);
        self.reference("spec.qosClass", spec.qos_class.as_deref());
        self.reference("spec.quota", spec.quota.as_deref());
        let (mut pool, mut pool6) = (None, None);
        for (at, text) in spec.cidrs.iter().enumerate() {
            let field = format!("spec.cidrs[{at}]");
            match text.parse::<Cidr>() {
                Err(error) => self.add(field, error.to_string()),
                Ok(cidr) if cidr.is_ipv6() => {
                    let is_second = pool6.is_some();
                    pool6 = Some((at, text.parse::<Pool6>()));
                    self.ipv6_range(&field, text, is_second);
                }
                Ok(_) if pool.is_some() => self.add(field, "a network has one range of IPv4 addresses"),
                Ok(_) => match text.parse::<Pool>() {
                    Err(error) => self.add(field, error.to_string()),
                    Ok(parsed) if !is_unicast(parsed.base()) => {
                        self.add(field, "not addresses that a vNIC can have");
                    }
                    Ok(parsed) => pool = Some(parsed),
                },
            }
        }
        if pool.is_none() && self.0.iter().all(|cause| !cause.field.starts_with("spec.cidrs")) {
            self.add("spec.cidrs", "a network needs a range of IPv4 addresses");
        }
        if let (Some(pool), Some((at, Ok(pool6)))) = (pool, pool6)
            && pool6.host_bits() < pool.host_bits()
        {
            let most = 128 - pool.host_bits();
            self.add(
                format!("spec.cidrs[{at}]"),
                format!("fewer addresses than the IPv4 range {pool} has: its prefix length can be {most} at most"),
            );
        }
        match spec.range.as_deref().map(|text| text.parse::<Pool>()) {
            Some(Err(PoolError)) => self.add("spec.range", PoolError.to_string()),
            Some(Ok(range)) if pool.is_some_and(|pool| !pool.encloses(range)) => {
                self.add("spec.range", "the host's range is not a part of the network's addresses");
            }
            _ => {}
        }
        let range = spec.range.as_deref().and_then(|text| text.parse::<Pool>().ok());
        match spec.floating.as_deref().map(|text| text.parse::<Pool>()) {
            Some(Err(PoolError)) => self.add("spec.floating", PoolError.to_string()),
            Some(Ok(part)) if pool.is_some_and(|pool| !pool.encloses(part)) => {
                self.add("spec.floating", "not a part of the network's addresses");
            }
            Some(Ok(part)) if range.is_some_and(|range| range.encloses(part) || part.encloses(range)) => {
                self.add("spec.floating", "the host's range has addresses of it");
            }
            _ => {}
        }
    }

    fn ipv6_range(&mut self, field: &str, text: &str, is_second: bool) {
        if is_second {
            return self.add(field, "a network has one range of IPv6 addresses at most");
        }
        match text.parse::<Pool6>() {
            Err(_) => self.add(field, "a network's IPv6 addresses have a prefix length from 32 to 112"),
            Ok(pool) if !is_unicast6(pool.base()) => {
                self.add(field, "not addresses that a vNIC can have: they are of 2000::/3 or fc00::/7");
            }
            Ok(_) => {}
        }
    }

    pub fn group(&mut self, spec: &GroupSpec) {
        self.name("spec.tenant", &spec.tenant);
        self.count("spec.members", spec.members.len(), SELECTOR_COUNT_MAX);
        for (at, member) in spec.members.iter().enumerate() {
            self.selector(&format!("spec.members[{at}]"), member);
        }
    }

    fn selector(&mut self, at: &str, selector: &VnicSelector) {
        self.labels(&format!("{at}.labels"), &selector.labels);
        self.count(&format!("{at}.networks"), selector.networks.len(), SELECTOR_ENTRY_COUNT_MAX);
        self.count(&format!("{at}.cidrs"), selector.cidrs.len(), SELECTOR_ENTRY_COUNT_MAX);
        self.count(&format!("{at}.vnics"), selector.vnics.len(), SELECTOR_ENTRY_COUNT_MAX);
        for (number, name) in selector.networks.iter().enumerate() {
            self.name(format!("{at}.networks[{number}]"), name);
        }
        for (number, text) in selector.cidrs.iter().enumerate() {
            self.cidr(format!("{at}.cidrs[{number}]"), text);
        }
        for (number, name) in selector.vnics.iter().enumerate() {
            self.name(format!("{at}.vnics[{number}]"), name);
        }
    }

    pub fn rule(&mut self, spec: &AccessRuleSpec) {
        self.name("spec.tenant", &spec.tenant);
        self.end("spec.from", &spec.from);
        self.end("spec.to", &spec.to);
    }

    fn end(&mut self, at: &str, end: &EndSelector) {
        self.reference(&format!("{at}.group"), end.group.as_deref());
        self.reference(&format!("{at}.network"), end.network.as_deref());
        self.labels(&format!("{at}.labels"), &end.labels);
        if let Some(text) = &end.cidr {
            self.cidr(format!("{at}.cidr"), text);
        }
    }

    pub fn class(&mut self, spec: &QosClassSpec) {
        self.limit("spec.qp", &spec.qp);
        self.limit("spec.vnic", &spec.vnic);
        self.limit("spec.tenant", &spec.tenant);
        if spec.priority > PRIORITY_MAX {
            self.add("spec.priority", format!("{}; 0 to {PRIORITY_MAX} are possible", spec.priority));
        }
        if !(1..=WEIGHT_MAX).contains(&spec.weight) {
            self.add("spec.weight", format!("{}; 1 to {WEIGHT_MAX} are possible", spec.weight));
        }
    }

    fn limit(&mut self, at: &str, limit: &LimitSpec) {
        match limit.rate {
            Some(rate) if !(RATE_MIN_BITS_PER_S..=RATE_MAX_BITS_PER_S).contains(&rate.0) => {
                self.add(format!("{at}.rate"), format!("{rate}; 1kbit to 10000Gbit are possible"));
            }
            None if limit.burst.is_some() => self.add(format!("{at}.burst"), "a burst without a rate"),
            _ => {}
        }
        if let Some(burst) = limit.burst.filter(|burst| !(BURST_MIN_BYTES..=BURST_MAX_BYTES).contains(&burst.0)) {
            self.add(format!("{at}.burst"), format!("{burst}; 1KiB to 16GiB are possible"));
        }
        if let Some(rate) = limit.message_rate.filter(|rate| rate.0 > MESSAGE_RATE_MAX_PER_S) {
            self.add(format!("{at}.messageRate"), format!("{rate}; 1000000M is the most"));
        }
        match limit.message_burst {
            Some(_) if limit.message_rate.is_none() => {
                self.add(format!("{at}.messageBurst"), "a burst without a rate");
            }
            Some(burst) if !(1..=MESSAGE_BURST_MAX).contains(&burst) => {
                self.add(format!("{at}.messageBurst"), format!("{burst}; 1 to {MESSAGE_BURST_MAX} are possible"));
            }
            _ => {}
        }
    }

    pub fn quota(&mut self, spec: &QuotaSpec) {
        if let Some(vnics) = spec.vnics.filter(|&vnics| vnics as usize > VNIC_COUNT_MAX) {
            self.add("spec.vnics", format!("{vnics}; a host has {VNIC_COUNT_MAX} at most"));
        }
    }

    /// Of a vNIC that is one host's own.
    pub fn no_hosts(&mut self, spec: &VnicSpec) {
        if !spec.hosts.is_empty() {
            self.add("spec.hosts", "only a vNIC that is declared for a cluster has hosts");
        }
    }

    pub fn vnic(&mut self, spec: &VnicSpec) {
        self.name("spec.network", &spec.network);
        self.reference("spec.qosClass", spec.qos_class.as_deref());
        self.reference("spec.quota", spec.quota.as_deref());
        self.count("spec.hosts", spec.hosts.len(), SELECTOR_ENTRY_COUNT_MAX);
        for (at, host) in spec.hosts.iter().enumerate() {
            self.name(format!("spec.hosts[{at}]"), host);
        }
        for (at, address) in spec.addresses.iter().enumerate() {
            if spec.addresses[..at].iter().any(|other| other.is_ipv4() == address.is_ipv4()) {
                self.add(format!("spec.addresses[{at}]"), "a vNIC has one address of a family");
            }
        }
    }
}

fn is_unicast(base: Ipv4Addr) -> bool {
    let first = base.octets()[0];
    first != 0 && first != 127 && first < 224 && !base.is_link_local()
}

/// Global unicast addresses, and unique local ones: what has another meaning (mapped, link-local,
/// multicast, …) is neither.
fn is_unicast6(base: Ipv6Addr) -> bool {
    let first = base.segments()[0];
    first & 0xe000 == 0x2000 || first & 0xfe00 == 0xfc00
}
