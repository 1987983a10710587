//! Hosts join by tokens, and controllers admit them, on a real etcd.
use crate::common::{Cluster, open, put, until};
use crate::given::{apply, network, record};
use freeflow_cluster::{
    Admission, ClusterError, ClusterFile, Controller, Follow, Followed, Holdings, HostKey, HostRecord, News, Operator,
    Pending, Report, Scope, There, Token, TokenTerms, Tokens, View, Welcome, begin_rights, join, join_as_controller,
    renew,
};
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::Store;
use freeflow_orchestrator::store::{Transaction, Write};
use serde_json::json;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const WAIT: Duration = Duration::from_secs(30);
const DAY: Duration = Duration::from_secs(86_400);

/// The file of a controller; with TLS the authority is openssl's, as an operator may have one already.
fn file(etcd: &Cluster, is_secure: bool) -> ClusterFile {
    let urls: Vec<String> = (0..etcd.count()).map(|number| etcd.url(number)).collect();
    let mut fields = json!({"etcd": urls, "controller": true});
    if is_secure {
        fields["cacert"] = "ca.pem".into();
        fields["authority"] =
            json!({"cert": "ca.pem", "key": "ca.key", "root_cert": "root.pem", "root_key": "root.key"});
    }
    let path = etcd.directory().join("controller.json");
    fs::write(&path, fields.to_string()).expect("written");
    ClusterFile::read(&path).expect("a file")
}

fn begin(etcd: &Cluster, is_secure: bool) -> ClusterFile {
    let file = file(etcd, is_secure);
    until("etcd answers", || begin_rights(&file).map_err(|error| error.to_string()));
    until("etcd answers", || Operator::init(&file.as_own(), "id").map_err(|error| error.to_string()));
    file
}

fn token(file: &ClusterFile, uses: u32) -> Token {
    Tokens::open(file).expect("a cluster").create(TokenTerms { uses, lasts: DAY }).expect("a token")
}

fn key(etcd: &Cluster, host: &str) -> HostKey {
    HostKey::of(&etcd.directory().join(format!("{host}.etcd.key"))).expect("a key")
}

fn why(outcome: Result<Welcome, ClusterError>) -> String {
    outcome.expect_err("it is refused").to_string()
}

/// A host's cluster file, with the certificate that it got.
fn own_file(etcd: &Cluster, host: &str, welcome: &Welcome) -> ClusterFile {
    let pem = welcome.certificate.as_ref().expect("a certificate");
    fs::write(etcd.directory().join(format!("{host}.pem")), pem).expect("written");
    let (cert, key) = (format!("{host}.pem"), format!("{host}.etcd.key"));
    let fields = json!({"etcd": [etcd.url(0)], "cacert": "ca.pem", "cert": cert, "key": key});
    let path = etcd.directory().join(format!("{host}.json"));
    fs::write(&path, fields.to_string()).expect("written");
    ClusterFile::read(&path).expect("a file")
}

fn delete(store: &mut EtcdStore, key: &str) {
    let writes = vec![Write { key: key.into(), value: None, lease: None }];
    store.commit(&Transaction { compares: Vec::new(), writes }).expect("deleted");
}

/// etcd with a certificate that `own_file` has written, at a part of the cluster.
fn store_as(etcd: &Cluster, host: &str, part: &str) -> EtcdStore {
    fs::copy(etcd.directory().join(format!("{host}.etcd.key")), etcd.directory().join(format!("{host}.key")))
        .expect("copied");
    EtcdStore::new(&etcd.endpoints_as(host), part).expect("a store")
}

