"""libibverbs.so.1 and the C test programs under AddressSanitizer: use after free, overruns, double frees.

Our crates are instrumented, the programs bring the C compiler's runtime. Not here: ThreadSanitizer, which needs an
instrumented standard library, and the stable toolchain has no source of that; loom checks what threads share. Cases that
count areas of the process' map, or that touch memory which the program has freed while it is registered, are left out:
the runtime's own areas and its poisoned shadow memory are in their way, not a fault.
"""

import os
import re

import pytest

import harness
from harness import PORT, need
from harness.settings import PROGRAMS, ROOT, TARGET, sample

OUT = TARGET / "sanitizer"
# No leak check (it needs ptrace, which containers may lack); no alternate stack (the runtime of gcc 12 writes to the stack of a
# thread that was cancelled, and reports itself); no second stack (registered stacks are the real ones).
OPTIONS = "ASAN_OPTIONS=detect_leaks=0:use_sigaltstack=0:detect_stack_use_after_return=0"
REMAP = ("kinds", "data", "rereg", "fork")
DIRECT_LEFT_OUT = ("writer_is_stopped", "idle")  # they need a program that is as fast as ever
STATUSES_LEFT_OUT = ("one_sided_1_gib",)


def build():
    environment = {**os.environ, "CARGO_TARGET_DIR": str(OUT), "FREEFLOW_SANITIZER": "address"}
    harness.run([ROOT / "scripts" / "link-library", "ibverbs", "libibverbs.so.1", OUT / "lib"], 900, env=environment)
    harness.run(["make", "-s", "-C", PROGRAMS, f"OUT={OUT / 'programs'}",
             "CFLAGS=-O1 -g -fsanitize=address -Wno-error", *(OUT / "programs" / name for name in
                                                              ("statuses", "direct", "apps", "remap", "freed"))], 300)


def path_of(name):
    return str(OUT / "programs" / name)


def words(*command):
    return ["env", f"LD_LIBRARY_PATH={OUT / 'lib'}", OPTIONS, *command]


def names_of(program, left_out):
    names = harness.run(words(path_of(program), "list")).split()
    return sample([name for name in names if not name.startswith(left_out)])


def cases(container, program, *arguments):
    output = container.exec(*words(path_of(program), *arguments), seconds=600)
    need(re.search(r"^\d+ passed, 0 failed$", output, re.M), output)
    return output.strip().splitlines()[-1]


def one_case(container, program, name):
    need(f"{name}: good" in container.exec(*words(path_of(program), name), seconds=240), f"{name} did not end well")


def statuses_of_two(server, client, names):
    program = path_of("statuses")
    server_output, output = harness.in_two_containers(
        server, client, words(program, "server", PORT, *names), words(program, "client", "{ip}", PORT, *names),
        seconds=600)
    need(" 0 failed" in output and " 0 failed" in server_output, output + server_output)


def is_instrumented(container):
    """A report would come: the library writes to memory that its caller has freed."""
    output = container.exec(*words(path_of("freed")), codes=(1,))
    need("AddressSanitizer: heap-use-after-free" in output and "ibv_query_device" in output, output)


@pytest.fixture(scope="module", autouse=True)
def instrumented():
    build()


@pytest.fixture(scope="module")
def names():
    return names_of("statuses", STATUSES_LEFT_OUT)


@pytest.mark.timeout(1500)  # it builds the library first
def test_use_after_free_is_reported(server):
    is_instrumented(server)


def test_statuses_in_one_process(server, names):
    cases(server, "statuses", "loopback", *names)


def test_statuses_between_two_containers(server, client, names):
    statuses_of_two(server, client, names)


def test_threads_processes_memory_exact_returns(server):
    cases(server, "apps")


@pytest.mark.parametrize("name", REMAP)
def test_remapping(server, name):
    one_case(server, "remap", name)


def test_direct_path(server):
    cases(server, "direct", "loopback", *names_of("direct", DIRECT_LEFT_OUT))
