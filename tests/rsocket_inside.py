#!/usr/bin/env python3
"""Runs in a container, under the preload library: what programs do with descriptors, threads and children.

  rsocket_inside.py ADDRESS      (the container's own: one thread connects to another)
"""

import ctypes
import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time

ADDRESS = sys.argv[1]
SECONDS = 10
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fdopen.restype = ctypes.c_void_p
LIBC.fclose.argtypes = [ctypes.c_void_p]
EDGE = select.EPOLLIN | select.EPOLLET


def need(condition, text):
    if not condition:
        raise AssertionError(text)


def listener(port, address=ADDRESS):
    made = socket.socket()
    made.bind((address, port))
    made.listen(4)
    return made


def pair(port):
    with listener(port) as waiting:
        need(f":{port:04X} " not in open("/proc/net/tcp").read(), "it listens by TCP")
        client = socket.socket()
        connecting = threading.Thread(target=client.connect, args=((ADDRESS, port),))
        connecting.start()
        server, _ = waiting.accept()
        connecting.join()
    for end in (client, server):
        end.settimeout(SECONDS)
    return client, server


def works(client, server):
    client.sendall(b"ping")
    need(server.recv(4) == b"ping", "what was sent")


def addresses_in_use(port):
    for held, wanted in (("0.0.0.0", ADDRESS), (ADDRESS, ADDRESS), (ADDRESS, "0.0.0.0")):
        with listener(port, held), socket.socket() as second:
            try:
                second.bind((wanted, port))
                raise AssertionError(f"{wanted} was free beside {held}")
            except OSError as error:
                need(error.errno == errno.EADDRINUSE, f"{wanted} beside {held}: {error}")


ORDINARY = "import socket, sys; l = socket.socket(); l.bind((sys.argv[1], int(sys.argv[2]))); l.listen(); print(flush=True); print(l.accept()[1][1])"


def bound_without_rdma(port):
    """The connection falls back to TCP, from the port that the program chose."""
    words = [sys.executable, "-c", ORDINARY, ADDRESS, str(port)]
    with subprocess.Popen(words, env={}, stdout=subprocess.PIPE, text=True) as server, socket.socket() as client:
        server.stdout.readline()
        client.bind((ADDRESS, port + 1))
        client.connect((ADDRESS, port))
        said = server.stdout.readline().strip()
    need(said == str(port + 1), f"it came from {said}")


def edges_by_worker(port):
    """One thread waits, another reads: each piece is told."""
    client, server = pair(port)
    with select.epoll() as epoll:
        epoll.register(server.fileno(), EDGE)
        for turn in range(20):
            client.sendall(b"x" * 100)
            told = epoll.poll(SECONDS)
            need(told, f"piece {turn} was not told")
            reader = threading.Timer(0.01, server.recv, args=(1000,))
            reader.start()
            if turn % 2:
                reader.join()
            else:
                # Blocked while the other reads; what was told may be told again then.
                epoll.poll(0.05)
                reader.join()


def edges_of_two(port):
    client, server = pair(port)
    sets = [select.epoll(), select.epoll()]
    for epoll in sets:
        epoll.register(server.fileno(), EDGE)
    for turn in range(5):
        client.sendall(b"x")
        for which, epoll in enumerate(sets):
            need(epoll.poll(SECONDS), f"set {which} did not hear of piece {turn}")
        server.recv(10)


def turns(port):
    """With room for one event nobody starves, the kernel's descriptors neither."""
    pairs = [pair(port + turn) for turn in range(3)]
    read, write = os.pipe()
    os.write(write, b"x")
    with select.epoll() as epoll:
        for client, server in pairs:
            client.sendall(b"x")
            need(server.recv(1, socket.MSG_PEEK) == b"x", "it did not arrive")
            epoll.register(server.fileno(), select.EPOLLIN)
        epoll.register(read, select.EPOLLIN)
        heard = {epoll.poll(SECONDS, 1)[0][0] for _ in range(20)}
    need(len(heard) == 4, f"heard of {heard}")


