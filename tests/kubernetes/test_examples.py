"""The examples of deploy/kubernetes/examples, from their very files, run as a reader would run them."""

import re

import pytest

from harness import kubernetes_freeflow, made_images
from harness.engines import wait_until
from harness.failure import need
from harness.kubernetes_freeflow import DEPLOY, declared, wait_for_condition
from harness.kubernetes_pods import listens, vnics, wait_for_no_vnic

NAMESPACE = "rdma-example"
# As containerd calls the image that the examples call `perftest:latest`.
PERFTEST = "docker.io/library/perftest:latest"
SECONDS = 180


@pytest.fixture(scope="module", autouse=True)
def network(kubernetes):
    kubernetes.start_dns()
    kubernetes_freeflow.install_once(kubernetes)
    root = made_images.make_root(kubernetes.node.directory / "perftest", "ib_write_bw", "cat")
    kubernetes.node.import_image(PERFTEST, root, {"Env": ["PATH=/bin"]})
    apply(kubernetes, "network.yaml")
    wait_for_condition(kubernetes, "network", "training", "Enforced", namespace=NAMESPACE)
    wait_for_condition(kubernetes, "accessrule", "servers", "Enforced", namespace=NAMESPACE)


def apply(kubernetes, name):
    kubernetes.kubectl("apply", "-f", DEPLOY / "examples" / name)


def test_perftest(kubernetes):
    apply(kubernetes, "perftest.yaml")
    kubernetes.wait_for_phase("client", "Succeeded", NAMESPACE, SECONDS)
    kubernetes.wait_for_phase("server", "Succeeded", NAMESPACE, SECONDS)
    output = kubernetes.logs("client", NAMESPACE)
    need(re.search(r"^ 65536 +5000 ", output, re.M) and "freeflow0" in output, output)
    kubernetes.kubectl("delete", "-f", DEPLOY / "examples" / "perftest.yaml")
    wait_for_no_vnic(kubernetes)


def test_a_client_is_reached_by_nobody(kubernetes):
    """The network denies, and the rule allows servers alone: with the label of a client the same server is cut off."""
    objects = kubernetes_freeflow.documents(DEPLOY / "examples" / "perftest.yaml")
    for each in objects:
        if each["kind"] == "Pod":
            each["metadata"]["labels"]["role"] = "client"
            each["spec"]["restartPolicy"] = "Never"
    server = next(each for each in objects if each["kind"] == "Pod" and each["metadata"]["name"] == "server")
    others = [each for each in objects if each["kind"] == "Service"]
    client = next(each for each in objects if each["kind"] == "Pod" and each["metadata"]["name"] == "client")
    kubernetes.apply(*others, server)
    kubernetes.wait_for_ready("server", NAMESPACE)
    wait_until(lambda: listens(kubernetes, "server", namespace=NAMESPACE, container="perftest"), "the server listens")
    kubernetes.apply(client)
    kubernetes.wait_for_phase("client", "Failed", NAMESPACE, SECONDS)
    output = kubernetes.logs("client", NAMESPACE)
    need("Failed to modify QP" in output and not re.search(r"^ 65536 +", output, re.M), output)
    kubernetes.delete("pods", "--all", namespace=NAMESPACE)
    wait_for_no_vnic(kubernetes)


def test_what_an_administrator_declares(kubernetes):
    apply(kubernetes, "tenants.yaml")
    for kind, name in (("qosclass", "ten-gigabit"), ("quota", "small"), ("clusternetwork", "storage")):
        wait_for_condition(kubernetes, kind, name, "Enforced", namespace=None)
    need("k8s._.storage" in kubernetes.node.host.freeflow("get", "networks"), "no network storage")
    kubernetes.kubectl("delete", "-f", DEPLOY / "examples" / "tenants.yaml")


def test_the_network_goes_with_its_namespace(kubernetes):
    kubernetes.apply(declared("Network", "more", NAMESPACE, cidrs=["10.62.0.0/24"]))
    wait_for_condition(kubernetes, "network", "more", "Enforced", namespace=NAMESPACE)
    kubernetes.kubectl("delete", "-f", DEPLOY / "examples" / "network.yaml", seconds=SECONDS)
    text = kubernetes.node.host.freeflow("get", "networks")
    need(NAMESPACE not in text and not vnics(kubernetes), text)
