//! A container's bundle: its `config.json` is read, changed as a CDI device would change it, and put in place whole.

use crate::failure::{Context, Failure, Result, fail};
use crate::runtime::policy::Device;
use freeflow_hostnet::cdi::Kind;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fchmod, fchown, fstat, openat, renameat, unlinkat};
use rustix::process::{Gid, Uid};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

const CONFIGURATION: &str = "config.json";
/// Longest that is read, bytes; the hook's limit.
const CONFIGURATION_BYTES_MAX: u64 = 16 << 20;
/// First argument of our hooks.
const HOOK_NAME: &str = "freeflow";

/// An open bundle.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    directory: OwnedFd,
    pub configuration: Value,
    mode: u32,
    owner: (u32, u32),
}

impl Bundle {
    /// # Errors
    /// It is no directory by itself (a symbolic link could change under the runtime), or its `config.json` is no JSON
    /// file of a bearable size.
    pub fn open(path: &Path) -> Result<Self> {
        // Without a slash at the end, which would follow a link.
        let path: PathBuf = path.components().collect();
        let path = if path.as_os_str().is_empty() { PathBuf::from(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, &path, flags, Mode::empty())
            .context(format!("the bundle {} is no directory", path.display()))?;
        let file_path = path.join(CONFIGURATION);
        // NONBLOCK: a FIFO would keep us waiting.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&directory, CONFIGURATION, flags, Mode::empty()).context(file_path.display())?;
        let status = fstat(&file).context(file_path.display())?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            fail!("{} is no file", file_path.display());
        }
        let mut text = Vec::new();
        File::from(file).take(CONFIGURATION_BYTES_MAX + 1).read_to_end(&mut text).context(file_path.display())?;
        if text.len() as u64 > CONFIGURATION_BYTES_MAX {
            fail!("{} is larger than {} MiB", file_path.display(), CONFIGURATION_BYTES_MAX >> 20);
        }
        let configuration: Value = serde_json::from_slice(&text).context(file_path.display())?;
        if !configuration.is_object() {
            fail!("{} is no container's configuration", file_path.display());
        }
        Ok(Self {
            path,
            directory,
            configuration,
            mode: status.st_mode & 0o7777,
            owner: (status.st_uid, status.st_gid),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the changed configuration in place of the old one, whole or not at all.
    pub fn write(&self) -> Result<()> {
        let what = format!("can't write {}", self.path.join(CONFIGURATION).display());
        let temporary = format!(".config.json.freeflow-{}", std::process::id());
        let text = serde_json::to_vec(&self.configuration).expect("JSON is encodable");
        // Of a process with this number that was killed.
        let _ = unlinkat(&self.directory, temporary.as_str(), AtFlags::empty());
        let put = || -> std::io::Result<()> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = openat(&self.directory, temporary.as_str(), flags, Mode::from(0o600))?;
            fchown(&fd, Some(Uid::from_raw(self.owner.0)), Some(Gid::from_raw(self.owner.1)))?;
            fchmod(&fd, Mode::from(self.mode))?;
            File::from(fd).write_all(&text)?;
            Ok(renameat(&self.directory, temporary.as_str(), &self.directory, CONFIGURATION)?)
        };
        put()
            .inspect_err(|_| {
                let _ = unlinkat(&self.directory, temporary.as_str(), AtFlags::empty());
            })
            .context(what)
    }
}

/// The vNICs that a configuration's hooks make: the engine has injected our CDI devices, or we were here before. An
/// image gives no hooks.
pub fn devices_of(configuration: &Value) -> Vec<Device> {
    let hooks = configuration["hooks"]["createRuntime"].as_array().into_iter().flatten();
    let device = |hook: &Value| {
        let words: Vec<&str> = hook["args"].as_array()?.iter().filter_map(Value::as_str).collect();
        let at = words.iter().position(|word| *word == "hook").filter(|_| words.first() == Some(&HOOK_NAME))?;
        let kind = [Kind::Network, Kind::Vnic].into_iter().find(|kind| words.get(at + 1) == Some(&kind.option()))?;
        Some(Device::new(kind, *words.get(at + 2)?))
    };
    hooks.filter_map(device).collect()
}

/// An object's field, which is made if it is absent or null.
fn field<'a>(object: &'a mut Map<String, Value>, name: &str, empty: Value) -> &'a mut Value {
    let value = object.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = empty;
    }
    value
}

fn object<'a>(value: &'a mut Value, what: &str) -> Result<&'a mut Map<String, Value>> {
    value.as_object_mut().ok_or_else(|| Failure::new(format!("the container's configuration: {what} is no object")))
}

fn list<'a>(value: &'a mut Value, what: &str) -> Result<&'a mut Vec<Value>> {
    value.as_array_mut().ok_or_else(|| Failure::new(format!("the container's configuration: {what} is no list")))
}

