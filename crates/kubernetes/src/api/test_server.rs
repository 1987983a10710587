//! An API server in the process of a test: it answers as a function says, and keeps what it was asked.
use super::client::Client;
use super::configuration::{Configuration, Server};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub method: String,
    /// With its query.
    pub path: String,
    pub content_type: String,
    pub authorization: String,
    pub body: String,
}

impl Seen {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_default()
    }
}

type Answer = Arc<dyn Fn(&Seen) -> (u16, String) + Send + Sync>;

pub(crate) struct TestServer {
    pub configuration: Configuration,
    seen: Arc<Mutex<Vec<Seen>>>,
}

async fn answered(request: Request<Incoming>, answer: Answer, all: Arc<Mutex<Vec<Seen>>>) -> Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("").to_string();
    let body = body.collect().await.unwrap().to_bytes();
    let seen = Seen {
        method: head.method.to_string(),
        path: head.uri.to_string(),
        content_type: header("content-type"),
        authorization: header("authorization"),
        body: String::from_utf8(body.to_vec()).unwrap(),
    };
    let (status, text) = answer(&seen);
    all.lock().unwrap().push(seen);
    Response::builder().status(status).body(Full::new(text.into())).unwrap()
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    answer: Answer,
    kept: Arc<Mutex<Vec<Seen>>>,
) {
    let service = service_fn(move |request| {
        let (answer, kept) = (answer.clone(), kept.clone());
        async move { Ok::<_, Infallible>(answered(request, answer, kept).await) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// A router's REST API, or another one at a socket. In a runtime of tokio's, with which it ends.
pub(crate) fn at_socket(path: &Path, answer: impl Fn(&Seen) -> (u16, String) + Send + Sync + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    let answer: Answer = Arc::new(answer);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, answer.clone(), Arc::default()));
        }
    });
}

impl TestServer {
    /// In a runtime of tokio's, with which it ends.
    pub async fn start(answer: impl Fn(&Seen) -> (u16, String) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (answer, seen): (Answer, _) = (Arc::new(answer), Arc::new(Mutex::new(Vec::new())));
        let kept = seen.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, answer.clone(), kept.clone()));
            }
        });
        let server = Server { is_secure: false, host: address.ip().to_string(), address, path: String::new() };
        let configuration = Configuration {
            server,
            server_name: None,
            authority: None,
            identity: None,
            token: None,
            namespace: "freeflow".into(),
        };
        Self { configuration, seen }
    }

    pub fn client(&self) -> Client {
        Client::new(self.configuration.clone())
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}
