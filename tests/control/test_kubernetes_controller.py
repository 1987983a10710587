"""`freeflow-kubernetes controller` between an API server of the test's own and a router: objects, conditions, ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from harness import api as rest
from harness import Failure, need
from harness.host import kill_router
from harness.kube_api import KubeApi
from harness.kube_controller import SECONDS, Controller, until


@contextlib.contextmanager
def etcd(directory):
    """A member that knows no users; its URL."""
    with contextlib.ExitStack() as ports:
        # Both are free now; who takes one until etcd has it makes the test fail, and not pass.
        sockets = [ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        client, peer = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    words = [os.environ.get("FREEFLOW_ETCD", "etcd"), "--name", "m", "--data-dir", directory / "etcd", "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"m={peer}"]
    with (directory / "etcd.log").open("w") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield client
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def kube():
    with KubeApi() as kube:
        yield kube


@pytest.fixture(scope="module")
def controllers(host, kube):
    all_of_them = [Controller(host.directory, kube.url, "one", "--socket", host.run_dir / "api.sock")]
    until("one leads", all_of_them[0].leads)
    yield all_of_them
    for controller in all_of_them:
        controller.kill()


@pytest.fixture
def api(host, controllers):
    return rest.Api(host)


def network(cidr, **more):
    return {"spec": {"cidrs": [cidr], **more}}


def accepted(kube, plural, namespace, name, status="True"):
    def probe():
        conditions = kube.conditions(plural, namespace, name) or {}
        return conditions if conditions.get("Accepted", ("",))[0] == status else None
    return until(f"{plural} {namespace}/{name}: Accepted is {status}; {kube.conditions(plural, namespace, name)}", probe)


def test_resources_become_objects(api, kube, host):
    kube.put("qosclasses", "", "slow", {"spec": {"vnic": {"rate": "1Gbit"}}})
    kube.put("networks", "team", "red", network("10.82.0.0/24", qosClass="slow", podLabels=["role"]))
    kube.put("vnics", "team", "db", {"spec": {"network": "red", "addresses": ["10.82.0.9"], "labels": {"tier": "db"}}})
    kube.put("networks", "other", "red", network("10.82.0.0/24"))
    for plural, namespace, name in (("qosclasses", "", "slow"), ("networks", "team", "red"), ("vnics", "team", "db"),
                                    ("networks", "other", "red")):
        conditions = accepted(kube, plural, namespace, name)
        need(conditions["Enforced"][0] == "True", str(conditions))
    made = api.want(200, "GET", "/networks/k8s.team.red")
    need(made["spec"]["tenant"] == "k8s.team" and made["spec"]["qosClass"] == "k8s._.slow", str(made))
    need(api.want(200, "GET", "/vnics/k8s.team.db")["metadata"]["labels"] == {"tier": "db"}, "labels of a vNIC")
    need(kube.get("networks", "team", "red")["metadata"]["finalizers"] == ["freeflow.io/declared"], "a finalizer")
    message = host.freeflow("delete", "network", "k8s.team.red", codes=(3,))
    need("kubectl edit networks.freeflow.io red -n team" in message, message)
    # Containers have vNICs of it as of any other network, and keep them.
    holder = host.container("holder", "--vnic", "k8s.team.db")
    kube.delete("vnics", "team", "db")
    until("the deletion waits", lambda: (kube.conditions("vnics", "team", "db") or {}).get("Deleted"))
    need(kube.conditions("vnics", "team", "db")["Deleted"][1] == "InUse", "why it waits")
    api.want(200, "GET", "/vnics/k8s.team.db")
    holder.remove()
    until("it is gone", lambda: kube.get("vnics", "team", "db") is None)
    container = host.container("pod", "--network", "k8s.team.red")
    kube.delete("networks", "team", "red")
    until("the deletion waits", lambda: (kube.conditions("networks", "team", "red") or {}).get("Deleted"))
    need(kube.conditions("networks", "team", "red")["Deleted"][1] == "InUse", "why it waits")
    container.remove()
    until("it is gone", lambda: kube.get("networks", "team", "red") is None)
    api.want(404, "GET", "/networks/k8s.team.red")


def test_a_refused_resource_says_why_and_stops_nobody(api, kube):
    kube.put("networks", "team", "broken", network("127.0.0.0/8"))
    kube.put("networks", "team", "fine", network("10.83.0.0/24"))
    accepted(kube, "networks", "team", "fine")
    conditions = accepted(kube, "networks", "team", "broken", "False")
    need(conditions["Accepted"][1] == "Invalid" and "spec.cidrs[0]" in conditions["Accepted"][2], str(conditions))
    warnings = [event["reason"] for (plural, _, _), event in kube.objects.items() if plural == "events" and event["type"] == "Warning"]
    need("Invalid" in warnings, str(warnings))
    kube.put("networks", "team", "broken", network("10.84.0.0/24"))
    accepted(kube, "networks", "team", "broken")


def test_the_router_and_the_leader_may_die(api, kube, host, controllers):
    controllers.append(Controller(host.directory, kube.url, "two", "--socket", host.run_dir / "api.sock"))
    kill_router(host)
    kube.put("networks", "team", "late", network("10.85.0.0/24"))
    time.sleep(2)
    need(not kube.conditions("networks", "team", "late"), "it was accepted by nobody")
    host.up()
    accepted(kube, "networks", "team", "late")
    controllers[0].kill()
    kube.put("networks", "team", "later", network("10.86.0.0/24"))
    until("the other one leads", controllers[1].leads)
    accepted(kube, "networks", "team", "later")


def test_a_pod_ends_when_it_is_asked_to(api, kube, host, controllers):
    # As the first process of a container, to which a signal means nothing that it does not ask for.
    in_pod = ("unshare", "--pid", "--fork", "--kill-child")
    pod = Controller(host.directory, kube.url, "in-pod", "--socket", host.run_dir / "api.sock", enter=lambda *words: (*in_pod, *words))
    controllers.append(pod)
    for other in controllers[:-1]:
        other.kill()
    until("the pod leads", pod.leads)
    next_one = Controller(host.directory, kube.url, "next", "--socket", host.run_dir / "api.sock")
    controllers.append(next_one)
    os.kill(pod.first_process(), signal.SIGTERM)
    need(pod.process.wait(SECONDS) == 0, pod.log.read_text())
    need("ends, as it was asked to" in pod.log.read_text(), pod.log.read_text())
    until("the next one leads", next_one.leads)
    with kube.lock:
        holders = [event["object"]["spec"].get("holderIdentity") for _, plural, event in kube.events if plural == "leases"]
    need(None in holders[holders.index("in-pod"):], f"the lease was not given back: {holders}")
    kube.put("networks", "team", "last", network("10.88.0.0/24"))
    accepted(kube, "networks", "team", "last")
    # One that waits has nothing to give back.
    waits = Controller(host.directory, kube.url, "waits", "--socket", host.run_dir / "api.sock")
    controllers.append(waits)
    until("it waits", lambda: waits.log.exists() and waits.process.poll() is None and
          (Path(f"/proc/{waits.process.pid}/comm").read_text().strip() == "freeflow-kubern") and
          int(signal_masks(waits.process.pid), 16) >> (signal.SIGTERM - 1) & 1)
    waits.process.terminate()
    need(waits.process.wait(SECONDS) == 0, waits.log.read_text())


def signal_masks(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))


def test_a_cluster_is_declared_to_by_an_operators_file(host, tmp_path):
    with KubeApi() as kube, etcd(tmp_path) as url:
        file = tmp_path / "operator.json"
        file.write_text(json.dumps({"etcd": [url]}))

        def made():
            # etcd needs a moment to choose its leader.
            with contextlib.suppress(Failure):
                return host.freeflow("cluster", "init", "--cluster", file) or True

        until("there is a cluster", made)
        controller = Controller(tmp_path, kube.url, "of-cluster", "--cluster", file)
        try:
            kube.put("networks", "team", "red", network("10.87.0.0/24"))
            kube.put("networks", "zebra", "red", network("10.87.0.0/25"))
            kube.put("vnics", "team", "db", {"spec": {"network": "red"}})
            conditions = accepted(kube, "vnics", "team", "db")
            need(conditions["Enforced"][:2] == ("False", "Behind"), str(conditions))
            need("no host" in conditions["Enforced"][2], str(conditions))
            # In a cluster each network has its own addresses: one of the two is there.
            both = [until("it is said", lambda: kube.conditions("networks", namespace, "red"))["Accepted"][0]
                    for namespace in ("team", "zebra")]
            need(both == ["True", "False"], str(both))
            listed = json.loads(host.freeflow("get", "networks", "--cluster", file, "-o", "json"))["items"]
            need([one["metadata"]["name"] for one in listed] == ["k8s.team.red"], str(listed))
            message = host.freeflow("delete", "network", "k8s.team.red", "--cluster", file, codes=(3,))
            need("managed by kubernetes" in message, message)
            # A backup has the manager, and a cluster that gets it, too.
            backup = tmp_path / "backup.yaml"
            backup.write_text(host.freeflow("cluster", "export", "--cluster", file))
            need("manager:" in backup.read_text(), "a backup without managers")
            host.freeflow("cluster", "import", backup, "--cluster", file, codes=(3,))
            host.freeflow("cluster", "import", backup, "--cluster", file, "--force")
            there = json.loads(host.freeflow("get", "network", "k8s.team.red", "--cluster", file, "-o", "json"))
            need(there["metadata"]["manager"]["name"] == "kubernetes", str(there))
            kube.delete("networks", "team", "red")
            until("the deletion waits", lambda: (kube.conditions("networks", "team", "red") or {}).get("Deleted"))
            kube.delete("vnics", "team", "db")
            until("both are gone", lambda: not kube.get("networks", "team", "red"))
            accepted(kube, "networks", "zebra", "red")
        finally:
            controller.kill()
