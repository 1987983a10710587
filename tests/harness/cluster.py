"""Three hosts of a laboratory that follow one declaration: a member of etcd on each, TLS, and an operator."""

import contextlib
import json
import time

from harness.etcd import Etcd
from harness.failure import Failure
from harness.lab import Lab
from harness.processes import run

HOSTS = (1, 2, 3)
SOON = 60


class Hosts:
    """The laboratory, its etcd, and an operator."""

    controllers = (1,)
    etcd_options = {}
    # The host where operators are.
    operator_at = 3

    def __init__(self):
        self.lab = Lab(3, 1500)
        self.etcd = None
        try:
            self.begin()
            self.rows = {row["name"]: row for row in self.lab.status()["hosts"]}
        except BaseException:
            self.close()
            raise

    def begin(self):
        """etcd, with certificates and rights by hand."""
        self.etcd = Etcd(self.lab, self.lab.directory / "etcd", ["operator", *map(name_of, HOSTS)], **self.etcd_options)
        self.etcd.wait_until_healthy()
        self.etcd.give_rights("operator", list(map(name_of, HOSTS)), list(map(name_of, self.controllers)))
        self.operator = self.etcd.file("operator")

    def host(self, number):
        return self.lab.host(number)

    def join(self, number, **fields):
        host, name = self.host(number), name_of(number)
        host.freeflow("down", "--force")
        row = self.rows[name]
        file = self.etcd.file(name, controller=number in self.controllers, **fields)
        host.freeflow("up", "--cluster", file, "--address", row["address"], "--range", row["range"], "--host", name)

    def as_operator(self, *words, at=None, codes=(0,), seconds=60):
        at = at or self.operator_at
        command = self.host(at).enter(self.host(at).freeflow_path, *words, "--cluster", self.operator)
        return run(command, seconds, codes=codes)

    def apply(self, text, at=None, **options):
        path = self.lab.directory / "declared.yaml"
        path.write_text(text)
        return self.as_operator("apply", "-f", path, at=at, **options)

    def status(self, at=None):
        return json.loads(self.as_operator("cluster", "status", "-o", "json", at=at))

    def wait(self, what, so, seconds=SOON):
        """Until it is so; `so` may fail meanwhile."""
        end, last = time.monotonic() + seconds, None
        while time.monotonic() < end:
            try:
                last = so()
                if last:
                    return last
            except Failure as failure:
                last = failure
            time.sleep(0.2)
        logs = "\n".join(self.log(n)[-1500:] for n in HOSTS)
        raise Failure(f"{what}: not in {seconds} s: {last}\n{logs}")

    def wait_for_all(self, hosts=HOSTS):
        """Until these hosts have followed all, without a problem."""
        def followed():
            status = self.status(at=hosts[0])
            rows = {row["name"]: row for row in status["hosts"]}
            return all((row := rows.get(name_of(n))) and row.get("address") and row["revision"] >= status["declared_revision"]
                       and not row["problems"] for n in hosts)
        self.wait("all hosts follow", followed)

    def network(self, number, name):
        items = json.loads(self.host(number).freeflow("get", "network", "-o", "json"))["items"]
        return next((item for item in items if item["metadata"]["name"] == name), None)

    def log(self, number):
        """What the host's follower has said."""
        log = self.host(number).run_dir / "cluster.log"
        return log.read_text() if log.exists() else ""

    def close(self):
        if self.etcd:
            self.etcd.close()
        self.lab.close()


@contextlib.contextmanager
def following(declared, *networks, kind=None):
    """Three hosts that have followed a declaration, and have blocks of its networks."""
    hosts = (kind or Hosts)()
    try:
        hosts.as_operator("cluster", "init")
        for number in HOSTS:
            hosts.join(number)
        hosts.apply(declared)
        hosts.wait_for_all()
        hosts.wait("blocks", lambda: all(hosts.network(number, network) for number in HOSTS for network in networks))
        yield hosts
    finally:
        hosts.close()


class JoiningHosts(Hosts):
    """The same with `freeflow cluster authority`, with these options, and tokens."""

    def __init__(self, *options):
        self.options = options
        super().__init__()

    def begin(self):
        self.etcd = Etcd(self.lab, self.lab.directory / "etcd", options=self.options)
        self.etcd.wait_until_healthy()
        self.operator = self.etcd.directory / "operator.json"
        self.controller = self.etcd.directory / "controller.json"

    def as_controller(self, *words, at=1, codes=(0,), seconds=60):
        """With the files of a controller, before it is a host."""
        host = self.host(at)
        return run(host.enter(host.freeflow_path, *words, "--cluster", self.controller), seconds, codes=codes)

    def token(self, *options):
        return self.as_controller("cluster", "token", "create", *options).strip()

    def up_controller(self, number, *options, **more):
        host = self.host(number)
        host.freeflow("down", "--force")
        return host.freeflow("up", "--cluster", self.controller, "--host", name_of(number), *options, **more)

    def join(self, number, token, *options, name=None, **more):
        """By a token in a file, where nobody else sees it."""
        host = self.host(number)
        host.freeflow("down", "--force")
        path = self.lab.directory / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        return host.freeflow("up", "--join", f"@{path}", "--host", name or name_of(number), *options, **more)


def name_of(number):
    return f"host{number}"
