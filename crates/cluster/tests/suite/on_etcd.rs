//! Operators, controllers and hosts on a real etcd.
use crate::common::{Cluster, open, put, until};
use crate::given::{apply, delete, network, object, record};
use freeflow_cluster::{
    ClusterError, ClusterFile, Controller, Follow, Followed, Held, Holdings, HostRecord, Operator, Report, Scope,
    There, View, place_vnics,
};
use freeflow_etcd::Endpoints;
use freeflow_orchestrator::objects::ObjectKind;
use freeflow_orchestrator::{Change, Pool, Reason};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

const USERS: [&str; 4] = ["root", "operator", "h1", "h2"];

/// A cluster file, of a user where etcd knows users.
pub fn file(etcd: &Cluster, user: Option<&str>) -> ClusterFile {
    let mut fields = json!({"etcd": (0..etcd.count()).map(|number| etcd.url(number)).collect::<Vec<_>>()});
    if let Some(user) = user {
        fields["cacert"] = "ca.pem".into();
        fields["cert"] = format!("{user}.pem").into();
        fields["key"] = format!("{user}.key").into();
    }
    let path = etcd.directory().join(format!("{}.json", user.unwrap_or("all")));
    fs::write(&path, fields.to_string()).expect("written");
    ClusterFile::read(&path).expect("a file")
}

pub fn init(file: &ClusterFile) -> Operator {
    until("etcd answers", || Operator::init(file, "id").map_err(|error| error.to_string()));
    Operator::open(file).expect("a cluster")
}

fn refusal(result: Result<impl Sized, ClusterError>) -> Reason {
    match result.map(drop).expect_err("it is refused") {
        ClusterError::Refused(refusal) => refusal.reason,
        other => panic!("{other}"),
    }
}

/// A host says that it is there, and how far it has come.
pub fn say(file: &ClusterFile, name: &str, number: u8, revision: u64, ranges: &[(&str, &str)]) {
    let mut report = Report::start(file, name, || 0).expect("a thread");
    let operator = Operator::open(file).expect("a cluster");
    let there = There::of(&operator.view().expect("read"), name);
    let ranges = ranges.iter().map(|(network, range)| (network.to_string(), range.to_string())).collect();
    let followed = Followed { revision, ranges, ..Followed::default() };
    report.say(Some(record(number)), Holdings::default(), followed, there);
    until("it is said", || {
        let view = operator.view().map_err(|error| error.to_string())?;
        let there = view.followed().get(name).is_some_and(|followed| followed.revision >= revision);
        if there && view.hosts().contains_key(name) { Ok(()) } else { Err(format!("{:?}", report.error())) }
    });
}

fn blocks(view: &View, network: &str) -> Vec<Pool> {
    view.blocks().iter().filter(|((of, _), _)| of == network).map(|(_, block)| *block).collect()
}

#[test]
fn what_is_declared_is_declared_once() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    until("etcd answers", || match Operator::open(&file) {
        Err(ClusterError::Absent(root)) if root == "/freeflow" => Ok(()),
        other => Err(format!("{:?}", other.err())),
    });
    let mut operator = init(&file);
    assert!(!Operator::init(&file, "other").expect("it is there").1);
    let (revision, outcomes) = operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).expect("done");
    assert_eq!(outcomes[0].what, Change::Created);
    assert_eq!(outcomes[0].object.metadata().resource_version, Some(revision.0));
    let (_, again) = operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).expect("done");
    assert_eq!(again[0].what, Change::Unchanged);
    let (_, tried) = operator.change(&apply(vec![network("blue", "10.51.0.0/24")]), true).expect("tried");
    assert_eq!((tried[0].what, operator.state().expect("read").networks().count()), (Change::Created, 1));
    for (command, reason) in [
        (apply(vec![network("default", "10.52.0.0/24")]), Reason::Forbidden),
        (apply(vec![object("Host", "h", json!({}))]), Reason::Forbidden),
        (
            apply(vec![object("Network", "x", json!({"cidrs": ["10.53.0.0/24"], "range": "10.53.0.0/28"}))]),
            Reason::Invalid,
        ),
        (delete(ObjectKind::Vnic, "v"), Reason::NotFound),
        (delete(ObjectKind::Group, "none"), Reason::NotFound),
    ] {
        assert_eq!(refusal(operator.change(&command, false)), reason, "{command:?}");
    }
    operator.change(&delete(ObjectKind::Network, "red"), false).expect("done");
    assert_eq!(operator.state().expect("read").networks().count(), 0);
}

