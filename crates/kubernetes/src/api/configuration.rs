//! Where the API server is, and who we are to it.
use super::error::ApiError;
use freeflow_cluster::{HOSTS_FILE, address_of, host_names};
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Longest file of a certificate, key or token, bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;

pub(super) fn invalid(text: String) -> ApiError {
    ApiError::Invalid(text)
}

/// Certificates, keys, tokens. Files are read when they are needed, since Kubernetes replaces them.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Source {
    File(PathBuf),
    Bytes(Vec<u8>),
}

impl Source {
    pub fn read(&self) -> Result<Vec<u8>, ApiError> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.clone()),
            Self::File(path) => {
                let failed = |error| invalid(format!("{}: {error}", path.display()));
                let mut bytes = Vec::new();
                let file = File::open(path).map_err(failed)?;
                file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
                Ok(bytes)
            }
        }
    }
}

/// The server's URL in its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    pub is_secure: bool,
    /// As it was written: the name or address that its certificate has to have.
    pub host: String,
    pub address: SocketAddr,
    /// Before all paths; empty, or begins with a slash and ends without.
    pub path: String,
}

impl Server {
    pub fn parse(text: &str, names: &str) -> Result<Self, ApiError> {
        let bad = |why: &str| invalid(format!("`{text}` is no address of a Kubernetes API server: {why}"));
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("https://HOST:PORT is wanted"))?;
        let (is_secure, default_port) = match scheme {
            "https" => (true, 443),
            "http" => (false, 80),
            _ => return Err(bad("https and http are known")),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"?#%\\".contains(&byte);
        if !rest.bytes().all(is_plain) || authority.contains('@') {
            return Err(bad("it has characters that are not understood"));
        }
        let (host, port) = match authority.rsplit_once(':') {
            // A colon within the brackets of an IPv6 address ends no host.
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| bad("its port"))?),
            _ => (authority, default_port),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let ip = address_of(host, names)
            .ok_or_else(|| bad(&format!("neither an IP address, nor a name in {HOSTS_FILE}")))?;
        let path = path.trim_end_matches('/').to_string();
        Ok(Self { is_secure, host: host.into(), address: SocketAddr::new(ip, port), path })
    }
}

/// The API server, its authority, and our identity.
#[derive(Clone)]
pub struct Configuration {
    pub(super) server: Server,
    /// The name that the server's certificate has to have, if not that of the URL.
    pub(super) server_name: Option<String>,
    pub(super) authority: Option<Source>,
    /// Certificate and key.
    pub(super) identity: Option<(Source, Source)>,
    pub(super) token: Option<Source>,
    pub(super) namespace: String,
}

impl Configuration {
    /// # Errors
    /// `Invalid`: this is no pod with a service account.
    pub fn of_pod() -> Result<Self, ApiError> {
        let variable = |name: &str| {
            let absent = || invalid(format!("{name} is not set: this is no Kubernetes pod; give --kubeconfig FILE"));
            std::env::var(name).ok().filter(|value| !value.is_empty()).ok_or_else(absent)
        };
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        Self::of_service(&host, &port, Path::new(SERVICE_ACCOUNT))
    }

    /// The same of a service's address and a service account's directory.
    fn of_service(host: &str, port: &str, directory: &Path) -> Result<Self, ApiError> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
        let server = Server::parse(&format!("https://{host}:{port}"), &host_names())?;
        let file = |name: &str| Source::File(directory.join(name));
        let (authority, token, namespace) = (file("ca.crt"), file("token"), file("namespace"));
        authority.read()?;
        token.read()?;
        let namespace = String::from_utf8(namespace.read()?).unwrap_or_default().trim().to_string();
        Ok(Self {
            server,
            server_name: None,
            authority: Some(authority),
            identity: None,
            token: Some(token),
            namespace,
        })
    }

    /// The pod's own namespace, or that of the file's context; empty if none is known.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const HOSTS: &str = "127.0.0.1 localhost\n192.0.2.1\tapi.example api # the server\n";

    #[test]
    fn servers_are_addresses_or_names_of_the_hosts_file() {
        for (text, address, path) in [
            ("https://192.0.2.7:6443", "192.0.2.7:6443", ""),
            ("https://192.0.2.7", "192.0.2.7:443", ""),
            ("https://[2001:db8::1]", "[2001:db8::1]:443", ""),
            ("https://[2001:db8::1]:6443/", "[2001:db8::1]:6443", ""),
            ("http://localhost:8001/k8s/clusters/c/", "127.0.0.1:8001", "/k8s/clusters/c"),
            ("https://API:6443", "192.0.2.1:6443", ""),
        ] {
            let server = Server::parse(text, HOSTS).expect(text);
            assert_eq!((server.address.to_string().as_str(), server.path.as_str()), (address, path), "{text}");
        }
        for text in
            ["192.0.2.7:6443", "ftp://192.0.2.7", "https://unknown", "https://u@192.0.2.7", "https://192.0.2.7/%2e"]
        {
            let error = Server::parse(text, HOSTS).expect_err(text).to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_pods_token_is_read_as_it_is_now() {
        let directory = std::env::temp_dir().join(format!("freeflow-service-account-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        assert!(Configuration::of_service("192.0.2.1", "443", &directory).is_err());
        for (name, text) in [("ca.crt", "certificate"), ("token", "one"), ("namespace", "freeflow\n")] {
            fs::write(directory.join(name), text).unwrap();
        }
        let configuration = Configuration::of_service("2001:db8::1", "443", &directory).unwrap();
        assert_eq!((configuration.namespace(), configuration.server.host.as_str()), ("freeflow", "2001:db8::1"));
        fs::write(directory.join("token"), "two").unwrap();
        assert_eq!(configuration.token.unwrap().read().unwrap(), b"two");
        fs::remove_dir_all(&directory).unwrap();
    }
}
