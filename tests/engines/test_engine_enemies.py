"""Hostile containers and hostile images at each engine: the cases that podman has in `hook`, `images` and `hostile`.

Nothing of another container's or of the host's is reached, nothing is made or changed outside, and an image chooses nothing.
"""

import hashlib
import os
import shutil

import pytest

from harness import made_images, programs, settings
from harness.enemies import Healthy
from harness.failure import need

SECONDS = 3
# Codes of an engine or a runtime that refuses, and of `ls`.
ANY = (0, 1, 2, 125, 126, 127, 128)
UP = "../" * 14
LIBRARY = f"{made_images.LIBRARIES}/libibverbs.so.1"
OTHER = "example.org/freeflow-hostile:1"
# Words of an image that would choose, load something, or lead elsewhere, if anybody of ours read them.
ENVIRONMENT = ("LD_PRELOAD=/no/such.so", "LD_AUDIT=/no/such.so", "LD_LIBRARY_PATH=/evil", "GCONV_PATH=/evil",
               "FREEFLOW_LIBDIR=/nowhere", "FREEFLOW_RUN_DIR=/nowhere", "FREEFLOW_LABEL=tier=admin", "FREEFLOW_IP=10.50.0.99",
               "FREEFLOW_NAME=boss")
LABELS = ("freeflow.io/network=red", "freeflow.io/vnic=boss", "freeflow.io/label.tier=admin", "freeflow.io/name=boss",
          "io.kubernetes.cri.container-type=sandbox")
# As a container's root: each of these has to fail.
MEDDLING = ("echo x >>/usr/lib/x86_64-linux-gnu/libibverbs.so.1", "echo x >/run/freeflow/x", "echo x >/run/freeflow/router.sock",
            "echo x >/run/freeflow/sysfs/x", "cat </dev/null >/run/freeflow/sysfs/class/infiniband/freeflow0/node_desc")


@pytest.fixture
def healthy(engine):
    pair = Healthy(engine.host, programs.program("load"))
    yield pair
    for container in (pair.server, pair.client):
        container.remove()


def settled(place):
    """After the healthy pair has gone."""
    vnics = place.engine.vnics()
    need({vnic["name"] for vnic in vnics} <= {"healthy1", "healthy2"}, vnics)


def beside(healthy, act):
    victim = healthy.start()
    try:
        note = act(victim)
    except BaseException:
        healthy.here.kill()
        healthy.there.kill()
        raise
    healthy.stop()
    return note


def test_things_of_other_containers_are_out_of_reach(place, healthy):
    """Sockets, processes, memory, queue pairs, keys, datagrams, addresses."""
    engine = place.engine

    def reach(victim):
        words = ["escape", engine.host.run_dir, healthy.server.pid, healthy.server.ip, *victim]
        output = engine.run("enemy", place.given, *map(str, words))
        need(", 0 failed" in output, output)

    beside(healthy, reach)


@pytest.mark.parametrize("what, counter", [("messages", "malformed_messages"), ("rings", "malformed_descriptors")])
def test_nonsense_disturbs_nobody(place, healthy, what, counter):
    engine = place.engine

    def send(_):
        before = engine.host.status()["counters"][counter]
        engine.run("enemy", place.given, "hostile", what, str(settings.SEED), str(SECONDS))
        need(engine.host.status()["counters"][counter] > before, f"the router counted no {counter}")

    beside(healthy, send)


def digests(host):
    """Of the host's files that containers see."""
    folder = host.freeflow_path.parent.parent / "lib"
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.so*")}