/// One deletes what another names at the same time: one of them is refused, and nothing names what is not there.
#[test]
fn operators_do_not_undo_what_others_rely_on() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    for round in 0..10 {
        let class = object("QosClass", "slow", json!({}));
        operator.change(&apply(vec![class]), false).expect("done");
        let named = object(
            "Network",
            &format!("n{round}"),
            json!({"cidrs": [format!("10.{round}.0.0/24")], "qosClass": "slow"}),
        );
        let other = {
            let file = file.clone();
            std::thread::spawn(move || {
                Operator::open(&file).expect("a cluster").change(&apply(vec![named]), false).is_ok()
            })
        };
        let deleted = operator.change(&delete(ObjectKind::QosClass, "slow"), false).is_ok();
        let made = other.join().expect("it ended");
        let state = operator.state().expect("what is declared makes sense");
        assert!(deleted != made, "round {round}: deleted {deleted}, named {made}");
        assert_eq!((state.class("slow").is_some(), state.networks().count()), (made, usize::from(made)));
        if made {
            operator.change(&delete(ObjectKind::Network, &format!("n{round}")), false).expect("done");
        }
    }
}

#[test]
fn each_host_has_a_block_until_it_has_followed_the_deletion() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).expect("done");
    say(&file, "h1", 1, 1, &[]);
    say(&file, "h2", 2, 1, &[]);
    // Two at once: they take turns.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let view = operator.view().expect("read");
                Controller::run(&file, &view).expect("given");
            });
        }
    });
    let view = operator.view().expect("read");
    let given: BTreeSet<String> = blocks(&view, "red").iter().map(Pool::to_string).collect();
    assert_eq!(given, BTreeSet::from(["10.50.0.0/28".into(), "10.50.0.16/28".into()]));
    let cidrs = apply(vec![network("red", "10.60.0.0/24")]);
    assert_eq!(refusal(operator.change(&cidrs, false)), Reason::InUse, "its addresses are in use");

    operator.change(&delete(ObjectKind::Network, "red"), false).expect("done");
    let mut view = operator.view().expect("read");
    Controller::run(&file, &view).expect("done");
    assert_eq!(blocks(&operator.view().expect("read"), "red").len(), 2, "nobody has said that it is gone");
    assert_eq!(refusal(operator.change(&cidrs, false)), Reason::InUse);
    say(&file, "h1", 1, view.revision().0, &[]);
    view = operator.view().expect("read");
    Controller::run(&file, &view).expect("done");
    view = operator.view().expect("read");
    assert_eq!((view.block("red", "h1"), view.block("red", "h2").is_some()), (None, true));
    // The other one is gone for good.
    assert_eq!(operator.remove_host("h2").expect("forgotten").blocks, 1);
    assert_eq!(refusal(operator.remove_host("h2")), Reason::NotFound);
    let view = operator.view().expect("read");
    assert_eq!((view.hosts().len(), blocks(&view, "red").len()), (1, 0));
    operator.change(&cidrs, false).expect("the name is free");
}

/// A controller that was away while a network was deleted, declared again and deleted again.
#[test]
fn an_old_view_takes_no_block_that_is_in_use() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    let red = apply(vec![network("red", "10.50.0.0/24")]);
    operator.change(&red, false).expect("done");
    say(&file, "h1", 1, 1, &[]);
    Controller::run(&file, &operator.view().expect("read")).expect("given");
    operator.change(&delete(ObjectKind::Network, "red"), false).expect("done");
    let deleted = operator.view().expect("read");
    say(&file, "h1", 1, deleted.revision().0, &[]);
    let old = operator.view().expect("read");
    Controller::run(&file, &old).expect("taken back");
    assert_eq!(blocks(&operator.view().expect("read"), "red").len(), 0);
    // Again, and in use.
    operator.change(&red, false).expect("done");
    Controller::run(&file, &operator.view().expect("read")).expect("given");
    let in_use = [("red", "10.50.0.0/28")];
    say(&file, "h1", 1, operator.view().expect("read").revision().0, &in_use);
    // By what it saw when it went away.
    Controller::run(&file, &old).expect("nothing is due");
    assert_eq!(blocks(&operator.view().expect("read"), "red").len(), 1);
    // Deleted again, of which the host has not heard; then it has, but has it in use.
    let heard_of = operator.view().expect("read").revision().0;
    operator.change(&delete(ObjectKind::Network, "red"), false).expect("done");
    Controller::run(&file, &operator.view().expect("read")).expect("nothing is due");
    say(&file, "h1", 1, heard_of, &[]);
    Controller::run(&file, &operator.view().expect("read")).expect("nothing is due");
    say(&file, "h1", 1, operator.view().expect("read").revision().0, &in_use);
    Controller::run(&file, &operator.view().expect("read")).expect("nothing is due");
    assert_eq!(blocks(&operator.view().expect("read"), "red").len(), 1);
    say(&file, "h1", 1, operator.view().expect("read").revision().0, &[]);
    Controller::run(&file, &operator.view().expect("read")).expect("taken back");
    assert_eq!(blocks(&operator.view().expect("read"), "red").len(), 0);
}

