"""The kubelet's interface to container engines (CRI v1, k8s.io/cri-api) without a kubelet: gRPC by curl.

Messages are dictionaries of field numbers. Not here: what pods are made of (engines.Pods).
"""

import pathlib
import re
import subprocess
import tempfile
import urllib.parse

from harness.failure import Failure, need

SERVICE = "http://localhost/runtime.v1.RuntimeService"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
# A gRPC message's prefix: whether it is compressed, and its length.
PREFIX_BYTES = 5


class Refused(Failure):
    """The engine's answer is an error."""


def varint(number):
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def encode(message):
    """Of field numbers to numbers, texts, messages, or lists of these."""
    data = b""
    for field, values in message.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int):
                data += varint(field << 3 | VARINT) + varint(value)
                continue
            content = encode(value) if isinstance(value, dict) else value.encode()
            data += varint(field << 3 | BYTES) + varint(len(content)) + content
    return data


def text_map(entries):
    """A `map<string, string>` field."""
    return [{1: key, 2: value} for key, value in entries.items()]


def read_varint(data, at):
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return number, at


def decode(data):
    """Field numbers to lists of numbers and bytes."""
    message, at = {}, 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
        else:
            length, at = read_varint(data, at) if kind == BYTES else (FIXED_BYTES[kind], at)
            value, at = data[at:at + length], at + length
        message.setdefault(key >> 3, []).append(value)
    return message


def call(socket, method, message, seconds=120):
    """The decoded answer; Refused with the engine's words."""
    content = encode(message)
    with tempfile.TemporaryDirectory(prefix="freeflow-test-cri.") as work:
        headers, body = pathlib.Path(work, "headers"), pathlib.Path(work, "body")
        words = ["curl", "--silent", "--show-error", "--http2-prior-knowledge", "--unix-socket", socket, "--max-time", seconds,
                 "--header", "content-type: application/grpc", "--header", "te: trailers", "--data-binary", "@-",
                 "--dump-header", headers, "--output", body, f"{SERVICE}/{method}"]
        frame = b"\0" + len(content).to_bytes(PREFIX_BYTES - 1, "big") + content
        done = subprocess.run([str(word) for word in words], input=frame, capture_output=True, check=False)
        need(done.returncode == 0, f"{method}: {done.stderr.decode(errors='replace')}")
        # Trailers are dumped with the headers.
        said = dict(re.findall(r"^(grpc-\w+): *(.*?)\r?$", headers.read_text(), re.M))
        if said.get("grpc-status") != "0":
            raise Refused(f"{method}: {urllib.parse.unquote(said.get('grpc-message', 'no answer'))}")
        return decode(body.read_bytes()[PREFIX_BYTES:])
