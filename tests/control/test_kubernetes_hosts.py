"""`freeflow-kubernetes controller` with a cluster of three hosts: which of them enforce an object is in its conditions."""

import pytest

import harness
from harness import need
from harness.cluster import HOSTS, JoiningHosts, name_of
from harness.kube_api import KubeApi
from harness.kube_controller import Controller, until
from harness.processes import Running
from harness.settings import PROGRAMS

PORT = 8001
SECONDS = 60
RED = {"cidrs": ["10.82.0.0/16"]}


@pytest.fixture(scope="module")
def hosts():
    harness.require_commands("etcd", "etcdctl", "openssl")
    hosts = JoiningHosts()
    try:
        hosts.as_controller("cluster", "init")
        hosts.up_controller(1)
        token = hosts.token("--uses", "2")
        for number in HOSTS[1:]:
            hosts.join(number, token)
        yield hosts
    finally:
        hosts.close()


@pytest.fixture(scope="module")
def kube(hosts):
    """The API server is here, and a socket leads to it from the host where the operator is, and with it the controller."""
    directory = hosts.lab.directory
    with KubeApi(directory / "api.sock") as kube:
        enter = hosts.host(hosts.operator_at).enter
        forward = Running(enter("/usr/bin/python3", PROGRAMS / "forward_inside.py", PORT, kube.path))
        controller = None
        try:
            forward.wait_for_output("ready")
            controller = Controller(directory, f"http://127.0.0.1:{PORT}", "one", "--cluster", hosts.operator, enter=enter)
            until("it leads", controller.leads)
            yield kube
        finally:
            if controller:
                controller.kill()
            forward.kill()


def wait_for_enforced(kube, status, reason, *words, without=()):
    """Until the condition is so, and its message has these words and none of those: at first more hosts may be behind."""
    def probe():
        found, why, text = (kube.conditions("networks", "team", "red") or {}).get("Enforced", ("", "", ""))
        return (found, why) == (status, reason) and all(word in text for word in words) and not any(word in text for word in without)
    until(lambda: f"{status}, {reason}, {words}: {kube.conditions('networks', 'team', 'red')}", probe, SECONDS)


def access(hosts, number):
    return hosts.network(number, "k8s.team.red")["spec"].get("access")


def test_all_hosts_enforce_a_network(hosts, kube):
    kube.put("networks", "team", "red", {"spec": RED})
    wait_for_enforced(kube, "True", "Everywhere", "3 of 3")
    for number in HOSTS:
        need(hosts.network(number, "k8s.team.red"), f"{name_of(number)} has no such network")


def test_a_host_without_a_router_is_named(hosts, kube):
    """It has the change when it is up again, and is counted."""
    host = hosts.host(2)
    harness.kill_router(host)
    kube.put("networks", "team", "red", {"spec": RED | {"access": "deny"}})
    wait_for_enforced(kube, "False", "Behind", name_of(2), without=(name_of(1), name_of(3)))
    need(access(hosts, 1) == access(hosts, 3) == "deny", "the two others do not enforce it")
    host.freeflow("up")
    wait_for_enforced(kube, "True", "Everywhere", "3 of 3")
    need(access(hosts, 2) == "deny", "the host that was behind does not enforce it")


def test_a_host_that_leaves_is_not_waited_for(hosts, kube):
    hosts.host(2).freeflow("down", "--force")
    kube.put("networks", "team", "red", {"spec": RED})
    wait_for_enforced(kube, "False", "Behind", name_of(2))
    hosts.as_operator("cluster", "remove", name_of(2))
    wait_for_enforced(kube, "True", "Everywhere", "2 of 2")
