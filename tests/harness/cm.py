"""Common parts of the tests of connection management: servers that listen by rdma_cm, and a server with its clients.

Nothing of the kernel's shows who listens there, so a container's router is asked (`freeflow status`), a guest's kernel by
`rdma resource`. Programs are ended by themselves, but for servers that never end (`stays`).
"""

import contextlib
import dataclasses
import subprocess
import time

from harness.failure import Failure, need
from harness.processes import steady, waiting

PORT = 7471  # rdma-core's examples all take this one
LISTEN_SECONDS = 40  # in an emulator too
AFTER_CLIENTS_SECONDS = 30


@dataclasses.dataclass
class Row:
    """A program and its peer. `{ip}` is the server's address, in the words of both; `{client}` the client's."""

    name: str
    server: list
    client: list
    says: tuple = ()  # the client
    server_says: tuple = ()
    stays: bool = False
    clients: int = 1
    seconds: int = 30
    client_codes: tuple = (0,)

    @staticmethod
    def of(server, client, *says, **more):
        return Row(client, server.split(), client.split(), says, **more)


def listener_count(end):
    """How many identifiers listen at a container's host, or in the guest."""
    host = getattr(end, "host", None)
    if host:
        return host.status()["cm"]["listener_count"]
    return int(end.exec("sh", "-c", "rdma resource show cm_id | grep -c LISTEN", codes=(0, 1)).split()[-1])


def wait_for_listener(end, running, before, seconds=LISTEN_SECONDS):
    until = time.monotonic() + seconds
    # Linux shows an identifier as LISTEN a moment before anybody can reach it: in a guest it is looked for twice.
    looks = 1 if getattr(end, "host", None) else 2
    while looks > 0:
        if listener_count(end) > before:
            looks -= 1
            continue
        code = running.process.poll()
        need(code is None, f"`{running.text()}` ended with {code} before it listened:\n{running.output()}")
        need(time.monotonic() < until, f"`{running.text()}` does not listen:\n{running.output()}\n"
             + "\n".join(waiting(getattr(running.process, "pid", 0))))
        time.sleep(0.01)


def wait_until(condition, text, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        need(time.monotonic() < until, text() if callable(text) else text)
        time.sleep(0.02)


@contextlib.contextmanager
def listening(end, *words):
    """A server that runs as long as the block does."""
    before = listener_count(end)
    running = end.start(*words)
    try:
        wait_for_listener(end, running, before)
        yield running
    finally:
        running.kill()
        end.background.remove(running)
        wait_for_end(end, before)


def wait_for_end(end, before):
    """The router hears of a process' end a little later; until then its listener would be counted among the next one's.
    A router that is dead counts none."""
    host = getattr(end, "host", None)
    until = time.monotonic() + 5
    while (not host or host.is_up()) and listener_count(end) > before and time.monotonic() < until:
        time.sleep(0.02)


def filled(words, server, client):
    return [str(word).replace("{ip}", server.ip).replace("{client}", client.ip) for word in words]


def finish(running, seconds, codes=(0,)):
    """A program's output, once it has ended well."""
    code = running.wait(seconds)
    need(code in codes, f"`{running.text()}` gave exit code {code}:\n{running.output()}")
    return running.output()


@steady
def run_row(server, client, row):
    """Runs a row to its end; the outputs of the server and of the first client."""
    before = listener_count(server)
    running = server.start(*filled(row.server, server, client))
    clients = []
    try:
        wait_for_listener(server, running, before)
        try:
            outputs = []
            # One after the other: rping keeps the last request only until it has served it, and accepts one twice if two come together.
            for _ in range(row.clients):
                clients.append(client.start(*filled(row.client, server, client)))
                outputs.append(finish(clients[-1], row.seconds, row.client_codes))
            if row.stays:
                need(running.process.poll() is None, "the server ended")
            else:
                finish(running, AFTER_CLIENTS_SECONDS)
        except Failure as failure:
            printed = f"\n--- a client printed:\n{clients[-1].output()}" if clients else ""
            raise Failure(f"{failure}{printed}\n--- the server printed:\n{running.output()}") from None
        for words, text in ((row.says, outputs[0]), (row.server_says, running.output())):
            for word in words:
                need(word in text, f"no `{word}` in:\n{text}")
        return running.output(), outputs[0]
    finally:
        for one in [running, *clients]:
            one.kill()
        server.background.remove(running)
        for one in clients:
            client.background.remove(one)
        wait_for_end(server, before)


def check_row(server, client, row):
    output = run_row(server, client, row)[1].strip().splitlines()
    return output[-1].strip()[:100] if output else ""


def wait_for_none(host, seconds=20):
    """Until nothing of connection management is left: neither identifiers nor connections that wait for their end."""
    def left():
        counts = host.status()["cm"]
        return {name: counts[name] for name in counts if name.endswith("_count") and counts[name]}

    def text():
        table = subprocess.run(host.command("ps", "--cm"), stdout=subprocess.PIPE, text=True).stdout
        return f"connection management keeps {left()}:\n{table[:2000]}"

    wait_until(lambda: not left(), text, seconds)
