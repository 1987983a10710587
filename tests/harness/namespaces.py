"""A namespace of one's own for what a test changes of the machine: its network, its mounts."""

import contextlib
import ctypes
import os

from harness.failure import need
from harness.processes import run

FLAGS = {"net": 0x40000000, "mnt": 0x00020000}


@contextlib.contextmanager
def own(kind):
    """This thread, and all that it starts meanwhile, are in a new namespace, which ends with the last of them."""
    libc, directory = ctypes.CDLL(None, use_errno=True), os.getcwd()
    before = os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        need(libc.unshare(FLAGS[kind]) == 0, f"no {kind} namespace: {os.strerror(ctypes.get_errno())}")
        try:
            if kind == "mnt":
                run(["mount", "--make-rprivate", "/"])
            yield
        finally:
            need(libc.setns(before, FLAGS[kind]) == 0, f"no way back: {os.strerror(ctypes.get_errno())}")
            os.chdir(directory)
    finally:
        os.close(before)
