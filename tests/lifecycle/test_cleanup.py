"""After `freeflow down` nothing is left: no namespace, interface, mount, process, file, shared memory or rule."""

import json
import os
import pathlib
import signal
import subprocess

import pytest

import harness
from harness import PORT, Host, need


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


def traces(run_dir):
    """Everything on this machine that could be a host's; other hosts may come and go beside us, so by our own name."""
    word = str(run_dir)
    found = set()
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        if word in line:
            found.add(f"mount: {line}")
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if word.encode() in (process / "cmdline").read_bytes():
                found.add(f"process {process.name}: {(process / 'cmdline').read_text()}")
        except OSError:
            continue
    for directory in ("/etc/cdi", "/var/run/cdi"):
        for path in pathlib.Path(directory).glob("*"):
            if word in path.read_text(errors="replace"):
                found.add(f"file: {path}")
    return found


def machine():
    """State of the machine as a whole; only to be compared where no other test runs."""
    found = set(output_of("ip", "netns").splitlines())
    for link in json.loads(output_of("ip", "-j", "link") or "[]"):
        found.add(f"link {link['ifname']}")
    found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    found |= {f"cgroup {path}" for path in pathlib.Path("/sys/fs/cgroup").glob("**/freeflow-*")}
    found |= {f"rule {line}" for line in output_of("iptables-save").splitlines() if line.startswith("-A")}
    return found


def gone(host, alone, before):
    need(not traces(host.run_dir), f"left behind: {traces(host.run_dir)}")
    if alone:
        left = machine() - before
        need(not left, f"left on the machine: {left}")


def use_and_down(host, load):
    server, client = host.pair()
    harness.in_two_containers(server, client, [load, "-t", 1, "server", PORT],
                          [load, "-t", 1, "client", "{ip}", PORT])
    host.freeflow("run", "--rm", "--name", "brief", "--", "ibv_devices")
    server.remove()
    # One container is alive: an orderly `down` refuses or asks, a forced one takes it away.
    host.freeflow("down", codes=range(1, 128))
    client.kill_background()
    host.freeflow("down", "--force")


def killed_and_down(host, load):
    """The router and a container's first process are killed; `up` and `down --force` still tidy."""
    server, _ = host.pair()
    running = server.start(load, "-a")
    running.wait_for_output("ready")
    harness.end_router(host)
    os.kill(server.pid, signal.SIGKILL)
    running.kill()
    host.up()
    host.freeflow("down", "--force")


@pytest.mark.parametrize("end", [use_and_down, killed_and_down], ids=["orderly", "after kills"])
def test_nothing_is_left_after_down(end):
    before = machine()
    with Host() as host:
        end(host, harness.program("load"))
        gone(host, os.environ.get("FREEFLOW_TEST_ALONE") == "1", before)
