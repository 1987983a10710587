//! The binary: readiness, signals, being killed; what a client that dies leaves in it.
mod common;

use common::process::Process;
use common::*;
use freeflow_protocol::admin::{AdminReply, AdminRequest};
use freeflow_verbs::QpType;

const LIMITS: &[&str] = &["--limits", r#"{"qp_count_max": 3}"#];

#[test]
fn what_clients_held_is_given_back() {
    let directory = Directory::new();
    let router = Process::start(&directory.0, LIMITS);
    let path = router.attach("a");
    let before = router.held();
    for _ in 0..5 {
        let mut client = Client::connect(&path);
        let channel = client.create_channel();
        let cq = client.create_cq(100, Some(channel.0));
        let qp = client.create_qp(QpType::Rc, &cq);
        client.connect_rc(&qp, client.gid(), qp.qpn, 14);
        let memory = client.memory(1000, true);
        let held = router.held();
        assert!(held.0 > before.0 && held.1 >= 4, "{held:?}");
        drop((memory, qp, cq, channel, client));
        // The connection that attached may have been counted in `before`: a leak would show by the second round.
        until("everything given back", || {
            let (descriptors, mappings) = router.held();
            (descriptors <= before.0 && mappings == before.1).then_some(())
        });
    }
}

#[test]
fn a_signal_ends_it_in_order() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let directory = Directory::new();
        let mut router = Process::start(&directory.0, LIMITS);
        let client = Client::connect(&router.attach("a"));
        router.signal(signal);
        assert_eq!(read_event(&client.async_events), None);
        assert_eq!(router.child.wait().unwrap().code(), Some(0));
        assert!(!router.run_dir.join("admin.sock").exists() && !router.run_dir.join("router.pid").exists());
    }
}

#[test]
fn a_shutdown_request_ends_it() {
    let directory = Directory::new();
    let mut router = Process::start(&directory.0, LIMITS);
    assert_eq!(admin(&router.run_dir, &AdminRequest::Shutdown), AdminReply::Done);
    assert_eq!(router.child.wait().unwrap().code(), Some(0));
}

#[test]
fn after_being_killed_the_next_one_goes_on() {
    let directory = Directory::new();
    let mut router = Process::start(&directory.0, LIMITS);
    let path = router.attach("a");
    let client = Client::connect(&path);
    router.signal(rustix::process::Signal::KILL);
    router.child.wait().unwrap();
    assert_eq!(read_event(&client.async_events), None);
    let router = Process::start(&directory.0, LIMITS);
    assert_eq!(router.attach("a"), path);
    assert_eq!(Client::connect(&path).gid(), client.gid());
}