/// Ends them also where a test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// So many controllers at work while this is done; and all that they said.
fn with_controllers<T>(file: &ClusterFile, count: usize, work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let controllers: Vec<_> = (0..count)
            .map(|number| {
                let (name, is_over) = (format!("c{number}"), &is_over);
                scope.spawn(move || {
                    let own = file.as_own();
                    let follow = Follow::start(&own).expect("a follower");
                    let (mut view, mut pending) = (View::new(&file.root, Scope::Said), Pending::new(&file.root));
                    let mut said = Vec::new();
                    while !is_over.load(Ordering::Relaxed) {
                        if let Some(news) = follow.next(Duration::from_millis(100)) {
                            pending.take(&news);
                            view.take(news);
                        }
                        if !pending.is_empty() {
                            // The rest waits; etcd may be busy.
                            let mut admission = Admission::open(file, &view).expect("its keys");
                            let (texts, _) = admission.run(&mut pending, &name);
                            said.extend(texts);
                        }
                    }
                    said
                })
            })
            .collect();
        let end = End(&is_over);
        let done = work();
        drop(end);
        (done, controllers.into_iter().flat_map(|controller| controller.join().expect("it ended")).collect())
    })
}

#[test]
fn two_controllers_give_the_last_use_to_one_host() {
    let etcd = Cluster::start(1, &["root"]);
    let file = begin(&etcd, true);
    for round in 0..4 {
        let token = token(&file, 1);
        let names = [format!("a{round}"), format!("b{round}")];
        let (outcomes, said) = with_controllers(&file, 2, || {
            thread::scope(|scope| {
                let join = |name| {
                    let (key, token) = (key(&etcd, name), &token);
                    scope.spawn(move || join(token, name, &key, WAIT))
                };
                let all: Vec<_> = names.iter().map(|name| join(name.as_str())).collect();
                all.into_iter().map(|one| one.join().expect("it ended")).collect::<Vec<_>>()
            })
        });
        let (admitted, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
        assert_eq!((admitted.len(), refused.len()), (1, 1), "round {round}: {said:?}");
        let why = why(refused.into_iter().next().expect("one"));
        assert!(why.contains("used up"), "{why}");
        let welcome = admitted.into_iter().next().expect("one").expect("admitted");
        assert_eq!((welcome.range, welcome.pool.as_str()), (format!("10.111.{round}.0/24"), "10.111.0.0/16"));
        assert!(welcome.certificate.is_some_and(|pem| pem.contains("BEGIN CERTIFICATE")));
        let list = Tokens::open(&file).expect("a cluster").list().expect("read");
        let (_, record) = list.into_iter().find(|(id, _)| *id == token.id).expect("it is there");
        assert!(record.uses_left == 0 && record.used_by.len() == 1, "{record:?}");
        assert_eq!(said.len(), 2, "each is answered once: {said:?}");
    }
}

#[test]
fn tokens_end_and_names_are_kept() {
    let etcd = Cluster::start(1, &["root"]);
    let file = begin(&etcd, true);
    let token = token(&file, 9);
    let first = join_as_controller(&file, "h1", &key(&etcd, "h1")).expect("a controller");
    assert_eq!(first.range, "10.111.0.0/24");
    let again = join_as_controller(&file, "h1", &key(&etcd, "h1")).expect("the same");
    assert_eq!(again.range, first.range);
    assert!(why(join_as_controller(&file, "h1", &key(&etcd, "another"))).contains("another key"));
    let why = |name: &str, key_of: &str, token: &Token, wait| why(join(token, name, &key(&etcd, key_of), wait));
    let ((), said) = with_controllers(&file, 1, || {
        let welcome = join(&token, "h2", &key(&etcd, "h2"), WAIT).expect("admitted");
        // Once more, having lost the answer: nothing is used up by that.
        assert_eq!(join(&token, "h2", &key(&etcd, "h2"), WAIT).expect("admitted").range, welcome.range);
        assert!(why("h2", "another", &token, WAIT).contains("another key"));
        assert!(why("h1", "another", &token, WAIT).contains("another key"));
        // Names that would be somebody's in etcd are names of hosts here, and no more.
        let root = join(&token, "root", &key(&etcd, "root-host"), WAIT).expect("admitted");
        let pem = etcd.directory().join("host.pem");
        fs::write(&pem, root.certificate.expect("a certificate")).expect("written");
        let subject =
            std::process::Command::new("openssl").args(["x509", "-noout", "-subject", "-in"]).arg(&pem).output();
        let subject = String::from_utf8(subject.expect("openssl").stdout).expect("text");
        assert!(subject.contains("host-root-"), "{subject}");
        // A request that the token's key has not signed is taken away, and nobody is answered.
        let mut joins = open(&etcd.endpoints_as("root"), &format!("/freeflow/requests/{}", token.id));
        put(&mut joins, "forged/request", r#"{"body":"{}","signature":"AAAA"}"#).expect("written");
        until("it is gone", || match joins.list("forged/", None).expect("read").entries.len() {
            0 => Ok(()),
            count => Err(format!("{count} entries")),
        });
        // A damaged entry holds up nobody else.
        let mut store = open(&etcd.endpoints_as("root"), "/freeflow/admission");
        put(&mut store, "hosts/damaged", "no JSON").expect("written");
        let failure = why("damaged", "damaged", &token, Duration::from_secs(1));
        assert!(failure.contains("no controller has answered"), "{failure}");
        let mut tokens = Tokens::open(&file).expect("a cluster");
        assert_eq!(tokens.list().expect("read")[0].1.uses_left, 7);
        tokens.revoke(&token.id).expect("revoked");
        assert!(tokens.revoke(&token.id).is_err());
        assert!(why("h3", "h3", &token, WAIT).contains("revoked"));
        let short = TokenTerms { uses: 1, lasts: Duration::from_secs(1) };
        let short = tokens.create(short).expect("a token");
        let is_over = || SystemTime::now().duration_since(UNIX_EPOCH).is_ok_and(|now| now.as_secs() > short.expires_s);
        until("it expires", || is_over().then_some(()).ok_or_else(|| "not yet".into()));
        assert!(why("h3", "h3", &short, WAIT).contains("expired"));
    });
    assert_eq!(said.iter().filter(|text| text.contains("is refused")).count(), 1, "the rest is counted: {said:?}");
    assert!(said.iter().any(|text| text.contains("host damaged gets no answer")), "{said:?}");
    let other = self::token(&file, 1);
    assert!(why("h4", "h4", &other, Duration::from_secs(1)).contains("no controller has answered"));
}

#[test]
fn hosts_ranges_are_apart_and_come_back_when_they_are_removed() {
    let etcd = Cluster::start(1, &[]);
    let file = begin(&etcd, false);
    let mut operator = Operator::open(&file).expect("a cluster");
    operator.change(&apply(vec![network("red", "10.111.1.0/24")]), false).expect("declared");
    // A host that was given 10.111.2.0/24 by hand.
    let report = Report::start(&file, "hand", || 0).expect("a thread");
    report.say(Some(record(2)), Holdings::default(), Followed::default(), There::default());
    until("it is there", || match operator.view().map_err(|error| error.to_string())?.hosts().contains_key("hand") {
        true => Ok(()),
        false => Err("not yet".into()),
    });
    let token = token(&file, 9);
    let ((), _) = with_controllers(&file, 2, || {
        let range = |host: &str| {
            let welcome = join(&token, host, &key(&etcd, host), WAIT).expect("admitted");
            assert_eq!(welcome.certificate, None, "etcd has no TLS");
            welcome.range
        };
        assert_eq!([range("h1"), range("h2")], ["10.111.0.0/24", "10.111.3.0/24"]);
        assert!(why(join(&token, "hand", &key(&etcd, "hand"), WAIT)).contains("another key"));
        // Blocks of `default` stay, though nobody has declared it and hosts don't speak of it; and no network is
        // declared over them.
        let report = Report::start(&file, "h2", || 0).expect("a thread");
        let own = HostRecord { default_range: "10.111.3.0/24".into(), ..record(77) };
        let followed = Followed { revision: 1_000_000, ..Followed::default() };
        report.say(Some(own), Holdings::default(), followed, There::default());
        until("it is there", || {
            match operator.view().map_err(|error| error.to_string())?.followed().contains_key("h2") {
                true => Ok(()),
                false => Err("not yet".into()),
            }
        });
        let view = operator.view().expect("read");
        Controller::run(&file, &view).expect("done");
        assert!(operator.change(&apply(vec![network("blue", "10.111.3.128/25")]), false).is_err());
        assert_eq!(operator.remove_host("h1").expect("removed").blocks, 1);
        assert_eq!(range("h3"), "10.111.0.0/24", "it is free again");
    });
    assert!(operator.view().expect("read").block("default", "h2").is_some());
}

#[test]
fn a_token_has_a_user_of_its_own_as_long_as_it_is_good() {
    let etcd = Cluster::start(1, &["root"]);
    let file = begin(&etcd, true);
    let join_users = || {
        let users = etcd.etcdctl(Some("root"), &["user", "list"]);
        users.lines().filter_map(|user| user.strip_prefix("join-")).map(str::to_owned).collect::<Vec<_>>()
    };
    let (kept, revoked, gone) = (token(&file, 1), token(&file, 1), token(&file, 1));
    assert_eq!(join_users().len(), 3);
    Tokens::open(&file).expect("a cluster").revoke(&revoked.id).expect("revoked");
    assert!(!join_users().contains(&revoked.id) && join_users().len() == 2);
    // By an operator, who has no right to take users away: a controller does.
    let mut store = open(&etcd.endpoints_as("root"), "/freeflow/admission");
    delete(&mut store, &format!("tokens/{}", gone.id));
    // Of another cluster in the same etcd, and somebody's whose name is alike.
    etcd.etcdctl(Some("root"), &["role", "add", "join-0123456789ab"]);
    let others =
        ["role", "grant-permission", "join-0123456789ab", "readwrite", "--prefix", "/other/requests/0123456789ab/"];
    etcd.etcdctl(Some("root"), &others);
    for user in ["join-0123456789ab", "join-me"] {
        etcd.etcdctl(Some("root"), &["user", "add", user, "--no-password"]);
    }
    // Of a controller that died when it had made a host's user, of which nothing else is left; and another cluster's.
    let host_user = |digits: &str, prefix: &str| {
        let user = format!("host-h9-{digits}");
        etcd.etcdctl(Some("root"), &["role", "add", &user]);
        etcd.etcdctl(Some("root"), &["role", "grant-permission", &user, "read", "--prefix", prefix]);
        etcd.etcdctl(Some("root"), &["user", "add", &user, "--no-password"]);
        user
    };
    let (left_over, others_host) =
        (host_user("0123456789abcdef", "/freeflow/"), host_user("fedcba9876543210", "/other/"));
    let mut blocks = open(&etcd.endpoints_as("root"), "/freeflow/blocks");
    put(&mut blocks, "default/gone", "10.111.7.0/24").expect("written");
    put(&mut blocks, "default/noted", "10.111.8.0/24").expect("written");
    let noted = json!({"public_key": "", "user": "host-noted-0123456789abcdef", "at_s": 0});
    put(&mut store, "hosts/noted", &noted.to_string()).expect("written");
    let view = Operator::open(&file.as_own()).expect("a cluster").view().expect("read");
    let pending = Pending::new(&file.root);
    let sweep = || Admission::open(&file, &view).expect("its keys").sweep(&pending).expect("done");
    let said = sweep();
    assert!(said.len() == 3 && said.iter().any(|text| text.contains(&left_over)), "{said:?}");
    // Of a host that was removed while another controller gave it a block.
    assert!(said.iter().any(|text| text.contains("gone, which is no host")), "{said:?}");
    let blocks = etcd.etcdctl(Some("root"), &["get", "--prefix", "/freeflow/blocks/data/default/"]);
    assert_eq!(blocks.lines().collect::<Vec<_>>(), ["/freeflow/blocks/data/default/noted", "10.111.8.0/24"]);
    delete(&mut store, "hosts/noted");
    let view = Operator::open(&file.as_own()).expect("a cluster").view().expect("read");
    let sweep = || Admission::open(&file, &view).expect("its keys").sweep(&pending).expect("done");
    assert_eq!(sweep().len(), 1);
    assert_eq!(sweep().len(), 0);
    let users = etcd.etcdctl(Some("root"), &["user", "list"]);
    assert!(!users.contains(&left_over) && users.contains(&others_host), "{users}");
    let mut left = join_users();
    left.sort_unstable();
    let mut expected = vec![kept.id.clone(), "0123456789ab".into(), "me".into()];
    expected.sort_unstable();
    assert_eq!(left, expected);
    let ((), _) = with_controllers(&file, 1, || {
        join(&kept, "h1", &key(&etcd, "h1"), WAIT).expect("admitted");
        assert!(why(join(&gone, "h2", &key(&etcd, "h2"), WAIT)).contains("lets nobody in by the token"));
    });
    // It is used up, and the answer may be asked for again; later nobody has anything to ask.
    assert_eq!(sweep().len(), 0);
    let key = format!("tokens/{}", kept.id);
    let there = store.get(&key, None).expect("read").expect("it is there");
    let mut record: serde_json::Value = serde_json::from_slice(&there.value).expect("JSON");
    record["used_up_s"] = (record["used_up_s"].as_u64().expect("a number") - 600).into();
    put(&mut store, &key, &record.to_string()).expect("written");
    assert_eq!((sweep().len(), join_users().contains(&kept.id)), (1, false));
    let left = etcd.etcdctl(Some("root"), &["get", "--prefix", "--keys-only", "/freeflow/requests/"]);
    assert_eq!(left.trim(), "", "something of them is left");
}

/// It writes as long as it may, and then nothing of it is left.
#[test]
fn a_host_that_was_removed_can_not_write_itself_back() {
    let etcd = Cluster::start(1, &["root"]);
    let file = begin(&etcd, true);
    let mut operator = Operator::open(&file.as_own()).expect("a cluster");
    let token = token(&file, 9);
    let (welcome, _) = with_controllers(&file, 1, || join(&token, "h1", &key(&etcd, "h1"), WAIT).expect("admitted"));
    own_file(&etcd, "h1", &welcome);
    let mut hostile = store_as(&etcd, "h1", "/freeflow/hosts/h1");
    let bytes = serde_json::to_string(&record(1)).expect("encodable");
    put(&mut hostile, "record", &bytes).expect("it speaks");
    put(&mut hostile, "other", "x").expect("it writes what it likes");
    for part in ["said", "vnics"] {
        put(&mut store_as(&etcd, "h1", &format!("/freeflow/{part}/h1")), "other", "x").expect("and there as well");
    }
    // No controller is up.
    let removed = operator.remove_host("h1").expect("noted");
    assert_eq!((removed.blocks, removed.is_pending, removed.token), (1, true, Some((token.id.clone(), 8))));
    put(&mut hostile, "record", &bytes).expect("its certificate works still");
    assert!(operator.view().expect("read").hosts().contains_key("h1"), "it has come back");
    let (removed, said) = with_controllers(&file, 2, || operator.remove_host("h1").expect("removed"));
    assert!(!removed.is_pending && said.iter().any(|text| text.contains("are nobody's now")), "{removed:?} {said:?}");
    assert!(put(&mut hostile, "record", &bytes).is_err());
    for part in ["hosts", "said", "vnics"] {
        let left = etcd.etcdctl(Some("root"), &["get", "--prefix", "--keys-only", &format!("/freeflow/{part}/")]);
        assert_eq!(left.trim(), "", "something of it is left");
    }
    let view = operator.view().expect("read");
    assert!(view.hosts().is_empty() && view.block("default", "h1").is_none());
    assert_eq!(etcd.etcdctl(Some("root"), &["user", "list"]).matches("host-h1-").count(), 0);
    // The next host of the name loses nothing by a controller that finishes late.
    let other = key(&etcd, "next");
    let (welcome, _) = with_controllers(&file, 2, || join(&token, "h1", &other, WAIT).expect("admitted"));
    assert_eq!(
        operator.view().expect("read").block("default", "h1").map(|block| block.to_string()),
        Some(welcome.range)
    );
}

#[test]
fn a_host_has_a_user_of_its_own_and_loses_a_controllers_rights() {
    let etcd = Cluster::start(1, &["root"]);
    let file = begin(&etcd, true);
    let (token, key) = (token(&file, 9), key(&etcd, "h1"));
    let welcome = join_as_controller(&file, "h1", &key).expect("a controller");
    own_file(&etcd, "h1", &welcome);
    let mut blocks = store_as(&etcd, "h1", "/freeflow/blocks");
    put(&mut blocks, "red/h1", "10.0.0.0/24").expect("a controller may");
    let (welcome, _) = with_controllers(&file, 1, || join(&token, "h1", &key, WAIT).expect("the same host"));
    own_file(&etcd, "h1", &welcome);
    let mut blocks = store_as(&etcd, "h1", "/freeflow/blocks");
    assert!(put(&mut blocks, "red/h1", "10.0.1.0/24").is_err(), "a plain host may not");
    put(&mut store_as(&etcd, "h1", "/freeflow/hosts/h1"), "record", "{}").expect("its own part");
    // An entry that somebody has written among those of hosts that were admitted makes no certificate of another name.
    let mut store = open(&etcd.endpoints_as("root"), "/freeflow/admission");
    let there = store.get("hosts/h1", None).expect("read").expect("it is there");
    let there: serde_json::Value = serde_json::from_slice(&there.value).expect("JSON");
    for user in [
        "root",
        "operator",
        "host-h1-",
        "host-h1-0123456789abcdeF",
        "host-h1-0123456789abcdef0",
        "host-h2-0123456789abcdef",
    ] {
        let mut bad = there.clone();
        bad["user"] = user.into();
        put(&mut store, "hosts/h1", &bad.to_string()).expect("written");
        let (outcome, _) = with_controllers(&file, 1, || join(&token, "h1", &key, WAIT));
        let why = why(outcome);
        assert!(why.contains("which is none of a host"), "{user}: {why}");
    }
    let users = etcd.etcdctl(Some("root"), &["user", "list"]);
    assert!(users.lines().any(|user| user == "root") && users.lines().any(|user| user == "operator"), "{users}");
}

#[test]
fn what_bearers_of_tokens_write_is_controllers_business_alone() {
    let etcd = Cluster::start(1, &[]);
    let file = begin(&etcd, false);
    let token = token(&file, 1);
    let mut joins = open(&etcd.endpoints(), &format!("/freeflow/requests/{}", token.id));
    let listed = |follow: &Follow| match follow.next(WAIT) {
        Some(News::Listed(_, entries)) => entries.iter().map(|entry| entry.key.clone()).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    put(&mut joins, "h1/request", "before").expect("written");
    let (plain, controller) = (ClusterFile { controller: false, ..file.clone() }, file);
    let follow = Follow::start(&plain).expect("a follower");
    let keys = listed(&follow);
    assert!(
        !keys.is_empty() && keys.iter().all(|key| !key.contains("/requests/") && !key.contains("/admission/")),
        "{keys:?}"
    );
    let keys = listed(&Follow::start(&controller).expect("a follower"));
    assert!(["/requests/", "/admission/"].iter().all(|part| keys.iter().any(|key| key.contains(part))), "{keys:?}");
    put(&mut joins, "h1/request", "after").expect("written");
    put(&mut open(&etcd.endpoints(), "/freeflow/hosts/h1"), "record", "{}").expect("written");
    loop {
        match follow.next(WAIT) {
            Some(News::Changed(_, changes)) => {
                assert!(changes.iter().all(|(key, _)| key.starts_with("/freeflow/hosts/h1/")), "{changes:?}");
                break;
            }
            Some(News::Unchanged(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    // More than is read at once: a controller goes on with a part of them.
    for number in 0..16 {
        let write = |part| Write { key: format!("n{number:02}/{part}"), value: Some(vec![b'x'; 60_000]), lease: None };
        let writes = (0..20).map(write).collect();
        joins.commit(&Transaction { compares: Vec::new(), writes }).expect("written");
    }
    put(&mut joins, "z/request", "late").expect("written");
    let keys = listed(&Follow::start(&controller).expect("a follower"));
    assert!(keys.iter().any(|key| key.contains("/n00/")) && !keys.iter().any(|key| key.contains("/z/")), "{keys:?}");
}

/// A host that joined says that it has all addresses; and where there are none, no use of a token is lost.
#[test]
fn no_host_keeps_others_out_by_what_it_says_it_has() {
    let etcd = Cluster::start(1, &[]);
    let file = begin(&etcd, false);
    let mut operator = Operator::open(&file).expect("a cluster");
    let token = token(&file, 9);
    let uses_left = || Tokens::open(&file).expect("a cluster").list().expect("read")[0].1.uses_left;
    let ((), _) = with_controllers(&file, 1, || {
        join(&token, "h1", &key(&etcd, "h1"), WAIT).expect("admitted");
        let report = Report::start(&file, "h1", || 0).expect("a thread");
        let own = HostRecord { default_range: "10.111.0.0/16".into(), ..record(1) };
        report.say(Some(own), Holdings::default(), Followed::default(), There::default());
        until("it is there", || match operator.view().map_err(|error| error.to_string())?.hosts().contains_key("h1") {
            true => Ok(()),
            false => Err("not yet".into()),
        });
        let welcome = join(&token, "h2", &key(&etcd, "h2"), WAIT).expect("admitted, too");
        assert_eq!((welcome.range.as_str(), uses_left()), ("10.111.1.0/24", 7));
    });
    // All of it is a host's, by hand.
    operator.remove_host("h1").expect("noted");
    let hand = HostRecord { default_range: "10.111.0.0/16".into(), ..record(3) };
    let mut store = open(&etcd.endpoints(), "/freeflow/hosts/hand");
    let ((), _) = with_controllers(&file, 1, || {
        put(&mut store, "record", &serde_json::to_string(&hand).expect("encodable")).expect("written");
        let why = why(join(&token, "h4", &key(&etcd, "h4"), WAIT));
        assert!(why.contains("no block of 10.111.0.0/16 is left"), "{why}");
        assert_eq!(uses_left(), 7);
    });
}

#[test]
fn a_host_that_is_in_has_its_certificate_renewed() {
    let etcd = Cluster::start(1, &["root"]);
    let controller = begin(&etcd, true);
    let key = key(&etcd, "h1");
    let first = join_as_controller(&controller, "h1", &key).expect("admitted");
    let own = |pem: &str| {
        fs::write(etcd.directory().join("h1.pem"), pem).expect("written");
        let fields = json!({"etcd": [etcd.url(0)], "cacert": "ca.pem", "cert": "h1.pem", "key": "h1.etcd.key"});
        let path = etcd.directory().join("h1.json");
        fs::write(&path, fields.to_string()).expect("written");
        ClusterFile::read(&path).expect("a file")
    };
    let certificate = first.certificate.expect("a certificate");
    let file = own(&certificate);
    let (renewed, said) = with_controllers(&controller, 2, || {
        until("another certificate", || match renew(&file, "h1", &key) {
            Ok(Some(welcome)) => Ok(welcome),
            Ok(None) => Err("not yet".into()),
            Err(error) => Err(error.to_string()),
        })
    });
    let renewed_certificate = renewed.certificate.expect("a certificate");
    assert!(renewed_certificate != certificate && renewed.range == first.range);
    assert!(said.iter().all(|text| text.contains("another certificate")) && !said.is_empty(), "{said:?}");
    // It asks for itself alone, with the key that it was admitted with.
    let file = own(&renewed_certificate);
    assert!(renew(&file, "h2", &key).is_err(), "etcd lets it write for another host");
    let stranger = self::key(&etcd, "stranger");
    let (error, _) = with_controllers(&controller, 1, || {
        until("it is refused", || match renew(&file, "h1", &stranger) {
            Err(error) => Ok(error.to_string()),
            other => Err(format!("{other:?}")),
        })
    });
    assert!(error.contains("no host of this name and key"), "{error}");
}
