"""Peers that were granted memory and keep it: when their right is over they change nothing and see nothing of it.

The owner is an ordinary program; the attacker, in another container, speaks with the router by hand, keeps the mapping and
the descriptor, and hands that to an accomplice in a third container. The cases are of tests/programs/direct_hostile.c.
"""

import re
import time

import pytest

import harness
from harness import PORT, need
from harness.enemies import Healthy, beside
from harness.settings import FULL, ROOT

SECONDS = 20 if FULL else 4
# How a right ends: the owner's verbs, what becomes of the attacker's side, the policy. At last one that never was for writing.
ENDS = ("dereg", "rereg", "qp-error", "qp-destroy", "peer-destroy", "peer-close", "policy", "read-only",
        "entered", "entered-qp")
REFUSALS = ("refusals", "no-access")
# Of the time that an owner has for a command, what the healthy pair runs meanwhile.
BESIDE_SECONDS = 3


def revocation_ms():
    protocol = (ROOT / "crates" / "protocol" / "src" / "library.rs").read_text()
    return int(re.search(r"REVOCATION_TIME_MAX_MS: u64 = ([\d_]+);", protocol)[1].replace("_", ""))


class Stage:
    def __init__(self, host):
        self.host, self.program = host, harness.program("direct_hostile")
        self.owner, self.attacker, self.third = (host.container(name) for name in ("owner", "attacker", "third"))
        self.silent = host.container("silent")
        self.path = host.directory / "colluder"
        self.third.start(self.program, "colluder", self.path).wait_for_output("ready")

    def data_path(self, path):
        self.host.freeflow("network", "set", "default", "--data-path", path)

    def both(self, owner, *names):
        """Starts the owner, then the others; gives all that run, the owner first."""
        running = [self.owner.start(self.program, *owner)]
        self.owner.wait_for_port(running[0])
        for container, words in names:
            running.append(container.start(self.program, *words))
        return running

    def attack(self, name, owner=None):
        return self.attacker, ("attacker", name, (owner or self.owner).ip, PORT, self.path)

    def ended(self, running):
        """All of them well; the owner's last line."""
        try:
            codes = [each.wait(60) for each in running]
            printed = "\n---\n".join(each.output() for each in running)
            need(not any(codes), f"exit codes {codes}:\n{printed}")
            return running[0].output().strip().splitlines()[-1]
        finally:
            for each in running:
                each.kill()

    def right_ends(self, name):
        running = self.both(("owner", name, PORT), self.attack(name))
        if name != "policy":
            return self.ended(running)
        try:
            running[0].wait_for_output("granted")
            self.data_path("routed")
            return self.ended(running)
        finally:
            self.data_path("auto")

    def refusals(self, name):
        running = self.both(("owner", name, PORT), self.attack(name))
        words = running[0].wait_for_output("ready").split()[1:4]
        self.third.exec(self.program, "stranger", self.owner.ip, *words)
        self.ended(running)
        return running[1].output().strip()

    def start_silent(self):
        """It takes long until the router has had enough: other cases run meanwhile."""
        running = self.silent.start(self.program, "silent", PORT, revocation_ms())
        self.silent.wait_for_port(running)
        container, words = self.attack("silent", self.silent)
        running = [running, container.start(self.program, *words)]
        running[0].wait_for_output("ordered")
        return running, time.monotonic() + revocation_ms() / 1000 - BESIDE_SECONDS

    def end_silent(self, healthy, running, when):
        time.sleep(max(0, when - time.monotonic()))
        return beside(healthy, self.ended, running)

    def churn(self, honest):
        running = self.both(("churn", PORT, SECONDS), (honest, ("honest", self.owner.ip, PORT)))
        running[0].wait_for_output("connected 0")
        container, words = self.attack("churn")
        running.append(container.start(self.program, *words))
        # Else the honest peer would only show that the router loses nothing.
        most = 0
        while running[0].process.poll() is None and most < 2:
            most = max(most, self.host.status()["grant_qp_count"])
        note = self.ended(running)
        need(most >= 2, f"{note}, but never had two QPs a grant")
        return note


@pytest.fixture(scope="module")
def healthy(host):
    return Healthy(host, harness.program("load"))


@pytest.fixture(scope="module")
def honest(host, healthy):
    return host.container("honest")


@pytest.fixture(scope="module")
def stage(host, honest):
    return Stage(host)


@pytest.fixture(scope="module", autouse=True)
def silent(stage, held):
    """An owner that ignores its commands. It takes long until the router has had enough: the others run meanwhile."""
    return stage.start_silent()


@pytest.mark.parametrize("name", ENDS)
def test_right_is_over_when(stage, name):
    stage.right_ends(name)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused(stage, name):
    stage.refusals(name)


def test_revoked_again_and_again(stage, healthy, honest):
    beside(healthy, stage.churn, honest)


def test_owner_that_ignores_its_commands(stage, healthy, silent):
    stage.end_silent(healthy, *silent)


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)