def joins_while_others_wait(port):
    """The first rsocket of a set, while threads wait for the kernel's set alone: each hears of it, with room for one event."""
    client, server = pair(port)
    client.sendall(b"x")
    need(server.recv(1, socket.MSG_PEEK) == b"x", "it did not arrive")
    for with_pipe in (False, True):
        read, write = os.pipe()
        epoll = select.epoll()
        if with_pipe:
            epoll.register(read, select.EPOLLIN)
        told = []
        waiters = [threading.Thread(target=lambda: told.append(epoll.poll(SECONDS, 1))) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        time.sleep(0.3)
        epoll.register(server.fileno(), select.EPOLLIN)
        for waiter in waiters:
            waiter.join()
        need(told == [[(server.fileno(), select.EPOLLIN)]] * 3, f"with{'' if with_pipe else 'out'} a pipe: {told}")
        os.write(write, b"x")
        heard = {told[0] for told in (epoll.poll(0, 9) for _ in range(2)) for told in told}
        need(heard == {server.fileno()} | ({read} if with_pipe else set()), f"heard of {heard}")
        with open(f"/proc/self/fdinfo/{epoll.fileno()}") as rows:
            count = sum(row.startswith("tfd:") for row in rows)
        need(count == with_pipe, f"the kernel's set holds {count}")
        epoll.close()
        os.close(read)
        os.close(write)


def forks_of_busy(port):
    client, server = pair(port)
    over = threading.Event()
    epoll = select.epoll()
    epoll.register(server.fileno(), EDGE)

    def spin():
        while not over.is_set():
            epoll.poll(0)

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if child == 0:
                os.close(server.fileno())
                os.close(epoll.fileno())
                os._exit(0)
            until = time.monotonic() + SECONDS
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(child, 9)
                    raise AssertionError("a child waits for a lock of its parent")
                time.sleep(0.001)
    finally:
        over.set()
    works(client, server)


def children_without(port):
    """A child has nothing of its parent's connections unless RDMAV_FORK_SAFE asks for it: clear errors, and no harm."""
    client, server = pair(port)
    with listener(port + 1) as waiting:
        child = os.fork()
        if child == 0:
            told = []
            for call in (lambda: server.recv(1), lambda: server.send(b"x"), waiting.accept, client.getpeername,
                         lambda: client.shutdown(socket.SHUT_RDWR)):
                try:
                    told.append(call())
                except OSError as error:
                    told.append(error.errno)
            os.close(server.fileno())
            os.close(client.fileno())
            os._exit(0 if told == [errno.ENOTCONN] * 5 else 1)
        need(os.waitpid(child, 0)[1] == 0, "a child was told something else than ENOTCONN")
    works(client, server)


def runs_programs(port):
    """A child of vfork closes all that it has, and its parent's connection stays."""
    client, server = pair(port)
    for _ in range(5):
        subprocess.run(["/bin/true"], close_fds=True, check=True, stdin=subprocess.DEVNULL)
    works(client, server)


def closed_by_others(port):
    """The number of a connection that the C library closed is a file's next: it is read, not the connection."""
    for turn, close in enumerate((lambda fd: LIBC.fclose(LIBC.fdopen(fd, b"r")), lambda fd: LIBC.close_range(fd, fd, 0))):
        client, server = pair(port + turn)
        fd = server.detach()
        need(close(fd) == 0, "closing")
        file = os.open("/proc/self/stat", os.O_RDONLY)
        if file != fd:
            os.dup2(file, fd)
        need(os.read(fd, 100).startswith(str(os.getpid()).encode()), "not the file")
        need(client.recv(1) == b"", "the other end did not hear of it")
        os.close(fd)


for number, check in enumerate((addresses_in_use, bound_without_rdma, edges_by_worker, edges_of_two, turns,
                                joins_while_others_wait, forks_of_busy,
                                children_without, runs_programs, closed_by_others)):
    check(6000 + 10 * number)
    print(check.__name__, flush=True)
print("well")
