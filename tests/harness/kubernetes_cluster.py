"""A cluster of FreeFlow on the nodes of a Kubernetes for tests, as docs/CLUSTER.md and docs/KUBERNETES.md say: an etcd of its
own with TLS, a controller on the first node, and the others joined by a token."""

from harness.engines import wait_until
from harness.etcd import Etcd
from harness.kubernetes_freeflow import NAMESPACE, install
from harness.processes import run
from harness.settings import DIST

SECRET = "freeflow-operator"
FILES = ("operator.json", "ca.pem", "operator.pem", "operator.key")


class Place:
    """As much of a lab as `Etcd` wants: one host, the first node; its programs begin in the directory of etcd's files."""

    def __init__(self, machine, directory):
        self.machine, self.directory = machine, directory
        self.freeflow_path = DIST / "bin" / "freeflow"

    def status(self):
        return {"hosts": [{"address": self.machine.address}]}

    def host(self, _):
        return self

    def enter(self, *words):
        return self.machine.inside("env", f"--chdir={self.directory}", *words)


class NodesCluster:
    """`close` ends its etcd; the hosts are the nodes'."""

    def __init__(self, kubernetes):
        self.kubernetes = kubernetes
        self.place = Place(kubernetes.machine, kubernetes.directory / "freeflow-etcd")
        self.etcd = Etcd(self.place, self.place.directory)
        try:
            self.etcd.wait_until_healthy()
            self.begin()
        except BaseException:
            self.close()
            raise

    def command(self, *words, role="controller"):
        file = self.etcd.directory / f"{role}.json"
        return run(self.place.enter(self.place.freeflow_path, *words, "--cluster", file), 60)

    def begin(self):
        self.command("cluster", "init")
        first, *others = self.kubernetes.nodes
        first.up_options = ("--cluster", self.etcd.directory / "controller.json", "--host", first.name)
        first.host.status()
        token = self.etcd.directory / "token"
        token.touch(mode=0o600)
        token.write_text(self.command("cluster", "token", "create", "--uses", str(len(others))))
        for node in others:
            node.up_options = ("--join", f"@{token}", "--host", node.name)
            node.host.status()
        # A host that has joined comes up by itself.
        for node in self.kubernetes.nodes:
            node.host.up_options = ()

    def install(self, *values):
        """The chart, with the operator's files as a secret."""
        kubernetes = self.kubernetes
        kubernetes.kubectl("create", "namespace", NAMESPACE)
        files = [f"--from-file={self.etcd.directory / name}" for name in FILES]
        kubernetes.kubectl("--namespace", NAMESPACE, "create", "secret", "generic", SECRET, *files)
        install(kubernetes, f"node.command={DIST}/bin/freeflow", f"controller.clusterSecret={SECRET}", *values)

    def wait_for_status(self, text):
        def has_it():
            return text in self.command("cluster", "status", role="operator")
        wait_until(has_it, lambda: f"{text}: {self.command('cluster', 'status', role='operator')}")

    def close(self):
        self.etcd.close()
