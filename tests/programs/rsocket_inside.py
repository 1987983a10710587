#!/usr/bin/env python3
"""Runs in a container, under the preload library: what programs do with descriptors, threads and children.

  rsocket_inside.py ADDRESS      (the container's own: one thread connects to another)
  rsocket_inside.py ADDRESS tcp  (without the library: says what the kernel's sockets do)
"""

import ctypes
import errno
import fcntl
import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

ADDRESS = sys.argv[1]
BY_TCP = len(sys.argv) > 2
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
        is_tcp = f":{port:04X} " in open("/proc/net/tcp").read()
        need(is_tcp == BY_TCP, f"by TCP is {is_tcp}")
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
    """One thread waits, another reads: each piece is reported."""
    client, server = pair(port)
    with select.epoll() as epoll:
        epoll.register(server.fileno(), EDGE)
        for turn in range(20):
            client.sendall(b"x" * 100)
            reported = epoll.poll(SECONDS)
            need(reported, f"piece {turn} was not reported")
            reader = threading.Timer(0.01, server.recv, args=(1000,))
            reader.start()
            if turn % 2:
                reader.join()
            else:
                # Blocked while the other reads; what was reported may be reported again then.
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
        reported = []
        waiters = [threading.Thread(target=lambda: reported.append(epoll.poll(SECONDS, 1))) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        time.sleep(0.3)
        epoll.register(server.fileno(), select.EPOLLIN)
        for waiter in waiters:
            waiter.join()
        need(reported == [[(server.fileno(), select.EPOLLIN)]] * 3, f"with{'' if with_pipe else 'out'} a pipe: {reported}")
        os.write(write, b"x")
        heard = {reported[0] for reported in (epoll.poll(0, 9) for _ in range(2)) for reported in reported}
        need(heard == {server.fileno()} | ({read} if with_pipe else set()), f"heard of {heard}")
        with open(f"/proc/self/fdinfo/{epoll.fileno()}") as rows:
            count = sum(row.startswith("tfd:") for row in rows)
        need(count == with_pipe, f"the kernel's set holds {count}")
        epoll.close()
        os.close(read)
        os.close(write)


COPIES = (os.dup, lambda fd: os.dup2(fd, os.open("/dev/null", os.O_RDONLY)), lambda fd: fcntl.fcntl(fd, fcntl.F_DUPFD, 100),
          lambda fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))


def copies_of_sets(port):
    """A copy of an epoll descriptor is the same set, made before its first rsocket or after, until the last one is closed."""
    client, server = pair(port)
    client.sendall(b"x")
    need(server.recv(1, socket.MSG_PEEK) == b"x", "it did not arrive")
    there = [(server.fileno(), select.EPOLLIN)]
    for copy, early in itertools.product(COPIES, (True, False)):
        one = select.epoll()
        if not early:
            one.register(server.fileno(), select.EPOLLIN)
        two = select.epoll.fromfd(copy(one.fileno()))
        # By the copy; as threads do that wait already.
        reported = []
        waiter = threading.Thread(target=lambda: reported.append(one.poll(SECONDS, 1)))
        waiter.start()
        if early:
            two.register(server.fileno(), select.EPOLLIN)
        waiter.join()
        need(reported == [there] and two.poll(SECONDS) == there, f"reported {reported}, {two.poll(0)}")
        one.close()
        need(two.poll(SECONDS) == there, "the set went with one of two descriptors")
        two.unregister(server.fileno())
        need(two.poll(0) == [], "notified of what is not there any more")
        two.close()
    waits_for_copies(client, server)