def test_a_container_s_root_changes_nothing_of_the_host_s(place):
    engine, run_dir = place.engine, place.engine.host.run_dir
    before = digests(engine.host)
    need(before, "no libraries")
    tries = "; ".join(f"if ( {words} ) 2>/dev/null; then echo done: '{words}'; fi" for words in MEDDLING)
    look = (f"[ -e {run_dir} ] && echo done: host; for name in admin.sock up.json state.redb vnics; do "
            "[ -e /run/freeflow/$name ] && echo done: $name; done; ls /run/freeflow")
    output = engine.run("one", place.given, "sh", "-c", f"{tries}; {look}", is_root=True)
    need("done:" not in output and "router.sock" in output, output)
    need(digests(engine.host) == before, "a library of the host has changed")
    # The next container finds its own.
    need("freeflow0" in engine.run("two", place.given, "ibv_devinfo"), "no device")


# ---- roots; each gets an image's usual files, and a folder outside that nothing may be made in


def links_that_lead_out(root, bait):
    """By name they would lead to the host's files; a FIFO lies where the hook reads."""
    (root / "run").rmdir()
    (root / "run").symlink_to(f"{UP}{bait}/run")
    (root / LIBRARY).symlink_to(f"{UP}{bait}/library")
    (root / "usr/lib64").symlink_to("/proc/1/root/tmp")
    os.mkfifo(root / "etc/ld.so.conf")


def run_directory_is_a_link(root, bait):
    (root / "run/freeflow").symlink_to(f"{UP}{bait}/run")
    (root / LIBRARY).symlink_to("/proc/self/exe")


def run_directory_is_a_file(root, _):
    (root / "run/freeflow").write_text("a file")


