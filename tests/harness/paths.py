"""Which way messages go between a test's containers: `--data-path` lets every suite run on each.

    auto            as a host does by itself
    routed          all by the router
    switch:SEED     now this and now that, at random, as long as the host is up

No program may see a difference, so no test does: a suite passes with each of them or with none.
"""

import random
import subprocess
import threading

from harness import settings

ALL = ("auto", "routed")
SWITCH_MS = (5, 200)
SET_SECONDS_MAX = 20


def wanted():
    """`auto`, `routed`, or the seed by which to switch."""
    word = settings.DATA_PATH
    return word if word in ALL else int(word.removeprefix("switch:"))


def set_path(host, path):
    """Whether that could be done: a router that a test just killed does not hear."""
    words = host.command("network", "set", "default", "--data-path", path)
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              timeout=SET_SECONDS_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class Switch:
    """Changes a host's data path at random times until it is stopped; it dies with the test."""

    def __init__(self, host, seed, wait_ms=SWITCH_MS):
        self.host, self.random, self.wait_ms = host, random.Random(seed), wait_ms
        self.changes = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        path = 0
        while not self.is_over.wait(self.random.uniform(*self.wait_ms) / 1000):
            path = 1 - path
            self.changes += set_path(self.host, ALL[path])

    def stop(self):
        self.is_over.set()
        self.thread.join(SET_SECONDS_MAX)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
