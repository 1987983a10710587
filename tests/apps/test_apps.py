"""Uses of verbs besides plain transfers (tests/programs/apps*.c), and other people's programs: UCX, Open MPI, valgrind.

MPI between containers is in test_mpi.py, further programs are in test_programs.py.
"""

import os
import re

import pytest

import harness
from harness import need
from harness.settings import DIST

UCX_PORT = 13337
UCX_DEVICE = "UCX_NET_DEVICES=freeflow0:1"
# Names of ucx_perftest's tests, and what they add.
UCX_TESTS = [
    ("tag_lat", "8", "500"), ("tag_bw", "1048576", "50"), ("ucp_put_bw", "100000", "100"), ("ucp_get", "100000", "100"),
    ("ucp_fadd", "8", "500"), ("ucp_cswap", "8", "500"), ("ucp_am_bw", "4000", "500"), ("stream_bw", "4000", "500"),
]
MPI_PROGRAM = r"""
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (size_t bytes = 8; bytes <= 1 << 20; bytes *= 8) {
        char *out = malloc(bytes), *in = malloc(bytes);
        memset(out, rank + 1, bytes);
        int next = (rank + 1) % size, previous = (rank + size - 1) % size;
        MPI_Sendrecv(out, bytes, MPI_CHAR, next, 0, in, bytes, MPI_CHAR, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (in[0] != previous + 1 || in[bytes - 1] != previous + 1) MPI_Abort(MPI_COMM_WORLD, 1);
        free(out), free(in);
    }
    int sum = 0, mine = rank + 1;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (sum != size * (size + 1) / 2) MPI_Abort(MPI_COMM_WORLD, 2);
    return MPI_Finalize();
}
"""


def apps(container, path, command_prefix=(), cases=()):
    output = container.exec(*command_prefix, path, *cases, seconds=120)
    need(re.search(r"^\d+ passed, 0 failed$", output, re.M), output)
    return output.strip().splitlines()[-1]


def in_the_host(host, path, cases):
    """LD_PRELOAD and the socket's path are all that a program needs."""
    socket = next((host.run_dir / "vnics").glob("*/router.sock"))
    env = {**os.environ, "LD_PRELOAD": str(DIST / "lib" / "libibverbs.so.1"), "FREEFLOW_SOCKET": str(socket)}
    output = harness.run([path, *cases], 60, env=env)
    need(" 0 failed" in output, output)


def under_valgrind(container, path):
    """Where there is no vDSO, and every access is looked at."""
    prefix = ["valgrind", "--quiet", "--error-exitcode=9", "--undef-value-errors=no"]
    return apps(container, path, prefix, ["bad_requests", "completion_fields", "shared_with_everything"])


def verbs_device(container):
    """UCX looks for the device file."""
    container.exec("sh", "-c", "test -c /dev/infiniband/uverbs0 && test -w /dev/infiniband/uverbs0")


def ucx_finds_the_device(container):
    output = container.exec("ucx_info", "-d")
    for transport in ("rc_verbs", "ud_verbs"):
        need(re.search(rf"Transport: {transport}\n#\s+Device: freeflow0:1\n", output), output)


def ucx(host, server, client, transports):
    for test in UCX_TESTS if transports == "rc_v" else UCX_TESTS[:1]:
        # UCX watches mappings by functions of its own: its memory is zero-copy all the same. On a busy machine its threads can't
        # always be held in time.
        for last in (False, False, True):
            before = host.status()["counters"]["slow_path_bytes"]
            one_of_ucx(server, client, transports, *test)
            bytes_ = host.status()["counters"]["slow_path_bytes"] - before
            if bytes_ == 0:
                break
            need(not last, f"{test[0]}: {bytes_} bytes through the slow path")


def one_of_ucx(server, client, transports, test, bytes_, count):
    common = ["env", f"UCX_TLS={transports}", UCX_DEVICE, "ucx_perftest", "-p", str(UCX_PORT)]
    options = ["-t", test, "-s", bytes_, "-n", count, "-w", "10"]
    _, output = harness.in_two_containers(server, client, common, [*common, "{ip}", *options], seconds=60, port=UCX_PORT)
    need(re.search(r"^Final:\s+\d+", output, re.M), output)


def ucx_asleep(server, client):
    """Whoever polls, finds nothing and arms must not sleep over what came in between."""
    words = ["env", "UCX_TLS=rc_v,self,sm", UCX_DEVICE, "ucx_perftest", "-E", "sleep", "-t", "tag_lat", "-n", "500",
             "-s", "8", "-p", str(UCX_PORT)]
    for _ in range(10):
        harness.in_two_containers(server, client, words, [*words, "{ip}"], seconds=30, port=UCX_PORT)


def open_mpi(container, directory):
    source, program = directory / "ring.c", directory / "ring"
    source.write_text(MPI_PROGRAM)
    harness.run(["mpicc.openmpi", "-O2", "-o", program, source])
    container.exec("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "3", "--mca", "pml", "ucx", "-x",
                   "UCX_TLS=rc_v,self", "-x", UCX_DEVICE, program, seconds=60)


MPI_HEADER = "/usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h"
pytestmark = pytest.mark.usefixtures("pair", "held")


@pytest.fixture(scope="module")
def path():
    return harness.program("apps")


def test_threads_processes_memory_exact_returns(server, path):
    apps(server, path)


def test_by_ld_preload_alone(host, path):
    in_the_host(host, path, ["child_", "stacks", "completion_fields"])


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)


def test_file_of_the_verbs_device(server):
    verbs_device(server)


def test_under_valgrind(server, path):
    harness.require_commands("valgrind")
    under_valgrind(server, path)


def test_ucx_finds_the_device(server):
    harness.require_commands("ucx_info")
    ucx_finds_the_device(server)


@pytest.mark.parametrize("transport", ["rc_v", "ud_verbs"])
def test_ucx(host, server, client, transport):
    harness.require_commands("ucx_perftest")
    ucx(host, server, client, transport)


def test_ucx_that_sleeps(server, client):
    harness.require_commands("ucx_perftest")
    ucx_asleep(server, client)


def test_open_mpi_over_ucx(host, server):
    harness.require_commands("mpirun.openmpi", "mpicc.openmpi", MPI_HEADER)
    open_mpi(server, host.directory)


def test_nothing_is_left_in_the_router_after_them(host, held):
    harness.wait_for_resources(host, held)