def library_folders_are_links(root, bait):
    """In a circle, out of the root, and to the folder that the vNIC's own covers."""
    for name, target in (("usr/lib64", "lib64"), ("usr/local/lib", f"{UP}{bait}/run"), ("opt/lib", "/run/freeflow")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    (root / "etc/ld.so.conf").write_text(f"/opt/lib\n/{UP}{bait}/run\n/proc/1/root{bait}/run\n/usr/lib64\n")


def library_is_no_file(root, _):
    (root / LIBRARY).mkdir()
    os.mkfifo(root / "lib64/libibverbs.so.1")
    os.mknod(root / made_images.LIBRARIES / "librdmacm.so.1", 0o600 | 0o20000, os.makedev(1, 5))


def elf_files_are_nonsense(root, _):
    """An interpreter, libraries and a cache that nobody outside the container may read as such."""
    for name in (LIBRARY, f"{made_images.LIBRARIES}/librdmacm.so.1", "etc/ld.so.cache", "lib64/ld-linux-x86-64.so.2"):
        (root / name).write_bytes(b"\x7fELF\x02\x01\x01" + b"\xff" * 4089)


def a_thousand_configurations(root, _):
    """Of the loader, with folders beyond count and lines beyond length."""
    folder = root / "etc/ld.so.conf.d"
    folder.mkdir()
    for number in range(1000):
        (folder / f"{number}.conf").write_text("".join(f"/{UP}lib{number}-{line}\n" for line in range(50)))
    (root / "etc/ld.so.conf").write_text("/" + "x" * 20_000_000)


def libraries_beyond_count(root, _):
    """In more places than a distribution ever has."""
    lines = []
    for number in range(20):
        folder = root / f"opt/{number}"
        folder.mkdir(parents=True)
        (folder / "libibverbs.so.1").write_text("a library")
        lines.append(f"/opt/{number}\n")
    (root / "etc/ld.so.conf").write_text("".join(lines))


ROOTS = (links_that_lead_out, run_directory_is_a_link, run_directory_is_a_file, library_folders_are_links, library_is_no_file,
         elf_files_are_nonsense, a_thousand_configurations, libraries_beyond_count)


@pytest.mark.parametrize("spoil", ROOTS, ids=[spoil.__name__ for spoil in ROOTS])
def test_a_hostile_image_reaches_nothing(place, tmp_path, spoil):
    """Whether it starts or not; and the engine serves the next container."""
    engine, bait = place.engine, tmp_path / "bait"
    root = made_images.make_root(tmp_path / "root", "sh", "ls")
    (bait / "run").mkdir(parents=True)
    (bait / "library").touch()
    before = digests(engine.host)
    spoil(root, bait)
    engine.import_root(OTHER, root)
    shutil.rmtree(root)
    output = engine.run("one", place.given, "ls", "/", image=OTHER, codes=ANY)
    need(not list((bait / "run").iterdir()), f"something was made outside of the image: {output}")
    need((bait / "library").stat().st_size == 0, f"something was mounted outside of the image: {output}")
    need(digests(engine.host) == before, "a library of the host has changed")
    engine.wait_for_no_vnic()
    need("freeflow0" in engine.run("two", place.given, "ibv_devinfo"), "no device")


def test_programs_of_an_image_are_not_run_by_us(place, tmp_path):
    """Under the names of the hook, the runtime, and what they call."""
    engine = place.engine
    root = made_images.make_root(tmp_path / "root", "sh", "ls", "ibv_devinfo")
    hook = engine.host.freeflow_path
    for name in (str(hook), str(hook.with_name("freeflow-runtime")), "/usr/bin/freeflow", "/usr/sbin/runc", "/usr/bin/runc",
                 "/sbin/ldconfig", "/usr/sbin/tc", "/bin/ip"):
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\nls /run/freeflow/not-there\nexit 1\n")
        path.chmod(0o755)
    engine.import_root(OTHER, root)
    need("freeflow0" in engine.run("one", place.given, "ibv_devinfo", image=OTHER), "no device")


def test_an_image_chooses_nothing(place):
    engine = place.engine
    engine.import_root(OTHER, environment=ENVIRONMENT, labels=LABELS)
    engine.detached("one", place.given, "sleep", "600", image=OTHER)
    vnics = engine.vnics()
    need([vnic["network"] for vnic in vnics] == ["default"] and vnics[0]["name"] != "boss", vnics)
    need(not [label for label in vnics[0]["labels"] if "tier" in label], vnics)
    engine.remove("one")
    engine.wait_for_no_vnic()
    for variable in ("FREEFLOW_NETWORK=red", "FREEFLOW_VNIC=boss"):
        engine.import_root(OTHER, environment=[variable])
        if place.way == "cdi":
            engine.detached("one", place.given, "sleep", "600", image=OTHER)
            need([vnic["network"] for vnic in engine.vnics()] == ["default"], engine.vnics())
            engine.remove("one")
        else:
            output = engine.run("one", place.given, "ls", image=OTHER, codes=(1, 125, 126, 127))
            need("the image's author" in output, output)
        engine.wait_for_no_vnic()


@pytest.mark.at("cri-1.6-runtime", "cri-1.7-runtime")
def test_a_pod_names_listed_networks_only(place):
    """Its annotations are of whoever may make pods."""
    engine = place.engine
    output = engine.run("one", engine.by_runtime("red", handler="freeflow"), "ls", codes=(125,))
    need("which annotations may not" in output, output)
    annotated = {**engine.by_runtime(), "annotations": {"freeflow.io/vnic": "boss"}}
    need("which annotations may not" in engine.run("one", annotated, "ls", codes=(125,)), "a vNIC by an annotation")
    engine.wait_for_no_vnic()


@pytest.mark.at("docker-26.1-cdi", "cri-1.7-cdi")
def test_annotations_choose_nothing_beside_a_cdi_device(place):
    engine = place.engine
    names = {"freeflow.io/network": "red", "freeflow.io/vnic": "boss", "freeflow.io/label.tier": "admin"}
    if isinstance(place.given, dict):
        given = {**place.given, "annotations": names}
    else:
        given = [*place.given, *(word for name in names.items() for word in ("--annotation", "=".join(name)))]
    engine.detached("one", given, "sleep", "600")
    vnics = engine.vnics()
    need([vnic["network"] for vnic in vnics] == ["default"] and "tier" not in str(vnics[0]["labels"]), vnics)
