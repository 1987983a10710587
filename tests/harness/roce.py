"""RoCEv2 packets as a third party sees them: a capture on an interface, and the ICRC by the standard's text alone.

Nothing here is shared with the code under test (IBTA volume 1, annex A17: A17.3.3 for the ICRC).
"""

import select
import socket
import struct
import threading
import zlib

PORT = 4791
ETHERNET_BYTES, UDP_BYTES, ICRC_BYTES = 14, 8, 4
ETH_P_ALL, ETH_P_IP, ETH_P_IPV6 = 0x0003, 0x0800, 0x86DD
PACKET_BYTES_MAX = 1 << 16


class Packet:
    """An Ethernet frame with a RoCEv2 packet inside. `frame` begins with the Ethernet header."""

    def __init__(self, frame):
        ip = frame[ETHERNET_BYTES:]
        self.is_ipv6 = ip[0] >> 4 == 6
        self.ip_bytes = 40 if self.is_ipv6 else (ip[0] & 15) * 4
        total = 40 + struct.unpack("!H", ip[4:6])[0] if self.is_ipv6 else struct.unpack("!H", ip[2:4])[0]
        self.bytes = bytes(ip[:total])
        family, place = (socket.AF_INET6, 8) if self.is_ipv6 else (socket.AF_INET, 12)
        size = 16 if self.is_ipv6 else 4
        self.source = socket.inet_ntop(family, ip[place:place + size])
        self.destination = socket.inet_ntop(family, ip[place + size:place + 2 * size])
        self.opcode = self.bytes[self.ip_bytes + UDP_BYTES]

    def icrc_is_good(self):
        packet, at = bytearray(self.bytes), self.ip_bytes
        said = struct.unpack("<I", packet[-ICRC_BYTES:])[0]
        if self.is_ipv6:
            # Traffic class, flow label, hop limit.
            packet[0:4] = bytes([packet[0] | 0x0F, 0xFF, 0xFF, 0xFF])
            packet[7] = 0xFF
        else:
            # Type of service, time to live, checksum.
            packet[1], packet[8] = 0xFF, 0xFF
            packet[10:12] = b"\xff\xff"
        packet[at + 6:at + 8] = b"\xff\xff"  # the UDP checksum
        packet[at + UDP_BYTES + 4] = 0xFF  # BTH: FECN, BECN, reserved
        # In front of it stands an InfiniBand LRH of ones.
        return zlib.crc32(b"\xff" * 8 + bytes(packet[:-ICRC_BYTES])) == said


def roce_of(frame):
    """The packet of a frame; None for other traffic."""
    kind = struct.unpack("!H", frame[12:14])[0]
    ip = frame[ETHERNET_BYTES:]
    if kind == ETH_P_IP and ip[9] == socket.IPPROTO_UDP:
        udp = ip[(ip[0] & 15) * 4:]
    elif kind == ETH_P_IPV6 and ip[6] == socket.IPPROTO_UDP:
        udp = ip[40:]
    else:
        return None
    return Packet(frame) if struct.unpack("!H", udp[2:4])[0] == PORT else None


class Capture:
    """Packets of RoCEv2 on an interface, while in the `with` block, at most so many."""

    def __init__(self, interface, packets_max=20000):
        self.packets, self.packets_max, self.ending = [], packets_max, threading.Event()
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self.socket.bind((interface, ETH_P_ALL))
        self.thread = threading.Thread(target=self.read, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def read(self):
        while True:
            # Once it is to end, what has come until then is still taken.
            ending = self.ending.is_set()
            if not select.select([self.socket], [], [], 0 if ending else 0.1)[0]:
                if ending:
                    return
                continue
            packet = roce_of(self.socket.recv(PACKET_BYTES_MAX))
            if packet and len(self.packets) < self.packets_max:
                self.packets.append(packet)

    def __exit__(self, *_):
        self.ending.set()
        self.thread.join()
        self.socket.close()
