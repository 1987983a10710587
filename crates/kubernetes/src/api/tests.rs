//! The client against a server in this process.
use super::configuration::{Server, Source};
use super::objects::Object;
use super::test_server::{Seen, TestServer};
use super::{ApiError, Client, Collection, Configuration, Kind, News, Preconditions, Selection, Watcher};
use serde_json::{Value, json};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, crypto::aws_lc_rs};

const NETWORKS: Kind = Kind::new("freeflow.io", "v1alpha1", "networks");

fn object(name: &str, version: u32) -> Value {
    json!({"metadata": {"name": name, "namespace": "a", "resourceVersion": version.to_string()}})
}

fn status(code: u16, reason: &str) -> (u16, String) {
    (code, json!({"kind": "Status", "code": code, "reason": reason, "message": format!("{reason} it is")}).to_string())
}

#[tokio::test]
async fn verbs_paths_and_bodies_are_the_servers() {
    let mut server = TestServer::start(|seen: &Seen| (200, seen.body.clone())).await;
    server.configuration.token = Some(Source::Bytes(b"secret\n".into()));
    let all = Collection::<Value>::of_namespace(&server.client(), &NETWORKS, "team-a");
    let body = json!({"metadata": {"name": "red"}});
    all.create(&body).await.unwrap();
    all.replace("red", &body).await.unwrap();
    all.merge("red", &body).await.unwrap();
    all.merge_status("red", &body).await.unwrap();
    all.apply("red", "free flow", &body).await.unwrap();
    let only = Preconditions { uid: Some("u".into()), ..Preconditions::default() };
    all.delete("red", &only).await.unwrap();
    let base = "/apis/freeflow.io/v1alpha1/namespaces/team-a/networks";
    let (json, merge) = ("application/json", "application/merge-patch+json");
    let wanted = [
        ("POST", base.to_string(), json),
        ("PUT", format!("{base}/red"), json),
        ("PATCH", format!("{base}/red"), merge),
        ("PATCH", format!("{base}/red/status"), merge),
        ("PATCH", format!("{base}/red?fieldManager=free%20flow&force=true"), "application/apply-patch+yaml"),
        ("DELETE", format!("{base}/red"), json),
    ];
    let seen = server.seen();
    assert_eq!(seen.len(), wanted.len());
    for (seen, (method, path, content_type)) in seen.iter().zip(&wanted) {
        assert_eq!((seen.method.as_str(), &seen.path, seen.content_type.as_str()), (*method, path, *content_type));
        assert_eq!(seen.authorization, "Bearer secret");
    }
    assert_eq!(seen[5].json()["preconditions"], json!({"uid": "u"}));
    for bad in ["", ".", ".."] {
        assert!(matches!(all.get(bad).await, Err(ApiError::Invalid(_))), "{bad}");
    }
    // A name that would be a path stays a part of one.
    all.merge("../../secrets", &body).await.unwrap();
    assert_eq!(server.seen().pop().unwrap().path, format!("{base}/..%2F..%2Fsecrets"));
}

#[tokio::test]
async fn lists_come_by_pages() {
    let server = TestServer::start(|seen: &Seen| {
        let (metadata, name) = match seen.path.contains("continue=p%2F2") {
            true => (json!({"resourceVersion": "7"}), "two"),
            false => (json!({"resourceVersion": "7", "continue": "p/2"}), "one"),
        };
        (200, json!({"metadata": metadata, "items": [object(name, 1)]}).to_string())
    })
    .await;
    let selection = Selection { labels: "app=web".into(), fields: "spec.nodeName=n 1".into() };
    let mut names = Vec::new();
    let take = |item: Value| names.push(item["metadata"]["name"].as_str().unwrap().to_owned());
    let version = Collection::<Object>::all(&server.client(), &NETWORKS).list(&selection, take).await.unwrap();
    assert_eq!((names, version.as_str()), (vec!["one".to_owned(), "two".to_owned()], "7"));
    assert!(server.seen()[0].path.ends_with("?limit=500&labelSelector=app%3Dweb&fieldSelector=spec.nodeName%3Dn%201"));
}

