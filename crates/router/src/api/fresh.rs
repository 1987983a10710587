//! Something that is found out once a second at most, whoever asks how often.
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long each part may take to answer.
pub(crate) const ANSWER_TIME_MAX: Duration = Duration::from_secs(3);

/// How long what was found is said again. Tests may be held up in between.
const FRESH_TIME: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

/// Something that was found, and its time.
pub(crate) type Fresh<T> = Mutex<Option<(Instant, T)>>;

/// Found less than a second ago, or just now.
pub(crate) async fn fresh<T: Clone>(found: &Fresh<T>, probe: impl Future<Output = T>) -> T {
    let mut found = found.lock().await;
    match &*found {
        Some((at, there)) if at.elapsed() < FRESH_TIME => there.clone(),
        _ => {
            let there = probe.await;
            *found = Some((Instant::now(), there.clone()));
            there
        }
    }
}
