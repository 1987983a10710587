"""The direct path: taken where it can be, past the router, and no program sees a difference, however often the path changes."""

import json
import os
import pathlib
import re
import signal
import tempfile
import time

import pytest

import harness
from harness import PORT, Failure, need, paths
from harness.settings import FULL, SEED

ROUNDS = 400 if FULL else 24  # of each case of tests/programs/direct*.c
SWITCHES_MIN = 1000 if FULL else 120
KILLS = 200 if FULL else 30
DEATH_SECONDS_MAX = 8  # as tests/lifecycle/test_kill.py
DEATH_ERRORS = ("retry counter exceeded", "Flushed", "remote operation error")
SWITCH_MS = (5, 40)
CLIENTS = 32 if FULL else 10  # of a large region
# Bytes that a request counts, the credit of a new QP, and other memory that the owner's process touches.
REQUEST_BYTES, FREE_BYTES, FAULTS_BYTES = 4096, 64 << 10, 4 << 20
# The policy, and the path that is then shown for a pair, and why.
DIRECT, ROUTED = ("auto", "direct", None), ("routed", "routed", "policy")
LOADS = ([], ["-e"], ["-m", "shared"], ["-e", "-m", "shared"])
SHORT_SECONDS = 0.25
GRANTED_AGAIN = 40 if FULL else 4
HELD = 500  # as in tests/programs/direct_idle.c, at either end
HELD_BYTES_MAX = 64 << 10
STOP_SECONDS = 1.5


# ---- what the host says


def row_of(host, name):
    """The only QP of a container."""
    rows = [row for row in json.loads(host.freeflow("ps", "--qps", "-o", "json")) if row["name"] == name]
    need(len(rows) == 1, f"{name} has not one QP: {rows}")
    return rows[0]


def wait_for_path(host, names, path, reason, seconds=10):
    end = time.monotonic() + seconds
    while True:
        rows = [row_of(host, name) for name in names]
        if all((row["path"], row["reason"]) == (path, reason) for row in rows):
            return
        need(time.monotonic() < end, f"not {path} ({reason}): {rows}")
        time.sleep(0.02)


def messages(host):
    """All that were counted, and those of them that the router carried."""
    counters = host.status()["counters"]
    return counters["messages"], counters["messages"] - counters["direct_messages"]


def counted_since(host, before, requests):
    """Each request is counted, once, on whatever path it went; returns how many the router carried."""
    total, carried = (now - then for now, then in zip(messages(host), before))
    need(total == requests, f"{total} were counted of {requests}, {carried} by the router")
    return carried


def pid_of(running, program):
    """The program itself, not the command that started it."""
    for pid in (running.process.pid, *harness.descendants(running.process.pid)):
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            if words.read().split(b"\0")[0] == program.encode():
                return pid
    raise Failure(f"`{running.text()}` has no process {program}")