#[tokio::test]
async fn large_objects_come_by_few() {
    // So large that no page of the usual number is an answer, nor one of the next smaller.
    let (count, pad) = (100, "x".repeat(256 << 10));
    let server = TestServer::start(move |seen: &Seen| {
        let parameter = |name: &str| {
            let found = seen.path.split(['?', '&']).find_map(|part| part.strip_prefix(name));
            found.map(|text| text.parse::<usize>().unwrap())
        };
        let (limit, first) = (parameter("limit=").unwrap(), parameter("continue=").unwrap_or(0));
        let last = (first + limit).min(count);
        let fat = |number: usize| json!({"metadata": {"name": number.to_string(), "annotations": {"a": pad}}});
        let mut metadata = json!({"resourceVersion": "7"});
        if last < count {
            metadata["continue"] = last.to_string().into();
        }
        (200, json!({"metadata": metadata, "items": (first..last).map(fat).collect::<Vec<_>>()}).to_string())
    })
    .await;
    let mut numbers = Vec::new();
    let take = |item: Value| numbers.push(item["metadata"]["name"].as_str().unwrap().parse::<usize>().unwrap());
    let client = server.client().answer_time(Duration::from_secs(600));
    Collection::<Object>::all(&client, &NETWORKS).list(&Selection::default(), take).await.unwrap();
    assert_eq!(numbers, (0..count).collect::<Vec<_>>());
    // One that is too long by itself is an error.
    let server = TestServer::start(|_: &Seen| (200, "x".repeat(9 << 20))).await;
    let all = Collection::<Object>::all(&server.client(), &NETWORKS);
    let error = all.list(&Selection::default(), drop).await.unwrap_err();
    assert!(matches!(error, ApiError::TooLong(_)), "{error}");
}

