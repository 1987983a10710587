#!/usr/bin/env python3
"""A name server of a Kubernetes for tests: IPv4 addresses of the pods behind a Service, and no other name.

    kube_dns_inside.py ADDRESS DOMAIN KUBECONFIG

It stands in for a cluster's DNS as far as examples need one: `SERVICE.NAMESPACE.svc.DOMAIN` of a headless Service.
"""

import json
import socket
import struct
import subprocess
import sys

A, IN = 1, 1
RESPONSE, NO_SUCH_NAME = 0x8580, 3
TIME_TO_LIVE_S = 1


def question(packet):
    """The name, the type and the bytes of a query's only question."""
    labels, at = [], 12
    while packet[at]:
        labels.append(packet[at + 1:at + 1 + packet[at]].decode().lower())
        at += 1 + packet[at]
    kind, = struct.unpack_from(">H", packet, at + 1)
    return labels, kind, packet[12:at + 5]


def addresses(service, namespace, configuration):
    """Of the pods that are ready behind it; `None`: there is no such Service."""
    words = ["kubectl", "--kubeconfig", configuration, "--namespace", namespace, "get", "endpointslices", "-o", "json",
             "--selector", f"kubernetes.io/service-name={service}"]
    slices = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=30).stdout)["items"]
    if not slices:
        return None
    ends = [end for one in slices for end in one.get("endpoints") or () if end.get("conditions", {}).get("ready")]
    return [address for end in ends for address in end["addresses"]]


def answer(packet, domain, configuration):
    labels, kind, asked = question(packet)
    service, namespace, *rest = [*labels, "", ""]
    found = addresses(service, namespace, configuration) if ".".join(rest[:-2]) == f"svc.{domain}" else None
    rows = found if found and kind == A else []
    header = struct.pack(">2sHHHHH", packet[:2], RESPONSE | (NO_SUCH_NAME if found is None else 0), 1, len(rows), 0, 0)
    # Each names the question by its place in the packet.
    return header + asked + b"".join(
        struct.pack(">HHHIH4s", 0xC00C, A, IN, TIME_TO_LIVE_S, 4, socket.inet_aton(address)) for address in rows)


def main():
    address, domain, configuration = sys.argv[1:]
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, 53))
    while True:
        packet, client = sock.recvfrom(512)
        sock.sendto(answer(packet, domain, configuration), client)


main()