def ticks(pid):
    """Processor time of a process and its threads."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


# ---- checked traffic


class Pair:
    """Two programs (tests/programs/load.c) under way."""

    def __init__(self, server, client, load, options=(), seconds=100, port=PORT):
        self.load = load
        self.server = server.start(load, *options, "-t", seconds, "-s", SEED, "server", port)
        server.wait_for_port(self.server, port)
        self.client = client.start(load, *options, "-t", seconds, "-s", SEED, "client", server.ip, port)
        for end in (self.server, self.client):
            end.wait_for_output("ready")

    def stop(self):
        """Asks them to end in order; how many requests both made."""
        os.kill(pid_of(self.client, self.load), signal.SIGTERM)
        return self.finish()

    def kill(self):
        self.server.kill()
        self.client.kill()

    def finish(self, seconds=20):
        """How many requests both ends made."""
        total = 0
        for end in (self.client, self.server):
            code = end.wait(seconds)
            need(code == 0 and "all right" in end.output(), f"exit code {code}:\n{end.output()}")
            total += int(re.search(r"^(\d+) requests", end.output(), re.M)[1])
        return total


def switched(host, server, client, load):
    """One pair stays; beside it others begin again: a library asks for the direct path most readily at first."""
    errors, before = host.status()["counters"]["completions_with_error"], messages(host)
    short_pairs, requests = 0, 0
    with paths.Switch(host, SEED, SWITCH_MS) as switch:
        pair = Pair(server, client, load, port=PORT + 1)
        end = time.monotonic() + SWITCHES_MIN
        while switch.changes < SWITCHES_MIN:
            need(time.monotonic() < end, f"only {switch.changes} changes of the path")
            short = Pair(server, client, load, LOADS[short_pairs % len(LOADS)])
            time.sleep(SHORT_SECONDS)
            requests += short.stop()
            short_pairs += 1
        requests += pair.stop()
    now = host.status()["counters"]["completions_with_error"]
    need(now == errors, f"{now - errors} failed completions")
    carried = counted_since(host, before, requests)
    need(carried < requests, "no request went past the router")
    return f"{switch.changes} changes, {short_pairs} pairs, {carried} of {requests} requests by the router"


def paths_are_reported(host, server, client, load, ways):
    """Of a pair at work, when its path is switched."""
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    pair = Pair(server, client, load)
    try:
        for path, *reported in ways:
            need(paths.set_path(host, path), "the router does not take the data path")
            wait_for_path(host, (server.name, client.name), *reported)
        pair.stop()
    finally:
        pair.kill()


def wait_for_grant(host, name, path, seconds=60):
    """Until a QP of a container is on this path, or, for `routed`, none is on another."""
    end = time.monotonic() + seconds
    while True:
        rows = [row for row in json.loads(host.freeflow("ps", "--qps", "-o", "json")) if row["name"] == name]
        if any(row["path"] == "direct" for row in rows) == (path == "direct"):
            return
        need(time.monotonic() < end, f"not {path}: {rows}")
        time.sleep(0.02)


def memory_is_granted_again(host, container, remap):
    """One pair goes on by WRITE and READ while its network is routed and then not: nobody registers anything again."""
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    running = container.start(remap, "shared-steady")
    running.wait_for_output("ready")
    try:
        for _ in range(GRANTED_AGAIN):
            wait_for_grant(host, container.name, "direct")
            need(paths.set_path(host, "routed"), "the router does not take the data path")
            wait_for_grant(host, container.name, "routed")
            need(paths.set_path(host, "auto"), "the router does not take the data path")
        wait_for_grant(host, container.name, "direct")
        os.kill(pid_of(running, remap), signal.SIGTERM)
        need(running.wait(60) == 0 and "shared-steady: good" in running.output(), running.output())
    finally:
        running.kill()


def past_the_router(host, server, client, load, path, *options):
    need(paths.set_path(host, path), "the router does not take the data path")
    before = messages(host)
    sent = Pair(server, client, load, options, seconds=2).finish()
    carried = counted_since(host, before, sent)
    need(carried == sent if path == "routed" else carried * 6 < sent, f"the router carried {carried} of {sent}")
    return f"{carried} of {sent} by the router"


def longest_message(host, server, client, messages_each=2000):
    """SENDs of 64 KiB, by turns: the longest that go past the router."""
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    before = messages(host)
    options = ("-s", 1 << 16, "-n", messages_each, "-F", "-p", PORT)
    answering = server.start("ib_send_lat", *options)
    server.wait_for_port(answering, PORT)
    asking = client.start("ib_send_lat", *options, server.ip)
    for end in (asking, answering):
        need(end.wait(60) == 0, end.output())
    carried = counted_since(host, before, 2 * messages_each)
    need(carried * 4 < messages_each, f"the router carried {carried} of {2 * messages_each}")
    return f"{carried} of {2 * messages_each} by the router"


def ping(host, server, client, path, reported, reason):
    need(paths.set_path(host, path), "the router does not take the data path")
    report = json.loads(host.freeflow("ping", server.name, client.name, "-o", "json"))
    ways = [(way["path"], way["reason"]) for way in report["ways"]]
    need(ways == [(reported, reason)] * 2, f"not {reported}: {report}")
    need([way["direct_count"] for way in report["ways"]] == [report["count"] if reported == "direct" else 0] * 2, f"{report}")


def ping_long(host, server, client):
    """A message that no channel takes, or of a process that may not send directly, is routed."""
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    report = json.loads(host.freeflow("ping", server.name, client.name, "-s", "524288", "-c", "100", "-o", "json"))
    need([(way["path"], way["direct_count"], way["reason"]) for way in report["ways"]] == [("routed", 0, "message over 256 KiB")] * 2, f"{report}")
    need("routed (message over 256 KiB), back routed" in host.freeflow("ping", server.name, client.name, "-s", "524288", "-c", "100"), "no reason")
    report = json.loads(harness.run(["env", "FREEFLOW_DIRECT=off", *host.command("ping", server.name, client.name, "-c", "100", "-o", "json")]))
    need([(way["path"], way["reason"]) for way in report["ways"]] == [("routed", "its library does not ask")] * 2, f"{report}")


# ---- why not direct

# Reasons of the sender's queue pairs, and the programs: the server's words, and the client's if they are others.
REASONS = [
    (None, ["ib_send_lat", "-F", "-D", "60"], None),
    ("message over 256 KiB", ["ib_send_bw", "-F", "-s", "524288", "-D", "60"], None),
    (None, ["ib_atomic_bw", "-F", "-D", "60"], None),
    (None, ["ib_send_bw", "-c", "UD", "-F", "-D", "60"], None),
    (None, ["ib_send_lat", "-c", "UD", "-F", "-D", "60"], None),
    ("UC or UD with an SRQ", ["ib_send_lat", "-c", "UD", "--use-srq", "-F", "-D", "60"], None),
    ("its library does not ask", ["ib_send_bw", "-c", "UD", "-F", "-D", "60"], ["env", "FREEFLOW_DIRECT=off", "ib_send_bw", "-c", "UD", "-F", "-D", "60"]),
    ("peer does not take it", ["env", "FREEFLOW_DIRECT=off", "ib_send_bw", "-c", "UD", "-F", "-D", "60"], ["ib_send_bw", "-c", "UD", "-F", "-D", "60"]),
    (None, ["ib_write_bw", "-c", "UC", "-F", "-D", "60"], None),
    (None, ["ib_send_lat", "-c", "UC", "-F", "-D", "60"], None),
    ("UC or UD with an SRQ", ["ib_send_lat", "-c", "UC", "--use-srq", "-F", "-D", "60"], None),
    (None, ["ib_send_bw", "-F", "--use-srq", "-D", "60"], None),
    ("its library does not ask", ["ib_write_bw", "-F", "-D", "60"], ["env", "FREEFLOW_DIRECT=off", "ib_write_bw", "-F", "-D", "60"]),
    ("peer does not take it", ["env", "FREEFLOW_DIRECT=off", "ib_send_bw", "-F", "-s", "64", "-D", "60"], ["ib_send_bw", "-F", "-s", "64", "-D", "60"]),
    ("memory not shared with the router", ["ib_write_bw", "-F", "-D", "60", "--mmap={file}"], None),
]


def reason_is_shown(host, server, client, wanted, words, other, directory):
    """Of a program at work; the path is as shown, or the reason would be of something else."""
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    files = {side: directory / side for side in ("server", "client")}
    for file in files.values():
        with open(file, "wb") as made:
            made.truncate(1 << 20)
    sides = {side: [word.replace("{file}", str(files[side])) for word in of] for side, of in (("server", words), ("client", other or words))}
    there = server.start(*sides["server"])
    server.wait_for_port(there)
    here = client.start(*sides["client"], server.ip)
    reported = ("direct", None) if wanted is None else ("routed", wanted)
    try:
        end = time.monotonic() + 20
        while True:
            rows = [row for row in json.loads(host.freeflow("ps", "--qps", "-o", "json")) if row["name"] == client.name]
            if rows and all((row["path"], row["reason"]) == reported for row in rows):
                break
            need(time.monotonic() < end and here.process.poll() is None, f"never {reported}: {rows}\n{here.output()}")
            time.sleep(0.05)
        before = rows[0]["sent_messages"]
        while (row := row_of(host, client.name))["sent_messages"] == before:
            need(time.monotonic() < end, f"nothing more was sent: {row}")
        need((row["direct_messages"] > 0) == (wanted is None), f"not as shown: {row}")
    finally:
        for container in (client, server):
            container.kill_background()
            container.exec("pkill", "-9", "^ib_", codes=(0, 1))


# ---- stops


def stopped(host, server, client, load, path):
    """Either end is stopped for a while: nothing fails, and both go on."""
    need(paths.set_path(host, path), "the router does not take the data path")
    errors, before = host.status()["counters"]["completions_with_error"], messages(host)
    pair = Pair(server, client, load)
    wait_for_path(host, (server.name, client.name), *(DIRECT if path == "auto" else ROUTED)[1:])
    for end in (pair.server, pair.client, pair.server):
        pid = pid_of(end, load)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOP_SECONDS)
        finally:
            os.kill(pid, signal.SIGCONT)
        count, until = messages(host)[0], time.monotonic() + 20
        while messages(host)[0] < count + 1000:
            need(time.monotonic() < until, "it does not go on")
            time.sleep(0.02)
    requests = pair.stop()
    now = host.status()["counters"]["completions_with_error"]
    need(now == errors, f"{now - errors} failed completions")
    return f"{counted_since(host, before, requests)} of {requests} by the router"


# ---- cases in C


# Those that lose nothing, or know what they lose.
UD_CASES = ["ud_one_sender", "ud_several_senders", "ud_headers", "ud_events", "ud_q_key", "begins_anew", "ud_handle", "ud_to_itself",
            "ud_group"]


def cases(server, client, direct, names=(), rounds=ROUNDS, options=(), before=()):
    words = [*before, direct, "-s", SEED, "-n", rounds, *options]
    server_output, output = harness.in_two_containers(
        server, client, [*words, "server", PORT, *names], [*words, "client", "{ip}", PORT, *names],
        seconds=60 + rounds)
    need(" 0 failed" in output and " 0 failed" in server_output, output + server_output)
    return output.strip().splitlines()[-1]


# Those that lose nothing where nobody waits for acknowledgements.
UC_CASES = ["mixed_heap", "mixed_shared", "mixed_pauses", "mixed_forks", "left_by_who", "few_of_many", "all_on_one"]


def cases_switched(host, server, client, direct, names=(), options=(), direct_min=0.0):
    """At least this part of the messages goes past the router, in one of three attempts: others' programs may have the
    processors just when the path is direct.
    """
    for _ in range(3):
        before = host.status()["counters"]
        with paths.Switch(host, SEED) as switch:
            note = cases(server, client, direct, names, options=options)
            note = f"{note}, {switch.changes} changes"
        grown = {name: value - before[name] for name, value in host.status()["counters"].items()}
        note = f"{note}, {grown['direct_messages']} of {grown['messages']} past the router"
        if grown["direct_messages"] >= direct_min * grown["messages"]:
            return note
    raise harness.Failure(note)


def losses(host, server, client, direct, path, name="uc_", carried_max=0.5):
    """UC, where many messages are lost; those that come after one go past the router again."""
    need(paths.set_path(host, path), "the router does not take the data path")
    before = host.status()["counters"]
    note = cases(server, client, direct, [name])
    grown = {name: value - before[name] for name, value in host.status()["counters"].items()}
    carried = grown["messages"] - grown["direct_messages"]
    note = f"{note}, {carried} of {grown['messages']} by the router"
    if path == "routed":
        need(not grown["direct_messages"], note)
    else:
        need(carried < carried_max * grown["messages"], note)
    return note


# ---- a large region


def large(host, server, client, program):
    """The owner's cost of leaving is bounded by the bytes that the router has carried before."""
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    before = host.status()["counters"]
    words = (PORT, CLIENTS)
    output, _ = harness.in_two_containers(
        server, client, [program, "server", *words], [program, "client", "{ip}", *words], seconds=100)
    now = host.status()["counters"]
    grown = {name: now[name] - before[name] for name in ("messages", "direct_messages", "bytes", "direct_bytes")}
    copied = int(re.search(r"^copied (\d+)", output, re.M)[1])
    routed = grown["bytes"] - grown["direct_bytes"]
    earned = routed + REQUEST_BYTES * (grown["messages"] - grown["direct_messages"])
    note = f"{copied >> 20} MiB copied, {routed >> 20} MiB routed, {earned >> 20} MiB earned, " \
           f"{grown['direct_bytes'] >> 20} MiB past the router"
    # Granted bytes are copied once, and once more the bytes that the slow path moved and that are
    # then shared again (docs/architecture/direct.md).
    need(copied <= 2 * earned + CLIENTS * FREE_BYTES + FAULTS_BYTES, note)
    need(copied and grown["direct_bytes"], f"nothing was granted: {note}")
    return note


