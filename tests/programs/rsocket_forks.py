#!/usr/bin/env python3
"""Runs in two containers, under the preload library with RDMAV_FORK_SAFE=1: a server whose children go on with connections.

  rsocket_forks.py serve ADDRESS PORT      until it was asked for all of WAYS
  rsocket_forks.py drive ADDRESS PORT
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time

BYTES = bytes(range(256)) * 12_000  # more than all buffers together
SECONDS = 20
WAYS = "eeexqkdp"


def need(condition, text):
    if not condition:
        raise AssertionError(text)


# ---- the server


def echo(connection):
    """All that comes, by poll; then the end."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        need(poll.poll(SECONDS * 1000), "nothing comes")
        data = connection.recv(50_000)
        if not data:
            break
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def child(way, connection, peer, listener):
    need(connection.getpeername() == peer, f"{connection.getpeername()}, not {peer}")
    need(connection.getsockname()[1] == int(sys.argv[3]), f"{connection.getsockname()}")
    try:
        listener.accept()
        raise AssertionError("a child accepted by its parent's listener")
    except OSError:
        pass
    if way == "e":
        echo(connection)
    elif way == "x":
        os.dup2(connection.fileno(), 0)
        os.dup2(connection.fileno(), 1)
        os.execv("/bin/cat", ["cat"])
    elif way == "q":
        connection.sendall(BYTES[:100_000])
    elif way == "k":
        try:
            need(connection.recv(1) == b"", "the parent goes on with it, and the child received")
        except ConnectionError:
            pass
    elif way == "d":
        while connection.recv(1000):
            pass
    elif way == "p":
        time.sleep(0.2)  # until the parent is done with it
        connection.sendall(connection.recv(4))


def serve(listener):
    children = []
    for _ in WAYS:
        connection, peer = listener.accept()
        connection.settimeout(None)
        way = connection.recv(1).decode()
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS)
            code = 1
            try:
                child(way, connection, peer, listener)
                code = 0
            except BaseException as error:
                print(f"child {way}: {error!r}", file=sys.stderr, flush=True)
            os._exit(code)
        if way == "k":
            connection.sendall(b"mine")
            need(connection.recv(4) == b"ours", "the parent's connection")
            need(os.waitpid(pid, 0)[1] == 0, "the child of way k")
            connection.sendall(b"still")
        else:
            children.append((way, pid))
        connection.close()
    for way, pid in children:
        need(os.waitpid(pid, 0)[1] == 0, f"the child of way {way}")
    print("well", flush=True)


# ---- its clients


def talk(way):
    connection = socket.create_connection((sys.argv[2], int(sys.argv[3])), SECONDS)
    connection.sendall(way.encode())
    if way in "ex":
        reader = os.fork()  # a child of the client's, too: who goes on is the parent, by its first write
        if reader == 0:
            os._exit(0)
        os.waitpid(reader, 0)
        sent, got = 0, bytearray()
        connection.setblocking(False)
        poll = select.poll()
        while len(got) < len(BYTES):
            poll.register(connection, select.POLLIN | (select.POLLOUT if sent < len(BYTES) else 0))
            need(poll.poll(SECONDS * 1000), f"it stands still: {sent} sent, {len(got)} received")
            try:
                if sent < len(BYTES):
                    sent += connection.send(BYTES[sent:sent + 70_000])
            except BlockingIOError:
                pass
            try:
                data = connection.recv(70_000)
                need(data, f"it ends after {len(got)}")
                got += data
            except BlockingIOError:
                pass
        need(got == BYTES, "other bytes")
        connection.setblocking(True)
        connection.shutdown(socket.SHUT_WR)
        need(connection.recv(1) == b"", "more than was sent")
    elif way == "q":
        got = bytearray()
        while data := connection.recv(70_000):
            got += data
        need(got == BYTES[:100_000], f"{len(got)} bytes of a child that ended at once")
    elif way == "k":
        need(connection.recv(4, socket.MSG_WAITALL) == b"mine", "the parent")
        connection.sendall(b"ours")
        need(connection.recv(5, socket.MSG_WAITALL) == b"still", "the parent, after its child")
    elif way == "p":
        connection.sendall(b"ping")
        need(connection.recv(4, socket.MSG_WAITALL) == b"ping", "the child")
    connection.close()


def main():
    need(os.environ.get("RDMAV_FORK_SAFE") == "1", "RDMAV_FORK_SAFE")
    if sys.argv[1] == "serve":
        with socket.socket() as listener:
            listener.bind((sys.argv[2], int(sys.argv[3])))
            listener.listen(8)
            serve(listener)
        return
    for way in WAYS:
        talk(way)
    # A program that the preload library does not see does not disturb.
    subprocess.run(["/bin/true"], check=True)
    print("well", flush=True)


main()
