"""MPI between two containers: Open MPI and two versions of MPICH, each with a program that compares every byte.

On one host by the direct path and routed, and between two hosts, idle and beside a load of twice the
processors; in full with every transport everywhere.
"""

import pathlib
import tempfile

import pytest

import harness
from harness import mpi, need, places
from harness.settings import FULL, SEED

UCX_DEVICE = {"UCX_NET_DEVICES": "freeflow0:1"}
UCX_TRANSPORTS = {
    "rc_v": {**UCX_DEVICE, "UCX_TLS": "rc_v,self"},
    "ud_v": {**UCX_DEVICE, "UCX_TLS": "ud_v,self"},
    "default": UCX_DEVICE,
}
MESSAGES = ["two-sided", "datatypes", "collectives"]
OPEN_MPI = {"pml": "ucx", "osc": "ucx"}
MPICH_5 = {"MPIR_CVAR_CH4_NETMOD": "ucx"}
# Parts that each can do: see tests/programs/mpi_windows.c for those that it can't, without FreeFlow too.
PARTS = {
    "Open MPI": [*MESSAGES, "bytes", "values", "swap"],
    "MPICH 4": [*MESSAGES, "aligned", "values", "swap"],
    "MPICH 5": [*MESSAGES, "bytes", "values", "swap"],
}
# Without FULL: the transports at each place; all with rc_v on one host, where most is ours.
SHORT = {
    "one host": {"Open MPI": ["rc_v", "default"], "MPICH 4": ["rc_v"], "MPICH 5": ["rc_v", "ud_v", "libfabric"]},
    "routed": {"Open MPI": ["rc_v", "ud_v"], "MPICH 4": ["ud_v"], "MPICH 5": ["default"]},
    "two hosts": {"Open MPI": ["rc_v"], "MPICH 4": ["default"], "MPICH 5": ["rc_v"]},
}
LOADED = {
    "one host": {"MPICH 5": ["ud_v"]},
    "routed": {"Open MPI": ["rc_v"]},
    "two hosts": {"MPICH 4": ["default"]},
}
ROUNDS = 20 if FULL else 5
SECONDS, SECONDS_LOADED = (240, 600) if FULL else (60, 180)


def transports(name):
    settings = {"Open MPI": OPEN_MPI, "MPICH 4": {}, "MPICH 5": MPICH_5}[name]
    table = {transport: {**settings, **more} for transport, more in UCX_TRANSPORTS.items()}
    if name == "MPICH 5":
        # Its last rank may wait so long in MPI_Finalize, by default 30 s (docs/VERBS.md).
        table["ud_v"]["UCX_UD_TIMEOUT"] = "10s"
        # The wheel has UCX in the same process, whose hook of sbrk hides the heap's end from libfabric's cache.
        table["libfabric"] = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "verbs;ofi_rxm",
                              "UCX_MEM_MMAP_HOOK_MODE": "none"}
    return table


def job(place, implementation, program, settings, seconds):
    before = place.messages()
    words = [program, ROUNDS, SEED, *PARTS[implementation.name]]
    output = mpi.run(implementation, place.pair, settings, words, seconds)
    need("right: " in output, output)
    moved = place.messages() - before
    need(moved > 50 * ROUNDS, f"only {moved} messages went over verbs")
    return f"{moved} messages"


IMPLEMENTATIONS = {"Open MPI": mpi.open_mpi, "MPICH 4": mpi.mpich_4, "MPICH 5": mpi.mpich_5}


def chosen():
    """Place, load, implementation and transport of each job."""
    for where in places.WHERE:
        for loaded in places.LOADS:
            for name in IMPLEMENTATIONS:
                for transport in transports(name):
                    if FULL or transport in (LOADED if loaded == "loaded" else SHORT)[where].get(name, ()):
                        yield pytest.param(where, loaded, name, transport, id=f"{name}, {transport}, {where}, {loaded}")


@pytest.fixture(scope="module")
def programs():
    """Of each implementation the test program, compiled with its own compiler."""
    harness.require_commands("mpicc.openmpi", "mpirun.openmpi", "mpicc.mpich", "mpiexec.mpich")
    with tempfile.TemporaryDirectory(prefix="freeflow-mpi.") as directory:
        implementations = {name: make() for name, make in IMPLEMENTATIONS.items()}
        yield {name: (each, each.build(pathlib.Path(directory))) for name, each in implementations.items()}


@pytest.mark.timeout(SECONDS_LOADED + 300)
@pytest.mark.parametrize("place, load, name, transport", chosen(), indirect=["place", "load"])
def test_mpi(programs, place, load, name, transport):
    implementation, program = programs[name]
    job(place, implementation, program, transports(name)[transport], SECONDS_LOADED if load == "loaded" else SECONDS)