# ---- deaths


def killed(host, server, client, load, path):
    """The survivor learns of it as on the other path, and as soon."""
    need(paths.set_path(host, path), "the router does not take the data path")
    pair = Pair(server, client, load)
    wait_for_path(host, (server.name, client.name), *(DIRECT if path == "auto" else ROUTED)[1:])
    begin = time.monotonic()
    os.kill(pid_of(pair.server, load), signal.SIGKILL)
    code = pair.client.wait(DEATH_SECONDS_MAX)
    seconds = time.monotonic() - begin
    output = pair.client.output()
    need(code == 1 and any(error in output for error in DEATH_ERRORS), f"exit code {code}:\n{output}")
    pair.server.wait(5)
    return f"{seconds:.2f} s: {output.strip().splitlines()[-1]}"


def many_kills(host, server, client, kill):
    words = [PORT, SEED + 2, KILLS]
    with paths.Switch(host, SEED):
        server_output, output = harness.in_two_containers(
            server, client, [kill, "server", *words], [kill, "client", "{ip}", *words], seconds=30 + KILLS)
    need("; 0 wrong" in output and "; 0 wrong" in server_output, output + server_output)


# ---- rest


def share_bytes(pid):
    """Of memory; what several processes have mapped counts in parts. Not of files: a program's code is no queue pair's."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def memory_held(host, server, client, direct):
    """Memory of the router and of both programs for an idle connected queue pair."""
    there = server.start(direct, "server", PORT, "held")
    server.wait_for_port(there)
    here = client.start(direct, "client", server.ip, PORT, "held")
    ends = (here, there)

    def memory(said):
        for end in ends:
            end.wait_for_output(said)
        pids = [pid_of(end, direct) for end in ends]
        taken = sum(share_bytes(pid) for pid in (*pids, host.router_pid()))
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        return taken

    before = memory("bare")
    each = (memory("held") - before) / (2 * HELD)
    for end in ends:
        need(end.wait(60) == 0, end.output())
    need(0 < each <= HELD_BYTES_MAX, f"{each:.0f} bytes")
    return f"{each:.0f} bytes"


def idle(host, server, client, direct):
    """Asleep in the completion channel, neither programs nor router take anything."""
    words = ["server", PORT, "idle"]
    there = server.start(direct, *words)
    server.wait_for_port(there)
    here = client.start(direct, "client", server.ip, PORT, "idle")
    for end in (there, here):
        end.wait_for_output("idle\n")
    wait_for_path(host, (server.name, client.name), "direct", None)
    pids = {"server": pid_of(there, direct), "client": pid_of(here, direct), "router": host.router_pid()}
    # Time stolen by the machine, and threads that fall asleep late, are not there each time.
    for last in (False, False, True):
        time.sleep(0.3)  # the router falls asleep
        before = {name: ticks(pid) for name, pid in pids.items()}
        time.sleep(1)
        taken = {name: ticks(pid) - before[name] for name, pid in pids.items()}
        if max(taken.values()) <= 1:
            break
        need(not last, f"ticks of {os.sysconf('SC_CLK_TCK')} in a second: {taken}")
    for end in (here, there):
        need(end.wait(60) == 0, end.output())


pytestmark = pytest.mark.usefixtures("held")


@pytest.fixture(scope="module")
def both(host, server, client):
    need(not host.switch and paths.wanted() == "auto", "this test sets the data path itself")
    return host, server, client


@pytest.fixture(scope="module")
def held(host, both):
    return harness.router_resources(host)


@pytest.fixture(scope="module")
def load():
    return harness.program("load")


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="freeflow-direct.", dir="/var/tmp") as directory:
        yield pathlib.Path(directory)


@pytest.mark.parametrize("ways", [[DIRECT, ROUTED], [DIRECT, ROUTED, DIRECT]],
                         ids=["direct, then routed by policy", "and then direct again"])
def test_path_of_a_pair_is_shown(both, load, ways):
    paths_are_reported(*both, load, ways)


def test_memory_is_granted_again(host, server):
    memory_is_granted_again(host, server, harness.program("remap"))


@pytest.mark.parametrize("path", paths.ALL)
def test_what_the_router_carries(both, load, path):
    past_the_router(*both, load, path)


def test_what_programs_did_that_exit_at_once_is_counted(both, load):
    past_the_router(*both, load, "auto", "-x")


def test_sends_of_64_kib_go_past_the_router(both):
    longest_message(*both)


@pytest.mark.parametrize("path, reported, reason", [ROUTED, DIRECT], ids=["routed", "auto"])
def test_freeflow_ping(both, path, reported, reason):
    ping(*both, path, reported, reason)


def test_freeflow_ping_with_long_messages(both):
    ping_long(*both)


@pytest.mark.parametrize("wanted, words, other", REASONS,
                         ids=[f"{' '.join(other or words)}: {wanted or 'direct'}" for wanted, words, other in REASONS])
def test_reason(both, directory, wanted, words, other):
    reason_is_shown(*both, wanted, words, other, directory)


def test_asleep_nobody_takes_processor_time(both):
    idle(*both, harness.program("direct"))


def test_memory_of_idle_connected_queue_pairs(both):
    memory_held(*both, harness.program("direct"))


def test_cases_between_two_containers(server, client):
    cases(server, client, harness.program("direct"))


def test_cases_while_the_path_changes(both):
    cases_switched(*both, harness.program("direct"))


def test_cases_of_uc_while_the_path_changes(both):
    cases_switched(*both, harness.program("direct"), UC_CASES, ["-u"])


@pytest.mark.parametrize("path", paths.ALL)
def test_lost_messages(both, path):
    losses(*both, harness.program("direct"), path)


@pytest.mark.parametrize("path", paths.ALL)
def test_datagrams(both, path):
    losses(*both, harness.program("direct"), path, "ud_", 0.6)


def test_datagrams_while_the_path_changes(both):
    cases_switched(*both, harness.program("direct"), UD_CASES, direct_min=0.1)


def test_datagrams_of_programs_without_the_direct_path(server, client):
    cases(server, client, harness.program("direct"), ["ud_"], before=["env", "FREEFLOW_DIRECT=off"])


def test_next_ring_after_a_lost_message(both):
    losses(*both, harness.program("direct"), "auto", "uc_next_ring", 0.25)


def test_large_region_that_its_peers_leave(both):
    large(*both, harness.program("direct_large"))


def test_atomics_are_done_once_whatever_ends_their_right(both):
    """By processes with the direct path and without, on the same words."""
    host, server, client = both
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    before, words = host.status()["counters"], (PORT, ROUNDS, SEED)
    program = harness.program("direct_atomics")
    harness.in_two_containers(server, client, [program, "server", *words], [program, "client", "{ip}", *words], seconds=180 + ROUNDS)
    grown = {name: value - before[name] for name, value in host.status()["counters"].items()}
    need(0 < grown["direct_messages"] < grown["messages"], f"not by both paths: {grown}")


@pytest.mark.parametrize("pages", ["64", "14"])
def test_grant_of_a_block_that_is_not_whole_pages(both, pages):
    """Nothing beside the block is mapped by its peer, and the slow path is used a few times only: of a small block, too.

    A router that could not freeze the server's threads in time tries again a second later, and the slow path serves
    until then: the program counts its tries, and the router has three attempts to do it at the first.
    """
    host, server, client = both
    need(paths.set_path(host, "auto"), "the router does not take the data path")
    program = harness.program("edges_peer")
    for _ in range(3):
        before = host.status()["counters"]
        _, output = harness.in_two_containers(server, client, [program, "server", PORT, pages], [program, "client", "{ip}", PORT, pages])
        grown = {name: value - before[name] for name, value in host.status()["counters"].items()}
        need(grown["direct_messages"] > 0 and grown["slow_path_bytes"] > 0, f"{grown}")
        if "granted at once" in output:
            break
    need("granted at once" in output and grown["slow_path_bytes"] < grown["bytes"] // 10, f"{output}: {grown}")


def test_traffic_while_the_path_changes(both, load):
    switched(*both, load)


@pytest.mark.parametrize("path", paths.ALL)
def test_either_end_is_stopped_for_a_while(both, load, path):
    stopped(*both, load, path)


@pytest.mark.parametrize("path", paths.ALL)
def test_one_end_is_killed(both, load, path):
    killed(*both, load, path)


def test_kills_while_the_path_changes(both):
    many_kills(*both, harness.program("kill"))


def test_nothing_is_left_in_the_router(host, held):
    harness.wait_for_resources(host, held)
