"""Every example of docs/CLUSTER.md, in its order, on the three hosts of a laboratory: `# on hN` says on which one.

Addresses of the page (192.0.2.N) are those of the laboratory here; etcd is started by the test, with the files that the page's first
command makes. The rest is as in tests/control/test_control_docs.py.
"""

import os
import re
import subprocess
import time

import pytest

import harness
from harness import need
from harness.etcd import Etcd
from harness.lab import Lab
from harness.page import blocks, examples, fits, write
from harness.settings import DIST, ROOT

DOCUMENT = ROOT / "docs" / "CLUSTER.md"
BLOCK_SECONDS = 90
# News reach other hosts a little later.
READS_ONLY = re.compile(r"freeflow (get|cluster status|ps|run --rm) .*\Z|freeflow cluster status\Z", re.DOTALL)
SETTLED_SECONDS = 20


class Page:
    """Its reader: a folder that all three hosts see."""

    def __init__(self, lab):
        self.lab, self.etcd = lab, None
        self.files = lab.directory / "page"
        self.files.mkdir()
        self.addresses = [row["address"] for row in lab.status()["hosts"]]
        for number in range(1, len(self.addresses) + 1):
            lab.host(number).freeflow("down", "--force")
            programs = self.programs(number)
            programs.mkdir()
            (programs / "freeflow").symlink_to(lab.host(number).freeflow_path)

    def programs(self, number):
        return self.lab.directory / f"bin{number}"

    def here(self, text):
        """With the addresses of this laboratory."""
        return re.sub(r"\b192\.0\.2\.([123])\b", lambda found: self.addresses[int(found[1]) - 1], text)

    def run(self, content, expected):
        place = re.match(r"# on h([123])\n", content)
        need(place, "a block does not begin with `# on hN`")
        number, script = int(place[1]), self.here(content[place.end():])
        host, end = self.lab.host(number), time.monotonic() + SETTLED_SECONDS
        environment = {
            **os.environ, "PATH": f"{self.programs(number)}:{os.environ['PATH']}:/usr/sbin:/sbin", "FREEFLOW_RUN_DIR": str(host.run_dir),
            "FREEFLOW_ROUTER": str(DIST / "bin" / "freeflow-router"), "FREEFLOW_LIBDIR": str(DIST / "lib")}
        command = [str(word) for word in host.enter("timeout", "-k", "5", BLOCK_SECONDS, "sh", "-e", "-c", script)]
        while True:
            process = subprocess.run(command, cwd=self.files, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, text=True)
            is_good = process.returncode == 0 and (expected is None or fits(self.here(expected), process.stdout))
            if is_good:
                break
            is_late = time.monotonic() > end or not READS_ONLY.match(script)
            need(not is_late, f"exit status {process.returncode}\n--- expected:\n{expected}\n--- printed:\n{process.stdout}")
            time.sleep(0.2)
        if "cluster authority" in content:
            # As the page says, and as the command has printed.
            self.etcd = Etcd(self.lab, self.files / "ca", is_made=True)
            self.etcd.wait_until_healthy()

    def close(self):
        if self.etcd:
            self.etcd.close()


TEXT = DOCUMENT.read_text()
BEGIN, END = (TEXT[:TEXT.index(title)].count("\n") for title in ("## Step by step", "## Tokens"))
BLOCKS = [block for block in blocks(TEXT) if BEGIN < block[0] < END]


@pytest.fixture(scope="module")
def page():
    harness.require_commands("etcd", "etcdctl", "getent", "hostname")
    lab = Lab(3, 1500)
    page = None
    try:
        page = Page(lab)
        yield page
    finally:
        if page:
            page.close()
        lab.close()


def test_the_page_has_examples():
    need(len(BLOCKS) > 15, "the examples of docs/CLUSTER.md were not found")


@pytest.mark.parametrize("files, content, expected", examples(BLOCKS, "CLUSTER.md"))
def test_example(page, files, content, expected):
    for file in files:
        write(page.files, file)
    page.run(content, expected)
