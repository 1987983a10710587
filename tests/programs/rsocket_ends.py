#!/usr/bin/env python3
"""Runs in two containers, under the preload library: what one end learns when the other is killed, leaves without closing, or resets.

  rsocket_ends.py serve ADDRESS PORT      one process for each of CASES, from this port on
  rsocket_ends.py drive ADDRESS PORT
"""

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

SECONDS = 20
# A queue pair ends with its process: words that are posted and not yet sent are lost then, as on a NIC.
SENDING_SECONDS = 0.5
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
LINGER_NONE = struct.pack("ii", 1, 0)
WORDS = bytes(range(256)) * 100
BOTH = select.POLLIN | select.POLLOUT


def need(condition, text):
    if not condition:
        raise AssertionError(text)


def until_some(pause, what, ask):
    """Asks again and again, for a bounded time, until there is an answer."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if (answer := ask()) is not None:
            return answer
        time.sleep(pause)
    raise AssertionError(f"never {what}")


# ---- the end that goes


def go(address, port, way, words):
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.alarm(3 * SECONDS)
    with socket.socket() as listener:
        listener.bind((address, port))
        listener.listen(1)
        connection, _ = listener.accept()
    connection.recv(1)
    if words:
        connection.sendall(WORDS)
    if words and way in ("kill", "leave"):
        time.sleep(SENDING_SECONDS)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "leave":
        os._exit(0)
    elif way == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
    connection.close()


def serve(address, port):
    words = lambda number, way, has_words: [sys.executable, __file__, "go", address, port + number, way, int(has_words)]
    ends = [subprocess.Popen([str(word) for word in words(number, *case[:2])]) for number, case in enumerate(CASES)]
    for end in ends:
        end.wait(3 * SECONDS)


# ---- the end that stays


def connect(address, port):
    def attempt():
        client = socket.socket()
        try:
            client.connect((address, port))
            need(f":{port:04X} " not in open("/proc/net/tcp").read(), "it is TCP")
            return client
        except ConnectionRefusedError:
            client.close()
    client = until_some(0.05, "connected", attempt)
    client.settimeout(SECONDS)
    return client


def by_poll(client, pause):
    """A program that always wants both, and always has room to send."""
    poll = select.poll()
    poll.register(client, BOTH)

    def reported():
        ((_, events),) = poll.poll(1000)
        return events if events != select.POLLOUT else None
    return until_some(pause, "notified by poll", reported)


def by_epoll(client, pause):
    with select.epoll() as epoll:
        epoll.register(client, BOTH)

        def reported():
            ((_, events),) = epoll.poll(1)
            return events if events != select.EPOLLOUT else None
        return until_some(pause, "notified by epoll", reported)


def polled(client):
    for turn, (look, pause) in enumerate(((by_poll, 0.2), (by_poll, 0), (by_epoll, 0.2), (by_epoll, 0))):
        if turn == 0:
            time.sleep(0.2)
        need(look(client, pause) & select.POLLIN, "notified of something else")


def polled_early(client):
    need(by_epoll(client, 0.2) & select.POLLIN, "notified of something else")


def asked(client):
    client.setblocking(False)

    def reported():
        try:
            return client.recv(10)
        except BlockingIOError:
            return None
    need(until_some(0.05, "notified by recv", reported) == b"", "notified of something else")
    client.settimeout(SECONDS)


def sent(client, pause, blocking):
    client.setblocking(blocking)

    def reported():
        try:
            client.send(b"x" * 10)
            return None
        except BlockingIOError:
            return None
        except OSError as error:
            return error.errno
    if blocking:
        client.settimeout(SECONDS)
    need(until_some(pause, "notified by send", reported) in (errno.ECONNRESET, errno.EPIPE), "notified of something else")


def errors(client):
    return [client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for _ in range(2)]


def read_all(client):
    got = bytearray()
    while len(got) < len(WORDS) and (data := client.recv(5000)):
        got += data
    need(bytes(got) == WORDS, f"{len(got)} of the {len(WORDS)} bytes that came before the end")


def orderly(client):
    """As TCP: who exits or is killed closes all that it had."""
    need(client.recv(10) == b"", "not the end of the stream")
    need(errors(client) == [0, 0], "an error")


def after_reset(client):
    need(by_poll(client, 0) & select.POLLERR, "no POLLERR")
    need(errors(client) == [errno.ECONNRESET, 0], "not one ECONNRESET")
    for call in (lambda: client.recv(10), lambda: client.send(b"x")):
        try:
            raise AssertionError(f"{call()}, not ECONNRESET")
        except ConnectionResetError:
            pass


# The other end's action, whether it sends before, and the check here.
CASES = (
    ("kill", False, polled, orderly),
    ("kill", False, polled_early, orderly),
    ("kill", False, asked, orderly),
    ("kill", False, orderly),
    ("kill", False, lambda client: sent(client, 0.05, True)),
    ("kill", False, lambda client: sent(client, 0.05, False)),
    ("kill", False, lambda client: sent(client, 0, False)),
    ("kill", True, read_all, orderly),
    ("leave", True, read_all, orderly),
    ("close", True, read_all, orderly),
    ("close", False, polled, orderly),
    ("reset", False, polled, after_reset),
    ("reset", False, after_reset),
    ("reset", True, read_all, after_reset),
)


def drive(address, port):
    for number, (way, has_words, *looks) in enumerate(CASES):
        with connect(address, port + number) as client:
            client.sendall(b"!")
            for look in looks:
                try:
                    look(client)
                except (AssertionError, OSError) as error:
                    raise AssertionError(f"case {number}, {way}, {has_words}, {look.__name__}: {error}") from error
    print("well")


role, host, first, *rest = sys.argv[1:]
if role == "go":
    go(host, int(first), rest[0], rest[1] == "1")
else:
    {"serve": serve, "drive": drive}[role](host, int(first))