def waits_for_copies(client, server):
    """A thread that waits for the kernel's set alone when it is copied hears of the copy's rsockets."""
    one = select.epoll()
    reported = []
    waiters = [threading.Thread(target=lambda: reported.append(one.poll(SECONDS, 1))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.3)
    two = select.epoll.fromfd(os.dup(one.fileno()))
    two.register(server.fileno(), select.EPOLLIN)
    need(two.poll(SECONDS, 1) == [(server.fileno(), select.EPOLLIN)], "not notified by the copy")
    for waiter in waiters:
        waiter.join()
    need(reported == [[(server.fileno(), select.EPOLLIN)]] * 3, f"reported {reported}")
    one.close()
    two.close()
    need(server.recv(1) == b"x", "it did not stay")
    works(client, server)


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
            reported = []
            for call in (lambda: server.recv(1), lambda: server.send(b"x"), waiting.accept, client.getpeername,
                         lambda: client.shutdown(socket.SHUT_RDWR)):
                try:
                    reported.append(call())
                except OSError as error:
                    reported.append(error.errno)
            os.close(server.fileno())
            os.close(client.fileno())
            os._exit(0 if reported == [errno.ENOTCONN] * 5 else 1)
        need(os.waitpid(child, 0)[1] == 0, "a child got something else than ENOTCONN")
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


def answer(call):
    try:
        return call()
    except OSError as error:
        return error.errno


def polled(which):
    poll = select.poll()
    poll.register(which, select.POLLIN | select.POLLOUT)
    return [events for _, events in poll.poll(0)]


def without_a_peer(port):
    """Poll, and an edge-triggered set that has the socket before it listens."""
    seen = []
    with socket.socket() as waiting, select.epoll() as epoll:
        waiting.bind((ADDRESS, port))
        seen.append(polled(waiting))
        epoll.register(waiting.fileno(), EDGE)
        seen += [[events for _, events in epoll.poll(0)] for _ in range(2)]
        waiting.listen(1)
        seen.append(polled(waiting))
        with socket.socket() as client:
            connecting = threading.Thread(target=client.connect, args=((ADDRESS, port),))
            connecting.start()
            seen.append([events for _, events in epoll.poll(SECONDS)])
            waiting.accept()[0].close()
            connecting.join()
    return seen


def peeked(port):
    client, server = pair(port)
    both = socket.MSG_PEEK | socket.MSG_WAITALL
    client.sendall(b"half")
    seen = [server.recv(1, socket.MSG_PEEK), server.recv(8, both | socket.MSG_DONTWAIT)]
    server.settimeout(None)
    sender = threading.Timer(0.05, client.sendall, args=(b" and half",))
    sender.start()
    seen.append(server.recv(8, both))
    sender.join()
    client.close()
    return [*seen, server.recv(20, both), server.recv(20), server.recv(20, both)]


def shut_and_closed(port):
    client, server = pair(port)
    client.shutdown(socket.SHUT_WR)
    seen = [server.recv(1)]
    server.close()
    return [*seen, client.recv(1), answer(lambda: client.send(b"x"))]


def addressed(port):
    client, server = pair(port)
    to = ("192.0.2.1", 9)
    server.settimeout(None)  # with a time-out Python makes it non-blocking, and MSG_WAITALL waits for nothing
    return [client.sendto(b"one", to), client.sendmsg([b"two"], [], 0, to), server.recv(6, socket.MSG_WAITALL)]


def was_reset(port):
    client, server = pair(port)
    server.sendall(b"words")
    need(client.recv(1, socket.MSG_PEEK), "no word")
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()
    poll = select.poll()
    poll.register(client, 0)
    need(poll.poll(SECONDS * 1000), "nothing is reported")
    seen = [polled(client), client.recv(5)]
    return seen + [client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for _ in range(2)]


def like_tcp(port):
    """Answers of rsockets are those of the kernel's sockets."""
    words = [sys.executable, __file__, ADDRESS, "tcp"]
    by_tcp = subprocess.run(words, env={}, stdout=subprocess.PIPE, text=True, check=True, timeout=3 * SECONDS).stdout
    for number, (look, kernels) in enumerate(zip(LOOKS, by_tcp.splitlines(), strict=True)):
        ours = repr(look(port + number))
        need(ours == kernels, f"{look.__name__}: {ours}, not {kernels}")


LOOKS = (without_a_peer, peeked, shut_and_closed, addressed, was_reset)
if BY_TCP:
    for number, look in enumerate(LOOKS):
        print(look(6990 + number))
    sys.exit()


def is_kernels(port):
    """Whether a TCP socket of the kernel's listens on the port."""
    rows = [row for table in ("tcp", "tcp6") if os.path.exists(f"/proc/net/{table}") for row in open(f"/proc/net/{table}")]
    return any(f":{port:04X} " in row and " 0A " in row for row in rows)


def connect(family, to, port, source=None):
    """Without blocking, as servers' clients do it; with a source that it is bound to first, blocking."""
    made = socket.socket(family)
    if source:
        made.bind((source, 0))
        made.settimeout(SECONDS)
        made.connect((to, port))
        return made
    made.setblocking(False)
    code = made.connect_ex((to, port))
    if code == errno.EINPROGRESS:
        waiting = select.poll()
        waiting.register(made, select.POLLOUT)
        need(waiting.poll(1000 * SECONDS), f"{to} does not answer")
        code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    made.settimeout(SECONDS)
    return made


def ends(family, held, to, port, source=None):
    """Both ends of a connection to a listener, which an rsocket's needs a thread for."""
    with socket.socket(family) as waiting:
        waiting.bind((held, port))
        waiting.listen(4)
        waiting.settimeout(SECONDS)
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(waiting.accept()))
        accepting.start()
        client = connect(family, to, port, source)
        accepting.join()
        [(server, peer)] = accepted
        server.settimeout(SECONDS)
        works(client, server)
        need(peer == server.getpeername() == client.getsockname(), f"{peer}, {server.getpeername()}, {client.getsockname()}")
        need(server.getsockname() == client.getpeername(), f"{server.getsockname()}, {client.getpeername()}")
        return is_kernels(port), client


SIX = [socket.AF_INET6] if os.path.exists("/proc/net/if_inet6") else []


