"""The router in the DaemonSet's pod (`router.inPod=true`): a node that has nothing of FreeFlow's before."""

import re
import shutil

import pytest

from harness import kubernetes_freeflow
from harness.engines import wait_until
from harness.failure import need
from harness.host import Host, end_router
from harness.kubernetes_freeflow import NAMESPACE, logs
from harness.kubernetes_node import NodeHost
from harness.kubernetes_pods import SLEEP, ByClaim, between_two, vnics, wait_for_no_vnic

WRITE = ["ib_write_bw", "-F", "-n", "200"]
PROGRAM = "/opt/freeflow/bin/freeflow"


class PodHost(NodeHost):
    """Its router comes and goes with the pod."""

    def begin(self):
        super().begin()
        self.freeflow_path = PROGRAM

    def up(self):
        pass

    def close(self):
        Host.current.remove(self)
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def way(kubernetes):
    need(not kubernetes.machine.path(PROGRAM).exists(), "the node has FreeFlow already")
    kubernetes_freeflow.install(kubernetes, "router.inPod=true")
    kubernetes.node.made_host = PodHost(kubernetes.machine)
    way = ByClaim(kubernetes)
    way.prepare_networks()
    return way


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes, way):
    yield
    kubernetes.delete("pods", "--all")
    wait_for_no_vnic(kubernetes)


def running(kubernetes, way, name="one"):
    kubernetes.apply(*way.objects(name, SLEEP, "red"))
    kubernetes.wait_for_ready(name)
    need("PORT_ACTIVE" in kubernetes.exec(name, "ibv_devinfo"), "no device")


def is_followed(kubernetes):
    return "k8s.default.red" in kubernetes.node.host.freeflow("get", "networks", codes=(0, 1, 2, 3))


def test_perftest_between_two_pods(kubernetes, way):
    output = between_two(kubernetes, way, WRITE, [*WRITE, "{ip}"], network="red")
    need(re.search(r"^ 65536 +200 ", output, re.M), output)


def test_the_router_dies(kubernetes, way):
    """The kubelet starts its container again, and it has what was declared."""
    running(kubernetes, way)
    before = kubernetes.node.host.router_pid()
    end_router(kubernetes.node.host)
    wait_until(lambda: kubernetes.node.host.router_pid() not in (before, None) and is_followed(kubernetes),
               lambda: f"another router has the network:\n{logs(kubernetes)}")
    kubernetes.delete("pod", "one")
    running(kubernetes, way, "two")


def test_the_pod_is_replaced(kubernetes, way):
    """As by an upgrade."""
    kubernetes.delete("pods", "--selector", "app.kubernetes.io/component=node", namespace=NAMESPACE)
    kubernetes_freeflow.wait_until_ready(kubernetes)
    wait_until(lambda: is_followed(kubernetes), lambda: f"the new router has the network:\n{logs(kubernetes)}")
    running(kubernetes, way)
    need([row["network"] for row in vnics(kubernetes)] == ["k8s.default.red"], vnics(kubernetes))
