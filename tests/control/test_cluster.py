"""Three hosts that follow one declaration on etcd: a member on each host, TLS, rights by certificate.

The cases go in this order, on one laboratory: what one leaves, the next one finds.
"""

import json
import signal
import time

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, Hosts
from harness.host import router_of
from harness.settings import PORT

DECLARED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24, "fd00:50::/64"], qosClass: slow}
---
apiVersion: freeflow.io/v1
kind: QosClass
metadata: {name: slow}
spec: {priority: 1}
---
apiVersion: freeflow.io/v1
kind: Group
metadata: {name: servers}
spec: {tenant: red, members: [{networks: [red]}]}
"""
BLUE = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: NAME}
spec: {tenant: blue, cidrs: [CIDR]}
"""


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ibv_rc_pingpong")
    hosts = Hosts()
    yield hosts
    hosts.close()


def pingpong(hosts, one, two, network, options=("-g", "0")):
    """Between a container on each of two hosts."""
    server = hosts.host(one).container(f"server{one}", "--network", network)
    client = hosts.host(two).container(f"client{two}", "--network", network)
    try:
        # Networks but `default` are sealed: no TCP from the host, but the overlay joins them.
        harness.in_two_containers(server, client, ["ibv_rc_pingpong", *options, "-p", PORT],
                                  ["ibv_rc_pingpong", *options, "-p", PORT, "{ip}"])
        return server.ip, client.ip
    finally:
        server.remove()
        client.remove()


def test_an_etcd_without_a_cluster_is_followed_by_nobody(hosts):
    failure = hosts.as_operator("get", "networks", codes=(1,))
    need("freeflow cluster init" in failure, failure)
    need("is made" in hosts.as_operator("cluster", "init"), "no cluster was made")
    need("is there already" in hosts.as_operator("cluster", "init"), "another cluster was made")


def test_hosts_join_and_find_each_other(hosts):
    for number in HOSTS:
        hosts.join(number)
    hosts.wait_for_all()
    hosts.wait("peers", lambda: all(
        len(peers := json.loads(hosts.host(n).freeflow("peers", "ls", "-o", "json"))["peers"]) == 2
        and all(peer["state"] == "up" for peer in peers) for n in HOSTS))
    pingpong(hosts, 1, 3, "default")


def test_one_declaration_is_every_hosts(hosts):
    printed = hosts.apply(DECLARED)
    need(printed.count("created") == 3, printed)
    hosts.wait_for_all()
    hosts.wait("a block for each", lambda: all(hosts.network(n, "red") for n in HOSTS))
    ranges = {hosts.network(n, "red")["spec"]["range"] for n in HOSTS}
    need(len(ranges) == 3 and all(text.startswith("10.50.0.") and text.endswith("/28") for text in ranges), f"{ranges}")
    need("unchanged" in hosts.apply(DECLARED), "the same again changed something")
    shown = json.loads(hosts.as_operator("get", "network", "red", "-o", "json"))
    need(shown["status"] == {"followedBy": 3, "behind": [], "refusedBy": []}, f"{shown}")
    backup = hosts.as_operator("cluster", "export")
    again = hosts.apply(backup)
    need(again.count("unchanged") == 3 and "status" not in backup and "default" not in backup, f"{backup}{again}")
    one, three = pingpong(hosts, 1, 3, "red")
    need(one.startswith("10.50.0.") and one != three, f"{one} {three}")
    pingpong(hosts, 2, 1, "red", ("-g", "2"))


def test_a_host_declares_nothing_of_the_clusters_by_itself(hosts):
    host = hosts.host(2)
    path = hosts.lab.directory / "own.yaml"
    path.write_text(DECLARED.replace("priority: 1", "priority: 2"))
    for words in (("apply", "-f", path), ("delete", "qosclass", "slow"), ("network", "set", "red", "--data-path", "routed")):
        failure = host.freeflow(*words, codes=(1, 5))
        need("follows a cluster" in failure, f"{words}: {failure}")
    # Its vNICs, and the network default, are its own.
    path.write_text("apiVersion: freeflow.io/v1\nkind: Vnic\nmetadata: {name: mine}\nspec: {network: red}\n")
    host.freeflow("apply", "-f", path)
    host.freeflow("network", "set", "default", "--data-path", "routed")
    host.freeflow("network", "set", "default", "--data-path", "auto")
    host.freeflow("delete", "vnic", "mine")
    for text in ("kind: Vnic\nmetadata: {name: v}\nspec: {network: default}", "kind: Network\nmetadata: {name: default}\nspec: {cidrs: [10.9.0.0/24]}"):
        failure = hosts.apply(f"apiVersion: freeflow.io/v1\n{text}\n", codes=(3, 5))
        need("host's" in failure or "own" in failure or "no Network default" in failure, failure)