def loopback(port):
    """A socket bound to loopback is an ordinary one, and reaches an rsocket that listens everywhere."""
    four = [(socket.AF_INET, "127.0.0.1", "0.0.0.0"), (socket.AF_INET, "127.1.2.3", "0.0.0.0")]
    six = [(family, address, "::") for family in SIX for address in ("::1", "::ffff:127.0.0.1")]
    for family, address, every in four + six:
        for source in (None, address):
            ordinary, client = ends(family, address, address, port, source)
            need(ordinary, f"{address} is an rsocket's")
            own, peer = client.getsockname()[0], client.getpeername()[0]
            need(peer == address and own == (source or address.replace("127.1.2.3", "127.0.0.1")), f"{own}, {peer}")
            client.close()
            port += 1
        for source in (None, every):
            ordinary, client = ends(family, every, address, port, source)
            need(not ordinary, f"{every} is no rsocket's")
            client.close()
            port += 1
        for blocking in (True, False):
            try:
                connect(family, address, port, every if blocking else None)
                raise AssertionError(f"somebody listens at {address}")
            except ConnectionRefusedError:
                pass


def loopback_is_one(port):
    """A listener there and one of an rsocket's everywhere: each has its own. What was begun as an rsocket stays one."""
    with listener(port, "0.0.0.0"), listener(port, "127.0.0.1") as here:
        client = connect(socket.AF_INET, "127.0.0.1", port)
        here.settimeout(SECONDS)
        works(client, here.accept()[0])
        with pair(port + 1)[0] as connected:
            need(connected.connect_ex(("127.0.0.1", port)) == errno.EISCONN, "it was connected twice")
        with socket.socket() as second:
            need(second.bind(("127.0.0.1", port + 2)) is None, "binding")
            need(second.getsockname() == ("127.0.0.1", port + 2), f"{second.getsockname()}")


def epoll_of_loopback(port):
    """A member of a set from before it was connected is reported by the kernel's set afterwards."""
    with listener(port, "127.0.0.1") as waiting, socket.socket() as client, select.epoll() as epoll:
        client.setblocking(False)
        epoll.register(client.fileno(), select.EPOLLOUT | select.EPOLLET)
        epoll.poll(0)
        need(client.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS), "connecting")
        need(epoll.poll(SECONDS) == [(client.fileno(), select.EPOLLOUT)], "it was not reported")
        waiting.accept()


def names_of_six(port):
    """An end of AF_INET6 has names of AF_INET6, whatever the connection manager calls it."""
    for family in SIX:
        mapped = f"::ffff:{ADDRESS}"
        for held in ("::", mapped):
            ordinary, client = ends(family, held, mapped, port)
            need(not ordinary, f"{held} is no rsocket's")
            need(client.getsockname()[0] == client.getpeername()[0] == mapped, f"{client.getsockname()}, {client.getpeername()}")
            client.close()
            port += 1


def peers_at_once(port):
    """An accepted socket has a peer, also before the other end has heard of it."""
    with listener(port) as waiting:
        for _ in range(20):
            with socket.socket() as client:
                connecting = threading.Thread(target=client.connect, args=((ADDRESS, port),))
                connecting.start()
                server, peer = waiting.accept()
                need(server.getpeername() == peer, f"{peer}")
                connecting.join()
                server.close()


def options(port):
    """An option that has no effect is refused; one that means nothing is read back."""
    with socket.socket() as made:
        tcp, level = socket.IPPROTO_TCP, socket.SOL_SOCKET
        for where, name, off in ((level, socket.SO_REUSEPORT, 0), (level, socket.SO_RCVLOWAT, 1), (tcp, socket.TCP_USER_TIMEOUT, 0)):
            try:
                made.setsockopt(where, name, 100)
                raise AssertionError(f"option {name} was taken")
            except OSError as error:
                need(error.errno == errno.ENOPROTOOPT, f"option {name}: {error}")
            made.setsockopt(where, name, off)
            need(made.getsockopt(where, name) == off, f"option {name} is not off")
        for where, name in ((level, socket.SO_PRIORITY), (tcp, socket.TCP_CORK), (tcp, socket.TCP_QUICKACK),
                            (tcp, socket.TCP_DEFER_ACCEPT), (socket.IPPROTO_IP, socket.IP_TTL)):
            made.setsockopt(where, name, 1)
            need(made.getsockopt(where, name) == 1, f"option {name} reads {made.getsockopt(where, name)}")
        made.bind((ADDRESS, port))
        need(made.getsockname() == (ADDRESS, port), "binding")


for number, check in enumerate((addresses_in_use, bound_without_rdma, edges_by_worker, edges_of_two, turns,
                                joins_while_others_wait, copies_of_sets, forks_of_busy,
                                children_without, runs_programs, closed_by_others, loopback, loopback_is_one, epoll_of_loopback,
                                names_of_six, peers_at_once, options, like_tcp)):
    check(6000 + 50 * number)
    print(check.__name__, flush=True)
print("well")
