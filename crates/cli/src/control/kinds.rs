//! The kinds of objects that can be declared, by all the names that people give them.

use crate::failure::{Failure, Result};
use freeflow_orchestrator::objects::ObjectKind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// As `kind` has it.
    pub name: &'static str,
    /// In paths.
    pub plural: &'static str,
    /// As hosts of a cluster tell of it, which is less.
    pub is_clusters: bool,
    pub short: &'static [&'static str],
}

/// In the order in which they can be deleted: whoever names another comes before it.
pub const KINDS: [Kind; 7] = [
    entry("AccessRule", "accessrules", &["rule", "rules"]),
    entry("Group", "groups", &[]),
    entry("Vnic", "vnics", &["nic", "nics"]),
    entry("Network", "networks", &["net", "nets"]),
    entry("Quota", "quotas", &[]),
    entry("QosClass", "qosclasses", &["qos"]),
    entry("Host", "hosts", &[]),
];

const fn entry(name: &'static str, plural: &'static str, short: &'static [&'static str]) -> Kind {
    Kind { name, plural, is_clusters: false, short }
}

impl Kind {
    /// `qosclass`: in what this command prints.
    pub fn singular(&self) -> String {
        self.name.to_ascii_lowercase()
    }

    /// The kind that a word on the command line means.
    pub fn named(word: &str) -> Result<Self> {
        let word = word.to_ascii_lowercase();
        let is_it = |kind: &&Kind| {
            kind.plural == word || kind.singular() == word || kind.short.iter().any(|short| *short == word)
        };
        KINDS.iter().find(is_it).copied().ok_or_else(|| {
            let all: Vec<String> = KINDS.iter().map(Kind::singular).collect();
            Failure::new(format!("no kind is called {word:?}; there are: {}", all.join(", "))).with_code(2)
        })
    }

    /// The entry of a kind.
    pub fn of(kind: ObjectKind) -> Self {
        *KINDS.iter().find(|entry| entry.name == kind.name()).expect("each kind is in the table")
    }

    /// Its place in the order of deletion.
    pub fn rank(&self) -> usize {
        KINDS.iter().position(|kind| kind == self).unwrap_or(KINDS.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_many_names() {
        for (word, name) in [
            ("Network", "Network"),
            ("networks", "Network"),
            ("NET", "Network"),
            ("qos", "QosClass"),
            ("QosClasses", "QosClass"),
            ("rule", "AccessRule"),
            ("vnics", "Vnic"),
            ("host", "Host"),
        ] {
            assert_eq!(Kind::named(word).unwrap().name, name, "{word}");
        }
        for bad in ["", "pod", "net work", "networkss"] {
            assert!(Kind::named(bad).unwrap_err().to_string().contains("there are: accessrule"), "{bad}");
        }
    }

    #[test]
    fn each_kind_of_object_has_an_entry() {
        for kind in ObjectKind::ALL {
            assert_eq!(Kind::of(*kind).plural, kind.plural());
        }
        assert_eq!(KINDS.len(), ObjectKind::ALL.len());
    }
}
