//! The cluster file: where etcd is, and who we are to it.
use crate::ClusterError;
use crate::keys::{Keys, Scope};
use freeflow_etcd::{Endpoints, EtcdStore};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// Before all keys of a cluster.
pub const DEFAULT_ROOT: &str = "/freeflow";
const ROOT_BYTES_MAX: usize = 128;

/// JSON, every field as it says; unknown fields are errors. Relative names of files are beside it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// `https://ADDRESS:PORT` of each member.
    pub etcd: Vec<String>,
    /// The authority of its certificates (PEM).
    pub cacert: Option<PathBuf>,
    /// Our certificate, by whose common name etcd knows us.
    pub cert: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// Before all keys of the cluster.
    #[serde(default = "default_root")]
    pub root: String,
    /// Whether packets between the hosts are sealed, as in a peers file: the same for all.
    #[serde(default)]
    pub wire: Wire,
    /// Whether this host gives all hosts their blocks of addresses: one at least has to.
    #[serde(default)]
    pub controller: bool,
    /// Of a controller that admits hosts: what it signs and gives rights with.
    pub authority: Option<AuthorityFile>,
}

/// Keys that controllers alone have.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuthorityFile {
    /// The certificate of the cluster's authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The certificate of etcd's user `root`.
    pub root_cert: PathBuf,
    /// Its private key.
    pub root_key: PathBuf,
}

/// Packets to and from the other hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// As they are.
    #[default]
    Plain,
    /// Encrypted and authenticated.
    Sealed,
}

fn default_root() -> String {
    DEFAULT_ROOT.into()
}

impl ClusterFile {
    /// Reads it.
    ///
    /// # Errors
    /// `File`: it can't be read, or can't be meant.
    pub fn read(path: &Path) -> Result<Self, ClusterError> {
        let bad = |why: String| ClusterError::File(format!("the cluster file {}: {why}", path.display()));
        let text = fs::read(path).map_err(|error| bad(error.to_string()))?;
        let mut file: Self = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        for name in [&mut file.cacert, &mut file.cert, &mut file.key].into_iter().flatten() {
            *name = folder.join(&*name);
        }
        if let Some(AuthorityFile { cert, key, root_cert, root_key }) = &mut file.authority {
            for name in [cert, key, root_cert, root_key] {
                *name = folder.join(&*name);
            }
        }
        if !file.root.starts_with('/') || file.root.len() > ROOT_BYTES_MAX || file.root.trim_matches('/').is_empty() {
            return Err(bad(format!("root {:?}: write a path such as {DEFAULT_ROOT}", file.root)));
        }
        file.endpoints().map_err(|error| bad(error.to_string()))?;
        Ok(file)
    }

    /// The keys that the host of this file follows.
    pub fn scope(&self) -> Scope {
        if self.controller { Scope::Said } else { Scope::Host }
    }

    /// Whether this host admits others. Where etcd has TLS it can only with the authority's key.
    pub fn admits(&self) -> bool {
        self.controller && (self.authority.is_some() || self.cacert.is_none())
    }

    /// As etcd's root: for users and their rights.
    pub(crate) fn as_root(&self) -> Self {
        match &self.authority {
            Some(authority) => {
                let (cert, key) = (Some(authority.root_cert.clone()), Some(authority.root_key.clone()));
                Self { cert, key, ..self.clone() }
            }
            None => self.clone(),
        }
    }

    /// As who the file says; as etcd's root where it names nobody: the file of controllers before they are hosts.
    #[must_use]
    pub fn as_own(&self) -> Self {
        if self.cert.is_some() { self.clone() } else { self.as_root() }
    }

    /// Files are read again each time: certificates are changed before they expire.
    pub(crate) fn endpoints(&self) -> Result<Endpoints, ClusterError> {
        let endpoints = Endpoints::parse(&self.etcd.join(","))
            .and_then(|endpoints| endpoints.files(self.cacert.as_deref(), self.cert.as_deref(), self.key.as_deref()))
            .map_err(|error| ClusterError::File(error.to_string()))?;
        Ok(endpoints)
    }

    pub(crate) fn keys(&self) -> Keys {
        Keys::new(&self.root)
    }

    pub(crate) fn store(&self, root: &str) -> Result<EtcdStore, ClusterError> {
        Ok(EtcdStore::new(&self.endpoints()?, root)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ClusterFile, ClusterError> {
        let name = format!("freeflow-cluster-file.{}.{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).expect("written");
        let file = ClusterFile::read(&path);
        fs::remove_file(&path).expect("removed");
        file
    }

    #[test]
    fn a_file_says_where_etcd_is() {
        let file = read(r#"{"etcd": ["http://192.0.2.1:2379", "http://192.0.2.2:2379"]}"#).expect("a file");
        assert_eq!((file.root.as_str(), file.controller, file.etcd.len()), ("/freeflow", false, 2));
        for (text, word) in [
            ("{}", "etcd"),
            (r#"{"etcd": []}"#, "no etcd member"),
            (r#"{"etcd": ["192.0.2.1"]}"#, "https://"),
            (r#"{"etcd": ["http://192.0.2.1:1"], "roots": "/x"}"#, "roots"),
            (r#"{"etcd": ["http://192.0.2.1:1"], "wire": "open"}"#, "open"),
            (r#"{"etcd": ["http://192.0.2.1:1"], "root": "/"}"#, "root"),
            (r#"{"etcd": ["http://192.0.2.1:1"], "root": "x"}"#, "root"),
            (r#"{"etcd": ["https://192.0.2.1:1"], "cert": "nowhere.pem", "key": "nowhere.key"}"#, "nowhere.pem"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(word) && error.contains("cluster file"), "{text}: {error}");
        }
    }
}
