//! The present objects of a collection, then every change of them.
//!
//! A list, then a watch from its resource version on; the watch begins again where it ended. Where the server does not
//! know that version any more (410) there is a new list, which stands for all that was missed.
use super::client::Body;
use super::collection::{Collection, Selection};
use super::error::{ApiError, Refusal};
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The server ends a watch after so long, and so do we if it does not.
const WATCH_SECONDS: u64 = 290;
const WATCH_TIME: Duration = Duration::from_secs(WATCH_SECONDS + 30);
/// Longest event, bytes: an object is 3 MiB at most.
const EVENT_BYTES_MAX: usize = 16 << 20;
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// A piece of news.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News<T> {
    /// All objects as they are now: what is not among them is gone.
    All(Vec<T>),
    /// A new object, or a changed one.
    Changed(T),
    /// The object as it was at last.
    Deleted(T),
    /// An object that `T` can't hold: its name, and why. The others are unaffected.
    Unreadable(String, String),
}

#[derive(Deserialize)]
struct Event {
    r#type: String,
    object: Value,
}

enum State {
    /// A list is next.
    Start,
    /// A watch from this resource version on is next.
    At(String),
    Watching(Box<Watching>),
}

struct Watching {
    body: Incoming,
    pending: Vec<u8>,
    /// The resource version up to which all is known.
    version: String,
    /// Without an event the pause before the next watch grows: a server that ends watches at once is spared.
    has_had_event: bool,
}

/// See the module. It is dropped to end it.
pub struct Watcher<T> {
    collection: Collection<T>,
    selection: Selection,
    state: State,
    pause: Duration,
    is_first: bool,
    ready: std::collections::VecDeque<News<T>>,
}

fn version_of(object: &Value) -> String {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_string()
}

/// Half to all of it, by chance.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 1024;
    pause / 2 + pause.mul_f64(random as f64 / 2048.0)
}

impl<T: DeserializeOwned> Watcher<T> {
    /// Nothing is asked yet.
    pub fn new(collection: Collection<T>, selection: Selection) -> Self {
        Self {
            collection,
            selection,
            state: State::Start,
            pause: PAUSE_FIRST,
            is_first: true,
            ready: std::collections::VecDeque::new(),
        }
    }

    /// Waits for news. May be dropped while it waits, and called again.
    ///
    /// # Errors
    /// Why there are none; the next call goes on by itself, after a pause.
    pub async fn next(&mut self) -> Result<News<T>, ApiError> {
        loop {
            if let Some(news) = self.ready.pop_front() {
                return Ok(news);
            }
            if let Err(error) = self.step().await {
                self.state = match std::mem::replace(&mut self.state, State::Start) {
                    _ if error.is_gone() => State::Start,
                    State::Watching(watching) => State::At(watching.version),
                    state => state,
                };
                // An expired version is no failure.
                if !error.is_gone() {
                    return Err(error);
                }
            }
        }
    }

    async fn wait(&mut self) {
        if !std::mem::replace(&mut self.is_first, false) {
            // The longer pause counts even where this future is dropped while it waits.
            let pause = self.pause;
            self.pause = (pause * 2).min(PAUSE_MAX);
            sleep(jittered(pause)).await;
        }
    }

    async fn step(&mut self) -> Result<(), ApiError> {
        match &mut self.state {
            State::Start => {
                self.wait().await;
                let (mut all, mut unreadable) = (Vec::new(), Vec::new());
                let take = |item| match read(item) {
                    Ok(object) => all.push(object),
                    Err(news) => unreadable.push(news),
                };
                let version = self.collection.list(&self.selection, take).await?;
                self.ready.push_back(News::All(all));
                self.ready.extend(unreadable);
                self.state = State::At(version);
                // After a list the watch begins at once.
                self.is_first = true;
                Ok(())
            }
            State::At(version) => {
                let version = version.clone();
                self.wait().await;
                let more = format!(
                    "watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}"
                );
                let path = self.collection.query(&self.selection, &more)?;
                let response = self.collection.client().send(Method::GET, &path, Body::None).await?;
                let body = response.into_body();
                let watching = Watching { body, pending: Vec::new(), version, has_had_event: false };
                self.state = State::Watching(Box::new(watching));
                Ok(())
            }
            State::Watching(watching) => {
                if let Some(line) = watching.line().await? {
                    return self.take(&line);
                }
                let State::Watching(watching) = std::mem::replace(&mut self.state, State::Start) else { return Ok(()) };
                // Watches end by themselves, and then go on.
                if watching.has_had_event {
                    self.pause = PAUSE_FIRST;
                }
                self.state = State::At(watching.version);
                Ok(())
            }
        }
    }

    fn take(&mut self, line: &[u8]) -> Result<(), ApiError> {
        let event: Event =
            serde_json::from_slice(line).map_err(|error| ApiError::Malformed(format!("a watch's event: {error}")))?;
        let State::Watching(watching) = &mut self.state else { return Ok(()) };
        if event.r#type == "ERROR" {
            let code = event.object["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(500);
            let refusal = Refusal::of(code, event.object.to_string().as_bytes());
            return Err(ApiError::Refused(Box::new(refusal)));
        }
        let version = version_of(&event.object);
        if !version.is_empty() {
            watching.version = version;
        }
        watching.has_had_event = true;
        self.pause = PAUSE_FIRST;
        let news = match event.r#type.as_str() {
            "ADDED" | "MODIFIED" => read(event.object).map_or_else(|unreadable| unreadable, News::Changed),
            "DELETED" => read(event.object).map_or_else(|unreadable| unreadable, News::Deleted),
            // BOOKMARK, and what is still to be invented.
            _ => return Ok(()),
        };
        self.ready.push_back(news);
        Ok(())
    }
}

fn read<T: DeserializeOwned>(object: Value) -> Result<T, News<T>> {
    let metadata = &object["metadata"];
    let text = |field: &str| metadata[field].as_str().unwrap_or_default();
    let name = match text("namespace") {
        "" => text("name").to_string(),
        namespace => format!("{namespace}/{}", text("name")),
    };
    serde_json::from_value(object).map_err(|error| News::Unreadable(name, error.to_string()))
}

impl Watching {
    /// A line without its end; `None`: the server has ended the watch. Nothing is lost if this is dropped.
    async fn line(&mut self) -> Result<Option<Vec<u8>>, ApiError> {
        loop {
            if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let rest = self.pending.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.pending, rest);
                line.pop();
                if line.is_empty() {
                    continue;
                }
                return Ok(Some(line));
            }
            if self.pending.len() > EVENT_BYTES_MAX {
                return Err(ApiError::Malformed("a watch's event that has no end".into()));
            }
            let Ok(frame) = timeout(WATCH_TIME, self.body.frame()).await else { return Ok(None) };
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(ApiError::Unanswered(format!("a watch was broken off: {error}"))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.pending.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}
