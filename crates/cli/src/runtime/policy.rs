//! The vNIC of a container that `freeflow runtime` starts, and who may choose it.
//!
//! Invariant: an image chooses no network and no vNIC, as with CDI. The arguments of the runtime are the engine's
//! configuration. An annotation is the caller's in Docker and containerd; podman and CRI-O copy an image's. A pod's is
//! that of whoever may make pods, who is no administrator of the host: its names have to be listed. A
//! container's environment is the caller's or the image's, and the two can't be distinguished: the host's
//! administrator has to list the names that it may give.

use crate::failure::{Context, Result, fail};
use crate::record::check_name;
use freeflow_hostnet::cdi::Kind;
use rustix::fs::{FileType, Mode, OFlags, fstat};
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The host's settings of the runtime.
pub const SETTINGS: &str = "/etc/freeflow/runtime.json";
const SETTINGS_BYTES_MAX: u64 = 64 << 10;
const NETWORK_ANNOTATION: &str = "freeflow.io/network";
const VNIC_ANNOTATION: &str = "freeflow.io/vnic";
const NETWORK_VARIABLE: &str = "FREEFLOW_NETWORK";
const VNIC_VARIABLE: &str = "FREEFLOW_VNIC";
/// Kubernetes' engines say by these that a container is a pod's first, which runs no program of anybody's.
const CONTAINERD_SANDBOX: &str = "io.kubernetes.cri.container-type";
const CRIO_SANDBOX: &str = "io.kubernetes.cri-o.ContainerType";
/// Before all annotations that Kubernetes' engines make of their own.
const POD_ANNOTATIONS: &str = "io.kubernetes.";
/// A bundle's folder of the engines that copy an image's annotations (podman, buildah, CRI-O).
const STORAGE_BUNDLE: &str = "userdata";

/// Names that a source may give; `*` is every one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Names {
    networks: Vec<String>,
    vnics: Vec<String>,
}

impl Names {
    fn all() -> Self {
        Self { networks: vec!["*".into()], vnics: vec!["*".into()] }
    }

    fn have(&self, device: &Device) -> bool {
        let names = match device.kind {
            Kind::Network => &self.networks,
            Kind::Vnic => &self.vnics,
        };
        names.iter().any(|name| name == "*" || *name == device.name)
    }
}

/// Content of the settings file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The runtime that starts containers.
    pub runtime: Option<PathBuf>,
    /// `None`: all, but for pods.
    annotation: Option<Names>,
    environment: Names,
}

impl Settings {
    /// Of a file that root alone can change; the defaults where there is no file at the usual place.
    pub fn read(asked: Option<&Path>) -> Result<Self> {
        let path = asked.unwrap_or(Path::new(SETTINGS));
        let Some(value) = Self::value(asked)? else { return Ok(Self::default()) };
        // A list of values by their position is no setting that anybody would understand.
        let is_object = |value: Option<&Value>| value.is_none_or(Value::is_object);
        if !value.is_object() || ![value.get("annotation"), value.get("environment")].into_iter().all(is_object) {
            fail!("{}: settings, annotation and environment have to be objects", path.display());
        }
        let settings: Self = serde_json::from_value(value).context(path.display())?;
        if settings.runtime.as_ref().is_some_and(|runtime| !runtime.is_absolute()) {
            fail!("{}: runtime has to be an absolute path", path.display());
        }
        Ok(settings)
    }

    /// The same for containers that run already: they can be stopped whatever else is wrong in the file.
    pub fn read_as_far_as_it_goes(asked: Option<&Path>) -> Self {
        let value = Self::value(asked).ok().flatten().unwrap_or_default();
        let runtime = value["runtime"].as_str().map(PathBuf::from).filter(|runtime| runtime.is_absolute());
        Self { runtime, ..Self::default() }
    }