def test_a_member_of_etcd_dies_and_nobody_minds(hosts):
    leader = hosts.etcd.leader()
    hosts.etcd.kill(leader)
    other = next(n for n in HOSTS if n != leader)
    hosts.wait("a change by two members", lambda: "created" in hosts.apply(
        BLUE.replace("NAME", "blue").replace("CIDR", "10.60.0.0/24"), at=other))
    hosts.wait("all have it", lambda: all(hosts.network(n, "blue") for n in HOSTS))
    hosts.etcd.start(leader)


def test_without_etcd_all_goes_on_and_changes_are_refused(hosts):
    for number in HOSTS[1:]:
        hosts.etcd.kill(number)
    failure = hosts.apply(BLUE.replace("NAME", "late").replace("CIDR", "10.61.0.0/24"), codes=(1,), at=1, seconds=120)
    need("etcd" in failure, failure)
    # Containers start from the blocks that there are, and reach other hosts.
    pingpong(hosts, 1, 2, "red")
    # A router that begins again has what it had.
    host = hosts.host(3)
    harness.end_router(host, signal.SIGKILL)
    host.freeflow("up")
    need(hosts.network(3, "red") and hosts.network(3, "blue"), "the router forgot what was declared")
    # Also without its certificate.
    harness.end_router(host, signal.SIGKILL)
    key = hosts.etcd.directory / "host3.key"
    key.rename(key.with_suffix(".away"))
    need("not followed until" in host.freeflow("up"), "nothing is said of the key")
    need(hosts.network(3, "red"), "the router forgot what was declared")
    key.with_suffix(".away").rename(key)
    host.freeflow("up")
    need("followed, see" in host.freeflow("status"), "it does not follow")
    pingpong(hosts, 3, 1, "red")
    for number in HOSTS[1:]:
        hosts.etcd.start(number)
    hosts.etcd.wait_until_healthy()
    hosts.apply(BLUE.replace("NAME", "late").replace("CIDR", "10.61.0.0/24"))
    hosts.wait_for_all()
    hosts.wait("all have it", lambda: all(hosts.network(n, "late") for n in HOSTS))


def test_a_host_that_was_cut_off_follows_when_it_is_back(hosts):
    hosts.lab.cut(2)
    hosts.wait("a change without it", lambda: "created" in hosts.apply(
        BLUE.replace("NAME", "away").replace("CIDR", "10.62.0.0/24"), at=3))
    hosts.wait("the others have it", lambda: hosts.network(1, "away") and hosts.network(3, "away"))
    need(hosts.network(2, "away") is None, "it came by no line")
    behind = json.loads(hosts.as_operator("get", "network", "away", "-o", "json", at=3))["status"]["behind"]
    need(behind == ["host2"], f"{behind}")
    hosts.lab.heal(2)
    hosts.wait("it has it, too", lambda: hosts.network(2, "away"))
    hosts.wait_for_all()


def test_a_network_that_is_in_use_stays_there_until_it_is_not(hosts):
    container = hosts.host(2).container("user", "--network", "away")
    hosts.as_operator("delete", "network", "away")
    hosts.wait("the others have it no more", lambda: not hosts.network(1, "away") and not hosts.network(3, "away"))
    # `status` names each network anyway; the first problem is the one that doctor names.
    hosts.wait("its host says so, too", lambda: "Network away" in hosts.host(2).freeflow("doctor", codes=(0, 1)))
    problem = hosts.wait("it is said", lambda: [problem for row in hosts.status()["hosts"] for problem in row["problems"]])
    need(problem[0]["name"] == "away" and "used by" in problem[0]["message"], f"{problem}")
    again = BLUE.replace("NAME", "away").replace("CIDR", "10.63.0.0/24")
    need("host2" in hosts.apply(again, codes=(3,)), "another network of this name while a host has the old one")
    container.remove()
    hosts.wait("it is gone everywhere", lambda: not hosts.network(2, "away"))
    hosts.wait("the name is free", lambda: "created" in hosts.apply(again))
    hosts.wait_for_all()


def test_the_follower_is_begun_again_by_up(hosts):
    host = hosts.host(3)
    process = json.loads((host.run_dir / "cluster.pid").read_text())
    harness.run(["kill", "-KILL", str(process["pid"])], 10)
    hosts.wait("it is said", lambda: "not followed" in host.freeflow("status"))
    need("nobody follows it" in host.freeflow("doctor", codes=(1,)), "doctor says nothing")
    # The one that was killed had a problem, which the next one has not.
    (host.run_dir / "cluster.problems").write_text('["of the one before"]')
    host.freeflow("up")
    need("followed, see" in host.freeflow("status"), "it does not follow")
    need("of the one before" not in host.freeflow("doctor", codes=(0, 1)), "a problem of the process that was killed")
    hosts.as_operator("delete", "network", "late")
    hosts.wait("it is gone", lambda: not hosts.network(3, "late"))


