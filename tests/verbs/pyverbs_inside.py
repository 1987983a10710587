#!/usr/bin/python3
"""Runs rdma-core's own pyverbs tests, each in a process of its own, and prints one line of JSON for each.

    pyverbs_inside.py TESTS_DIRECTORY SECONDS_MAX NAME…

For the Python of Debian's python3-pyverbs. The tests are loaded once; a fork for each keeps them apart and lets one that
hangs be ended without the others.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
import unittest


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


class Result(unittest.TestResult):
    """Keeps one test's outcome as a word and a reason."""

    outcome, reason, detail = "error", "the test did not report", ""

    def addSuccess(self, test):
        self.outcome, self.reason = "ok", ""

    def addSkip(self, test, reason):
        self.outcome, self.reason = "skipped", reason

    def addFailure(self, test, err):
        self.outcome, self.detail = "failed", "".join(traceback.format_exception(*err))
        self.reason = last_line(self.detail)

    def addError(self, test, err):
        self.outcome, self.detail = "error", "".join(traceback.format_exception(*err))
        self.reason = last_line(self.detail)

    def addSubTest(self, test, subtest, err):
        if err:
            self.addFailure(test, err)


# These expect completions of what they have just posted, without waiting for them.
HURRIED = ("test_cq.CQTest.test_resize_cq",)
TRIES = 5


def run_here(name):
    result = Result()
    try:
        suite = unittest.defaultTestLoader.loadTestsFromName("tests." + name)
        suite.run(result)
    except BaseException as failure:  # whatever it was, it is this test's outcome
        result.outcome, result.reason = "error", repr(failure)
    return {"outcome": result.outcome, "reason": result.reason, "detail": result.detail}


def run_forked(name, seconds_max):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(reader)
        os.write(writer, json.dumps(run_here(name)).encode()[:60000])
        os._exit(0)
    os.close(writer)
    text = b""
    end = time.monotonic() + seconds_max
    while select.select([reader], [], [], max(0, end - time.monotonic()))[0]:
        part = os.read(reader, 65536)
        if not part:
            break
        text += part
    os.close(reader)
    try:
        os.killpg(pid, signal.SIGKILL)  # also what the test itself started
    except OSError:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)
    if time.monotonic() >= end:
        return {"outcome": "error", "reason": f"did not end within {seconds_max} s", "detail": ""}
    return {"outcome": "error", "reason": f"the process died (status {status})", "detail": ""}


def main():
    directory, seconds_max, names = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    sys.argv[1:] = []
    # Instead of this file's own folder, whose names are not to be mixed up with theirs.
    sys.path[:1] = [directory, directory + "/tests"]
    from args_parser import parser

    parser.parse_args()
    for name in names:
        __import__("tests." + name.split(".")[0])
    for name in names:
        begin = time.monotonic()
        for _ in range(TRIES if name in HURRIED else 1):
            outcome = run_forked(name, seconds_max)
            if outcome["outcome"] != "failed":
                break
        outcome |= {"name": name, "seconds": round(time.monotonic() - begin, 1)}
        print(json.dumps(outcome), flush=True)


main()
