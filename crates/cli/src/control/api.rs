//! The router's REST API, seen from this command: HTTP/1.1 and JSON on `RUN_DIR/api.sock`.
//!
//! The server checks everything; here answers are bounded in size and time, and its refusals become
//! failures with the causes it names. Who may do what is decided by the socket's credentials, so
//! nothing is sent about the caller.

use crate::cluster::ClusterApi;
use crate::failure::{Context as _, Failure, Result};
use freeflow_hostnet::run_dir::RunDir;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, Uri};
use serde::Deserialize;
use serde_json::Value;
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

pub const BASE: &str = "/apis/freeflow.io/v1";
/// For a path or a query (RFC 3986, section 2.1).
pub fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Of what [`encoded`] gives; `None`: of something else.
pub fn decoded(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), text.bytes());
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

/// How long the router may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest answer, and longest line of a watch, bytes.
const ANSWER_BYTES_MAX: usize = 256 << 20;
const LINE_BYTES_MAX: usize = 16 << 20;
/// Bytes read from the socket at a time.
const READ_BYTES: usize = 16 << 10;

/// Exit statuses beyond 1 (failed) and 2 (wrong usage).
pub const EXIT_REFUSED: u8 = 3;
pub const EXIT_NOT_FOUND: u8 = 4;
pub const EXIT_FORBIDDEN: u8 = 5;
/// Of many objects of a cluster some are declared, and the message says which.
pub const EXIT_PARTLY: u8 = 6;

/// Where and why an object was refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Cause {
    #[serde(default)]
    pub field: String,
    #[serde(default)]
    pub message: String,
}

/// The router's answer when it refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Refusal {
    #[serde(skip)]
    pub code: u16,
    pub reason: String,
    pub message: String,
    pub details: Details,
}

/// The object and fields concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Details {
    pub kind: Option<String>,
    pub name: Option<String>,
    /// Which of the objects that were sent, from 0.
    pub index: Option<usize>,
    pub causes: Vec<Cause>,
    /// Of a dry run: what names the object, `Vnic a`.
    pub users: Vec<String>,
}

impl Refusal {
    pub fn exit_code(&self) -> u8 {
        match self.code {
            403 => EXIT_FORBIDDEN,
            404 => EXIT_NOT_FOUND,
            400 | 409 | 422 | 507 => EXIT_REFUSED,
            _ => crate::failure::EXIT_FAILURE,
        }
    }
}

/// A refusal that came from the router, or why there is no answer at all.
#[derive(Debug)]
pub enum Trouble {
    Refused(Box<Refusal>),
    Failed(Failure),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Failed(failure) => failure,
            Trouble::Refused(refusal) => {
                let code = refusal.exit_code();
                let mut text = refusal.message;
                for cause in &refusal.details.causes {
                    let field = if cause.field.is_empty() { String::new() } else { format!("{}: ", cause.field) };
                    // A message that says it all already is not repeated.
                    if !text.contains(&cause.message) {
                        text.push_str(&format!("\n{field}{}", cause.message));
                    }
                }
                if code == EXIT_FORBIDDEN {
                    text.push_str(
                        "\nroles: root or the group freeflow-admin change everything, freeflow-tenant-NAME a tenant's \
                         groups, rules and vNICs, freeflow-viewer reads",
                    );
                }
                Failure::new(text).with_code(code)
            }
        }
    }
}

pub type Answer<T> = std::result::Result<T, Trouble>;

/// The API of one host, with a connection for each request: they are few. Or what is declared for all hosts.
pub struct Api {
    cluster: Option<RefCell<ClusterApi>>,
    socket: PathBuf,
    is_running: bool,
    up: String,
    runtime: Runtime,
    /// How long the router may take to answer, and the message after that.
    answer_timeout: Duration,
    silence: String,
}

