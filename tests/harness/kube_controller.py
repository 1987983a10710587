"""`freeflow-kubernetes controller` with the tests' own API server (`kube_api`)."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness import settings
from harness.engines import wait_until
from harness.failure import need

SECONDS = 30
PROGRAM = "freeflow-kubernetes"


def program():
    """As `make` has put it, or as cargo has built it."""
    places = [settings.DIST / "bin" / PROGRAM, settings.TARGET / "debug" / PROGRAM]
    found = [place for place in places if place.exists()]
    if not found:
        pytest.skip(f"there is no {PROGRAM}: it is a part of `make`")
    return found[0]


def until(what, probe, seconds=SECONDS):
    return wait_until(probe, what, seconds)


class Controller:
    """`enter` gives the command that runs another one where the controller runs; without it that is here."""

    def __init__(self, directory, url, identity, *target, enter=lambda *words: words):
        config = directory / f"{identity}.kubeconfig"
        config.write_text(f"current-context: c\ncontexts: [{{name: c, context: {{cluster: k, namespace: freeflow}}}}]\n"
                          f"clusters: [{{name: k, cluster: {{server: '{url}'}}}}]\n")
        self.log = directory / f"{identity}.log"
        words = enter(program(), "--kubeconfig", config, "controller", *target, "--identity", identity)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env={**os.environ, "POD_NAME": ""}, start_new_session=True)

    def leads(self):
        need(self.process.poll() is None, f"the controller has ended: {self.log.read_text()}")
        return " leads" in self.log.read_text()

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def first_process(self):
        """Of the PID namespace that `unshare` made for it: its number here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(until("it has begun", children.read_text))