/// As after a backup was restored: blocks that were given later are there only because hosts say so.
#[test]
fn ranges_in_use_are_given_to_nobody_else() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).expect("done");
    say(&file, "a", 1, 1, &[]);
    say(&file, "b", 2, 1, &[("red", "10.50.0.0/28")]);
    // More than a block is nobody's.
    say(&file, "c", 3, 1, &[("red", "10.50.0.0/24")]);
    Controller::run(&file, &operator.view().expect("read")).expect("given");
    let view = operator.view().expect("read");
    let given = ["a", "b", "c"].map(|host| view.block("red", host).expect("a block").to_string());
    assert_eq!(given, ["10.50.0.16/28", "10.50.0.0/28", "10.50.0.32/28"]);
    let mut last = 0;
    for _ in 0..3 {
        Operator::restored(&file).expect("said");
        let said = operator.view().expect("read").identity().expect("there").restored;
        assert!(said > last);
        last = said;
    }
}

#[test]
fn networks_of_a_cluster_have_addresses_of_their_own() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    say(&file, "h1", 1, 1, &[]);
    operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).expect("done");
    for objects in [
        vec![network("blue", "10.50.0.128/25")],
        vec![network("blue", "10.0.0.0/8")],
        vec![network("blue", "10.60.0.0/24"), network("green", "10.60.0.0/16")],
        vec![network("blue", "10.111.0.0/16")],
    ] {
        assert_eq!(refusal(operator.change(&apply(objects), false)), Reason::Conflict);
    }
    // A host that claims everything stops nobody.
    let mut greedy = Report::start(&file, "h9", || 0).expect("a thread");
    let all = HostRecord { default_range: "10.0.0.0/8".into(), ..record(9) };
    greedy.say(Some(all), Holdings::default(), Followed::default(), There::default());
    until("it is said", || {
        let view = operator.view().map_err(|error| error.to_string())?;
        if view.hosts().contains_key("h9") { Ok(()) } else { Err(format!("{:?}", greedy.error())) }
    });
    operator
        .change(&apply(vec![network("blue", "10.60.0.0/24"), network("green", "10.62.0.0/16")]), false)
        .expect("done");
}

#[test]
fn a_host_that_was_removed_says_nothing_any_more() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    let mut report = Report::start(&file, "h1", || 0).expect("a thread");
    let nothing = Holdings::default;
    report.say(Some(record(1)), nothing(), Followed::default(), There::default());
    let before = until("it is said", || {
        let view = operator.view().map_err(|error| error.to_string())?;
        let there = There::of(&view, "h1");
        view.followed().get("h1").map(|_| there).ok_or_else(|| format!("{:?}", report.error()))
    });
    report.say(None, nothing(), Followed { revision: 7, ..Followed::default() }, before.clone());
    until("it is said", || {
        let view = operator.view().map_err(|error| error.to_string())?;
        view.followed().get("h1").filter(|followed| followed.revision == 7).map(drop).ok_or_else(|| "not yet".into())
    });
    operator.remove_host("h1").expect("forgotten");
    report.say(Some(record(1)), nothing(), Followed { revision: 8, ..Followed::default() }, before);
    until("it is void", || if report.is_void() { Ok(()) } else { Err(format!("{:?}", report.error())) });
    let view = operator.view().expect("read");
    assert_eq!((view.hosts().len(), view.holdings().len(), view.followed().len()), (0, 0, 0));
    assert_eq!(report.error(), None);
}

