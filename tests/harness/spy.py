#!/usr/bin/env python3
"""One on the underlay, in the network of a lab's host: looks at each datagram between the hosts, and sends some of them again.

    spy.py watch HEXADECIMAL COUNT      how many of so many datagrams have these bytes in them, and how many are sealed
    spy.py replay HOW COUNT             sends sealed datagrams of this host again: as they were, or spoilt in one place
"""

import socket
import struct
import sys

LINK = "eth0"
ETHERNET_BYTES, IP_BYTES, UDP_BYTES = 14, 20, 8
ROCE_PORT = 4791
SEALED = 0xe0
# More than one datagram that the kernel has yet to cut is no datagram.
SINGLE_BYTES_MAX = 1000
HEAD_BYTES = ETHERNET_BYTES + IP_BYTES + UDP_BYTES
# Where a sealed packet has what: see crates/wire/src/sealed.rs.
SPOILT = {"key": 1, "shard": 4, "counter": 5, "text": 20, "tag": -1}


def datagrams(sock):
    """Ethernet frames with datagrams for a router, and whether they go out of this host."""
    while True:
        frame, address = sock.recvfrom(1 << 17)
        if len(frame) <= HEAD_BYTES or frame[12:14] != b"\x08\x00" or frame[ETHERNET_BYTES + 9] != socket.IPPROTO_UDP:
            continue
        if struct.unpack_from("!H", frame, ETHERNET_BYTES + IP_BYTES + 2)[0] == ROCE_PORT:
            yield frame, address[2] == socket.PACKET_OUTGOING


def watch(sock, text, count):
    found, sealed = 0, 0
    for number, (frame, _) in enumerate(datagrams(sock), 1):
        found += text in frame
        sealed += frame[HEAD_BYTES] == SEALED
        if number == count:
            break
    print(f"{found} of {count} have it, {sealed} are sealed", flush=True)


def replay(sock, how, count):
    for frame, is_own in datagrams(sock):
        if not is_own or len(frame) > SINGLE_BYTES_MAX or frame[HEAD_BYTES] != SEALED:
            continue
        copy = bytearray(frame)
        if how in SPOILT:
            at = SPOILT[how]
            copy[at if at < 0 else HEAD_BYTES + at] ^= 0x40
        copy[ETHERNET_BYTES + IP_BYTES + 6:HEAD_BYTES] = bytes(2)  # no checksum: the kernel had not computed it yet
        sock.send(copy)
        count -= 1
        if count == 0:
            break
    print("sent", flush=True)


def main(what, argument, count):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((LINK, 3))
    sock.settimeout(30)
    print("ready", flush=True)
    if what == "watch":
        watch(sock, bytes.fromhex(argument), int(count))
    else:
        replay(sock, argument, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
