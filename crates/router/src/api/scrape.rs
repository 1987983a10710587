//! `--metrics-listen`: `/metrics`, `/livez` and `/readyz` by TCP, for whoever reaches the address;
//! nothing else, and nothing changes.
//!
//! Nobody is asked who they are, so all together are answered one at a time and take at most half of the time.
use super::failure::Failure;
use super::routes::Server;
use super::stream::Patient;
use super::{health, metrics};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{sleep, timeout};

const CONNECTION_COUNT_MAX: usize = 16;
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(60);
const HEAD_TIME_MAX: Duration = Duration::from_secs(5);
const HEAD_BYTES_MAX: usize = 8 << 10;
const HEADER_COUNT_MAX: usize = 32;
/// Between two answers, at least.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// After a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Errors: the address can't be listened on.
pub fn listen(address: SocketAddr) -> io::Result<StdListener> {
    let listener = StdListener::bind(address)
        .map_err(|error| io::Error::new(error.kind(), format!("can't listen on {address} for metrics: {error}")))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn router(server: Arc<Server>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .route("/livez", get(health::is_alive))
        .route("/readyz", get(health::is_ready))
        .method_not_allowed_fallback(async || Failure::bad_method())
        .fallback(async || Failure::not_found("there are /metrics, /livez and /readyz"))
        .layer(from_fn_with_state(Arc::new(Mutex::new(())), one_at_a_time))
        .with_state(server)
}

async fn one_at_a_time(State(lane): State<Arc<Mutex<()>>>, request: Request, next: Next) -> Response {
    let lane = lane.lock_owned().await;
    let begin = Instant::now();
    let response = next.run(request).await;
    let pause = begin.elapsed().max(PAUSE_MIN);
    tokio::spawn(async move {
        sleep(pause).await;
        drop(lane);
    });
    response
}

async fn scrape(State(server): State<Arc<Server>>) -> Result<Response, Failure> {
    let text = metrics::text(&server.link, server.probes.follower().await).await?;
    Ok((metrics::HEADER, text).into_response())
}

/// Serves for ever.
pub async fn serve(listener: StdListener, server: Arc<Server>) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(CONNECTION_COUNT_MAX));
    let app = router(server);
    loop {
        // Others wait in the kernel's queue.
        let Ok(place) = places.clone().acquire_owned().await else { return Ok(()) };
        let Ok((stream, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME_MAX).keep_alive(false);
        builder.max_buf_size(HEAD_BYTES_MAX).max_headers(HEADER_COUNT_MAX);
        let served =
            builder.serve_connection(TokioIo::new(Patient::new(stream)), TowerToHyperService::new(app.clone()));
        tokio::spawn(async move {
            let _place = place;
            // An error here is the other end's, which knows.
            let _ = timeout(CONNECTION_TIME_MAX, served).await;
        });
    }
}
