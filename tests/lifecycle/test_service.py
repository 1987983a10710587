"""`freeflow up` as a service: what it reports by sd_notify, and how `--foreground` ends."""

import os
import signal
import socket

import pytest

import harness
from harness import Host, Running, need, settings
from harness.settings import DIST

SECONDS = 60


@pytest.fixture
def supervisor(tmp_path):
    """A socket that hears what services report, and the environment that names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(SECONDS)
        yield heard, {**os.environ, "NOTIFY_SOCKET": heard.getsockname()}


@pytest.fixture
def own():
    with Host() as host:
        yield host


def lines(heard):
    return heard.recv(4096).decode().splitlines()


def foreground(host, environment):
    """`up --foreground` of a host that was up; harness hosts are."""
    words = host.command("up", "--foreground", *settings.up_options())
    return Running(words, env=environment)


def test_the_router_is_the_main_process(own, supervisor):
    heard, environment = supervisor
    # Already up, and after its router has died.
    for _ in range(2):
        harness.run(own.command("up"), SECONDS, env=environment)
        said = lines(heard)
        need("READY=1" in said and f"MAINPID={own.router_pid()}" in said, said)
        harness.end_router(own)
    own.up()


def test_a_supervisor_that_does_not_hear_is_named(own):
    printed = harness.run(own.command("up"), SECONDS, env={**os.environ, "NOTIFY_SOCKET": "/nowhere/notify"})
    need("NOTIFY_SOCKET /nowhere/notify" in printed, printed)


def test_sigterm_ends_the_router_and_leaves_containers(own, supervisor):
    heard, environment = supervisor
    container = own.container("stays")
    process = foreground(own, environment)
    said = lines(heard)
    need("READY=1" in said and not [line for line in said if line.startswith("MAINPID")], said)
    pid = own.router_pid()
    process.process.send_signal(signal.SIGTERM)
    need(process.wait(SECONDS) == 0, process.output())
    need(not harness.router_of(pid, own.run_dir), "the router lives")
    own.up()
    need([row["name"] for row in own.containers()] == ["stays"], "the container is gone")
    container.exec("test", "-e", "/sys/class/infiniband/freeflow0/node_guid")


def test_a_router_that_dies_is_a_failure(own, supervisor):
    heard, environment = supervisor
    process = foreground(own, environment)
    lines(heard)
    harness.end_router(own)
    need(process.wait(SECONDS) == 1 and "the router has ended" in process.output(), process.output())
    own.up()


def test_down_ends_it_in_order(own, supervisor):
    heard, environment = supervisor
    process = foreground(own, environment)
    lines(heard)
    own.freeflow("down", "--force")
    need(process.wait(SECONDS) == 0 and "was taken down" in process.output(), process.output())
    own.up()


def test_generated_files_are_of_the_commands(tmp_path):
    harness.run([DIST / "bin" / "freeflow", "generate", tmp_path])
    need({path.name for path in (tmp_path / "completions").iterdir()} == {"_freeflow", "freeflow.bash", "freeflow.fish"},
         "other completions")
    pages = {path.name for path in (tmp_path / "man").iterdir()}
    need({"freeflow.1", "freeflow-up.1", "freeflow-lab-run.1"} <= pages and "freeflow-hook.1" not in pages, sorted(pages))
