//! Requests and their answers, with limits of size and time.
use super::configuration::{Configuration, invalid};
use super::connection::Target;
use super::error::{ApiError, Refusal};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// For a request and its answer.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// Longest answer, bytes: a page of a list, of objects that are 3 MiB at most and mostly some KiB. A controller has
/// room for a few of these.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// The same of a router, whose lists have no pages.
const ROUTER_ANSWER_BYTES_MAX: usize = 64 << 20;
/// A connection that nobody uses is closed after that.
const IDLE_TIME: Duration = Duration::from_secs(50);
/// How often a request is sent that the server puts off (429), and the longest pause between.
const ATTEMPT_COUNT: u32 = 4;
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// The form of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body<'a> {
    None,
    Json(&'a Value),
    MergePatch(&'a Value),
    /// JSON is YAML.
    Apply(&'a Value),
}

impl Body<'_> {
    fn content_type(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Json(_) => Some("application/json"),
            Self::MergePatch(_) => Some("application/merge-patch+json"),
            Self::Apply(_) => Some("application/apply-patch+yaml"),
        }
    }

    fn bytes(self) -> Bytes {
        match self {
            Self::None => Bytes::new(),
            Self::Json(value) | Self::MergePatch(value) | Self::Apply(value) => value.to_string().into(),
        }
    }
}

/// The API server; clones share its connections. In a runtime of tokio's.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<Target, Full<Bytes>>,
    target: Target,
    /// Scheme, authority and path before all others.
    base: String,
    answer_time: Duration,
    answer_bytes_max: usize,
}

impl Client {
    /// Nothing is connected yet.
    pub fn new(configuration: Configuration) -> Self {
        let server = &configuration.server;
        // TLS is the connection's matter, so that to `hyper` all are plain. The authority becomes the header Host.
        let base = format!("http://{}{}", server.address, server.path);
        Self::of(Target::Server(Arc::new(configuration)), base)
    }

    /// A server of the same kind at a Unix socket: a router's REST API.
    pub fn at_socket(path: &Path) -> Self {
        let client = Self::of(Target::Socket(Arc::new(path.to_path_buf())), "http://freeflow".into());
        Self { answer_bytes_max: ROUTER_ANSWER_BYTES_MAX, ..client }
    }

    fn of(target: Target, base: String) -> Self {
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_TIME)
            .pool_timer(TokioTimer::new())
            .build(target.clone());
        Self { http, target, base, answer_time: ANSWER_TIME, answer_bytes_max: ANSWER_BYTES_MAX }
    }

    /// Another time limit of requests (not of watches); 30 s if not set.
    #[must_use]
    pub fn answer_time(self, answer_time: Duration) -> Self {
        Self { answer_time, ..self }
    }

    /// GET of a path of another form than objects have, such as `/version` or `/apis/GROUP`.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.exchange(Method::GET, path, Body::None).await
    }

    /// POST to such a path.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, ApiError> {
        self.exchange(Method::POST, path, Body::Json(body)).await
    }

    /// DELETE of such a path.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.exchange(Method::DELETE, path, Body::None).await
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, ApiError> {
        let Target::Server(configuration) = &self.target else { return Ok(None) };
        let Some(token) = &configuration.token else { return Ok(None) };
        let token = token.read()?;
        let token = String::from_utf8(token).unwrap_or_default();
        let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
            .map_err(|_| invalid("the token has characters that a token has not".into()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn request(&self, method: Method, path: &str, body: Body<'_>) -> Result<Request<Full<Bytes>>, ApiError> {
        let mut request = Request::new(Full::new(body.bytes()));
        *request.method_mut() = method;
        *request.uri_mut() =
            format!("{}{path}", self.base).parse().map_err(|error| invalid(format!("{path}: {error}")))?;
        let headers = request.headers_mut();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("freeflow/", env!("CARGO_PKG_VERSION"))));
        if let Some(content_type) = body.content_type() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        if let Some(authorization) = self.authorization()? {
            headers.insert(AUTHORIZATION, authorization);
        }
        Ok(request)
    }

    /// The head of an answer, which is a success. Bodies of others are read.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Body<'_>,
    ) -> Result<Response<Incoming>, ApiError> {
        let request = self.request(method, path, body)?;
        let attempt = async {
            let response = self.http.request(request).await.map_err(|error| failure(&error))?;
            if response.status().is_success() {
                return Ok(response);
            }
            let (code, retry) = (response.status().as_u16(), retry_after(response.headers()));
            let mut refusal = Refusal::of(code, &self.all(response).await?);
            refusal.details.retry_after_seconds = refusal.details.retry_after_seconds.max(retry);
            Err(ApiError::Refused(Box::new(refusal)))
        };
        self.in_time(attempt).await
    }

    async fn all(&self, response: Response<Incoming>) -> Result<Bytes, ApiError> {
        match Limited::new(response.into_body(), self.answer_bytes_max).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(ApiError::TooLong(self.answer_bytes_max)),
            Err(error) => Err(ApiError::Unanswered(error.to_string())),
        }
    }

    async fn in_time<T>(&self, attempt: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        let late = |_| Err(ApiError::Unanswered(format!("in {} s", self.answer_time.as_secs())));
        timeout(self.answer_time, attempt).await.unwrap_or_else(late)
    }

    /// A request and its answer as a value. One that the server puts off is sent again.
    pub(super) async fn exchange<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Body<'_>,
    ) -> Result<T, ApiError> {
        let mut attempt = 1;
        loop {
            let answer = async {
                let response = self.send(method.clone(), path, body).await?;
                let bytes = self.in_time(self.all(response)).await?;
                serde_json::from_slice(&bytes).map_err(|error| ApiError::Malformed(format!("{method} {path}: {error}")))
            };
            match answer.await {
                Err(error) if attempt < ATTEMPT_COUNT && error.retry_after().is_some() => {
                    sleep(error.retry_after().unwrap_or_default().min(PAUSE_MAX)).await;
                    attempt += 1;
                }
                other => return other,
            }
        }
    }
}

fn retry_after(headers: &HeaderMap) -> u64 {
    headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok()).unwrap_or(0)
}

/// Our own error of a connection, which `hyper-util` wraps, or the causes in a line.
fn failure(error: &legacy::Error) -> ApiError {
    let mut texts = Vec::new();
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if let Some(ours) = error.downcast_ref::<ApiError>() {
            return ours.clone();
        }
        texts.push(error.to_string());
        cause = error.source();
    }
    ApiError::Unanswered(texts.join(": "))
}
