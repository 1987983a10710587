"""The mesh of a cluster: hosts are connected where their containers are in networks of one tenant, and not before.

Three hosts of a cluster that has no full mesh. The cases go in this order, on one laboratory: what one leaves, the next
one finds.
"""

import json
import os
import signal

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, Hosts, name_of
from harness.settings import PORT

NETWORK = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: NAME}
spec: {tenant: TENANT, cidrs: [CIDR]}
"""
NETWORKS = (("red", "red", "10.50.0.0/24"), ("crimson", "red", "10.51.0.0/24"), ("blue", "blue", "10.60.0.0/24"))
PINGPONG = ["ibv_rc_pingpong", "-g", "0", "-p", PORT]


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl", "ibv_rc_pingpong")
    hosts = Hosts()
    try:
        hosts.as_operator("cluster", "init", "--full-mesh", "1")
        for number in HOSTS:
            hosts.join(number)
        words = [NETWORK.replace("NAME", name).replace("TENANT", tenant).replace("CIDR", cidr) for name, tenant, cidr in NETWORKS]
        hosts.apply("---".join(words))
        hosts.wait_for_all()
        hosts.wait("blocks", lambda: all(hosts.network(n, name) for n in HOSTS for name, *_ in NETWORKS))
        yield hosts
    finally:
        hosts.close()


def peers(hosts, number):
    """State of each host that this one's router knows."""
    listed = json.loads(hosts.host(number).freeflow("peers", "ls", "-o", "json"))["peers"]
    return {peer["host"]: peer["state"] for peer in listed}


def members(hosts):
    """Networks that each host says it is in."""
    found = {}
    for number in HOSTS:
        text = hosts.etcd.ctl("get", "--print-value-only", f"/freeflow/hosts/{name_of(number)}/data/members/0").strip()
        found[number] = set(json.loads(text)["networks"]) if text else set()
    return found


def test_hosts_without_containers_have_no_peers(hosts):
    need([peers(hosts, n) for n in HOSTS] == [{}, {}, {}], f"{[peers(hosts, n) for n in HOSTS]}")
    refused = hosts.as_operator("cluster", "init", "--full-mesh", "9", codes=(1,))
    need("has 1, and keeps that" in refused, refused)


def test_hosts_of_two_tenants_are_not_connected(hosts):
    hosts.red = hosts.host(1).container("one", "--network", "red")
    hosts.blue = hosts.host(3).container("three", "--network", "blue")
    hosts.wait("members", lambda: members(hosts) == {1: {"red"}, 2: set(), 3: {"blue"}})
    hosts.wait_for_all()
    need([peers(hosts, n) for n in HOSTS] == [{}, {}, {}], f"{[peers(hosts, n) for n in HOSTS]}")


def test_the_first_container_in_a_network_reaches_one_elsewhere_at_its_first_attempt(hosts):
    server = hosts.red.start(*PINGPONG)
    hosts.red.wait_for_port(server)
    # One attempt, of the first process of a container on a host that has had no peer: TCP, then RDMA.
    hosts.host(2).freeflow("run", "--rm", "--name", "two", "--network", "red", "--", *PINGPONG, hosts.red.ip)
    need(server.wait(20) == 0, f"the server: {server.output()}")
    need(peers(hosts, 1) == {"host2": "up"} and peers(hosts, 2) == {"host1": "up"}, f"{peers(hosts, 1)} {peers(hosts, 2)}")
    need(peers(hosts, 3) == {}, f"{peers(hosts, 3)}")
    # The container has ended, and the host stays in its network for some time.
    need(members(hosts)[2] == {"red"}, f"{members(hosts)}")


def test_names_are_there_when_the_first_container_starts(hosts):
    """Of another network of the tenant, on a host that was in none of that."""
    found = hosts.host(3).freeflow("run", "--rm", "--network", "red", "--", "getent", "ahostsv4", "one")
    need(hosts.red.ip in found, found)
    hosts.wait("all are connected", lambda: peers(hosts, 3) == {"host1": "up", "host2": "up"})


def test_networks_of_a_tenant_join_hosts(hosts):
    hosts.host(2).freeflow("run", "--rm", "--network", "crimson", "--", "true")
    need(members(hosts)[2] == {"red", "crimson"}, f"{members(hosts)}")
    need(peers(hosts, 2) == {"host1": "up", "host3": "up"}, f"{peers(hosts, 2)}")


def test_a_host_whose_follower_hangs_keeps_no_container_from_starting(hosts):
    """It has not heard that the other one is in its network."""
    follower = json.loads((hosts.host(3).run_dir / "cluster.pid").read_text())["pid"]
    os.kill(follower, signal.SIGSTOP)
    try:
        hosts.host(1).freeflow("run", "--rm", "--network", "blue", "--", "true")
        need("blue" in members(hosts)[1], f"{members(hosts)}")
    finally:
        os.kill(follower, signal.SIGCONT)
    hosts.wait("it has heard", lambda: peers(hosts, 3)["host1"] == "up")


def test_a_container_starts_without_etcd(hosts):
    for number in HOSTS:
        hosts.etcd.kill(number)
    try:
        found = hosts.host(2).freeflow("run", "--rm", "--network", "blue", "--", "hostname", "-I")
        need(found.startswith("10.60."), found)
        # What was connected is connected.
        server = hosts.red.start(*PINGPONG)
        hosts.red.wait_for_port(server)
        hosts.host(2).freeflow("run", "--rm", "--network", "red", "--", *PINGPONG, hosts.red.ip)
        need(server.wait(20) == 0, f"the server: {server.output()}")
    finally:
        for number in HOSTS:
            hosts.etcd.start(number)
    hosts.etcd.wait_until_healthy()
    hosts.wait_for_all()


def test_a_host_that_begins_anew_stays_in_its_networks_for_some_time(hosts):
    before = members(hosts)
    need("red" in before[1], f"{before}")
    host = hosts.host(1)
    host.freeflow("down", "--force")
    hosts.join(1)
    hosts.wait_for_all()
    hosts.wait("it is in its network still", lambda: peers(hosts, 1) == {"host2": "up", "host3": "up"})
    need(members(hosts)[1] == before[1], f"{members(hosts)}")
