//! The thread: a runtime of its own, the listener, and a task for each connection.
use super::caller::{Caller, Groups};
use super::feed::{Change, Feed, Side};
use super::health::Probes;
use super::link::Link;
use super::plane::AddStatuses;
use super::routes::{Asking, LeaseFile, Server, closed_router, router};
use super::scrape;
use super::stream::Patient;
use super::users::{Place, Users};
use super::watch::History;
use crate::audit::Audit;
use crate::base::log::{Lines, info, warning};
use crate::base::privileges::{self, ThreadKind};
use axum::Router;
use axum::extract::Extension;
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::objects::AnyObject;
use freeflow_shm::fd;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{Mutex, oneshot};
use tokio::time::{sleep, timeout};

/// Everybody may connect; who may ask is decided then.
const SOCKET_MODE: u32 = 0o666;
/// A request's head, and a connection between two requests.
const HEAD_TIME_MAX: Duration = Duration::from_secs(10);
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADER_COUNT_MAX: usize = 32;
/// A connection: its credentials are those of its beginning.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(3700);
/// One of somebody without a role.
const NOBODY_TIME_MAX: Duration = Duration::from_secs(3);
/// After a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Statuses that are asked for at a time.
const STATUS_COUNT_MAX: usize = 128;
/// Transactions whose changes are sent together.
const BATCH_COUNT_MAX: usize = 128;
/// Threads for files; there is little to do.
const BLOCKING_THREADS_MAX: usize = 2;

pub struct ApiParts {
    pub run_dir: PathBuf,
    /// Where the store is.
    pub state_dir: PathBuf,
    /// The name of the Host.
    pub host: String,
    pub link: Link,
    pub audit: Audit,
    /// Revision of the state when the router began.
    pub revision: Revision,
    /// Where metrics are served by TCP too.
    pub metrics_listen: Option<SocketAddr>,
}

/// The thread; it ends when this is dropped, and with it all connections.
pub struct Api {
    thread: Option<JoinHandle<()>>,
    stop: Option<oneshot::Sender<()>>,
    path: PathBuf,
}

impl Api {
    /// Listens when it returns. The feed is for the control thread.
    pub fn start(parts: ApiParts) -> io::Result<(Self, Feed)> {
        let path = parts.run_dir.join("api.sock");
        let scraped = parts.metrics_listen.map(scrape::listen).transpose()?;
        let listener = listen(&path)?;
        let (stop, stopped) = oneshot::channel();
        let (changes, changes_end) = unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name(ThreadKind::ApiDisk.name())
            .on_thread_start(|| privileges::enter(ThreadKind::ApiDisk))
            .build()?;
        let body = move || {
            privileges::enter(ThreadKind::Api);
            let served = runtime.block_on(async {
                tokio::select! {
                    served = serve((listener, scraped), parts, changes_end) => served,
                    _ = stopped => Ok(()),
                }
            });
            if let Err(error) = served {
                warning!("the REST server can't work", error = error);
            }
            // Not even for a disk that does not answer.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("ff-api".into()).spawn(body)?;
        Ok((Self { thread: Some(thread), stop: Some(stop), path }, Feed::new(changes)))
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warning!("the REST server's thread panicked");
        }
    }
}

/// A socket that a dead router left is replaced.
fn listen(path: &Path) -> io::Result<StdListener> {
    match std::fs::symlink_metadata(path) {
        Ok(about) if about.file_type().is_socket() => std::fs::remove_file(path)?,
        _ => {}
    }
    let listener = StdListener::bind(path)?;
    listener.set_nonblocking(true)?;
    fd::refuse_descriptors(&listener)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok(listener)
}

