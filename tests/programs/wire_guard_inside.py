#!/usr/bin/env python3
"""Parts of tests/wire/test_wire_guard.py in hosts' networks: datagrams by plain sockets, and who hears them.

    wire_guard_inside.py send HOW DESTINATION PORT COUNT    prints `sent N refused N`
    wire_guard_inside.py hear ADDRESS PORT...               prints `ready`, then `PORT BYTES` for each datagram
"""

import selectors
import socket
import sys

SO_MARK, IPV6_FREEBIND = 36, 78
MARK = 0x1062
LARGE_BYTES = 20000


def send(how, destination, port, count):
    family, _, _, _, address = socket.getaddrinfo(destination, int(port), type=socket.SOCK_DGRAM)[0]
    sock = socket.socket(family, socket.SOCK_DGRAM)
    if how.startswith("from="):
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind((how[5:], 0))
    if how == "marked":
        sock.setsockopt(socket.SOL_SOCKET, SO_MARK, MARK)
    if how == "connected":
        sock.connect(address)
    if how == "segmented":
        sock.setsockopt(17, 103, 500)  # UDP_SEGMENT
    payload = b"x" * (LARGE_BYTES if how in ("large", "segmented") else 40)
    sent = refused = 0
    for _ in range(int(count)):
        try:
            if how == "connected":
                sock.send(payload)
            else:
                sock.sendto(payload, address)
            sent += 1
        except PermissionError:
            refused += 1
    print(f"sent {sent} refused {refused}")


def hear(address, *ports):
    selector = selectors.DefaultSelector()
    for port in ports:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        if ":" in address:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, int(port)))
        selector.register(sock, selectors.EVENT_READ, port)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            print(f"port {key.data} {len(key.fileobj.recv(65536))}", flush=True)


if __name__ == "__main__":
    {"send": send, "hear": hear}[sys.argv[1]](*sys.argv[2:])
