//! Where etcd's members are, and who we are to them.
use crate::error::EtcdError;
use crate::names::{HOSTS_FILE, address_of, host_names};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

/// For a connection, TLS included.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// A connection in use on which nothing comes for so long is asked whether it lives. etcd ends one that asks more often
/// than every 5 s, or while it is idle.
const KEEP_ALIVE: Duration = Duration::from_secs(6);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(3);

/// A certificate and its key, both PEM: etcd takes the certificate's common name for its user.
#[derive(Clone)]
pub struct Identity {
    /// The certificate, and those between it and etcd's authority.
    pub certificate: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
}

/// etcd's members, and the keys for them.
#[derive(Clone, Default)]
pub struct Endpoints {
    urls: Vec<Url>,
    authority: Option<Vec<u8>>,
    identity: Option<Identity>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Url {
    secure: bool,
    /// As it was written: the name or address that the member's certificate has to have.
    host: String,
    address: SocketAddr,
}

fn invalid(text: String) -> EtcdError {
    EtcdError::Invalid(text)
}

impl Url {
    fn parse(text: &str, names: &str) -> Result<Self, EtcdError> {
        let bad = |why: &str| invalid(format!("`{text}` is no address of an etcd member: {why}"));
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("https://HOST:PORT is wanted"))?;
        let secure = match scheme {
            "https" => true,
            "http" => false,
            _ => return Err(bad("https and http are known")),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| bad("it has no port"))?;
        let port: u16 = port.parse().map_err(|_| bad("it has no port"))?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let ip = address_of(bare, names)
            .ok_or_else(|| bad(&format!("neither an IP address, nor a name in {HOSTS_FILE}")))?;
        Ok(Self { secure, host: bare.into(), address: SocketAddr::new(ip, port) })
    }
}

impl Endpoints {
    /// Several URLs with commas between them, such as `https://192.0.2.1:2379,https://192.0.2.2:2379`. Names are
    /// those of `/etc/hosts`.
    ///
    /// # Errors
    /// `Invalid`: no URL, one with another scheme, without a port or with an unknown name.
    pub fn parse(urls: &str) -> Result<Self, EtcdError> {
        let names = host_names();
        let urls: Result<Vec<Url>, _> =
            urls.split(',').map(str::trim).filter(|url| !url.is_empty()).map(|url| Url::parse(url, &names)).collect();
        let urls = urls?;
        if urls.is_empty() {
            return Err(invalid("no etcd member is given".into()));
        }
        Ok(Self { urls, ..Self::default() })
    }

    /// The same keys for the members of another list.
    #[must_use]
    pub fn at(self, members: &Self) -> Self {
        Self { urls: members.urls.clone(), ..self }
    }

    /// Members have to have a certificate of this authority (PEM).
    #[must_use]
    pub fn authority(mut self, pem: Vec<u8>) -> Self {
        self.authority = Some(pem);
        self
    }

    /// The certificate that we show to them.
    #[must_use]
    pub fn identity(mut self, identity: Identity) -> Self {
        self.identity = Some(identity);
        self
    }

    /// The same from files: `--cacert`, `--cert` and `--key`.
    ///
    /// # Errors
    /// `Invalid`: a file can't be read; or one of certificate and key without the other.
    pub fn files(
        mut self,
        authority: Option<&Path>,
        certificate: Option<&Path>,
        key: Option<&Path>,
    ) -> Result<Self, EtcdError> {
        let read = |path: &Path| fs::read(path).map_err(|error| invalid(format!("{}: {error}", path.display())));
        if let Some(path) = authority {
            self.authority = Some(read(path)?);
        }
        match (certificate, key) {
            (Some(certificate), Some(key)) => {
                self.identity = Some(Identity { certificate: read(certificate)?, key: read(key)? });
            }
            (None, None) => {}
            _ => return Err(invalid("a certificate and its key are given together or not at all".into())),
        }
        Ok(self)
    }

    /// A channel to each member, which connects when it is first used. In a runtime of tokio's.
    pub(crate) fn channels(&self) -> Result<Vec<Channel>, EtcdError> {
        self.urls.iter().map(|url| self.channel(url)).collect()
    }

    fn channel(&self, url: &Url) -> Result<Channel, EtcdError> {
        if !url.secure && (self.authority.is_some() || self.identity.is_some()) {
            return Err(invalid(format!("http://{} takes no certificates: https is meant", url.address)));
        }
        let scheme = if url.secure { "https" } else { "http" };
        let problem = |error: tonic::transport::Error| {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            invalid(format!("{scheme}://{}: {error}{cause}", url.address))
        };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", url.address))
            .map_err(problem)?
            .connect_timeout(CONNECT_TIME)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_ANSWER)
            .keep_alive_while_idle(false)
            .tcp_nodelay(true);
        if url.secure {
            let mut tls = ClientTlsConfig::new().domain_name(url.host.clone());
            if let Some(pem) = &self.authority {
                tls = tls.ca_certificate(Certificate::from_pem(pem));
            }
            if let Some(Identity { certificate, key }) = &self.identity {
                tls = tls.identity(tonic::transport::Identity::from_pem(certificate, key));
            }
            endpoint = endpoint.tls_config(tls).map_err(problem)?;
        }
        Ok(endpoint.connect_lazy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTS: &str =
        "127.0.0.1 localhost\n# 192.0.2.9 commented\n192.0.2.1\tetcd1.example etcd1 # the first\n::1 six\n";

    #[test]
    fn members_are_addresses_or_names_of_the_hosts_file() {
        for (text, address) in [
            ("https://192.0.2.7:2379", "192.0.2.7:2379"),
            ("http://[2001:db8::1]:1/", "[2001:db8::1]:1"),
            ("https://ETCD1:2379", "192.0.2.1:2379"),
            ("https://six:2379", "[::1]:2379"),
        ] {
            let url = Url::parse(text, HOSTS).expect(text);
            assert_eq!((url.address.to_string().as_str(), url.secure), (address, text.starts_with("https")), "{text}");
        }
        for text in
            ["192.0.2.7:2379", "ftp://192.0.2.7:1", "https://192.0.2.7", "https://commented:1", "https://a:99999"]
        {
            let error = Url::parse(text, HOSTS).expect_err(text).to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(Endpoints::parse(" , ").is_err());
    }

    #[test]
    fn a_certificate_needs_its_key() {
        let endpoints = Endpoints::parse("https://192.0.2.7:2379").expect("a member");
        assert!(endpoints.clone().files(None, Some(Path::new("/dev/null")), None).is_err());
        assert!(endpoints.files(Some(Path::new("/nonexistent")), None, None).is_err());
    }
}
