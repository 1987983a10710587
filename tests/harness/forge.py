#!/usr/bin/env python3
"""Parts of tests/wire/test_wire_hostile.py that run in hosts' networks and in containers: forged RoCEv2 packets.

    wire_forge.py KIND SOURCE DESTINATION QPN RKEY ADDRESS [COUNT]

The whole IP packet is written here, so SOURCE is whatever is wanted; the ICRC is right, but where it shall not be.
"""

import os
import random
import socket
import struct
import sys
import zlib

ROCE_PORT = 4791
# By which routers' packets pass their host's guard; root of a host may set it, too.
SO_MARK, ROUTER_MARK = 36, 0x1062
RC_WRITE_ONLY, UC_WRITE_ONLY, UD_SEND_ONLY, RC_ACKNOWLEDGE, NOTHING_KNOWN = 0x0a, 0x2a, 0x64, 0x11, 0x1f
DEFAULT_PKEY = 0xffff
WRONG_QKEY = 0x5a5a5a5a
MANAGEMENT_QKEY = 0x80010000
PAYLOAD = b"\xee" * 64
# As FreeFlow's routers number their packets; they take no others from each other.
IDENTIFICATION = 1


def bth(opcode, qpn, psn, pkey=DEFAULT_PKEY):
    return struct.pack("!BBHII", opcode, 0x40, pkey, qpn, 0x80000000 | psn & 0xffffff)


def reth(address, rkey):
    return struct.pack("!QII", address, rkey, len(PAYLOAD))


def packet(kind, qpn, rkey, address):
    """Payload of the UDP datagram, without its ICRC."""
    psn = random.getrandbits(24)
    write = reth(address, rkey) + PAYLOAD
    if kind == "management":  # a REQ to the connection manager (IBTA 12.6.5), but for what follows its header
        head = struct.pack("!BBBBHHQHHI", 1, 7, 2, 3, 0, 0, random.getrandbits(64), 0x10, 0, 0)
        return bth(UD_SEND_ONLY, 1, psn) + struct.pack("!II", MANAGEMENT_QKEY, 1) + head + os.urandom(232)
    if kind == "datagram":
        return bth(UD_SEND_ONLY, qpn, psn) + struct.pack("!II", WRONG_QKEY, rkey) + PAYLOAD
    if kind == "acknowledge":
        return bth(RC_ACKNOWLEDGE, qpn, psn) + struct.pack("!I", 0x1f000000)
    if kind == "unreliable":
        return bth(UC_WRITE_ONLY, qpn, psn) + write
    if kind == "unknown-opcode":
        return bth(NOTHING_KNOWN, qpn, psn) + write
    if kind == "pkey":
        return bth(RC_WRITE_ONLY, qpn, psn, 0x1234) + write
    if kind == "short-header":
        return bth(RC_WRITE_ONLY, qpn, psn) + reth(address, rkey)[:7]
    return bth(RC_WRITE_ONLY, qpn, psn) + write


def icrc(head, roce):
    """IBTA 7.8.1, A17.3.3: what routers change counts as ones."""
    masked = bytearray(head + roce)
    for at in (1, 8, 10, 11, 26, 27, 28 + 4):
        if at < len(masked):
            masked[at] = 0xff
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + bytes(masked)))


def datagram(source, destination, roce, spoil=False):
    udp_length = 8 + len(roce) + 4
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + udp_length, IDENTIFICATION, 0x4000, 64, 17, 0,
                       socket.inet_aton(source), socket.inet_aton(destination))
    head += struct.pack("!HHHH", 49152 + random.getrandbits(10), ROCE_PORT, udp_length, 0)
    crc = icrc(head, roce)
    return head + roce + (bytes([crc[0] ^ 1]) + crc[1:] if spoil else crc)


def main(kind, source, destination, qpn, rkey, address, count="20"):
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    sock.setsockopt(socket.SOL_SOCKET, SO_MARK, ROUTER_MARK)
    for _ in range(int(count)):
        if kind == "noise":
            roce = os.urandom(random.randrange(0, 300))
        else:
            roce = packet(kind, int(qpn), int(rkey), int(address))
        try:
            sock.sendto(datagram(source, destination, roce, kind == "bad-icrc"), (destination, 0))
        except PermissionError:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
