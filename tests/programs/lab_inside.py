#!/usr/bin/env python3
"""Parts of tests/control/test_lab.py in containers: ping, TCP, and UDP in every disguise."""

import hashlib
import os
import socket
import struct
import sys
import time

IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
IPV6_DSTOPTS = 59
DONE_PORT = 5001


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff


def ping(address, size="56", seconds="20"):
    """One echo of a packet of this size behind the IP header, never in fragments; 1 where no answer comes in time."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
    payload = bytes(int(size) - 8)
    identifier = os.getpid() & 0xffff
    packet = struct.pack("!BBHHH", 8, 0, 0, identifier, 1) + payload
    packet = packet[:2] + struct.pack("!H", checksum(packet)) + packet[4:]
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        try:
            sock.sendto(packet, (address, 0))
            sock.settimeout(min(0.3, max(0.01, end - time.monotonic())))
            while True:
                answer, (source, _) = sock.recvfrom(65536)
                if source == address and answer[20] == 0 and answer[24:26] == identifier.to_bytes(2, "big"):
                    return 0
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno == 90:  # EMSGSIZE: it can't become better
                print(error)
                return 1
    print("no answer")
    return 1


def tcp_serve(port):
    listener = socket.create_server(("0.0.0.0", int(port)))
    connection, _ = listener.accept()
    digest, count = hashlib.sha256(), 0
    while data := connection.recv(1 << 16):
        digest.update(data)
        count += len(data)
    connection.sendall(f"{count} {digest.hexdigest()}".encode())
    return 0


def tcp_send(address, port, count):
    data = os.urandom(int(count))
    connection = socket.create_connection((address, int(port)), timeout=20)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    answer = b""
    while part := connection.recv(4096):
        answer += part
    return 0 if answer.decode() == f"{len(data)} {hashlib.sha256(data).hexdigest()}" else 1


def listen(*ports):
    """Prints a line `port NUMBER bytes COUNT` for each datagram until one comes to DONE_PORT."""
    sockets = {}
    for port in (*map(int, ports), DONE_PORT):
        sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        sock.setblocking(False)
        sockets[sock] = port
    print("ready", flush=True)
    done = last = False
    while not last:
        last = done  # once more around, after the last one: others were looked at before it
        for sock, port in sockets.items():
            try:
                data, _ = sock.recvfrom(65536)
            except BlockingIOError:
                continue
            done |= port == DONE_PORT
            print(f"port {port} bytes {len(data)}", flush=True)
        time.sleep(0.002)
    return 0


def udp(port, payload):
    return struct.pack("!HHHH", 40000, port, 8 + len(payload), 0) + payload


def ipv4(destination, payload, fragment=0, source="0.0.0.0"):
    header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 0x1234, fragment, 64, 17, 0,
                         socket.inet_aton(source), socket.inet_aton(destination))
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + payload


def raw_ipv4(destination, *packets):
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    for packet in packets:
        sock.sendto(packet, (destination, 0))


def tagged(destination, port, protocols):
    """A frame with VLAN tags (of VLAN 0, which a kernel looks through) to a neighbour that is known already."""
    with open("/proc/net/arp") as table:
        mac = next(line.split()[3] for line in table if line.split()[0] == destination)
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    sock.bind(("ff0", 0))
    own = sock.getsockname()[4]
    tags = b"".join(struct.pack("!HH", protocol, 0) for protocol in protocols)
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    probe.connect((destination, port))
    frame = bytes.fromhex(mac.replace(":", "")) + own + tags + b"\x08\x00"
    sock.send(frame + ipv4(destination, udp(port, b"t" * 30), source=probe.getsockname()[0]))


def send(disguise, destination, port):
    port = int(port)
    if disguise.startswith("ipv6"):
        sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        if disguise == "ipv6-options":
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_DSTOPTS, bytes([0, 0, 1, 4, 0, 0, 0, 0]))
        size = 4000 if disguise == "ipv6-fragments" else 30
        sock.sendto(bytes(size), socket.getaddrinfo(destination, port, socket.AF_INET6)[0][4])
    elif disguise == "tiny-fragments":
        # The first fragment is the UDP header alone; it can't be shorter.
        whole = udp(port, bytes(40))
        raw_ipv4(destination, ipv4(destination, whole[:8], 0x2000), ipv4(destination, whole[8:], 1))
    elif disguise == "spoofed":
        raw_ipv4(destination, ipv4(destination, udp(port, b"s" * 30), source="192.168.240.3"))
    elif disguise == "vlan":
        tagged(destination, port, [0x8100])
    elif disguise == "vlan-in-vlan":
        tagged(destination, port, [0x88a8, 0x8100])
    else:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if "options" in disguise:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"\x01" * 8)
        sock.sendto(bytes(4000 if "fragments" in disguise else 30), (destination, port))
    return 0


if __name__ == "__main__":
    act = {"ping": ping, "tcp-serve": tcp_serve, "tcp-send": tcp_send, "listen": listen, "send": send}[sys.argv[1]]
    sys.exit(act(*sys.argv[2:]))
