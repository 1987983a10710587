//! Names of FreeFlow's objects for those of Kubernetes.
//!
//! | object | FreeFlow's name | its tenant |
//! |---|---|---|
//! | NAME of the namespace NS | `k8s.NS.NAME` | `k8s.NS` |
//! | NAME of the whole cluster | `k8s._.NAME` | `k8s._` |
//!
//! A namespace has no dot and no `_` in its name, so no two objects have one name. Nobody else declares objects whose
//! names begin with `k8s.`: FreeFlow refuses that.
use freeflow_orchestrator::KUBERNETES_PREFIX;
use std::fmt;

/// Longest name of an object, so that FreeFlow's is not too long with any namespace.
pub const NAME_BYTES_MAX: usize = 60;
/// In a namespace's place.
const CLUSTER: &str = "_";
const NAMESPACE_BYTES_MAX: usize = 63;

/// A text that is no name of an object or a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadName(String);

impl fmt::Display for BadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no name: 1 to {NAME_BYTES_MAX} of a-z, 0-9, '-' and '.'", self.0)
    }
}

impl std::error::Error for BadName {}

fn is_label(text: &str, bytes_max: usize) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    !text.is_empty()
        && text.len() <= bytes_max
        && text.bytes().all(|byte| is_plain(byte) || byte == b'-')
        && text.bytes().next().is_some_and(is_plain)
        && text.bytes().last().is_some_and(is_plain)
}

fn checked(name: &str) -> Result<&str, BadName> {
    let is_good = name.len() <= NAME_BYTES_MAX && name.split('.').all(|part| is_label(part, NAME_BYTES_MAX));
    if is_good { Ok(name) } else { Err(BadName(name.into())) }
}

/// FreeFlow's name of an object: of a namespace, or (`None`) of the whole cluster.
///
/// # Errors
/// One of them is no name that Kubernetes gives, or too long.
pub fn freeflow_name(namespace: Option<&str>, name: &str) -> Result<String, BadName> {
    Ok(format!("{}.{}", tenant(namespace)?, checked(name)?))
}

/// The tenant of a namespace's objects, or (`None`) of the whole cluster's.
///
/// # Errors
/// It is no name of a namespace.
pub fn tenant(namespace: Option<&str>) -> Result<String, BadName> {
    match namespace {
        Some(namespace) if !is_label(namespace, NAMESPACE_BYTES_MAX) => Err(BadName(namespace.into())),
        other => Ok(format!("{KUBERNETES_PREFIX}{}", other.unwrap_or(CLUSTER))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_objects_have_one_name() {
        let name = |namespace, name| freeflow_name(namespace, name).unwrap();
        assert_eq!(name(Some("team-a"), "red"), "k8s.team-a.red");
        assert_eq!(name(None, "red"), "k8s._.red");
        assert_ne!(name(Some("a"), "b.c"), name(Some("a-b"), "c"));
        assert_eq!(tenant(Some("team-a")).unwrap(), "k8s.team-a");
        let longest = (["n".repeat(NAMESPACE_BYTES_MAX), "x".repeat(NAME_BYTES_MAX)]).map(|text| text);
        let longest = name(Some(&longest[0]), &longest[1]);
        assert!(freeflow_orchestrator::name_is_good(&longest), "{}", longest.len());
    }

    #[test]
    fn other_texts_are_no_names() {
        for bad in ["", ".", "..", "a..b", "A", "_", "a/b", "a b", "-a", "a-", "a.", "a\n", "ä", &"x".repeat(61)] {
            assert!(freeflow_name(Some("team"), bad).is_err(), "{bad}");
        }
        for bad in ["", "_", "a.b", "A", "..", &"x".repeat(64)] {
            assert!(freeflow_name(Some(bad), "red").is_err(), "{bad}");
        }
    }
}
