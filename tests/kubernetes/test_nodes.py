"""Two nodes of Kubernetes that are a cluster of FreeFlow: one declaration, by two controllers of which one leads, for both."""

import re

import pytest

from harness.engines import wait_until
from harness.failure import need
from harness.host import end_router
from harness.kubernetes import Kubernetes
from harness.kubernetes_cluster import NodesCluster
from harness.kubernetes_freeflow import NAMESPACE, condition, declared, logs, wait_for_condition
from harness.kubernetes_pods import ByClaim, at_node, between_two, vnics, wait_for_no_vnic

WRITE = ["ib_write_bw", "-F", "-n", "200"]
NETWORK = declared("Network", "red", "default", cidrs=["10.51.0.0/16"], podLabels=["role"])


@pytest.fixture(scope="module")
def kubernetes():
    with Kubernetes(nodes=2) as kubernetes:
        yield kubernetes


@pytest.fixture(scope="module")
def cluster(kubernetes):
    cluster = NodesCluster(kubernetes)
    try:
        cluster.install("controller.replicas=2")
        kubernetes.apply(NETWORK)
        wait_for_condition(kubernetes, "network", "red", "Enforced")
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes, cluster):
    yield
    kubernetes.delete("pods", "--all")
    wait_for_no_vnic(kubernetes)


@pytest.fixture(scope="module")
def way(kubernetes):
    return ByClaim(kubernetes)


def test_a_network_is_enforced_by_both_hosts(kubernetes):
    text = condition(kubernetes, "network", "red", "Enforced")["message"]
    need("2 of 2" in text, text)
    for node in kubernetes.nodes:
        need("k8s.default.red" in node.host.freeflow("get", "networks"), f"{node.name} has no such network")


def test_perftest_between_pods_of_two_nodes(kubernetes, way):
    output = between_two(kubernetes, way, WRITE, [*WRITE, "{ip}"], kubernetes.nodes[1], "red")
    need(re.search(r"^ 65536 +200 ", output, re.M), output)


def test_rdma_cm_between_pods_of_two_nodes(kubernetes, way):
    output = between_two(kubernetes, way, ["rping", "-s", "-a", "0.0.0.0", "-C", "10"],
                         ["sh", "-c", "rping -c -a {ip} -C 10 -v && echo done"], kubernetes.nodes[1], "red")
    need("done" in output, output)


def test_pods_of_two_nodes_have_two_addresses(kubernetes, way):
    for number, node in enumerate(kubernetes.nodes):
        kubernetes.apply(*way.objects(f"pod{number}", ["sleep", "600"], "red", **at_node(node)))
    for number in range(len(kubernetes.nodes)):
        kubernetes.wait_for_ready(f"pod{number}")
    addresses = {row["address"] for row in vnics(kubernetes)}
    need(len(addresses) == 2 and all(len(node.host.status()["vnics"]) == 1 for node in kubernetes.nodes), vnics(kubernetes))


def test_a_host_that_is_behind_is_named(kubernetes):
    second = kubernetes.nodes[1]
    end_router(second.host)
    kubernetes.apply(NETWORK | {"spec": NETWORK["spec"] | {"access": "deny"}})
    # At first both may be behind.
    def is_named():
        found = condition(kubernetes, "network", "red", "Enforced")
        return found["status"] == "False" and second.name in found["message"] and kubernetes.node.name not in found["message"]
    wait_until(is_named, lambda: f"{second.name} alone is behind: {condition(kubernetes, 'network', 'red', 'Enforced')}")
    second.host.up()
    wait_for_condition(kubernetes, "network", "red", "Enforced")
    need("deny" in second.host.freeflow("get", "networks"), second.host.freeflow("get", "networks"))
    kubernetes.apply(NETWORK)
    wait_for_condition(kubernetes, "network", "red", "Enforced")


def leader(kubernetes):
    return kubernetes.get("lease", "freeflow-controller", NAMESPACE)["spec"]["holderIdentity"]


def test_another_controller_leads_when_the_first_is_gone(kubernetes):
    before = leader(kubernetes)
    pods = [row["metadata"]["name"] for row in kubernetes.get("pods", namespace=NAMESPACE)]
    need(before in pods, f"the lease's holder {before} is none of {pods}")
    kubernetes.delete("pod", before, namespace=NAMESPACE, words=("--grace-period=0", "--force"))
    wait_until(lambda: leader(kubernetes) != before, lambda: f"another one leads than {before}:\n{logs(kubernetes)}")
    kubernetes.apply(declared("Network", "later", "default", cidrs=["10.57.0.0/16"]))
    wait_for_condition(kubernetes, "network", "later", "Enforced")
    kubernetes.delete("networks.freeflow.io", "later")