#[tokio::test]
async fn refusals_say_what_the_server_says() {
    let server = TestServer::start(|seen: &Seen| match seen.path.rsplit('/').next() {
        Some("absent") => status(404, "NotFound"),
        Some("taken") => status(409, "AlreadyExists"),
        _ => (200, "no JSON".into()),
    })
    .await;
    let all = Collection::<Object>::all(&server.client(), &NETWORKS);
    let error = all.get("absent").await.unwrap_err();
    assert!(error.is_not_found() && error.to_string() == "NotFound it is", "{error}");
    assert_eq!(all.find("absent").await.unwrap(), None);
    assert!(all.get("taken").await.unwrap_err().is_already_there());
    let error = all.get("other").await.unwrap_err();
    assert!(matches!(&error, ApiError::Malformed(text) if text.contains("/networks/other")), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_busy_is_asked_again() {
    let count = AtomicUsize::new(0);
    let server = TestServer::start(move |_: &Seen| match count.fetch_add(1, Ordering::Relaxed) {
        0 | 1 => status(429, "TooManyRequests"),
        _ => (200, object("red", 1).to_string()),
    })
    .await;
    // Time stands still unless all wait: the limit of the request itself must not pass meanwhile.
    let client = server.client().answer_time(Duration::from_secs(3600));
    Collection::<Object>::all(&client, &NETWORKS).get("red").await.unwrap();
    assert_eq!(server.seen().len(), 3);
}

#[tokio::test]
async fn a_server_that_is_silent_or_absent_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut server = TestServer::start(|_: &Seen| (200, String::new())).await;
    server.configuration.server.address = listener.local_addr().unwrap();
    let client = Client::new(server.configuration.clone()).answer_time(Duration::from_millis(100));
    let error = client.get::<Value>("/version").await.unwrap_err();
    assert!(matches!(&error, ApiError::Unanswered(_)), "{error}");
    drop(listener);
    let error = Client::new(server.configuration.clone()).get::<Value>("/version").await.unwrap_err();
    assert!(matches!(&error, ApiError::Unreachable(text) if text.contains("refused")), "{error}");
}

fn event(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

/// List, watch that ends, watch whose version has expired, list.
#[tokio::test]
async fn watches_go_on_where_they_ended_and_begin_again_where_they_must() {
    let lists = AtomicUsize::new(0);
    let server = TestServer::start(move |seen: &Seen| {
        if !seen.path.contains("watch=true") {
            let number = lists.fetch_add(1, Ordering::Relaxed);
            let items = if number == 0 { json!([object("red", 1)]) } else { json!([object("blue", 9)]) };
            return (
                200,
                json!({"metadata": {"resourceVersion": if number == 0 { "5" } else { "20" }}, "items": items})
                    .to_string(),
            );
        }
        match seen.path.rsplit('=').next() {
            Some("5") => {
                let broken = json!({"metadata": {"name": 7}});
                let bookmark = json!({"metadata": {"resourceVersion": "9"}});
                let all = [
                    ("ADDED", object("blue", 6)),
                    ("MODIFIED", broken),
                    ("DELETED", object("red", 7)),
                    ("BOOKMARK", bookmark),
                ];
                (200, all.iter().map(|(kind, object)| event(kind, object)).collect())
            }
            Some("9") => (200, event("ERROR", &json!({"code": 410, "reason": "Expired", "message": "too old"}))),
            _ => status(403, "Forbidden"),
        }
    })
    .await;
    let all = Collection::<Object>::all(&server.client(), &NETWORKS);
    let mut watcher = Watcher::new(all, Selection::default());
    let mut seen = Vec::new();
    for _ in 0..5 {
        let news = tokio::time::timeout(Duration::from_secs(20), watcher.next()).await.unwrap().unwrap();
        seen.push(match news {
            News::All(all) => format!("all {}", all.iter().map(|one| one.metadata.name.clone()).collect::<String>()),
            News::Changed(object) => format!("changed {}", object.metadata.name),
            News::Deleted(object) => format!("deleted {}", object.metadata.name),
            News::Unreadable(..) => "unreadable".into(),
        });
    }
    assert_eq!(seen, ["all red", "changed blue", "unreadable", "deleted red", "all blue"]);
    let error = watcher.next().await.unwrap_err();
    assert!(error.is_forbidden(), "{error}");
}

fn openssl(directory: &std::path::Path, words: &[&str]) {
    let done = Command::new("openssl").args(words).current_dir(directory).output().expect("openssl");
    assert!(done.status.success(), "openssl {words:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// An authority and a server's certificate for 127.0.0.1 in a directory.
fn certificates(directory: &std::path::Path) {
    std::fs::create_dir_all(directory).unwrap();
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    let authority = ["req", "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2"];
    openssl(directory, &[&authority[..], &key[..]].concat());
    let request = ["req", "-subj", "/CN=server", "-keyout", "server.key", "-out", "server.csr"];
    openssl(directory, &[&request[..], &key[..]].concat());
    std::fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1,DNS:kubernetes\n").unwrap();
    let sign = ["x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"];
    openssl(directory, &[&sign[..], &["-extfile", "names", "-out", "server.pem", "-days", "2"]].concat());
}

#[tokio::test]
async fn the_server_shows_a_certificate_of_its_authority() {
    let directory = std::env::temp_dir().join(format!("freeflow-kubernetes-tls-{}", std::process::id()));
    certificates(&directory);
    certificates(&directory.join("other"));
    let chain = CertificateDer::pem_file_iter(directory.join("server.pem")).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(directory.join("server.key")).unwrap();
    let tls = rustls::ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let service = hyper::service::service_fn(|_| async {
                let body = http_body_util::Full::new(hyper::body::Bytes::from(r#"{"gitVersion": "v1.37.2"}"#));
                Ok::<_, std::convert::Infallible>(hyper::Response::new(body))
            });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(hyper_util::rt::TokioIo::new(stream), service),
            );
        }
    });
    let configuration = |authority: &str, name: Option<&str>| Configuration {
        server: Server { is_secure: true, host: "127.0.0.1".into(), address, path: String::new() },
        server_name: name.map(String::from),
        authority: Some(Source::File(directory.join(authority))),
        identity: None,
        token: None,
        namespace: String::new(),
    };
    for name in [None, Some("kubernetes")] {
        let version: Value = Client::new(configuration("ca.pem", name)).get("/version").await.unwrap();
        assert_eq!(version["gitVersion"], "v1.37.2");
    }
    for (authority, name) in [("other/ca.pem", None), ("ca.pem", Some("elsewhere")), ("names", None)] {
        let error = Client::new(configuration(authority, name)).get::<Value>("/version").await.unwrap_err();
        assert!(matches!(error, ApiError::Unreachable(_) | ApiError::Invalid(_)), "{authority}: {error}");
    }
    std::fs::remove_dir_all(&directory).unwrap();
}
