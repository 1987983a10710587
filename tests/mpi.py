#!/usr/bin/env python3
"""MPI between two containers: Open MPI and two versions of MPICH, each with a program that compares every byte.

On one host by the direct path and routed, and between two hosts, idle and beside a load of twice the
processors; in full with every transport everywhere.
"""

import contextlib
import pathlib
import tempfile

import lib
import lib_mpi
import lib_paths
from lib import FULL, need

UCX_DEVICE = {"UCX_NET_DEVICES": "freeflow0:1"}
UCX_TRANSPORTS = {
    "rc_v": {**UCX_DEVICE, "UCX_TLS": "rc_v,self"},
    "ud_v": {**UCX_DEVICE, "UCX_TLS": "ud_v,self"},
    "default": UCX_DEVICE,
}
MESSAGES = ["two-sided", "datatypes", "collectives"]
OPEN_MPI = {"pml": "ucx", "osc": "ucx"}
MPICH_5 = {"MPIR_CVAR_CH4_NETMOD": "ucx"}
# What each can: see tests/c/mpi_windows.c for what else each can't, without FreeFlow too.
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


@contextlib.contextmanager
def place(name, hosts_file):
    """Two containers that know each other by name, and the hosts under them."""
    if name == "two hosts":
        with lib.Lab(2, 4200) as lab:
            lab.wait_for_peers()
            yield lib_mpi.pair(lab.hosts[0], lab.hosts[1], hosts_file), lab.hosts
    else:
        with lib.Host() as host:
            if name == "routed":
                need(lib_paths.set_path(host, "routed"), "the router does not take the data path")
            yield lib_mpi.pair(host, host, hosts_file), [host]


def messages(hosts):
    counters = [host.status()["counters"] for host in hosts]
    return sum(each["messages"] + each["direct_messages"] for each in counters)


def job(pair, hosts, implementation, program, settings, seconds):
    before = messages(hosts)
    words = [program, ROUNDS, lib.SEED, *PARTS[implementation.name]]
    output = lib_mpi.run(implementation, pair, settings, words, seconds)
    need("right: " in output, output)
    moved = messages(hosts) - before
    need(moved > 50 * ROUNDS, f"only {moved} messages went over verbs")
    return f"{moved} messages"


def is_chosen(where, name, transport, loaded):
    return FULL or transport in (LOADED if loaded else SHORT)[where].get(name, ())


def at_place(checks, where, directory, programs):
    with place(where, directory / "hosts") as (pair, hosts):
        before = [lib.router_resources(host) for host in hosts]
        for loaded in (False, True):
            with lib_mpi.Load() if loaded else contextlib.nullcontext():
                for implementation, program in programs.items():
                    for transport, settings in transports(implementation.name).items():
                        if is_chosen(where, implementation.name, transport, loaded):
                            name = f"{implementation.name}, {transport}, {where}{', beside a load' if loaded else ''}"
                            checks.check(name, job, pair, hosts, implementation, program, settings,
                                         SECONDS_LOADED if loaded else SECONDS)
        for host, held in zip(hosts, before):
            checks.check(f"nothing is left in the router: {where}", lib.wait_for_resources, host, held)


def test(checks):
    lib.require_commands("mpicc.openmpi", "mpirun.openmpi", "mpicc.mpich", "mpiexec.mpich")
    implementations = [lib_mpi.open_mpi(), lib_mpi.mpich_4(), lib_mpi.mpich_5()]
    with tempfile.TemporaryDirectory(prefix="freeflow-mpi.") as directory:
        directory = pathlib.Path(directory)
        programs = {each: each.build(directory) for each in implementations}
        for where in SHORT:
            at_place(checks, where, directory, programs)


if __name__ == "__main__":
    lib.main(test)