/// How far a host has followed is not written on other holdings than it has said, such as those of a backup: an
/// operator who reads that it has spoken relies on both.
#[test]
fn how_far_a_host_has_followed_is_never_newer_than_its_holdings() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let operator = init(&file);
    let view = || operator.view().expect("read");
    let holds =
        |at| Holdings { vnics: [("v".to_owned(), Held { at, ..Held::default() })].into(), ..Holdings::default() };
    let mut report = Report::start(&file, "h1", || 0).expect("a thread");
    let said = |report: &mut Report, revision: u64| {
        until("it is said", || match view().followed().get("h1") {
            Some(followed) if followed.revision == revision => Ok(()),
            other => Err(format!("{other:?}, {:?}", report.error())),
        });
    };
    report.say(Some(record(1)), holds(5), Followed { revision: 1, ..Followed::default() }, There::default());
    said(&mut report, 1);
    let there = There::of(&view(), "h1");
    assert_eq!(there.holdings.as_ref().map(|(_, holdings)| holdings), Some(&holds(5)));
    // The same again is how far it has come, and no more.
    report.say(None, holds(5), Followed { revision: 2, ..Followed::default() }, there.clone());
    said(&mut report, 2);
    assert_eq!(There::of(&view(), "h1"), there);
    // Others, as a backup has them: the host has not heard of that yet.
    let mut other = open(&etcd.endpoints(), "/freeflow/hosts/h1");
    put(&mut other, "holdings", &serde_json::to_string(&holds(3)).expect("encodable")).expect("written");
    report.say(None, holds(5), Followed { revision: 3, ..Followed::default() }, there.clone());
    until("it is void", || if report.is_void() { Ok(()) } else { Err(format!("{:?}", report.error())) });
    assert_eq!(view().followed()["h1"].revision, 2);
    // It has heard of it.
    report.say(None, holds(5), Followed { revision: 3, ..Followed::default() }, There::of(&view(), "h1"));
    said(&mut report, 3);
    assert_eq!(view().holdings()["h1"].1, holds(5));
}

#[test]
fn a_host_is_sent_no_words_of_others_on_how_far_they_have_come() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    say(&file, "h1", 1, 1, &[]);
    let (host, controller) = (Follow::start(&file).expect("a thread"), Follow::start_of(&file, Scope::Said));
    let controller = controller.expect("a thread");
    let mut views = [View::new(&file.root, Scope::Host), View::new(&file.root, Scope::Said)];
    say(&file, "h1", 1, 9, &[]);
    let last = operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).expect("done").0;
    for (follow, view) in [&host, &controller].into_iter().zip(&mut views) {
        until("it is heard", || {
            follow.next(Duration::from_millis(100)).into_iter().for_each(|news| {
                let _ = view.take(news);
            });
            if view.declared_revision() == last { Ok(()) } else { Err(format!("{}", view.revision())) }
        });
    }
    let [host, controller] = views;
    assert_eq!((host.followed().len(), controller.followed()["h1"].revision), (0, 9));
    assert!(host.hosts().contains_key("h1") && host.holdings().contains_key("h1"));
    // By the view of a host no block is given: those in use would be free.
    let error = Controller::run(&file, &host).expect_err("it is refused").to_string();
    assert!(error.contains("not followed here"), "{error}");
    assert!(Controller::run(&file, &controller).is_ok());
}

#[test]
fn a_network_without_room_is_said() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    operator.change(&apply(vec![network("tiny", "10.50.0.0/29")]), false).expect("done");
    say(&file, "h1", 1, 1, &[]);
    say(&file, "h2", 2, 1, &[]);
    let full = Controller::run(&file, &operator.view().expect("read")).expect("done");
    assert_eq!(full, ["tiny"]);
    assert_eq!(blocks(&operator.view().expect("read"), "tiny").len(), 1);
}

