//! The routes of the REST server without a router behind them, for tests of any request (`crates/fuzz`).
//!
//! The control thread and the worker never answer: the runtime's clock must be paused, so that nobody waits for
//! them. Nothing is written anywhere.
use super::caller::{Caller, Role};
use super::health::Probes;
use super::link::Link;
use super::routes::{Asking, Server, closed_router, router};
use super::users::Users;
use super::watch::History;
use crate::audit::{Audit, Who};
use crate::base::wake::Waker;
use crate::control::health::Health;
use crate::control::message::{ControlHandle, Message};
use crate::control::thread::Control;
use crate::dataplane::command::Submission;
use crate::dataplane::handle::WorkerHandle;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Extension;
use axum::http::Request;
use freeflow_orchestrator::Revision;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use tokio::sync::Mutex;

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
    /// Questions to the control thread.
    pub question_count: usize,
}

/// A server that asks nobody.
pub struct Harness {
    open: Router,
    closed: Router,
    questions: Receiver<Message<Control>>,
    /// Open, and not read.
    _commands: Receiver<Submission>,
}

impl Harness {
    /// `host`: the name of the Host.
    pub fn new(host: &str) -> io::Result<Self> {
        let ((messages, questions), (commands, _commands)) = (channel(), channel());
        let waker = Arc::new(Waker::new()?);
        let control = ControlHandle { messages, waker: waker.clone() };
        let link = Link::new(control, WorkerHandle { commands, waker, lock: Arc::default() });
        let server = Arc::new(Server {
            link,
            history: History::new(Revision(1)),
            audit: Audit::default(),
            lane: Mutex::new(()),
            reads: Mutex::new(()),
            probes: Probes::new(NO_DIRECTORY.into(), NO_DIRECTORY.into(), Health::default()),
            host: host.into(),
        });
        Ok(Self { open: router(server.clone()), closed: closed_router(server), questions, _commands })
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
        Some(HarnessAnswer { code, body, question_count: self.questions.try_iter().count() })
    }
}
