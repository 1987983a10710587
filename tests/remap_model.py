#!/usr/bin/env python3
"""Memory that is mapped, moved, thrown away, written, registered and transferred at random, against a plain-memory model.

The steps are of tests/c/remap_model.c, and follow from a seed, which is printed. Each run has a peer for each thread, past the
router or by it, or as the path changes; the counters say that it was so.
"""

import shutil

import lib
import lib_paths
from lib import need

STEPS = 200_000 if lib.FULL else 12_000  # of a run, all its threads together
TRACED_STEPS = 20_000 if lib.FULL else 1_500
PHASES_STEPS = 100_000
RUNS = (("auto", 1), ("auto", 4), ("routed", 1), ("routed", 3), ("switched", 2))
TRACED = ("REMAP_TRACED=1",)  # in phases: what was placed meets a tracer
# Seeds that failed once, with the run that they failed in.
FAILED = (
    # A child shared what the parent had moved by mremap beside a tracer.
    (5, "auto", 3, 15_000, TRACED),
)


def grown(host, before):
    now = host.status()["counters"]
    return {name: now[name] - before[name] for name in ("messages", "direct_messages")}


def run(host, container, program, path, threads, seed, steps, words=(), extra=()):
    need(lib_paths.set_path(host, "routed" if path == "routed" else "auto"), "the router does not take the data path")
    switch = lib_paths.Switch(host, seed) if path == "switched" else None
    before = host.status()["counters"]
    settings = [f"REMAP_SEED={seed}", f"REMAP_THREADS={threads}", f"REMAP_STEPS={steps}", *extra]
    try:
        output = container.exec("env", *settings, *words, program, "model", seconds=1200 if lib.FULL else 120)
    finally:
        if switch:
            switch.stop()
    need("model: good" in output, output)
    counts = grown(host, before)
    # A transfer is at least every fourth step.
    need(counts["messages"] > steps // 4, f"{counts}")
    need((counts["direct_messages"] > 0) == (path != "routed"), f"path {path}: {counts}")
    return f"{output.splitlines()[-2]}; {counts['direct_messages']} of {counts['messages']} messages past the router"


def test(checks):
    program = lib.program("remap")
    with lib.Host() as host:
        container = host.container("one")
        empty = lib.router_resources(host)
        for at, (path, threads) in enumerate(RUNS):
            name = f"{path}, threads: {threads}"
            checks.check(name, run, host, container, program, path, threads, lib.SEED + at, STEPS)
        for seed, path, threads, steps, settings in FAILED:
            checks.check(f"seed {seed}", run, host, container, program, path, threads, seed, steps, (), settings)
        if lib.FULL:
            checks.check("a tracer comes and goes", run, host, container, program, "auto", 3, lib.SEED, PHASES_STEPS, (), TRACED)
        # No thread can be held: what is placed stays so, or becomes a private copy.
        if shutil.which("strace"):
            words = ("strace", "-f", "-e", "trace=none", "-o", "/dev/null")
            checks.check("traced", run, host, container, program, "auto", 2, lib.SEED, TRACED_STEPS, words)
        else:
            checks.skip("traced", "strace is not installed")
        checks.check("nothing is left in the router", lib.wait_for_resources, host, empty)


if __name__ == "__main__":
    lib.main(test)