    /// Names that an annotation may give.
    fn annotation_names(&self, configuration: &Value) -> Names {
        let annotations = configuration["annotations"].as_object();
        let is_pod = annotations.is_some_and(|all| all.keys().any(|key| key.starts_with(POD_ANNOTATIONS)));
        let unlisted = || if is_pod { Names::default() } else { Names::all() };
        self.annotation.clone().unwrap_or_else(unlisted)
    }

    fn value(asked: Option<&Path>) -> Result<Option<Value>> {
        let path = asked.unwrap_or(Path::new(SETTINGS));
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) if asked.is_none() => return Ok(None),
            opened => opened.context(path.display())?,
        };
        let status = fstat(&file).context(path.display())?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            fail!("{} is no file", path.display());
        }
        if status.st_uid != 0 || status.st_mode & 0o022 != 0 {
            fail!("{} can be changed by others than root: chown root, chmod go-w", path.display());
        }
        let mut text = Vec::new();
        File::from(file).take(SETTINGS_BYTES_MAX).read_to_end(&mut text).context(path.display())?;
        Ok(Some(serde_json::from_slice(&text).context(path.display())?))
    }
}

/// A network or a vNIC, as a CDI device names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub kind: Kind,
    pub name: String,
}

impl Device {
    pub fn new(kind: Kind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Network => write!(f, "the network {}", self.name),
            Kind::Vnic => write!(f, "the vNIC {}", self.name),
        }
    }
}

/// Where a container's configuration names a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Annotation,
    Environment,
}

