"""Containers of engines: killed midway with their runtime or hook, after a power cut, started again, in user
namespaces. Nothing of theirs stays."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import time

import pytest

import harness
from harness.failure import need
from harness.host import end_router
from harness.processes import descendants, run
from harness.runtime import SECONDS, Runtime, kill, started

# Of a user namespace: the host's number of its root, and how many.
OUTSIDE, COUNT = 200_000, 65_536


@pytest.fixture(scope="module")
def runtime():
    with harness.Host() as host:
        runtime = Runtime(host)
        try:
            yield runtime
        finally:
            runtime.close()


def address_of(runtime, name):
    return {vnic["id"]: vnic["address"] for vnic in runtime.host.status()["vnics"]}[name]


def short_hash(path):
    """Stands for a run directory in the aliases of its interfaces (FNV-1a)."""
    value = 0xcbf29ce484222325
    for byte in str(path).encode():
        value = (value ^ byte) * 0x100000001b3 % 2**64
    return f"{value % 2**32:08x}"


def leftovers(runtime):
    """All that a container may leave on this host."""
    run_dir = runtime.host.run_dir
    mark = f"freeflow {short_hash(run_dir)} vnic "
    links = json.loads(run(["ip", "-j", "link", "show"]))
    left = [link["ifname"] for link in links if link.get("ifalias", "").startswith(mark)]
    left += runtime.vnics()
    left += [path.name for path in (run_dir / "vnics").iterdir()]
    left += [path.name for path in (run_dir / "engines").glob("[!.]*") if path.is_file()]
    left += [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if str(runtime.root) in line]
    return left


def nothing_is_left(runtime, seconds=10):
    """Processes that were killed take a moment to end."""
    end = time.monotonic() + seconds
    while left := leftovers(runtime):
        need(time.monotonic() < end, f"something is left: {left}")
        runtime.host.up()


def test_a_restarted_container_keeps_its_address(runtime):
    bundle = runtime.bundle("sleep", "600")
    with started(runtime, bundle) as (name, _):
        before = address_of(runtime, name)
        need(leftovers(runtime), "the test sees nothing of a container")
    others = set()
    for _ in range(2):
        with started(runtime, runtime.bundle("sleep", "600")) as (other, _):
            others.add(address_of(runtime, other))
    runtime.call("create", "--bundle", bundle, name)
    try:
        need(address_of(runtime, name) == before, "another address")
        # The next container gets none that another one had a moment ago.
        with started(runtime, runtime.bundle("sleep", "600")) as (other, _):
            need(address_of(runtime, other) not in {before, *others}, "an address is given again at once")
    finally:
        runtime.call("delete", "--force", name)
    # Another one may have taken it: then the container gets the next.
    runtime.host.freeflow("run", "-d", "--name", "taker", "--ip", before, "--", "sleep", "600")
    try:
        runtime.call("create", "--bundle", bundle, name)
        need(address_of(runtime, name) != before, "two with one address")
    finally:
        runtime.call("delete", "--force", name)
        runtime.host.freeflow("rm", "-f", "taker")
    nothing_is_left(runtime)


def hook_below(pid):
    for below in descendants(pid):
        with contextlib.suppress(OSError):
            if b"createRuntime" in pathlib.Path(f"/proc/{below}/cmdline").read_bytes():
                return below
    return None


@pytest.mark.parametrize("victims", ["hook", "runc", "both"])
def test_a_start_that_is_killed_midway(runtime, victims):
    """At moments that differ; the next `up` takes away all that stays."""
    bundle = runtime.bundle("sleep", "600")
    name = f"c{runtime.count}"
    for delay in (0, 0.005, 0.02, 0.05):
        starting = harness.Running(runtime.command("create", "--bundle", bundle, name))
        try:
            hook = None
            while hook is None and starting.process.poll() is None:
                hook = hook_below(starting.process.pid)
            time.sleep(delay)
            # By numbers: one of them may have ended by itself.
            for victim in [hook] * (victims != "runc") + [starting.process.pid] * (victims != "hook"):
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(victim, signal.SIGKILL)
            starting.wait(SECONDS)
        finally:
            runtime.call("delete", "--force", name, codes=(0, 1))
            shutil.rmtree(runtime.directory / "state" / name, ignore_errors=True)
    nothing_is_left(runtime)
    with started(runtime, bundle) as (again, _):
        need("freeflow0" in runtime.call("exec", again, "ibv_devices"), "no device after that")
    nothing_is_left(runtime)


def test_a_power_cut(runtime):
    """All processes are gone at once, no hook has run, and the run directory is as it was."""
    names = []
    for _ in range(2):
        bundle = runtime.bundle("sleep", "600")
        name, pid = f"c{runtime.count}", runtime.directory / "pid"
        runtime.call("create", "--bundle", bundle, "--pid-file", pid, name)
        names.append((name, int(pid.read_text())))
    end_router(runtime.host)
    for name, pid in names:
        kill(runtime, name, pid)
        shutil.rmtree(runtime.directory / "state" / name)
    runtime.host.up()
    need(leftovers(runtime) == [], f"something is left: {leftovers(runtime)}")


def in_user_namespace(spec):
    spec["linux"]["namespaces"].append({"type": "user"})
    for kind in ("uidMappings", "gidMappings"):
        spec["linux"][kind] = [{"containerID": 0, "hostID": OUTSIDE, "size": COUNT}]


@pytest.mark.parametrize("owner", [OUTSIDE, 0])
def test_a_user_namespace(runtime, owner):
    """As Docker's `userns-remap`, podman's `--userns` and pods with `hostUsers: false` make them: the image's files
    belong to the container's root, or are mapped for it."""
    for directory in (runtime.host.directory, runtime.directory):
        directory.chmod(0o711)
    root = runtime.directory / f"root-of-{owner}"
    shutil.copytree(runtime.root, root, symlinks=True)
    run(["chown", "--recursive", f"{owner}:{owner}", root])
    script = "ibv_devices && ls /run/freeflow /sys/class/infiniband /sys/class/net && test -c /dev/infiniband/uverbs0"
    bundle = runtime.bundle("sh", "-c", script, change=lambda spec: (in_user_namespace(spec), spec["root"].update(path=str(root))))
    output = runtime.run(bundle)
    need("freeflow0" in output and "router.sock" in output and "ff0" in output, output)
    nothing_is_left(runtime)


