"""A host of a cluster that an operator has drained starts no containers with the cluster's vNICs.

The cases go in this order, on one laboratory of three hosts: what one leaves, the next one finds.
"""

import pytest

import harness
from harness import need
from harness.cluster import following

DECLARED = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: red}
spec: {tenant: red, cidrs: [10.50.0.0/24]}
---
apiVersion: freeflow.io/v1
kind: Vnic
metadata: {name: database}
spec: {network: red}
"""
NEW = """
apiVersion: freeflow.io/v1
kind: Network
metadata: {name: blue}
spec: {tenant: red, cidrs: [10.52.0.0/24]}
"""


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl")
    with following(DECLARED, "red") as hosts:
        yield hosts


def refused(hosts, number, *words):
    """The failure of a container there, once there is one."""
    def failure():
        printed = hosts.host(number).freeflow("run", "--rm", *words, "--", "true", codes=(0, 125))
        return printed if "was drained by" in printed else None
    return hosts.wait(f"host {number} refuses", failure)


def drained(hosts):
    return [row["name"] for row in hosts.status()["hosts"] if row["drained"]]


def test_a_drained_host_starts_no_containers_and_keeps_those_that_run(hosts):
    failure = hosts.as_operator("host", "drain", "host9", codes=(4,))
    need("there are: host1, host2, host3" in failure, failure)
    kept = hosts.host(2).container("kept", "--network", "red")
    used = hosts.host(2).container("database", "--rm", "--vnic", "database")
    printed = hosts.as_operator("host", "drain", "host2")
    need("those that run go on" in printed and drained(hosts) == ["host2"], printed)
    failure = refused(hosts, 2, "--network", "red")
    need("the host host2 was drained by" in failure and "@" in failure, failure)
    hosts.host(2).freeflow("run", "--rm", "--", "true")
    need(kept.exec("echo", "there").strip() == "there", "a container that ran has ended")
    for words in (["cluster", "status"], ["get", "hosts"]):
        need("drained" in hosts.as_operator(*words), "it is not shown")
    # What it has declared it gives away, and does not get back.
    used.remove()
    moved = hosts.host(3).container("database", "--rm", "--vnic", "database")
    moved.remove()
    refused(hosts, 2, "--vnic", "database")
    # Also when its router and follower begin again.
    harness.kill_router(hosts.host(2))
    hosts.host(2).freeflow("up")
    failure = hosts.host(2).freeflow("run", "--rm", "--network", "red", "--", "true", codes=(125,))
    need("was drained by" in failure, failure)


def test_a_drained_host_gets_nothing_new(hosts):
    failure = hosts.as_operator("move", "database", "--to", "host2", codes=(3, 5))
    need("the host host2 was drained by" in failure, failure)
    hosts.apply(NEW)
    hosts.wait_for_all()
    hosts.wait("the others have it", lambda: hosts.network(1, "blue") and hosts.network(3, "blue"))
    need(not hosts.network(2, "blue"), "a drained host was given a block")


def test_its_containers_are_stopped_on_demand_and_it_comes_back(hosts):
    def names():
        return [row["name"] for row in hosts.host(2).containers()]

    need(names() == ["kept"], f"{names()}")
    own = hosts.host(2).container("own")
    printed = hosts.as_operator("host", "drain", "host2", "--stop")
    need("are stopped" in printed, printed)
    hosts.wait("its container has ended", lambda: names() == ["own"])
    printed = hosts.as_operator("host", "undrain", "host2")
    need("starts containers" in printed and not drained(hosts), printed)
    hosts.wait("it has the new network, too", lambda: hosts.network(2, "blue"))
    again = hosts.wait("containers start there", lambda: hosts.host(2).container("again", "--network", "red"))
    server = hosts.host(2).container("database", "--rm", "--vnic", "database")
    for container in (server, again, own):
        container.remove()


def test_a_host_is_removed_by_this_name_too(hosts):
    hosts.host(2).freeflow("down", "--force")
    hosts.as_operator("host", "drain", "host2")
    printed = hosts.as_operator("host", "remove", "host2")
    need("Host host2 is forgotten" in printed, printed)
    need(not drained(hosts) and [row["name"] for row in hosts.status()["hosts"]] == ["host1", "host3"], "it is there")
