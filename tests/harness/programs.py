"""Programs that tests run: our own C programs, built if need be, and others', which have to be installed."""

import fcntl
import os
import pathlib
import re
import shutil
import subprocess

from harness import settings
from harness.failure import Failure, need

LIBRARIES = pathlib.Path("/usr/lib/x86_64-linux-gnu")
# The Debian package of a command or file whose name does not say it; the first that matches.
PACKAGES = (
    (r"ibv_.*", "ibverbs-utils"), (r"ib_(send|write|read|atomic)_(bw|lat)", "perftest"),
    (r"ibstat(us)?", "infiniband-diags"),
    (r"rping|ucmatose|udaddy|mckey|cmtime|r(io)?stream|rcopy|rdma_x?(server|client)", "rdmacm-utils"),
    (r"NPtcp", "netpipe-tcp"), (r"redis-server", "redis-server"), (r"redis-.*", "redis-tools"),
    (r"ucx_.*", "ucx-utils"),
    (r"mpicc\.openmpi", "libopenmpi-dev"), (r"mpi.*\.openmpi", "openmpi-bin"), (r"mpicc\.mpich", "libmpich-dev"),
    (r"mpi.*\.mpich", "mpich"), (r"fi_pingpong", "libfabric-bin"), (r"unshare|nsenter|fsfreeze|setpriv", "util-linux"),
    (r"groupadd|groupdel", "passwd"), (r"getent", "libc-bin"), (r"ip|rdma", "iproute2"),
    (r".*/libjemalloc.*", "libjemalloc2"), (r".*/libtcmalloc_minimal.*", "libtcmalloc-minimal4"),
    (r"/usr/share/doc/rdma-core/tests", "python3-pyverbs"), (r".*/ucp\.h", "libucx-dev"),
    (r".*/openmpi/.*", "libopenmpi-dev"),
)


def package_of(name):
    return next((package for pattern, package in PACKAGES if re.fullmatch(pattern, name)), name)


def require_root():
    if os.geteuid() != 0:
        raise Failure("these tests make network and mount namespaces: run them as root")


def require_commands(*names):
    """Fails where a program that a test runs is not installed, or a file is missing (its whole path)."""
    missing = [name for name in map(str, names)
               if not (os.path.exists(name) if name.startswith("/") else shutil.which(name))]
    printed = [f"{name} (package {package_of(name)})" for name in missing]
    need(not missing, f"missing here: {', '.join(printed)}; scripts/install-deps installs what the tests need")


def make(directory, target=None, lock=".lock"):
    """The folder where a Makefile of ours puts its programs, once it has."""
    out = settings.TARGET / "test-programs"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        words = ["make", "-s", "-C", directory, f"OUT={out}", *([out / target] if target else [])]
        built = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    need(built.returncode == 0, f"the C test programs don't build:\n{built.stdout}")
    return out


def program(name):
    """The path of a C test program, built if need be."""
    return str(make(settings.PROGRAMS) / name)


def dynamic(name):
    """A program of FreeFlow's that is linked dynamically, so that a library can stand before the C library's: what was
    built to be tested, if it is that, or cargo's build for tests."""
    path = settings.DIST / "bin" / name
    if b"\0/lib64/ld-linux" not in path.read_bytes()[:4096]:
        # In a workspace's build each crate has the features that `cargo test` wants of it.
        words = ["cargo", "build", "--quiet", "--locked", "--workspace", "--bin", name]
        built = subprocess.run(words, cwd=settings.ROOT, env={**os.environ, "CARGO_TARGET_DIR": str(settings.TARGET)},
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        need(built.returncode == 0, f"{name} does not build:\n{built.stdout}")
        path = settings.TARGET / "debug" / name
    return path