@pytest.mark.parametrize("namespace", ["none", "user"])
def test_an_engine_without_root_is_refused(runtime, namespace):
    """Rootless podman runs runc and its hooks as root of a user namespace; other engines as the user."""
    for directory in (runtime.host.directory, runtime.directory):
        directory.chmod(0o711)
    home = runtime.directory / f"rootless-{namespace}"
    home.mkdir()
    run(["runc", "spec", "--rootless", "--bundle", home])
    file = home / "config.json"
    spec = json.loads(file.read_text())
    spec["process"].update(terminal=False, args=["sleep", "600"])
    spec["root"]["path"] = str(runtime.root)
    # As the CDI device has it.
    words = [str(word) for word in ("freeflow", "--run-dir", runtime.host.run_dir, "hook", "--network", "default")]
    spec["hooks"] = {stage: [{"path": str(runtime.host.freeflow_path), "args": [*words, stage]}]
                     for stage in ("createRuntime", "poststop")}
    uid = 0 if namespace == "user" else 1000
    for kind in ("uidMappings", "gidMappings"):
        spec["linux"][kind] = [{"containerID": 0, "hostID": uid, "size": 1}]
    file.write_text(json.dumps(spec))
    run(["chown", "--recursive", "1000:1000", home])
    user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
    inside = ["unshare", "--user", "--map-root-user", "--mount"] if namespace == "user" else []
    output = run([*user, *inside, "runc", "--root", home / "state", "run", "--bundle", home, "rootless"], SECONDS, codes=(1,))
    need("without the host's root (rootless)" in output, output)
    nothing_is_left(runtime)