/// etcd's own rights, by the names in certificates, as docs/CLUSTER.md has them.
#[test]
fn a_host_writes_of_itself_alone() {
    let etcd = Cluster::start(1, &USERS);
    let root = file(&etcd, Some("root"));
    init(&root);
    let mut words: Vec<String> =
        ["user add root --no-password", "role add root", "user grant-role root root"].map(String::from).into();
    words.extend(
        ["role add operator", "role grant-permission operator readwrite --prefix /freeflow/"].map(String::from),
    );
    for host in ["h1", "h2"] {
        words.push(format!("role add {host}"));
        words.push(format!("role grant-permission {host} read --prefix /freeflow/"));
        for part in ["hosts", "said", "vnics"] {
            words.push(format!("role grant-permission {host} readwrite --prefix /freeflow/{part}/{host}/"));
        }
    }
    for user in ["operator", "h1", "h2"] {
        words.push(format!("user add {user} --no-password"));
        words.push(format!("user grant-role {user} {user}"));
    }
    words.push("auth enable".into());
    for line in words {
        etcd.etcdctl(Some("root"), &line.split(' ').collect::<Vec<_>>());
    }
    let own = file(&etcd, Some("h1"));
    until("operators may declare", || {
        let mut operator = Operator::open(&file(&etcd, Some("operator"))).map_err(|error| error.to_string())?;
        operator.change(&apply(vec![network("red", "10.50.0.0/24")]), false).map_err(|error| error.to_string())
    });
    say(&own, "h1", 1, 1, &[]);
    // It reads all, and follows.
    let follow = Follow::start(&own).expect("a thread");
    assert!(matches!(follow.next(Duration::from_secs(20)), Some(freeflow_cluster::News::Listed(..))));
    // But neither declares, nor gives itself addresses, nor speaks for others.
    let denied = |result: Result<(), ClusterError>| {
        let error = result.expect_err("it may not").to_string();
        assert!(error.contains("permission denied"), "{error}");
    };
    let mut as_host = Operator::open(&own).expect("it reads");
    denied(as_host.change(&apply(vec![network("blue", "10.51.0.0/24")]), false).map(drop));
    denied(as_host.change(&delete(ObjectKind::Network, "red"), false).map(drop));
    denied(Controller::run(&own, &as_host.view().expect("read")).map(drop));
    let mut report = Report::start(&own, "h2", || 0).expect("a thread");
    report.say(Some(record(2)), Holdings::default(), Followed::default(), There::default());
    until("it is refused", || match report.error() {
        Some(error) if error.contains("permission denied") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    for part in ["hosts", "said", "vnics"] {
        let mut store = open(&etcd.endpoints_as("h1"), &format!("/freeflow/{part}/h2"));
        let error = put(&mut store, "followed", "{}").expect_err("it may not").to_string();
        assert!(error.contains("permission denied"), "{error}");
    }
    let view = as_host.view().expect("read");
    assert_eq!(view.hosts().keys().collect::<Vec<_>>(), ["h1"]);
    assert_eq!((view.declared().expect("it makes sense").networks().count(), view.blocks().len()), (1, 0));
}

fn many(networks: usize) -> Vec<freeflow_orchestrator::objects::AnyObject> {
    let network = |number: usize| {
        let spec =
            json!({"tenant": "t", "cidrs": [format!("10.{}.{}.0/24", number / 256, number % 256)], "qosClass": "c7"});
        object("Network", &format!("n{number}"), spec)
    };
    // The other way round than they can be made.
    (0..networks)
        .map(network)
        .chain((0..120).map(|number| object("QosClass", &format!("c{number}"), json!({}))))
        .collect()
}

#[test]
fn many_objects_are_declared_in_parts() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    // A mistake in the last one changes nothing.
    let mut wrong = many(180);
    wrong.push(object("Network", "last", json!({"tenant": "t", "cidrs": ["10.200.0.0/24"], "qosClass": "none"})));
    let before = operator.view().expect("read").declared_revision();
    operator.change(&apply(wrong), false).map(drop).expect_err("it names what is not there");
    assert_eq!(operator.view().expect("read").declared_revision(), before);

    let all = many(180);
    let (_, tried) = operator.change(&apply(all.clone()), true).expect("tried");
    let (revision, done) = operator.change(&apply(all.clone()), false).expect("declared");
    assert_eq!((tried.len(), done.len(), done[0].name.as_str()), (300, 300, "n0"));
    assert!(done.iter().all(|outcome| outcome.what == Change::Created));
    let at = |index: usize| done[index].object.metadata().resource_version.expect("stored");
    assert!(at(299) < at(179) && at(179) <= revision.0, "classes before networks");
    let state = operator.state().expect("it makes sense");
    assert_eq!((state.networks().count(), state.class("c119").is_some()), (180, true));
    let (again, same) = operator.change(&apply(all), false).expect("nothing to do");
    assert!(again >= revision && same.iter().all(|outcome| outcome.what == Change::Unchanged));
}

/// An operator that may write classes alone: etcd refuses the second part, and it is said what is there.
#[test]
fn a_part_that_fails_is_said_by_name() {
    let etcd = Cluster::start(1, &USERS);
    init(&file(&etcd, Some("root")));
    let classes = format!("/freeflow/declared/data/{}qosclasses/", freeflow_orchestrator::KEY_PREFIX);
    let mut words: Vec<String> =
        ["user add root --no-password", "role add root", "user grant-role root root", "role add operator"]
            .map(String::from)
            .into();
    words.push("role grant-permission operator read --prefix /freeflow/".into());
    words.push("role grant-permission operator readwrite /freeflow/declared/data/serial".into());
    for prefix in [classes.as_str(), "/freeflow/declared/receipts/"] {
        words.push(format!("role grant-permission operator readwrite --prefix {prefix}"));
    }
    words.extend(["user add operator --no-password", "user grant-role operator operator"].map(String::from));
    words.push("auth enable".into());
    for line in words {
        etcd.etcdctl(Some("root"), &line.split(' ').collect::<Vec<_>>());
    }
    let own = file(&etcd, Some("operator"));
    let mut operator = until("rights are there", || Operator::open(&own).map_err(|error| error.to_string()));
    // 120 classes, of which 20 are in a part with networks.
    let error = operator.change(&apply(many(90)), false).map(drop).expect_err("it may not");
    let ClusterError::Partly(partly) = error else { panic!("{error}") };
    assert_eq!((partly.done.len(), partly.doubtful.len(), partly.left.len()), (100, 0, 110));
    assert!(partly.why.contains("permission denied"), "{}", partly.why);
    let state = operator.state().expect("it makes sense");
    let is_there = |(kind, name): &(ObjectKind, String)| state.object(*kind, name).is_some();
    assert!(partly.done.iter().all(is_there) && !partly.left.iter().any(is_there));
    // Nothing of the first part is no part at all.
    let error = operator.change(&apply(many(180).split_off(20)[..150].to_vec()), false).map(drop);
    assert!(!matches!(error.expect_err("it may not"), ClusterError::Partly(_)));
}

/// Hosts say what they ask for and have let go; controllers place; an operator moves.
#[test]
fn a_declared_vnic_has_one_place_whoever_writes_it() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    for number in 1..=3 {
        say(&file, &format!("h{number}"), number, 1, &[]);
    }
    let red = object("Network", "red", json!({"tenant": "red", "cidrs": ["10.50.0.0/24"]}));
    let vnic = |name: &str| object("Vnic", name, json!({"network": "red"}));
    operator.change(&apply(vec![red, vnic("database")]), false).expect("done");
    let (operator, mut other) = (operator, Operator::open(&file).expect("a cluster"));
    let state = operator.state().expect("read");
    assert_eq!(
        state.network("red").and_then(|red| red.floating).map(|part| part.to_string()).as_deref(),
        Some("10.50.0.224/27")
    );
    let said = |name: &str, holdings: Holdings| {
        let mut report = Report::start(&file, name, || 0).expect("a thread");
        let there = There::of(&operator.view().expect("read"), name);
        report.say(None, holdings.clone(), Followed::default(), there);
        until("it is said", || {
            let view = operator.view().map_err(|error| error.to_string())?;
            let is_there = view.holdings().get(name).is_some_and(|(_, there)| *there == holdings);
            if is_there { Ok(()) } else { Err(format!("{:?}", report.error())) }
        });
    };
    let claims = |number| Holdings { claims: [("database".to_owned(), number)].into(), ..Holdings::default() };
    let place = || operator.view().expect("read").places().get("database").cloned();
    said("h1", claims(7));
    said("h2", claims(9));
    // Several controllers at once, with the same news.
    let views: Vec<View> = (0..3).map(|_| operator.view().expect("read")).collect();
    std::thread::scope(|scope| {
        for view in &views {
            scope.spawn(|| place_vnics(&file, view).expect("done"));
        }
    });
    let (at, first) = place().expect("a place");
    assert_eq!((first.host.as_str(), first.next.as_deref()), ("h1", None));
    // h1 has it; an operator moves it, which h1 has to agree to.
    said("h1", Holdings::default());
    assert_eq!(refusal(operator.move_vnic("database", "h9", false)), Reason::NotFound);
    assert_eq!(refusal(operator.move_vnic("none", "h2", false)), Reason::NotFound);
    let moved = operator.move_vnic("database", "h3", false).expect("moved");
    assert_eq!(moved.from.as_deref(), Some("h1"));
    place_vnics(&file, &operator.view().expect("read")).expect("done");
    let (moving, there) = place().expect("a place");
    assert_eq!((there.host.as_str(), there.next.as_deref()), ("h1", Some("h3")));
    assert!(moving > at);
    // A word about the place before this one is none about it.
    let released = |at| Holdings {
        vnics: [("database".to_owned(), Held { at, released: true, refused: None })].into(),
        ..Holdings::default()
    };
    said("h1", released(at.0));
    place_vnics(&file, &operator.view().expect("read")).expect("done");
    assert_eq!(place().expect("a place").1.host, "h1");
    said("h1", released(moving.0));
    place_vnics(&file, &operator.view().expect("read")).expect("done");
    let (_, there) = place().expect("a place");
    assert_eq!((there.host.as_str(), there.moved), ("h3", true), "an operator's move comes before h2's claim");
    // By force it is another's at once.
    operator.move_vnic("database", "h2", true).expect("moved");
    let (forced, there) = place().expect("a place");
    assert_eq!((there.host.as_str(), there.next), ("h2", None));
    // Its address stays its own until h2 has let it go.
    other.change(&delete(ObjectKind::Vnic, "database"), false).expect("done");
    let asked = object("Vnic", "other", json!({"network": "red", "addresses": ["10.50.0.226"]}));
    assert_eq!(refusal(other.change(&apply(vec![asked.clone()]), false)), Reason::InUse);
    said("h2", released(forced.0));
    place_vnics(&file, &operator.view().expect("read")).expect("done");
    assert_eq!(place(), None);
    other.change(&apply(vec![asked]), false).expect("done");
    // A host that is forgotten has no place.
    said("h3", Holdings { claims: [("other".to_owned(), 1)].into(), ..Holdings::default() });
    place_vnics(&file, &operator.view().expect("read")).expect("done");
    assert_eq!(operator.view().expect("read").places()["other"].1.host, "h3");
    other.remove_host("h3").expect("done");
    assert_eq!(operator.view().expect("read").places().len(), 0);
}

