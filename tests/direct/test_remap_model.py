"""Memory that is mapped, moved, thrown away, written, registered and transferred at random, against a plain-memory model.

The steps are of tests/programs/remap_model.c, and follow from a seed, which is printed. Each run has a peer for each thread, past the
router or by it, or as the path changes; the counters say that it was so.
"""

import pytest

import harness
from harness import need, paths
from harness.settings import FULL, SEED

STEPS = 200_000 if FULL else 12_000  # of a run, all its threads together
TRACED_STEPS = 20_000 if FULL else 1_500
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
    need(paths.set_path(host, "routed" if path == "routed" else "auto"), "the router does not take the data path")
    switch = paths.Switch(host, seed) if path == "switched" else None
    before = host.status()["counters"]
    settings = [f"REMAP_SEED={seed}", f"REMAP_THREADS={threads}", f"REMAP_STEPS={steps}", *extra]
    try:
        output = container.exec("env", *settings, *words, program, "model", seconds=1200 if FULL else 120)
    finally:
        if switch:
            switch.stop()
    need("model: good" in output, output)
    counts = grown(host, before)
    # A transfer is at least every fourth step.
    need(counts["messages"] > steps // 4, f"{counts}")
    need((counts["direct_messages"] > 0) == (path != "routed"), f"path {path}: {counts}")
    return f"{output.splitlines()[-2]}; {counts['direct_messages']} of {counts['messages']} messages past the router"


@pytest.fixture(scope="module")
def program():
    return harness.program("remap")


@pytest.mark.parametrize("at, path, threads", [(at, *run) for at, run in enumerate(RUNS)],
                         ids=[f"{path}, threads: {threads}" for path, threads in RUNS])
def test_model(host, container, held, program, at, path, threads):
    run(host, container, program, path, threads, SEED + at, STEPS)


@pytest.mark.parametrize("seed, path, threads, steps, settings", FAILED, ids=[f"seed {row[0]}" for row in FAILED])
def test_seed_that_failed_once(host, container, held, program, seed, path, threads, steps, settings):
    run(host, container, program, path, threads, seed, steps, (), settings)


if FULL:
    def test_tracer_comes_and_goes(host, container, held, program):
        run(host, container, program, "auto", 3, SEED, PHASES_STEPS, (), TRACED)


def test_traced(host, container, held, program):
    """No thread can be held: what is placed stays so, or becomes a private copy."""
    harness.require_commands("strace")
    words = ("strace", "-f", "-e", "trace=none", "-o", "/dev/null")
    run(host, container, program, "auto", 2, SEED, TRACED_STEPS, words)


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)