impl Api {
    pub fn of(run_dir: &RunDir) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("the API's client")?;
        let socket = run_dir.path().join("api.sock");
        Ok(Self {
            cluster: None,
            answer_timeout: ANSWER_TIMEOUT,
            silence: format!("the router does not answer on {}; see its log", socket.display()),
            socket,
            is_running: run_dir.admin_socket().exists(),
            up: format!("freeflow{} up", run_dir.option()),
            runtime,
        })
    }

    /// The cluster's of this file, if there is one, else the host's.
    pub fn choose(run_dir: &RunDir, cluster: Option<&Path>) -> Result<Self> {
        let cluster = cluster.map(|path| ClusterApi::open(path).map(RefCell::new)).transpose()?;
        Ok(Self { cluster, ..Self::of(run_dir)? })
    }

    /// Whether it is about all hosts of a cluster.
    pub fn is_clusters(&self) -> bool {
        self.cluster.is_some()
    }

    /// Another time limit, and what is said when it has passed.
    pub fn with_limit(self, answer_timeout: Duration, silence: &str) -> Self {
        Self { answer_timeout, silence: silence.into(), ..self }
    }

    pub fn get(&self, path: &str) -> Answer<Value> {
        self.ask(Method::GET, path, None)
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer<Value> {
        self.ask(Method::POST, path, Some(body))
    }

    pub fn put(&self, path: &str, body: &Value) -> Answer<Value> {
        self.ask(Method::PUT, path, Some(body))
    }

    pub fn delete(&self, path: &str) -> Answer<Value> {
        self.ask(Method::DELETE, path, None)
    }

    fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Answer<Value> {
        match &self.cluster {
            Some(cluster) => cluster.borrow_mut().answer(&method, path, body),
            None => self.runtime.block_on(self.exchange(method, path, body)),
        }
    }

    /// Calls `event` for each line of a watch until it wants no more, or the router ends it (`Ok`).
    pub fn watch(&self, path: &str, mut event: impl FnMut(Value) -> Answer<bool>) -> Answer<()> {
        if let Some(cluster) = &self.cluster {
            return cluster.borrow_mut().watch(path, event);
        }
        self.runtime.block_on(async {
            let response = self.send(Method::GET, path, None).await?;
            let mut body = response.into_body();
            let mut pending = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.context("the router broke the watch off")?;
                let Ok(data) = frame.into_data() else { continue };
                pending.extend_from_slice(&data);
                let Some(end) = pending.iter().rposition(|&byte| byte == b'\n') else {
                    if pending.len() > LINE_BYTES_MAX {
                        return Err(Failure::new("the router sent an event that has no end").into());
                    }
                    continue;
                };
                let rest = pending.split_off(end + 1);
                for line in pending.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
                    let value = serde_json::from_slice(line).context("the router's event")?;
                    if !event(value)? {
                        return Ok(());
                    }
                }
                pending = rest;
            }
            Ok(())
        })
    }

    async fn exchange(&self, method: Method, path: &str, body: Option<&Value>) -> Answer<Value> {
        let whole = async {
            let response = self.send(method, path, body).await?;
            let bytes = collect(response.into_body()).await?;
            Ok(serde_json::from_slice(&bytes).context("the router's answer")?)
        };
        match tokio::time::timeout(self.answer_timeout, whole).await {
            Ok(answer) => answer,
            Err(_) => Err(self.stuck().into()),
        }
    }

    fn stuck(&self) -> Failure {
        Failure::new(self.silence.clone())
    }

    /// Sends a request; an answer that is a refusal is one here.
    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Answer<Response<Incoming>> {
        let stream = self.connect().await?;
        let begun = async {
            let (mut sender, connection) =
                http1::handshake(Stream(stream)).await.map_err(|error| self.broken(&error))?;
            // It ends with the sender, or the socket.
            tokio::task::spawn(connection);
            let uri: Uri = path.parse().context(format!("{path:?}"))?;
            let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
            let request = Request::builder()
                .method(method)
                .uri(uri)
                .header("host", "freeflow")
                .header("accept", "application/json")
                .header("content-type", "application/json")
                .header("user-agent", concat!("freeflow/", env!("CARGO_PKG_VERSION")))
                .body(Full::new(bytes))
                .context("the request")?;
            sender.send_request(request).await.map_err(|error| self.broken(&error))
        };
        let response = tokio::time::timeout(self.answer_timeout, begun).await.map_err(|_| self.stuck())??;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let bytes = tokio::time::timeout(self.answer_timeout, collect(response.into_body()))
            .await
            .map_err(|_| self.stuck())??;
        Err(self.refusal(status, &bytes))
    }

    fn broken(&self, error: &hyper::Error) -> Failure {
        Failure::new(format!("the router broke off on {}: {error}; see its log", self.socket.display()))
    }

    fn refusal(&self, status: StatusCode, bytes: &[u8]) -> Trouble {
        match serde_json::from_slice::<Refusal>(bytes) {
            Ok(refusal) if !refusal.message.is_empty() => {
                Trouble::Refused(Box::new(Refusal { code: status.as_u16(), ..refusal }))
            }
            _ => Trouble::Failed(Failure::new(format!(
                "the router answered {status} and does not say why: it is of another version than this command; restart it \
                 (its own freeflow down, then {})",
                self.up
            ))),
        }
    }

    async fn connect(&self) -> Result<UnixStream> {
        let error = match UnixStream::connect(&self.socket).await {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let socket = self.socket.display();
        Err(match error.kind() {
            io::ErrorKind::PermissionDenied => Failure::new(format!(
                "no permission to reach {socket}; it takes root or one of the groups freeflow-admin, \
                 freeflow-tenant-NAME and freeflow-viewer"
            ))
            .with_code(EXIT_FORBIDDEN),
            io::ErrorKind::NotFound if self.is_running => Failure::new(format!(
                "the router that runs has no API ({socket} is missing): it is older than this command; restart it with: {}",
                self.up
            )),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Failure::new(format!(
                "no router is running in {}; bring the host up with: {}",
                self.socket.parent().unwrap_or(&self.socket).display(),
                self.up
            )),
            _ => Failure::new(format!("{socket}: {error}")),
        })
    }
}

async fn collect(body: Incoming) -> Result<Bytes> {
    Ok(Limited::new(body, ANSWER_BYTES_MAX).collect().await.context("the router's answer")?.to_bytes())
}

/// The stream that `hyper` reads and writes: it brings its own traits, so that it needs no
/// particular runtime.
struct Stream(UnixStream);

impl hyper::rt::Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut cursor: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ_BYTES];
        let count = cursor.remaining().min(READ_BYTES);
        let mut buffer = ReadBuf::new(&mut bytes[..count]);
        let result = Pin::new(&mut self.0).poll_read(context, &mut buffer);
        cursor.put_slice(buffer.filled());
        result
    }
}

impl hyper::rt::Write for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_paths_are_encoded() {
        assert_eq!(encoded("a-b.c_1~"), "a-b.c_1~");
        assert_eq!(encoded("a/b?c=d e%ä"), "a%2Fb%3Fc%3Dd%20e%25%C3%A4");
    }
}