/// Applies a CDI device's `containerEdits`, of those kinds that ours have.
///
/// # Errors
/// The configuration is not a Linux container's.
pub fn apply(configuration: &mut Value, edits: &Value) -> Result<()> {
    let top = object(configuration, "all of it")?;
    if !top.get("linux").is_some_and(Value::is_object) {
        fail!("the container's configuration is not a Linux container's");
    }
    let hooks = object(field(top, "hooks", json!({})), "hooks")?;
    for hook in edits["hooks"].as_array().into_iter().flatten() {
        let mut hook = hook.clone();
        let stage = hook.as_object_mut().and_then(|hook| hook.remove("hookName"));
        let stage = stage.as_ref().and_then(Value::as_str).expect("our hooks name their stage");
        list(field(hooks, stage, json!([])), stage)?.push(hook);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_hostnet::cdi::container_edits;
    use freeflow_hostnet::run_dir::RunDir;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn edits() -> Value {
        let run_dir = RunDir::new(Path::new("/run/freeflow")).unwrap();
        container_edits(&run_dir, Path::new("/usr/bin/freeflow"), (Kind::Network, "red"))
    }

    #[test]
    fn the_edits_are_those_of_cdi() {
        let engine = json!({"path": "/usr/bin/dockerd", "args": ["libnetwork-setkey"]});
        let mut configuration = json!({
            "ociVersion": "1.0.2", "future": {"a": 1.5}, "hooks": {"prestart": [engine], "poststop": null},
            "linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}}});
        assert_eq!(devices_of(&configuration), []);
        apply(&mut configuration, &edits()).unwrap();
        assert_eq!(devices_of(&configuration), [Device::new(Kind::Network, "red")]);
        assert_eq!(configuration["future"], json!({"a": 1.5}));
        let hooks = &configuration["hooks"];
        assert_eq!(hooks["prestart"], json!([engine]));
        for stage in ["createRuntime", "poststop"] {
            let ours = &hooks[stage][0];
            assert_eq!(ours["path"], "/usr/bin/freeflow");
            assert_eq!(ours["env"][0], "PATH=/usr/sbin:/usr/bin:/sbin:/bin");
            assert!(ours.get("hookName").is_none() && hooks[stage].as_array().unwrap().len() == 1);
        }
        assert_eq!(configuration["linux"], json!({"resources": {"devices": [{"allow": false, "access": "rwm"}]}}));
        apply(&mut configuration, &edits()).unwrap();
        assert_eq!(devices_of(&configuration).len(), 2, "the same network twice");
    }

    #[test]
    fn configurations_of_another_form_are_refused() {
        for text in [
            "{}",
            r#"{"linux": 7}"#,
            r#"{"linux": {}, "hooks": []}"#,
            r#"{"linux": {}, "hooks": {"createRuntime": {}}}"#,
        ] {
            assert!(apply(&mut serde_json::from_str(text).unwrap(), &edits()).is_err(), "{text}");
        }
        let foreign =
            json!({"hooks": {"createRuntime": [{"args": ["other", "hook", "--network", "red"]}, {"args": 7}]}});
        assert_eq!(devices_of(&foreign), []);
    }

    #[test]
    fn a_bundle_is_opened_without_links_and_written_whole() {
        let directory = std::env::temp_dir().join(format!("freeflow-bundle-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let path = directory.join("bundle");
        fs::create_dir_all(&path).unwrap();
        let file = path.join(CONFIGURATION);
        let reason = |path: &Path| Bundle::open(path).unwrap_err().to_string();
        assert!(reason(&path).contains("config.json"));
        for bad in ["", "{", "[]", "\"x\"", &"[".repeat(100_000)] {
            fs::write(&file, bad).unwrap();
            assert!(Bundle::open(&path).is_err(), "{}", &bad[..bad.len().min(9)]);
        }
        fs::File::create(&file).unwrap().set_len(CONFIGURATION_BYTES_MAX + 1).unwrap();
        assert!(reason(&path).contains("larger than 16 MiB"));
        fs::write(&file, r#"{"linux": {}}"#).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let mut bundle = Bundle::open(&path).unwrap();
        apply(&mut bundle.configuration, &edits()).unwrap();
        bundle.write().unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(devices_of(&Bundle::open(&path).unwrap().configuration).len(), 1);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "nothing else is left in the bundle");
        let link = directory.join("link");
        symlink(&path, &link).unwrap();
        assert!(Bundle::open(&link).is_err() && Bundle::open(&link.join("")).is_err());
        fs::rename(&file, path.join("other")).unwrap();
        symlink("other", &file).unwrap();
        assert!(Bundle::open(&path).is_err(), "a configuration by a link");
        fs::remove_dir_all(&directory).unwrap();
    }
}
