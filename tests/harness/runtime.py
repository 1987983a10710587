"""`freeflow runtime` in front of runc, on bundles as engines make them."""

import contextlib
import json
import os
import signal
import time

import harness
from harness import made_images
from harness.failure import need
from harness.processes import run

SECONDS = 30
REFUSED = (1,)
PROGRAMS = ("sh", "ls", "cat", "sleep", "ibv_devices")


class Runtime:
    """The wrapper under the name by which engines call it, and containers of it."""

    def __init__(self, host, programs=PROGRAMS):
        harness.require_commands("runc", *programs)
        self.host, self.directory = host, host.directory / "runtime"
        self.directory.mkdir()
        self.program = self.directory / "freeflow-runtime"
        self.program.symlink_to(host.freeflow_path)
        self.root = made_images.make_root(self.directory / "image", *programs)
        self.log = self.directory / "log.json"
        self.count = 0

    def bundle(self, *words, environment=(), annotations=None, change=None):
        """`change` may alter the configuration."""
        self.count += 1
        bundle = self.directory / f"bundle{self.count}"
        bundle.mkdir()
        run(["runc", "spec", "--bundle", bundle])
        file = bundle / "config.json"
        spec = json.loads(file.read_text())
        process = spec["process"]
        process.update(terminal=False, args=list(words), user={"uid": 1000, "gid": 1000}, noNewPrivileges=True)
        process["capabilities"] = {name: [] for name in process["capabilities"]}
        process["env"] += environment
        spec["root"]["path"] = str(self.root)
        spec["annotations"] = annotations or {}
        if change:
            change(spec)
        file.write_text(json.dumps(spec))
        return bundle

    def command(self, *words, options=()):
        runc = ["--root", self.directory / "state", "--log", self.log, "--log-format", "json"]
        return [self.program, "--run-dir", self.host.run_dir, *options, *runc, *words]

    def call(self, *words, options=(), codes=(0,)):
        return run(self.command(*words, options=options), SECONDS, codes=codes)

    def run(self, bundle, options=(), codes=(0,)):
        return self.call("run", "--bundle", bundle, f"c{self.count}", options=options, codes=codes)

    def refused(self, bundle, options=()):
        """The reason, which the engine finds in the log as well; nothing was started."""
        self.log.unlink(missing_ok=True)
        output = self.run(bundle, options, codes=REFUSED)
        reason = json.loads(self.log.read_text().splitlines()[-1])
        need(reason["level"] == "error" and reason["msg"] in output, f"the log has another reason: {reason} and {output}")
        need(self.list() == [], "a container is there")
        need(self.vnics() == [], "a vNIC is there")
        return reason["msg"]

    def list(self):
        return [one["id"] for one in json.loads(self.call("list", "--format", "json")) or []]

    def vnics(self):
        return [vnic["id"] for vnic in self.host.status()["vnics"]]

    def close(self):
        for name in self.list():
            self.call("delete", "--force", name)


@contextlib.contextmanager
def started(runtime, bundle, options=()):
    """A container that runs in the background, and its process."""
    name, pid = f"c{runtime.count}", runtime.directory / "pid"
    runtime.call("create", "--bundle", bundle, "--pid-file", pid, name, options=options)
    try:
        runtime.call("start", name)
        yield name, int(pid.read_text())
    finally:
        runtime.call("delete", "--force", name)


def kill(runtime, name, pid):
    """Ends the first process, until the real runtime knows it."""
    os.kill(pid, signal.SIGKILL)
    while json.loads(runtime.call("state", name))["status"] != "stopped":
        time.sleep(0.02)
