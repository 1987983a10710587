"""Every example of docs/CONTROL.md, in its order, on a fresh host: YAML blocks become files, sh blocks are run, and what follows
them in a block without a language is what they print.

A `…` stands for anything within a line, alone in a line for any number of lines. It runs in a mount namespace with an /etc of its
own, since the document makes users; and with a `sudo` that is but the part of it that is needed.
"""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

import pytest

import harness
from harness import namespaces, need
from harness.page import blocks, examples, fits, write
from harness.settings import DIST, ROOT

DOCUMENT = ROOT / "docs" / "CONTROL.md"
DEFAULT_RUN_DIR = "/run/freeflow"
BLOCK_SECONDS = 60
# Results of commands that only read may come a little later: nobody waits for the audit log's thread.
READS_ONLY = re.compile(r"(tail|freeflow (get|describe|status|ps)) .*\Z")
SETTLED_SECONDS = 10
PROGRAMS_NEEDED = ("curl", "ibv_rc_pingpong", "rping", "groupadd", "useradd", "setpriv", "unshare")
SUDO = """#!/bin/sh
[ "$1" = -u ] || exit 99
user=$2
shift 2
exec setpriv --reuid "$user" --regid "$user" --init-groups -- "$@"
"""


def self_check():
    need(fits("a … c\n…\nend", "a  b c\nx\ny\nend\n") and fits("…\nend", "end\n"), "a pattern does not fit what it should")
    need(not fits("a\nb", "a\n") and not fits("a", "a\nb\n") and not fits("a … c", "a b\nc\n"), "a pattern fits too much")


class Page:
    """The document's reader: a folder, and the environment of a user who has just installed FreeFlow."""

    def __init__(self, host, directory):
        self.host, self.directory = host, directory
        programs = directory / "bin"
        programs.mkdir()
        # The build directory may be closed to others; the command finds the rest by the environment.
        shutil.copy2(host.freeflow_path, programs / "freeflow")
        (programs / "sudo").write_text(SUDO)
        (programs / "sudo").chmod(0o755)
        self.files = directory / "files"
        self.files.mkdir()
        self.environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin", "FREEFLOW_RUN_DIR": str(host.run_dir),
            "FREEFLOW_ROUTER": str(DIST / "bin" / "freeflow-router"), "FREEFLOW_LIBDIR": str(DIST / "lib")}

    def run(self, content, expected):
        script = content.replace(DEFAULT_RUN_DIR, str(self.host.run_dir))
        end = time.monotonic() + SETTLED_SECONDS
        while True:
            process = subprocess.run(["timeout", "-k", "5", str(BLOCK_SECONDS), "sh", "-e", "-c", script], cwd=self.files,
                                     env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, text=True)
            need(process.returncode == 0, f"exit status {process.returncode}:\n{process.stdout}")
            if expected is None or fits(expected, process.stdout):
                return
            is_late = time.monotonic() > end or not READS_ONLY.match(content)
            need(not is_late, f"expected:\n{expected}\n--- printed:\n{process.stdout}")
            time.sleep(0.1)


BLOCKS = blocks(DOCUMENT.read_text())


@pytest.fixture(scope="module")
def own_etc():
    """A mount namespace where /etc can be changed."""
    harness.require_commands(*PROGRAMS_NEEDED)
    with namespaces.own("mnt"), tempfile.TemporaryDirectory(prefix="freeflow-etc.") as etc:
        script = f"mount -t tmpfs none {etc} && cp -a /etc/. {etc}/ && mount --bind {etc} /etc && umount {etc}"
        harness.run(["sh", "-c", script])
        yield


@pytest.fixture(scope="module")
def page(own_etc, host):
    host.directory.chmod(0o711)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="page.", dir=host.directory))
    directory.chmod(0o711)
    return Page(host, directory)


def test_patterns_fit_what_they_should():
    self_check()


@pytest.mark.parametrize("files, content, expected", examples(BLOCKS, "CONTROL.md"))
def test_example(page, files, content, expected):
    for file in files:
        write(page.files, file)
    page.run(content, expected)