async fn serve(
    (listener, scraped): (StdListener, Option<TcpListener>),
    parts: ApiParts,
    changes: UnboundedReceiver<Vec<Change>>,
) -> io::Result<()> {
    let listener = UnixListener::from_std(listener)?;
    let history = History::new(parts.revision);
    tokio::spawn(keep_history(parts.link.clone(), history.clone(), changes));
    let (link, audit, lane, reads) = (parts.link, parts.audit, Mutex::new(()), Mutex::new(()));
    let lease_file = LeaseFile { directory: parts.state_dir.clone(), is_stale: false };
    let lease_file = Arc::new(Mutex::new(lease_file));
    let probes = Probes::new(parts.run_dir, parts.state_dir);
    let server = Arc::new(Server { link, history, audit, lane, reads, probes, host: parts.host, lease_file });
    if let Some(listener) = scraped {
        let server = server.clone();
        tokio::spawn(async move {
            if let Err(error) = scrape::serve(listener, server).await {
                warning!("metrics can't be served by TCP", error = error);
            }
        });
    }
    let (open, closed) = (router(server.clone()), closed_router(server));
    let users = Users::new(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX));
    let (mut groups, mut lines) = (Groups::default(), Lines::default());
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // No descriptor is left, or the other end is gone already.
            Err(_) => {
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(caller) = Caller::of(&stream, &mut groups) else { continue };
        let Some(place) = users.enter(&caller) else {
            if let Some(left_out) = lines.take(freeflow_shm::monotonic_ns()) {
                info!("too many connections to the REST server", uid = caller.who.uid, left_out = left_out);
            }
            continue;
        };
        let is_nobody = caller.role.is_nobody();
        let app = if is_nobody { &closed } else { &open };
        tokio::spawn(connection(stream, app.clone(), caller, place));
        // A flood of connections leaves the others their turn.
        tokio::task::yield_now().await;
    }
}

async fn connection(stream: UnixStream, app: Router, caller: Caller, place: Place) {
    let is_nobody = caller.role.is_nobody();
    let time_max = if is_nobody { NOBODY_TIME_MAX } else { CONNECTION_TIME_MAX };
    let app = app.layer(Extension(Asking { caller, place: Arc::new(place) }));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME_MAX.min(time_max));
    builder.max_buf_size(HEAD_BYTES_MAX).max_headers(HEADER_COUNT_MAX).keep_alive(!is_nobody);
    let served = builder.serve_connection(TokioIo::new(Patient::new(stream)), TowerToHyperService::new(app));
    // An error here is the other end's, which knows.
    let _ = timeout(time_max, served).await;
}

/// Takes what has changed, adds the statuses, and lets it be read.
async fn keep_history(link: Link, history: Arc<History>, mut changes: UnboundedReceiver<Vec<Change>>) {
    let mut batches = Vec::new();
    // Together what has come meanwhile: some statuses cost as much for many as for one.
    while changes.recv_many(&mut batches, BATCH_COUNT_MAX).await > 0 {
        let mut batch: Vec<Change> = batches.drain(..).flatten().collect();
        let mut sides: Vec<&mut Side> = batch.iter_mut().filter_map(|change| change.after.as_mut()).collect();
        for few in sides.chunks_mut(STATUS_COUNT_MAX) {
            let objects: Vec<AnyObject> = few.iter().map(|side| side.object.clone()).collect();
            let objects = link.ask(AddStatuses { objects }).await;
            for (side, object) in few.iter_mut().zip(objects.unwrap_or_default()) {
                adopt_status(&mut side.object, object);
            }
        }
        history.push(&batch);
    }
}

/// The object may have changed again since: only its status is of now.
fn adopt_status(own: &mut AnyObject, other: AnyObject) {
    if own.name() != other.name() {
        return;
    }
    macro_rules! adopt {
        ($($kind:ident),*) => {
            match (own, other) {
                $((AnyObject::$kind(own), AnyObject::$kind(other)) => own.status = other.status,)*
                _ => {}
            }
        };
    }
    adopt!(Network, Group, AccessRule, QosClass, Quota, Vnic, Host);
}