/// A follower is killed while its word is on the way, and the word arrives when the next follower has said another one.
#[test]
fn a_word_that_is_late_takes_the_place_of_no_later_one() {
    let etcd = Cluster::start(3, &[]);
    let file_of = |member: usize| {
        let path = etcd.directory().join(format!("of{member}.json"));
        fs::write(&path, json!({"etcd": [etcd.url(member)]}).to_string()).expect("written");
        ClusterFile::read(&path).expect("a file")
    };
    let (slow, quick) = (file_of(0), file_of(1));
    let operator = init(&quick);
    say(&slow, "h1", 1, 1, &[]);
    let view = || operator.view().map_err(|error| error.to_string());
    let named = || view().map(|view| view.followed()["h1"].reclaim_after_s);
    let words = |after_s| Followed { reclaim_after_s: Some(after_s), ..Followed::default() };
    let there = There::of(&view().expect("read"), "h1");
    let mut first = Report::start(&slow, "h1", || 0).expect("a thread");
    first.say(None, Holdings::default(), words(30), there.clone());
    until("it is said", || if named()? == Some(30) { Ok(()) } else { Err(format!("{:?}", first.error())) });
    etcd.stop(0, true);
    first.say(None, Holdings::default(), words(20), there.clone());
    until("no answer comes", || first.error().map(drop).ok_or_else(|| "not yet".into()));
    drop(first);
    // Its thread may have begun once more, and ends when that has no answer either.
    std::thread::sleep(Duration::from_secs(6));
    let mut second = Report::start(&quick, "h1", || 0).expect("a thread");
    second.say(None, Holdings::default(), words(3600), there);
    until("it is said", || if named()? == Some(3600) { Ok(()) } else { Err(format!("{:?}", second.error())) });
    etcd.stop(0, false);
    drop(open(&Endpoints::parse(&etcd.url(0)).expect("an address"), "/other"));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(named().expect("read"), Some(3600));
    assert_eq!(second.error(), None);
}
