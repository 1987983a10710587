//! TLS both ways, and etcd's rights by the name in a certificate.
use crate::common::{Cluster, open, put, until};
use freeflow_etcd::{Auth, Client, EtcdError, EtcdStore, Follower, News, Right};
use freeflow_orchestrator::store::{Store, StoreError};

const USERS: [&str; 3] = ["root", "host1", "stranger"];

#[test]
fn rights_are_those_of_the_certificate() {
    let cluster = Cluster::start(1, &USERS);
    let mut root = open(&cluster.endpoints_as("root"), "/freeflow/hosts/h1");
    for words in [
        "user add root --no-password",
        "role add root",
        "user grant-role root root",
        "role add host1",
        "role grant-permission host1 readwrite --prefix /freeflow/hosts/h1/",
        "user add host1 --no-password",
        "user grant-role host1 host1",
        "auth enable",
    ] {
        cluster.etcdctl(Some("root"), &words.split(' ').collect::<Vec<_>>());
    }
    until("root may write", || put(&mut root, "a", "1").map_err(|error| error.to_string()));
    let mut own = open(&cluster.endpoints_as("host1"), "/freeflow/hosts/h1");
    put(&mut own, "b", "2").expect("its own prefix");
    assert_eq!(own.list("", None).expect("listed").entries.len(), 2);
    let mut other = EtcdStore::new(&cluster.endpoints_as("host1"), "/freeflow/hosts/h2").expect("a store");
    for error in [other.list("", None).expect_err("another's"), put(&mut other, "a", "1").expect_err("another's")] {
        assert!(matches!(&error, StoreError::Broken(text) if text.contains("permission denied")), "{error}");
    }

    // Nor are changes of others' keys told.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let client = runtime.block_on(async { Client::new(&cluster.endpoints_as("host1")) }).expect("a client");
    let news = runtime.block_on(async { Follower::spawn(client, "/freeflow/hosts/").recv().await });
    assert!(matches!(&news, Some(News::Behind(EtcdError::Denied(_)))), "{news:?}");

    let mut stranger = EtcdStore::new(&cluster.endpoints_as("stranger"), "/freeflow/hosts/h1").expect("a store");
    assert!(put(&mut stranger, "a", "3").is_err(), "etcd does not know that user");
    assert_eq!(root.get("a", None).expect("read").expect("there").value, b"1");
}

#[test]
fn rights_are_given_and_taken() {
    let cluster = Cluster::start(1, &USERS);
    let mut root = open(&cluster.endpoints_as("root"), "/freeflow/hosts/h1");
    let auth = Auth::new(&cluster.endpoints_as("root")).expect("a client");
    let give = || -> Result<Vec<bool>, EtcdError> {
        let mut is_new = Vec::new();
        for name in ["root", "host1"] {
            is_new.extend([auth.add_user(name)?, auth.add_role(name)?]);
            auth.give_role(name, name)?;
        }
        auth.give_right("host1", Right::Read, "/freeflow/")?;
        auth.give_right("host1", Right::ReadWrite, "/freeflow/hosts/h1/")?;
        auth.enable()?;
        Ok(is_new)
    };
    assert_eq!(give(), Ok(vec![true; 4]));
    assert_eq!(give(), Ok(vec![false; 4]), "all of it may be done again");
    put(&mut root, "a", "1").expect("root may write");
    let mut own = open(&cluster.endpoints_as("host1"), "/freeflow/hosts/h1");
    put(&mut own, "b", "2").expect("its own prefix");
    let mut other = EtcdStore::new(&cluster.endpoints_as("host1"), "/freeflow/hosts/h2").expect("a store");
    assert!(other.list("", None).is_ok() && put(&mut other, "a", "1").is_err(), "others' it reads");
    // Without that right nobody gives rights.
    let of_host = Auth::new(&cluster.endpoints_as("host1")).expect("a client");
    assert!(matches!(of_host.add_user("host2"), Err(EtcdError::Denied(_))));
    auth.delete("host1").expect("deleted");
    auth.delete("host1").expect("it may be gone already");
    assert!(own.list("", None).is_err() && put(&mut own, "b", "3").is_err(), "its certificate is nobody's");
}

#[test]
fn both_ends_need_a_certificate_of_the_authority() {
    let (cluster, another) = (Cluster::start(1, &USERS), Cluster::start(1, &USERS));
    open(&cluster.endpoints_as("host1"), "/freeflow");
    for (what, endpoints) in [
        ("no certificate", cluster.endpoints()),
        ("another authority's", another.endpoints_as("root").at(&cluster.endpoints())),
    ] {
        let store = EtcdStore::new(&endpoints, "/freeflow").expect("a store");
        let error = store.revision().expect_err(what);
        assert!(matches!(&error, StoreError::Broken(text) if text.contains("etcd")), "{what}: {error}");
    }
}
