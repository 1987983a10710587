"""`freeflow runtime` in front of runc, on bundles as engines make them: no engine is needed.

A container gets its vNIC and nothing stays; an image chooses nothing; a bundle that is not one starts nothing.
"""

import json
import os
import pathlib
import shutil

import pytest

import harness
from harness import made_images
from harness.failure import need
from harness.processes import run
from harness.runtime import REFUSED, SECONDS, Runtime, kill, started


@pytest.fixture(scope="module")
def runtime():
    with harness.Host() as host:
        red = {"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": "red"},
               "spec": {"cidrs": ["10.50.0.0/24"]}}
        file = host.directory / "red.json"
        file.write_text(json.dumps(red))
        host.freeflow("apply", "-f", file)
        runtime = Runtime(host)
        try:
            yield runtime
        finally:
            runtime.close()


def test_a_container_has_its_vnic_and_nothing_stays(runtime):
    words = ["sh", "-c", "ibv_devices; ls /run/freeflow /sys/class/net"]
    output = runtime.run(runtime.bundle(*words))
    need("freeflow0" in output and "ff0" in output, output)
    need(runtime.vnics() == [], "the vNIC is still there")


def test_several_at_once(runtime):
    bundles = []
    for _ in range(4):
        bundles.append((runtime.bundle("ibv_devices"), f"c{runtime.count}"))
    commands = [runtime.command("run", "--bundle", bundle, name) for bundle, name in bundles]
    running = [harness.Running(command) for command in commands]
    for one in running:
        need(one.wait(SECONDS) == 0 and "freeflow0" in one.output(), one.output())
    need(runtime.vnics() == [], "a vNIC is still there")


def test_the_arguments_and_an_annotation_choose(runtime):
    annotated = {"freeflow.io/network": "red"}
    for bundle, options in ((runtime.bundle("sleep", "600", annotations=annotated), ()),
                            (runtime.bundle("sleep", "600"), ("--network", "red"))):
        with started(runtime, bundle, options):
            networks = [vnic["network"] for vnic in runtime.host.status()["vnics"]]
            need(networks == ["red"], networks)
    reason = runtime.refused(runtime.bundle("sleep", "600", annotations=annotated), ("--network", "default"))
    need("not the network default" in reason, reason)


def test_an_image_chooses_nothing(runtime):
    for words in (["FREEFLOW_NETWORK=red"], ["FREEFLOW_VNIC=boss"], ["FREEFLOW_NETWORK=../red"]):
        runtime.refused(runtime.bundle("sleep", "600", environment=words))
    # Of those that the administrator has listed, the environment may name one.
    settings = runtime.directory / "settings.json"
    settings.write_text('{"environment": {"networks": ["red"]}}')
    bundle = runtime.bundle("sleep", "600", environment=["FREEFLOW_NETWORK=red"])
    with started(runtime, bundle, ("--config", settings)):
        need([vnic["network"] for vnic in runtime.host.status()["vnics"]] == ["red"], "it is not in red")
    settings.chmod(0o666)
    need("changed by others" in runtime.refused(bundle, ("--config", settings)), "settings that others can write")
    # podman and CRI-O copy an image's annotations.
    storage = runtime.directory / "userdata"
    shutil.copytree(runtime.bundle("sleep", "600", annotations={"freeflow.io/network": "red"}), storage)
    need("image's author" in runtime.refused(storage), "annotations of an image")
    # Neither these nor variables of the runtime reach the hook.
    output = runtime.run(runtime.bundle("ibv_devices", environment=[
        "LD_PRELOAD=/no/such/library.so", "FREEFLOW_LIBDIR=/nowhere", "FREEFLOW_RUN_DIR=/nowhere"]))
    need("freeflow0" in output, output)


def test_what_is_no_bundle_starts_nothing(runtime):
    bundle = runtime.bundle("sleep", "600")
    link = runtime.directory / "link"
    link.symlink_to(bundle)
    runtime.refused(link)
    file = bundle / "config.json"
    good = file.read_text()
    for text in ("", "{", "[]", good[:-2], "[" * 100_000, good.replace('"linux"', '"solaris"')):
        file.write_text(text)
        runtime.refused(bundle)
    file.write_text("{}")
    os.truncate(file, (16 << 20) + 1)
    need("larger than" in runtime.refused(bundle), "a huge configuration")
    file.unlink()
    os.mkfifo(file)
    runtime.refused(bundle)
    file.unlink()
    (bundle / "other.json").write_text(good)
    file.symlink_to("other.json")
    runtime.refused(bundle)
    shutil.rmtree(bundle)
    runtime.refused(bundle)
    need("no network" in (reason := runtime.call(
        "run", "--bundle", runtime.bundle("true", annotations={"freeflow.io/network": "blue"}), "c", codes=REFUSED))
        or "blue" in reason, reason)
    need(runtime.vnics() == [] and runtime.list() == [], "something was started")


