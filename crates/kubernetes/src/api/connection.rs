//! Connections: TCP, TLS above it, or a Unix socket.
use super::configuration::{Configuration, invalid};
use super::error::ApiError;
use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// For a connection, TLS included.
const CONNECT_TIME: Duration = Duration::from_secs(10);

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// An open connection.
pub struct Open(Box<dyn Stream>);

impl AsyncRead for Open {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(context, into)
    }
}

impl AsyncWrite for Open {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_shutdown(context)
    }
}

impl Connection for Open {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// Where connections lead; the URI of a request is not asked.
#[derive(Clone)]
pub(super) enum Target {
    Server(Arc<Configuration>),
    Socket(Arc<PathBuf>),
}

/// Certificates and keys as they are in their files now.
fn tls_config(configuration: &Configuration) -> Result<ClientConfig, ApiError> {
    let mut roots = RootCertStore::empty();
    let authority = configuration.authority.as_ref();
    let authority = authority.ok_or_else(|| invalid("no certificate-authority of the API server is given".into()))?;
    let pem = authority.read()?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| invalid(format!("the API server's authority: {error}")))?;
        roots.add(certificate).map_err(|error| invalid(format!("the API server's authority: {error}")))?;
    }
    if roots.is_empty() {
        return Err(invalid("the API server's authority has no certificate".into()));
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| invalid(error.to_string()))?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &configuration.identity else { return Ok(builder.with_no_client_auth()) };
    let bad = |error: &dyn std::fmt::Display| invalid(format!("the client's certificate: {error}"));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&certificate.read()?).collect();
    let key = PrivateKeyDer::from_pem_slice(&key.read()?).map_err(|error| bad(&error))?;
    builder.with_client_auth_cert(chain.map_err(|error| bad(&error))?, key).map_err(|error| bad(&error))
}

impl Target {
    async fn open(&self) -> Result<Open, ApiError> {
        let unreachable = |place: String| move |error: io::Error| ApiError::Unreachable(format!("{place}: {error}"));
        match self {
            Self::Socket(path) => {
                let failed = unreachable(path.display().to_string());
                Ok(Open(Box::new(UnixStream::connect(path.as_path()).await.map_err(failed)?)))
            }
            Self::Server(configuration) => {
                let server = &configuration.server;
                let place = server.address.to_string();
                let tcp = TcpStream::connect(server.address).await.map_err(unreachable(place.clone()))?;
                let _ = tcp.set_nodelay(true);
                if !server.is_secure {
                    return Ok(Open(Box::new(tcp)));
                }
                let name = configuration.server_name.as_ref().unwrap_or(&server.host).clone();
                let name = ServerName::try_from(name).map_err(|error| invalid(error.to_string()))?;
                let connector = TlsConnector::from(Arc::new(tls_config(configuration)?));
                Ok(Open(Box::new(connector.connect(name, tcp).await.map_err(unreachable(place))?)))
            }
        }
    }
}

/// For `hyper-util`, which keeps the connections.
impl tower_service::Service<Uri> for Target {
    type Response = TokioIo<Open>;
    type Error = ApiError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ApiError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let target = self.clone();
        Box::pin(async move {
            let late = |_| Err(ApiError::Unreachable(format!("no connection in {} s", CONNECT_TIME.as_secs())));
            timeout(CONNECT_TIME, target.open()).await.unwrap_or_else(late).map(TokioIo::new)
        })
    }
}
