"""Images of several kinds in podman containers with the CDI device, each unprivileged and without capabilities: of this
machine's files, without a C library, of another one, and with rdma-core under another name. Those of releases are in
test_releases.py."""

import shutil

import pytest

import harness
from harness import images, need, podman
from harness.programs import LIBRARIES

BUSYBOX = "/bin/busybox"
DEVINFO = "/usr/bin/ibv_devinfo"
# Read-only, and no tmpfs anywhere.
STRICT = (*images.READ_ONLY, "--read-only-tmpfs=false")
REFUSED = "this image is built on musl, and FreeFlow's verbs library needs glibc"
# Of one length, so that the name can be changed in a file.
NAME, OTHER_NAME = b"libibverbs.so.1\0", b"libibverbz.so.1\0"


@pytest.fixture(scope="module")
def engine():
    with podman.on_own_host() as engine:
        yield engine


@pytest.mark.parametrize("options", [(), STRICT], ids=["ordinary", "read-only"])
def test_own_release(engine, options):
    harness.require_commands(DEVINFO, "ibv_rc_pingpong")
    need("freeflow0" in images.inside(engine, "/", "ibv_devinfo", options=options), "no device")
    images.pair(engine, "/", ["ibv_rc_pingpong", "-g", "0", "-n", "100"], "100 iters in", options=options)


@pytest.mark.parametrize("options", [(), STRICT], ids=["ordinary", "read-only"])
def test_static_program_and_nothing_else(engine, tmp_path, options):
    """Nothing is there that the drop-ins could lie over, and no folder for them: the program runs as it is."""
    harness.require_commands(BUSYBOX)
    root = images.bare(tmp_path / "root")
    shutil.copy(BUSYBOX, root / "busybox")
    need("INTERP" not in harness.run(["readelf", "--program-headers", BUSYBOX]), f"{BUSYBOX} is not static")
    need(images.inside(engine, root, "/busybox", "echo", "it runs", options=options) == "it runs\n", "it does not run")
    found = images.inside(engine, root, "/busybox", "find", "/run", "/lib", "/usr", options=options, codes=(1,))
    need("/run/freeflow/router.sock" in found, f"its vNIC is missing: {found}")
    need("libibverbs" not in found, f"a library was made: {found}")


def test_files_that_ldd_lists(engine, tmp_path):
    """No shell, no cache of the loader, and not the parts of older C libraries that the drop-ins name."""
    harness.require_commands(DEVINFO)
    parts = ("libpthread", "libdl")
    root = images.of_programs(tmp_path / "root", DEVINFO, without=(*parts, "libibverbs"))
    need(not [file for name in parts for file in root.rglob(f"{name}.so*")], "the root has what it must lack")
    need("freeflow0" in images.inside(engine, root, "/usr/bin/ibv_devinfo"), "no device")


@pytest.mark.parametrize("has_other_loader", [False, True], ids=["plain", "with-glibc-loader"])
def test_musl_is_refused(engine, tmp_path, has_other_loader):
    """Also where a package (gcompat) has put a loader at the place of glibc's."""
    harness.require_commands(BUSYBOX)
    root = images.bare(tmp_path / "root")
    for name in (images.MUSL_LOADER, "bin/busybox", *(["lib64/ld-linux-x86-64.so.2"] if has_other_loader else [])):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(BUSYBOX, root / name)
    output = images.inside(engine, root, "/bin/busybox", "true", codes=(126, 127))
    need(REFUSED in output, f"the reason is not given: {output}")
    need(not engine.host.containers(), "a vNIC is left")


def test_library_under_another_name(engine, tmp_path):
    """As Python wheels bring it: the image's own is loaded, and the drop-in stands before it if it is preloaded."""
    harness.require_commands(DEVINFO)
    root = images.of_programs(tmp_path / "root", DEVINFO)
    libraries = root / "usr/lib/x86_64-linux-gnu"
    (libraries / "libibverbs.so.1").unlink()
    for source, copy in ((DEVINFO, root / "usr/bin/ibv_devinfo"), (LIBRARIES / "libibverbs.so.1", libraries / "libibverbz.so.1")):
        content = open(source, "rb").read()
        need(content.count(NAME) == 1, f"{source} does not have the name once")
        copy.write_bytes(content.replace(NAME, OTHER_NAME))
    alone = images.inside(engine, root, "/usr/bin/ibv_devinfo", codes=(255,))
    need("freeflow0" not in alone and "No IB devices found" in alone, f"rdma-core's own has our device: {alone}")
    preloaded = ("--env", "LD_PRELOAD=libibverbs.so.1")
    need("freeflow0" in images.inside(engine, root, "/usr/bin/ibv_devinfo", options=preloaded), "no device")