def test_a_hostile_root_gets_nothing_outside(runtime):
    bait = runtime.directory / "bait"
    (bait / "run").mkdir(parents=True)
    (bait / "library").touch()
    root = runtime.directory / "hostile"
    shutil.copytree(runtime.root, root, symlinks=True)
    up = "../" * 12
    shutil.rmtree(root / "run")
    (root / "run").symlink_to(f"{up}{bait}/run")
    (root / made_images.LIBRARIES / "libibverbs.so.1").unlink(missing_ok=True)
    (root / made_images.LIBRARIES / "libibverbs.so.1").symlink_to(f"{up}{bait}/library")
    (root / "usr/lib64").symlink_to("/proc/1/root/tmp")
    os.mkfifo(root / "etc/ld.so.conf")
    bundle = runtime.bundle("ls", "/")
    spec = json.loads((bundle / "config.json").read_text())
    spec["root"]["path"] = str(root)
    (bundle / "config.json").write_text(json.dumps(spec))
    runtime.run(bundle, codes=(0, 1))
    need(list((bait / "run").iterdir()) == [], "something was made outside of the image")
    need((bait / "library").stat().st_size == 0, "something was mounted outside of the image")
    need(str(bait) not in pathlib.Path("/proc/self/mountinfo").read_text(), "a mount outside of the image")
    need(runtime.vnics() == [], "a vNIC is still there")


def test_pause_exec_and_the_rest_are_runc_s(runtime):
    need(runtime.call("--version") == run(["runc", "--version"]), "--version is not runc's")
    with started(runtime, runtime.bundle("sleep", "600")) as (name, _):
        runtime.call("pause", name)
        need(json.loads(runtime.call("state", name))["status"] == "paused", "it is not paused")
        runtime.call("resume", name)
        runtime.call("update", "--cpu-share", "512", name)
        need("freeflow0" in runtime.call("exec", name, "ibv_devices"), "no device in a second program")


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_first_real_runtime_stays_it(runtime):
    """One that is installed later would not know the containers of the first."""
    record = runtime.host.run_dir / "runtime"
    record.unlink(missing_ok=True)
    runtime.call("list")
    need(not record.exists(), "a call that starts nothing decides")
    with started(runtime, runtime.bundle("sleep", "600")) as (name, _):
        need(os.path.samefile(record.read_text(), shutil.which("runc")), record.read_text())
        first = script(runtime.directory / "first", f'echo "$1 $2" >>{runtime.directory}/first.calls\nexec runc "$@"')
        record.write_text(str(first))
        need(json.loads(runtime.call("state", name))["status"] == "running", "it does not run")
        need((runtime.directory / "first.calls").exists(), "another runtime was called")
        first.unlink()
        need(json.loads(runtime.call("state", name))["status"] == "running", "no runtime instead of one that is gone")
        record.write_text(str(runtime.program))
        need(json.loads(runtime.call("state", name))["status"] == "running", "it calls itself")


def test_a_runtime_that_calls_this_one_is_refused(runtime):
    """It would go on for ever."""
    for call in ("exec ", ""):
        loop = script(runtime.directory / "runc", f'{call}{runtime.program} --config {runtime.directory}/loop.json "$@"')
        settings = runtime.directory / "loop.json"
        settings.write_text(json.dumps({"runtime": str(loop)}))
        options = ("--config", settings)
        reason = runtime.call("run", "--bundle", runtime.bundle("true"), "c", options=options, codes=REFUSED)
        need(f"{loop} calls freeflow-runtime" in reason, reason)
        need("calls freeflow-runtime" in runtime.call("list", options=options, codes=REFUSED), "a call that starts nothing")
    need(runtime.vnics() == [] and runtime.list() == [], "something was started")


def test_words_in_odd_places(runtime):
    """As runc reads them: a container has its vNIC or is not started."""
    bundle = runtime.bundle("ibv_devices")
    output = runtime.call("--", "run", "--bundle", bundle, "--", f"c{runtime.count}")
    need("freeflow0" in output, output)
    need("create a container" in runtime.call("create", "--bundle", bundle, "--help"), "no help")
    runtime.call("run", "--bundle", bundle, "--help=false", f"c{runtime.count}", codes=REFUSED)
    need(runtime.vnics() == [] and runtime.list() == [], "something was started")


def test_checkpoint_and_restore_are_refused(runtime):
    with started(runtime, runtime.bundle("sleep", "600")) as (name, _):
        need("vNIC" in runtime.call("checkpoint", name, codes=REFUSED), "checkpoint gave another reason")
        need(json.loads(runtime.call("state", name))["status"] == "running", "it does not run")
    need("vNIC" in runtime.call("restore", "--bundle", runtime.bundle("true"), "c", codes=REFUSED), "restore")


def test_a_container_is_started_again_after_its_engine_has_died(runtime):
    """Nobody ran `poststop`, and the id is the same, as in `docker start`."""
    bundle = runtime.bundle("sleep", "600")
    with started(runtime, bundle) as (name, pid):
        kill(runtime, name, pid)
        shutil.rmtree(runtime.directory / "state" / name)
        need(runtime.vnics() == [name], runtime.vnics())
        runtime.call("create", "--bundle", bundle, name)
        need(runtime.vnics() == [name], runtime.vnics())


def test_a_killed_container_leaves_nothing(runtime):
    bundle = runtime.bundle("sleep", "600")
    with started(runtime, bundle) as (name, pid):
        kill(runtime, name, pid)
        # An engine may find it only later, or never: `up` looks whose process is gone.
        runtime.host.up()
        need(runtime.vnics() == [], "the vNIC is still there")
    need(runtime.vnics() == [] and runtime.list() == [], "something is left")