def test_a_backup_is_followed_when_an_operator_says_so(hosts):
    """An etcd as it was before a network was declared, with the same identity."""
    hosts.etcd.keep()
    hosts.apply(BLUE.replace("NAME", "since").replace("CIDR", "10.64.0.0/24"))
    hosts.wait_for_all()
    hosts.wait("all have it", lambda: all(hosts.network(n, "since") for n in HOSTS))
    hosts.etcd.restore()
    hosts.etcd.wait_until_healthy()
    hosts.wait("it is noticed", lambda: all("from a backup" in hosts.log(n) for n in HOSTS))
    # Whatever is written since makes it no newer.
    hosts.apply(BLUE.replace("NAME", "later").replace("CIDR", "10.65.0.0/24"))
    time.sleep(4)
    need(all(hosts.network(n, "since") and not hosts.network(n, "later") for n in HOSTS), "a host follows a backup")
    pingpong(hosts, 1, 2, "red")
    hosts.as_operator("cluster", "restored")
    hosts.wait("it is followed", lambda: all(hosts.network(n, "later") and not hosts.network(n, "since") for n in HOSTS))
    hosts.wait_for_all()
    pingpong(hosts, 3, 1, "red")


def test_a_controller_without_its_record_gives_no_blocks(hosts):
    """As in a backup from before it joined, of which nothing else is older than what it knows."""
    key = "/freeflow/hosts/host1/data/record"
    record = hosts.etcd.ctl("get", "--print-value-only", key).strip()
    hosts.etcd.ctl("del", key)
    hosts.wait("host 1 says so", lambda: "was removed from the cluster" in hosts.log(1))
    # Controllers do one after the other: when the second is followed, the first would have its blocks.
    for name, cidr in (("unled", "10.61.0.0/24"), ("unled-too", "10.62.0.0/24")):
        hosts.apply(BLUE.replace("NAME", name).replace("CIDR", cidr), at=3)
        hosts.wait(f"host 2 knows {name}", lambda: f"Network {name}: no controller has given" in hosts.log(2))
    given = hosts.etcd.ctl("get", "--prefix", "--keys-only", "/freeflow/blocks/data/unled").split()
    need(not given, f"{given}")
    hosts.etcd.ctl("put", key, record)
    hosts.wait("it gives blocks again", lambda: hosts.network(2, "unled") and hosts.network(3, "unled-too"))
    hosts.as_operator("delete", "network", "unled", "unled-too")
    hosts.wait_for_all()


def test_an_empty_etcd_takes_nothing_away(hosts):
    """A wrong address, or a store that was lost and made again."""
    for number in HOSTS:
        hosts.etcd.kill(number)
        hosts.etcd.forget(number)
    for number in HOSTS:
        hosts.etcd.start(number)
    hosts.etcd.wait_until_healthy()

    def said(word):
        return lambda: all(word in hosts.log(n) for n in HOSTS)
    hosts.wait("it is noticed", said("holds no cluster"))
    hosts.as_operator("cluster", "init")
    hosts.wait("it is another", said("and this host follows"))
    need(all(hosts.network(n, "red") and hosts.network(n, "blue") for n in HOSTS), "a host has lost what was declared")
    pingpong(hosts, 1, 2, "red")


def test_a_router_that_follows_nothing_is_nobodys(hosts):
    """After a crash, and up without the cluster, what the host declares is its own."""
    host = hosts.host(3)
    harness.end_router(host, signal.SIGKILL)
    host.freeflow("up", "--cluster", "off", "--address", hosts.rows["host3"]["address"], codes=(1,))
    host.freeflow("up", "--cluster", "off")
    need(not (host.run_dir / "cluster.pid").exists(), "the follower goes on")
    path = hosts.lab.directory / "own.yaml"
    path.write_text(BLUE.replace("NAME", "own").replace("CIDR", "10.90.0.0/24"))
    host.freeflow("apply", "-f", path)
    host.freeflow("delete", "network", "own")


def test_down_leaves_nothing(hosts):
    hosts_with = HOSTS[:2]
    pids = [json.loads((hosts.host(n).run_dir / "cluster.pid").read_text())["pid"] for n in hosts_with]
    for number in HOSTS:
        hosts.host(number).freeflow("down", "--force")
    for number, pid in zip(hosts_with, pids):
        need(not router_of(pid, hosts.host(number).run_dir), f"a follower is left: {pid}")
    need(not (hosts.host(1).run_dir / "cluster").exists(), "its directory is left")
