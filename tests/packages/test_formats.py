"""The other packages: rpms, debug symbols, the image; other releases of Debian; lintian. Part of `make test-packages`."""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import zlib

import pytest

import harness
from harness import need, packages
from harness.packages import MACHINE, NEXT, VERSION, deb_names, life
from harness.podman import LIMITS
from harness.roots import NEWEST, SUITES, Root

DROP_IN_LIBC = 2.17
NAMES = (*packages.NAMES, "freeflow-kubernetes", "freeflow-dbg")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All kinds, of two versions."""
    output = tmp_path_factory.mktemp("packages")
    packages.make(output, "deb", "rpm", version=NEXT, options=("--level", "0", "--without-symbols"))
    return packages.make(output, options=("--level", "1"), seconds=600)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", [suite for suite in SUITES if suite != NEWEST])
def test_deb_on_another_release(made, suite):
    with Root(suite) as root:
        root.run("dpkg", "--install", *root.take(*(made[name] for name in deb_names())))
        printed = root.script(life("--state /var/lib/freeflow", loads=SUITES[suite] >= DROP_IN_LIBC))
        need("ended well" in printed, printed)
        root.run("dpkg", "--install", *root.take(*(made[name] for name in deb_names(NEXT))))
        root.run("dpkg", "--remove", "freeflow")
        need(root.file("/var/lib/freeflow/state.redb").is_file(), "removal takes what is declared")
        root.run("dpkg", "--purge", "freeflow", "freeflow-libs")
        left = [name for name in root.names() if "deb-systemd-helper" not in name]
        need(not left, f"left: {left}")


def test_lintian_has_no_error(made):
    harness.require_commands("lintian")
    found = harness.run(["lintian", "--fail-on", "error", "--allow-root", "--no-tag-display-limit",
                         *(made[name] for name in deb_names(names=NAMES))], 300, codes=(0, 2))
    errors = [line for line in found.splitlines() if line.startswith("E:")]
    need(not errors, found)


def test_rpm_is_installed_upgraded_and_removed(made):
    harness.require_commands("rpm")

    def files(version):
        return [made[f"{name}-{version}-1.{MACHINE}.rpm"] for name in ("freeflow", "freeflow-libs")]

    with Root() as root:
        rpm = ["rpm", "--root", root.path]
        root.file("/var/lib/rpm").mkdir()
        # The root has Debian's packages, so rpm knows of nothing that these require.
        harness.run([*rpm, "--nodeps", "--upgrade", *files(VERSION)])
        printed = root.script(life("--state /var/lib/freeflow"))
        need("ended well" in printed, printed)
        settings = root.file("/etc/default/freeflow")
        settings.write_text(settings.read_text() + "# by the operator\n")
        harness.run([*rpm, "--nodeps", "--upgrade", *files(NEXT)])
        need(harness.run([*rpm, "--query", "--queryformat", "%{VERSION} ", "freeflow", "freeflow-libs"]).split() == [NEXT] * 2,
             "another version")
        need("# by the operator" in settings.read_text(), "the operator's settings are gone")
        owners = harness.run([*rpm, "--query", "--all", "--queryformat", "[%{FILEUSERNAME}:%{FILEGROUPNAME} ]"])
        need(set(owners.split()) == {"root:root"}, owners)
        harness.run([*rpm, "--verify", "--nouser", "--nogroup", "freeflow-libs"])
        harness.run([*rpm, "--erase", "freeflow", "freeflow-libs"])
        left = [name for name in root.names() if not name.startswith("var/lib/freeflow")]
        need(left == ["etc/default/freeflow.rpmsave"], f"left: {left}")


def section(path, name):
    with tempfile.NamedTemporaryFile() as file:
        harness.run(["objcopy", "--dump-section", f"{name}={file.name}", path, "/dev/null"])
        return file.read()


def test_symbols_are_apart_and_linked(made, tmp_path):
    for name in deb_names(names=NAMES):
        harness.run(["dpkg-deb", "--extract", made[name], tmp_path])
    programs = ["usr/bin/freeflow", "usr/bin/freeflow-kubernetes", "usr/lib/freeflow/freeflow-router",
                *(f"usr/lib/freeflow/{name}" for name in packages.LIBRARIES)]
    for name in programs:
        program, symbols = tmp_path / name, tmp_path / "usr/lib/debug" / f"{name}.debug"
        link = section(program, ".gnu_debuglink")
        need(link.split(b"\0")[0].decode() == symbols.name, f"{name} names {link}")
        need(int.from_bytes(link[-4:], "little") == zlib.crc32(symbols.read_bytes()), f"{symbols} is another build's")
        sections = harness.run(["readelf", "--wide", "--sections", program])
        need(not re.search(r"\.(symtab|debug_info|debug_line)\b", sections), f"{name} has symbols")
        need(".symtab" in harness.run(["readelf", "--wide", "--sections", symbols]), f"{symbols} has none")


@contextlib.contextmanager
def own_podman():
    """With a store, a network namespace and a mount namespace that go away."""
    harness.require_commands("podman", "runc", "skopeo")
    directory = tempfile.mkdtemp(prefix="freeflow-test-image.")
    words = ["podman", "--runtime", "runc", "--root", f"{directory}/store", "--runroot", f"{directory}/run",
             "--cgroup-manager", "cgroupfs", "--events-backend", "none"]

    def podman(*more, **options):
        return harness.run([*words, *more], 120, **options)

    try:
        yield podman
    finally:
        with contextlib.suppress(harness.Failure):
            podman("rm", "--force", "--time", "5", "--all")
        subprocess.run(["umount", "--quiet", f"{directory}/store/overlay"], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(directory, ignore_errors=True)


def test_image_runs_a_host(made):
    with own_podman() as podman:
        image = made[f"freeflow-{VERSION}-{MACHINE}.oci.tar"]
        seen = json.loads(harness.run(["skopeo", "inspect", f"oci-archive:{image}"]))
        need(seen["Architecture"] == "amd64" and seen["Labels"]["org.opencontainers.image.version"] == VERSION, seen)
        loaded = podman("load", "--input", image)
        name = re.search(r"localhost/freeflow:\S+", loaded)
        need(name, loaded)
        need(VERSION in podman("run", "--rm", *LIMITS, "--network", "none", name[0], "--version"), "another version")
        # The network of its own is the host's here.
        podman("run", "--detach", *LIMITS, "--name", "host", "--privileged", "--network", "none", "--pid", "host", name[0])
        end = time.monotonic() + 60
        while not (status := podman("exec", "host", "freeflow", "status", "-o", "json", codes=range(256))).startswith("{"):
            need(time.monotonic() < end, f"{status}\n{podman('logs', 'host', codes=range(256))}")
            time.sleep(0.1)
        need(json.loads(status)["pid"], status)
        podman("stop", "--time", "20", "host")
        need(podman("inspect", "--format", "{{.State.ExitCode}}", "host").split() == ["0"], podman("logs", "host"))
