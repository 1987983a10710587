//! Two routers in this process, of which one takes the other out of its peers file while queue pairs are connected.
use super::wire::{Apart, count, operations};
use crate::common::hosts::{Hosts, alone};
use crate::common::*;
use freeflow_verbs::{CompletionStatus, QpType, SendOpcode};
use serde_json::{Value, json};

/// `ibv_qp_attr::timeout`: 67 ms.
const TIMEOUT: u8 = 14;

fn is_connected(hosts: &Hosts, host: usize) -> bool {
    peers_status(&hosts.hosts[host].run_dir()).peers.iter().all(|peer| peer.state == "up")
}

fn until_connected(hosts: &Hosts) {
    until("the hosts to be connected", || (0..2).all(|host| is_connected(hosts, host)).then_some(()));
    until("the sockets to know the way", || {
        let has_way = |host: usize| hosts.wire(host).hosts.iter().any(|other| other.mtu > 0);
        (0..2).all(has_way).then_some(())
    });
}

fn without_peers(file: &mut Value) {
    file["peers"] = json!([]);
}

#[test]
fn a_host_that_left_the_file_is_not_heard_until_it_is_back() {
    let _alone = alone();
    let mut pair = Apart::new(Hosts::new(), QpType::Rc);
    operations(&mut pair, true, true);
    let Apart { hosts, a, b, .. } = &mut pair;
    let (a_cq, mut b_cq) = (a.create_cq(4, None), b.create_cq(4, None));
    let (mut a_qp, mut b_qp) = (a.create_qp(QpType::Rc, &a_cq), b.create_qp(QpType::Rc, &b_cq));
    a.connect_rc(&a_qp, b.gid(), b_qp.qpn, TIMEOUT);
    b.connect_rc(&b_qp, a.gid(), a_qp.qpn, TIMEOUT);
    let (from, to) = (b.memory(8, true), a.memory(8, true));
    a.post_receive(&mut a_qp, 1, &[to.sge(0, 64)]);
    // The queue pair of the other host has found its way before.
    b.post_send(&mut b_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(b_cq.wait().status, CompletionStatus::Success);

    hosts.change_file(0, without_peers);
    until("the sockets to have no way there", || (hosts.wire(0).hosts[0].mtu == 0).then_some(()));
    let before = hosts.wire(0);
    a.post_receive(&mut a_qp, 2, &[to.sge(0, 64)]);
    b.post_send(&mut b_qp, &request(SendOpcode::Send, &[from.sge(0, 64)]));
    assert_eq!(b_cq.wait().status, CompletionStatus::RetryExceeded);
    let after = hosts.wire(0);
    assert!(count(&after.counters, "unknown_source") > count(&before.counters, "unknown_source"));
    assert_eq!(after.hosts[0].counters, before.hosts[0].counters, "no queue pair has heard it");

    // Queue pairs that had nothing to send meanwhile go on.
    hosts.change_file(0, |_| ());
    until_connected(hosts);
    operations(&mut pair, true, true);
}

#[test]
fn a_host_may_have_the_address_of_one_that_is_gone() {
    let _alone = alone();
    let hosts = Hosts::new();
    assert_eq!(hosts.wire(0).hosts[0].number, 1);
    hosts.change_file(1, |file| file["host"] = json!("h9"));
    hosts.change_file(0, |file| file["peers"][0]["host"] = json!("h9"));
    until_connected(&hosts);
    let wire = hosts.wire(0).hosts;
    assert_eq!((wire.len(), wire[0].number), (1, 2), "the one that is gone is forgotten");
    operations(&mut Apart::new(hosts, QpType::Rc), true, true);
}
