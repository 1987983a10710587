"""Pods with user namespaces (`hostUsers: false`), whose root is nobody on the host, and a runc that has idmapped mounts."""

import json
import os
import re

import pytest

from harness.engines import wait_until
from harness.failure import need, skip_lacking
from harness.kubernetes_pods import SLEEP, WAYS, between_two, wait_for_no_vnic

WRITE = ["ib_write_bw", "-F", "-n", "200"]
# The kubelet's own bound: idmapped mounts of tmpfs.
LINUX = (6, 3)
HANDLERS = {"runtime": "freeflow", "claim": "users", "plugin": "users"}


def features(kubernetes, handler):
    rows = kubernetes.get("node", kubernetes.node.name, None)["status"].get("runtimeHandlers", [])
    return next((row.get("features", {}) for row in rows if row["name"] == handler), {})


@pytest.fixture(scope="module", params=HANDLERS)
def way(request, kubernetes):
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < LINUX:
        skip_lacking("idmapped mounts of tmpfs (Linux 6.3)")
    way = WAYS[request.param](kubernetes)
    way.prepare()
    handler = HANDLERS[request.param]
    if handler == "freeflow":
        choose_runtime(kubernetes)
    kubernetes.apply({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": handler}, "handler": handler})
    wait_until(lambda: features(kubernetes, handler).get("userNamespaces"),
               lambda: f"the runtime {handler} has user namespaces: {features(kubernetes, handler)}")
    return WithUsers(way, handler)


def choose_runtime(kubernetes):
    """The new runc behind `freeflow-runtime`; containerd asks it for its features when it begins."""
    node = kubernetes.node
    node.stop_containerd()
    file = node.machine.path("/etc/freeflow/runtime.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"runtime": str(node.runc_with_users)}))
    node.start_containerd()
    node.wait_for_new_heartbeat()


class WithUsers:
    """The same pods by one way, with user namespaces."""

    def __init__(self, way, handler):
        self.way, self.handler = way, handler

    def objects(self, *words, **spec):
        made = self.way.objects(*words, **spec)
        made[-1]["spec"] |= {"hostUsers": False, "runtimeClassName": self.handler}
        return made


@pytest.fixture(autouse=True)
def no_pods_left(kubernetes):
    yield
    kubernetes.delete("pods", "--all")
    wait_for_no_vnic(kubernetes)


def test_root_in_the_pod_is_nobody_outside(kubernetes, way):
    made = way.objects("one", SLEEP)
    made[-1]["spec"]["containers"][0]["securityContext"] |= {"runAsUser": 0, "runAsNonRoot": False}
    kubernetes.apply(*made)
    kubernetes.wait_for_ready("one")
    output = kubernetes.exec("one", "sh", "-c", "cat /proc/self/uid_map; ibv_devinfo; ls /sys/class/net; echo x >/run/freeflow/x || true")
    first = int(output.split()[1])
    need(first >= 65536 and "PORT_ACTIVE" in output and "ff0" in output.split(), output)
    need("x" not in kubernetes.exec("one", "ls", "/run/freeflow").split(), "the pod writes among FreeFlow's files")


def test_perftest_between_two_pods(kubernetes, way):
    output = between_two(kubernetes, way, WRITE, [*WRITE, "{ip}"])
    need(re.search(r"^ 65536 +200 ", output, re.M), output)
