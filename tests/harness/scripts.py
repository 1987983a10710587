"""Tests in shell: a script with a function for each, that says `ok` or `FAIL` and its name when it has run."""

import re

from harness import settings
from harness.failure import need
from harness.processes import run

SECONDS = 300
LINE = re.compile(r"^(ok|FAIL) +(.+)$", re.M)


class Script:
    def __init__(self, name):
        self.path = settings.TESTS / "lifecycle" / name
        self.names = re.search(r"^tests=\(([^)]*)\)", self.path.read_text(), re.M)[1].split()

    def run(self, names):
        return Verdicts(run([self.path, *names], SECONDS, codes=(0, 1)))


class Verdicts:
    """Of each test, with all that was said since the one before."""

    def __init__(self, output):
        self.output, self.found, begin = output, {}, 0
        for match in LINE.finditer(output):
            self.found[match[2].replace(" ", "_")] = match[1], output[begin:match.end()]
            begin = match.end() + 1

    def check(self, name):
        need(name in self.found, f"{name} did not run:\n{self.output[-3000:]}")
        verdict, text = self.found[name]
        need(verdict == "ok", text)