/// Devices in words.
pub fn names_of(devices: &[Device]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

/// Devices that a configuration names, with the name's place. Names are separated by commas.
fn named(configuration: &Value) -> Vec<(Source, &'static str, Device)> {
    let mut all = Vec::new();
    let mut add = |source, place, kind, names: &str| {
        all.extend(names.split(',').map(|name| (source, place, Device::new(kind, name))));
    };
    for (kind, annotation) in [(Kind::Network, NETWORK_ANNOTATION), (Kind::Vnic, VNIC_ANNOTATION)] {
        if let Some(names) = configuration["annotations"][annotation].as_str() {
            add(Source::Annotation, annotation, kind, names);
        }
    }
    let environment = configuration["process"]["env"].as_array().into_iter().flatten().filter_map(Value::as_str);
    for (variable, names) in environment.filter_map(|word| word.split_once('=')) {
        match variable {
            NETWORK_VARIABLE => add(Source::Environment, NETWORK_VARIABLE, Kind::Network, names),
            VNIC_VARIABLE => add(Source::Environment, VNIC_VARIABLE, Kind::Vnic, names),
            _ => {}
        }
    }
    all
}

/// Of containerd's own annotation where that is the engine: others copy an image's.
fn is_sandbox(configuration: &Value, copies_annotations: bool) -> bool {
    let annotation = if copies_annotations { CRIO_SANDBOX } else { CONTAINERD_SANDBOX };
    configuration["annotations"][annotation] == "sandbox"
}

/// The devices that a container gets. None: a pod's sandbox, which needs none.
///
/// `given` are the devices that are decided already: by the runtime's arguments, or by CDI devices of the same
/// container. `fallback` is the network of a container for which nothing decides.
///
/// # Errors
/// The configuration names another device, or one that its source may not give.
pub fn devices(
    settings: &Settings,
    given: Vec<Device>,
    configuration: &Value,
    bundle: &Path,
    fallback: impl FnOnce() -> Result<String>,
) -> Result<Vec<Device>> {
    let copies_annotations = bundle.file_name().is_some_and(|name| name == STORAGE_BUNDLE);
    if is_sandbox(configuration, copies_annotations) {
        return Ok(Vec::new());
    }
    // The first source that names any decides.
    let (mut chosen, mut by) = (given, None);
    let is_given = !chosen.is_empty();
    for (source, place, device) in named(configuration) {
        check_name(&device.name)?;
        if is_given || by.is_some_and(|by| by != source) {
            if !chosen.contains(&device) {
                let decided = if is_given { "the engine's configuration or a CDI device" } else { "an annotation" };
                let chosen = names_of(&chosen);
                fail!("{place} names {device} for this container, and not {chosen}: {decided} has decided");
            }
            continue;
        }
        by = Some(source);
        match source {
            Source::Annotation if copies_annotations => fail!(
                "{place} names {device}, which the image's author may have done: this engine copies an image's \
                 annotations; use --device {}={}",
                device.kind.name(),
                device.name
            ),
            Source::Annotation if !settings.annotation_names(configuration).have(&device) => {
                fail!("{place} names {device}, which annotations may not: see {SETTINGS}")
            }
            Source::Environment if !settings.environment.have(&device) => fail!(
                "{place} names {device}, which the image's author may have done; use the annotation {}, a runtime of \
                 that network, or list the name in {SETTINGS}",
                if device.kind == Kind::Network { NETWORK_ANNOTATION } else { VNIC_ANNOTATION }
            ),
            _ => chosen.push(device),
        }
    }
    if chosen.is_empty() {
        chosen.push(Device::new(Kind::Network, &fallback()?));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn network(name: &str) -> Device {
        Device::new(Kind::Network, name)
    }

    fn of(settings: &str, given: Option<Device>, configuration: Value) -> Result<Option<Device>> {
        all_of(settings, given.into_iter().collect(), configuration).map(|mut devices| devices.pop())
    }

    fn all_of(settings: &str, given: Vec<Device>, configuration: Value) -> Result<Vec<Device>> {
        let bundle = Path::new("/run/engine/task/id");
        devices(&serde_json::from_str(settings).unwrap(), given, &configuration, bundle, || Ok("default".into()))
    }

    fn refusal<T: fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_caller_chooses_by_annotation_and_an_image_by_nothing() {
        let annotated = json!({"annotations": {"freeflow.io/network": "red"}});
        let environment = json!({"process": {"env": ["PATH=/bin", "FREEFLOW_NETWORK=red"]}});
        assert_eq!(of("{}", None, annotated.clone()).unwrap(), Some(network("red")));
        assert_eq!(of("{}", None, json!({})).unwrap(), Some(network("default")));
        assert!(refusal(of("{}", None, environment.clone())).contains("the image's author"));
        let lists = r#"{"environment": {"networks": ["red"]}, "annotation": {"networks": ["blue"]}}"#;
        assert_eq!(of(lists, None, environment).unwrap(), Some(network("red")));
        assert!(refusal(of(lists, None, annotated.clone())).contains("annotations may not"));
        // podman copies an image's annotations into its bundle.
        let podman = Path::new("/var/lib/containers/storage/overlay-containers/id/userdata");
        let refused = devices(&Settings::default(), Vec::new(), &annotated, podman, || Ok("default".into()))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("--device freeflow.io/net=red"), "{refused}");
        let vnic = json!({"annotations": {"freeflow.io/vnic": "database"}});
        assert_eq!(of("{}", None, vnic).unwrap(), Some(Device::new(Kind::Vnic, "database")));
    }

    #[test]
    fn arguments_and_cdi_decide_alone() {
        let red = json!({"annotations": {"freeflow.io/network": "red"}});
        assert_eq!(of("{}", Some(network("red")), red.clone()).unwrap(), Some(network("red")));
        assert!(refusal(of("{}", Some(network("blue")), red)).contains("not the network blue"));
        let environment = json!({"process": {"env": ["FREEFLOW_VNIC=boss"]}});
        assert!(of("{}", Some(network("blue")), environment).is_err());
    }

    #[test]
    fn several_are_chosen_by_one_source() {
        let two = json!({"annotations": {"freeflow.io/network": "red,blue,red", "freeflow.io/vnic": "boss"}});
        let expected = [network("red"), network("blue"), network("red"), Device::new(Kind::Vnic, "boss")];
        assert_eq!(all_of("{}", Vec::new(), two.clone()).unwrap(), expected);
        let given = vec![network("red"), network("blue")];
        assert!(refusal(all_of("{}", given.clone(), two)).contains("the vNIC boss"));
        let one = json!({"annotations": {"freeflow.io/network": "blue"}});
        assert_eq!(all_of("{}", given.clone(), one).unwrap(), given);
        let listed = r#"{"environment": {"networks": ["red", "blue"]}}"#;
        let environment = json!({"process": {"env": ["FREEFLOW_NETWORK=blue,red"]}});
        assert_eq!(all_of(listed, Vec::new(), environment).unwrap(), [network("blue"), network("red")]);
        let some_listed = json!({"process": {"env": ["FREEFLOW_NETWORK=red,green"]}});
        assert!(all_of(listed, Vec::new(), some_listed).is_err());
        let both =
            json!({"annotations": {"freeflow.io/network": "red"}, "process": {"env": ["FREEFLOW_NETWORK=blue"]}});
        assert!(refusal(all_of(listed, Vec::new(), both)).contains("an annotation has decided"));
    }

    #[test]
    fn bad_names_are_refused() {
        for bad in ["", "-x", "../red", "a b", "red\n", "red,", ",red", "red, blue"] {
            assert!(of("{}", None, json!({"annotations": {"freeflow.io/network": bad}})).is_err(), "{bad:?}");
        }
        // Of another form than an engine's: nothing is named.
        assert_eq!(of("{}", None, json!({"annotations": [], "process": 7})).unwrap(), Some(network("default")));
    }

    #[test]
    fn a_sandbox_gets_none() {
        let sandbox = json!({"annotations": {"io.kubernetes.cri.container-type": "sandbox"}});
        assert_eq!(of("{}", None, sandbox.clone()).unwrap(), None);
        assert_eq!(of("{}", Some(network("red")), sandbox.clone()).unwrap(), None);
        // podman copies an image's annotations.
        let podman = devices(&Settings::default(), vec![network("red")], &sandbox, Path::new("/x/userdata"), || {
            Ok("default".into())
        });
        assert_eq!(podman.unwrap(), [network("red")]);
    }

    #[test]
    fn a_pod_names_what_is_listed() {
        let pod = |name: &str| json!({"annotations": {"freeflow.io/network": name, "io.kubernetes.cri.container-type": "container"}});
        assert!(refusal(of("{}", None, pod("red"))).contains("annotations may not"));
        assert!(of(r#"{"environment": {"networks": ["red"]}}"#, None, pod("red")).is_err());
        assert_eq!(of(r#"{"annotation": {"networks": ["red"]}}"#, None, pod("red")).unwrap(), Some(network("red")));
    }

    #[test]
    fn settings_are_strict_and_root_s() {
        let directory = std::env::temp_dir().join(format!("freeflow-runtime-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("runtime.json");
        let read = |text: &str, mode: u32| {
            use std::os::unix::fs::PermissionsExt;
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Settings::read(Some(&path))
        };
        if rustix::process::geteuid().is_root() {
            let settings = read(r#"{"runtime": "/usr/bin/runc"}"#, 0o644).unwrap();
            assert_eq!(settings.runtime, Some("/usr/bin/runc".into()));
            assert_eq!(settings.annotation, None);
            let wrong = read(r#"{"runtime": "/usr/bin/crun", "anotation": {}}"#, 0o644);
            assert!(wrong.is_err());
            assert_eq!(Settings::read_as_far_as_it_goes(Some(&path)).runtime, Some("/usr/bin/crun".into()));
            for bad in ["", "[]", r#"{"runtimes": []}"#, r#"{"runtime": "runc"}"#, r#"{"environment": [["red"]]}"#] {
                assert!(read(bad, 0o644).is_err(), "{bad}");
            }
        }
        assert!(read(r#"{"runtime": "/tmp/mine"}"#, 0o666).is_err());
        assert_eq!(Settings::read_as_far_as_it_goes(Some(&path)), Settings::default());
        assert!(Settings::read(Some(&directory)).is_err());
        assert!(Settings::read(Some(&directory.join("none"))).is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
