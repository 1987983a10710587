//! A runtime's call of the plugin: its environment, and `CNI_ARGS`.

use crate::cni::answer::{CniError, CniResult, Code, refuse};
use std::path::PathBuf;

const CONTAINER_ID_BYTES_MAX: usize = 128;
/// `IFNAMSIZ` of linux/if.h, without the zero.
const INTERFACE_BYTES_MAX: usize = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

#[derive(Clone, Debug)]
pub struct Call {
    pub command: Command,
    pub container: String,
    pub interface: String,
    pub namespace: Option<PathBuf>,
    pub pod: Pod,
}

/// A pod of Kubernetes, as its runtime names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    pub namespace: Option<String>,
    pub name: Option<String>,
}

impl Command {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "ADD" => Self::Add,
            "DEL" => Self::Del,
            "CHECK" => Self::Check,
            "GC" => Self::Gc,
            "STATUS" => Self::Status,
            "VERSION" => Self::Version,
            _ => return None,
        })
    }

    fn is_of_container(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }
}

/// `read` gives an environment variable, which counts as absent when it is empty.
///
/// # Errors
/// One that the command needs is missing, or can't be what it is.
pub fn read(read: impl Fn(&str) -> Option<String>) -> CniResult<Call> {
    let given = |name: &str| read(name).filter(|value| !value.is_empty());
    let needed = |name: &str| {
        given(name).ok_or_else(|| CniError::new(Code::Environment, format!("{name} is missing: a CNI runtime sets it")))
    };
    let text = needed("CNI_COMMAND")?;
    let Some(command) = Command::parse(&text) else {
        refuse!(Code::Environment, "CNI_COMMAND={text:?} is none of ADD, DEL, CHECK, GC, STATUS and VERSION");
    };
    let mut call = Call {
        command,
        container: String::new(),
        interface: String::new(),
        namespace: given("CNI_NETNS").map(PathBuf::from),
        pod: Pod::default(),
    };
    if !command.is_of_container() {
        return Ok(call);
    }
    call.container = needed("CNI_CONTAINERID")?;
    call.interface = needed("CNI_IFNAME")?;
    if !is_identifier(&call.container) || call.container.len() > CONTAINER_ID_BYTES_MAX {
        refuse!(Code::Environment, "CNI_CONTAINERID={:?} can't be a container's id", call.container);
    }
    if !is_interface_name(&call.interface) {
        refuse!(Code::Environment, "CNI_IFNAME={:?} can't be an interface's name", call.interface);
    }
    if command != Command::Del {
        needed("CNI_NETNS")?;
        call.pod = pod(&given("CNI_ARGS").unwrap_or_default())?;
    }
    Ok(call)
}

/// Of a container's id and a network configuration's name: letters, digits, `.`, `_` and `-`, the first a letter or
/// a digit.
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|letter| letter.is_ascii_alphanumeric() || "._-".contains(letter))
}

fn is_interface_name(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_graphic() && !"/:".contains(letter);
    (1..=INTERFACE_BYTES_MAX).contains(&text.len()) && text != "." && text != ".." && text.chars().all(is_plain)
}

/// Of `CNI_ARGS`: `KEY=VALUE;…`.
fn pod(text: &str) -> CniResult<Pod> {
    let mut pairs = Vec::new();
    for part in text.split(';').filter(|part| !part.is_empty()) {
        let Some(pair) = part.split_once('=') else {
            refuse!(Code::Environment, "CNI_ARGS: {part:?} is no KEY=VALUE");
        };
        pairs.push(pair);
    }
    let ignores_unknown =
        pairs.iter().any(|(key, value)| *key == "IgnoreUnknown" && ["1", "true", "True", "TRUE"].contains(value));
    let mut pod = Pod::default();
    for (key, value) in pairs {
        let field = match key {
            "K8S_POD_NAMESPACE" => &mut pod.namespace,
            "K8S_POD_NAME" => &mut pod.name,
            "IgnoreUnknown" | "K8S_POD_INFRA_CONTAINER_ID" | "K8S_POD_UID" => continue,
            _ if ignores_unknown => continue,
            _ => refuse!(Code::Environment, "CNI_ARGS: the key {key:?} is unknown, and IgnoreUnknown=1 is not there"),
        };
        if field.replace(value.to_string()).is_some() {
            refuse!(Code::Environment, "CNI_ARGS has {key} twice");
        }
    }
    Ok(pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> CniResult<Call> {
        read(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
    }

    const ADD: [(&str, &str); 4] =
        [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c-1_x.y"), ("CNI_NETNS", "/run/netns/x"), ("CNI_IFNAME", "eth0")];

    fn add(name: &'static str, value: &'static str) -> CniResult<Call> {
        let others = ADD.into_iter().filter(|(known, _)| *known != name);
        of(&others.chain([(name, value)]).collect::<Vec<_>>())
    }

    #[test]
    fn a_call_needs_what_its_command_needs() {
        assert_eq!(of(&ADD).unwrap().command, Command::Add);
        for (missing, _) in ADD {
            let without: Vec<_> = ADD.into_iter().filter(|(name, _)| *name != missing).collect();
            let error = of(&without).unwrap_err();
            assert!(error.code == Code::Environment && error.to_string().contains(missing), "{error}");
        }
        for command in ["GC", "STATUS", "VERSION"] {
            assert!(of(&[("CNI_COMMAND", command)]).is_ok(), "{command}");
        }
        let del: Vec<_> = ADD.into_iter().filter(|(name, _)| *name != "CNI_NETNS").skip(1).collect();
        let del = of(&[vec![("CNI_COMMAND", "DEL")], del].concat()).unwrap();
        assert_eq!((del.command, del.namespace), (Command::Del, None));
        for bad in ["", "add", "UPDATE"] {
            assert_eq!(of(&[("CNI_COMMAND", bad)]).unwrap_err().code, Code::Environment);
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for bad in ["../x", "a/b", "-a", ".a", "a b", "ä"] {
            assert!(add("CNI_CONTAINERID", bad).is_err(), "{bad}");
        }
        for bad in ["a/b", "a:b", "a b", "..", ".", "sixteen-letters-"] {
            assert!(add("CNI_IFNAME", bad).is_err(), "{bad}");
        }
        assert!(add("CNI_IFNAME", "fifteen-letters").is_ok());
    }

    #[test]
    fn a_pod_is_named_once() {
        let kubelet = "IgnoreUnknown=1;K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=web-0;K8S_POD_UID=u;Other=x";
        let pod = add("CNI_ARGS", kubelet).unwrap().pod;
        assert_eq!(pod, Pod { namespace: Some("team-a".into()), name: Some("web-0".into()) });
        for bad in ["Other=x", "K8S_POD_NAMESPACE=a;K8S_POD_NAMESPACE=b", "IgnoreUnknown=1;x"] {
            assert_eq!(add("CNI_ARGS", bad).unwrap_err().code, Code::Environment, "{bad}");
        }
    }
}
