"""Many cases that one run of a program goes through, each of which is a test of its own."""

import re

from harness.failure import need

LINE = re.compile(r"^(ok|FAILED)\s+(\S+)\s+\d+ ms$", re.M)


def selected(request, function, argument="case"):
    """Those values of a test's parameter that run, after -k, --sample and their like."""
    items = [item for item in request.session.items if item.function is function]
    return [item.callspec.params[argument] for item in items]


class Report:
    """Output of C programs by tests/programs/runner.c: a line for each case, its errors before it."""

    def __init__(self, *outputs):
        self.outputs = outputs
        self.cases = [self.read(output) for output in outputs]

    @staticmethod
    def read(output):
        """The verdict of each case, and all that was said since the one before."""
        found, begin = {}, 0
        for match in LINE.finditer(output):
            found[match[2]] = match[1], output[begin:match.end()]
            begin = match.end() + 1
        return found

    def check(self, case):
        for output, cases in zip(self.outputs, self.cases):
            need(case in cases, f"{case} did not run:\n{output[-3000:]}")
            verdict, text = cases[case]
            need(verdict == "ok", text)
