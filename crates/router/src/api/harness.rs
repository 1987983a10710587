//! The routes of the REST server without a router behind them, for tests of any request (`crates/fuzz`).
//!
//! The control thread and the worker never answer: the runtime's clock must be paused, so that
//! nobody waits for them. Nothing is written anywhere.
use super::caller::{Caller, Role};
use super::health::Probes;
use super::link::Link;
use super::plane::ApiRequest;
use super::routes::{Asking, LeaseFile, Server, closed_router, router};
use super::users::Users;
use super::watch::History;
use crate::audit::{Audit, Who};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Extension;
use axum::http::Request;
use freeflow_orchestrator::Revision;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use tokio::sync::{Mutex, oneshot};

/// Not there, so that probes of the disk fail.
const NO_DIRECTORY: &str = "/proc/self/no-directory";
/// File descriptors of the process, which bound its connections.
const DESCRIPTOR_COUNT: u64 = 1024;

/// The caller's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HarnessRole {
    Admin,
    Viewer,
    /// An admin of this tenant.
    Tenant(&'static str),
    None,
}

/// The answer to one request.
#[derive(Clone, Debug)]
pub struct HarnessAnswer {
    /// HTTP status code.
    pub code: u16,
    pub body: Vec<u8>,
    /// Requests to the control thread.
    pub request_count: usize,
}

/// A server that asks nobody.
pub struct Harness {
    open: Router,
    closed: Router,
    requests: Receiver<ApiRequest>,
    /// Open, and not read.
    _probes: Receiver<oneshot::Sender<()>>,
}

impl Harness {
    /// `host`: the name of the Host.
    pub fn new(host: &str) -> Self {
        let ((control, requests), (worker, _probes)) = (channel(), channel());
        // Each fails only when the harness has ended.
        let link = Link::new(move |request| drop(control.send(request)), move |probe| drop(worker.send(probe)));
        let server = Arc::new(Server {
            link,
            history: History::new(Revision(1)),
            audit: Audit::default(),
            lane: Mutex::new(()),
            reads: Mutex::new(()),
            probes: Probes::new(NO_DIRECTORY.into(), NO_DIRECTORY.into()),
            host: host.into(),
            lease_file: Arc::new(Mutex::new(LeaseFile { directory: NO_DIRECTORY.into(), is_stale: false })),
        });
        Self { open: router(server.clone()), closed: closed_router(server), requests, _probes }
    }

    /// Answers a request, read to the end. `None`: method or address can't be of any request.
    pub async fn ask(&self, role: HarnessRole, method: &str, target: &[u8], body: &[u8]) -> Option<HarnessAnswer> {
        let request = Request::builder().method(method).uri(target).body(Body::from(body.to_vec())).ok()?;
        let role = match role {
            HarnessRole::Admin => Role { is_admin: true, ..Role::default() },
            HarnessRole::Viewer => Role { is_viewer: true, ..Role::default() },
            HarnessRole::Tenant(name) => Role { tenants: [name.to_owned()].into(), ..Role::default() },
            HarnessRole::None => Role::default(),
        };
        let app = if role.is_nobody() { &self.closed } else { &self.open };
        let who = Who { uid: u32::from(!role.is_admin), pid: 1, role: role.to_string() };
        let caller = Caller { who, role: Arc::new(role) };
        let place = Arc::new(Users::new(DESCRIPTOR_COUNT).enter(&caller)?);
        let app = app.clone().layer(Extension(Asking { caller, place }));
        let response = match TowerToHyperService::new(app).call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let code = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.ok()?.to_vec();
        Some(HarnessAnswer { code, body, request_count: self.requests.try_iter().count() })
    }
}
