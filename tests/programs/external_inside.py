#!/usr/bin/env python3
"""Both ends of the check of contents in tests/interop/test_external.py: every kind of RC message, of awkward sizes, byte by byte.

    external_inside.py GID_INDEX MTU [SERVER]

The server lends its memory and sends hashes of it; the client knows what must be there, and says OK at the end.
"""

import hashlib
import json
import random
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import RecvWR, SGE, SendWR

PORT = 18515
BYTES = 1 << 18
SIZES = [0, 1, 2, 3, 5, 255, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 10001, 65537, 100002]
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
POLL_SECONDS = 30
MTUS = {1024: e.IBV_MTU_1024, 4096: e.IBV_MTU_4096}
# Immediate data given in network byte order comes as the same number (pyverbs converts neither way).
IMMEDIATE = 0x01020304


def contents(name):
    return bytearray(random.Random(name).randbytes(BYTES))


class End:
    def __init__(self, name, gid_index, mtu):
        self.context = Context(name=get_device_list()[0].name.decode())
        self.pd, self.cq = PD(self.context), CQ(self.context, 64)
        self.mr = MR(self.pd, BYTES, ACCESS)
        self.model = contents(name)
        self.mr.write(bytes(self.model), BYTES)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq,
                          cap=QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=2, max_recv_sge=2))
        self.qp = QP(self.pd, init, QPAttr(port_num=1))
        self.psn = random.randrange(1 << 24)
        self.gid_index, self.mtu = gid_index, mtu

    def card(self):
        gid = str(self.context.query_gid(1, self.gid_index))
        return {"gid": gid, "qpn": self.qp.qp_num, "psn": self.psn, "address": self.mr.buf, "rkey": self.mr.rkey}

    def connect(self, card):
        route = GlobalRoute(dgid=GID(card["gid"]), sgid_index=self.gid_index)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        self.qp.to_init(attributes)
        attributes.path_mtu = MTUS[self.mtu]
        attributes.dest_qp_num, attributes.rq_psn = card["qpn"], card["psn"]
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 4
        attributes.min_rnr_timer = 12
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rtr(attributes)
        attributes.sq_psn, attributes.timeout = self.psn, 18
        attributes.retry_cnt = attributes.rnr_retry = 7
        self.qp.to_rts(attributes)
        self.peer = card

    def sges(self, offset, length):
        """In two parts."""
        half = length // 3
        parts = [(offset, half), (offset + half, length - half)] if half else [(offset, length)]
        return [SGE(self.mr.buf + at, size, self.mr.lkey) for at, size in parts]

    def post(self, opcode, offset, length, remote=None, atomic=None):
        sges = self.sges(offset, length) if atomic is None else [SGE(self.mr.buf + offset, 8, self.mr.lkey)]
        request = SendWR(wr_id=1, opcode=opcode, num_sge=len(sges), sg=sges, send_flags=e.IBV_SEND_SIGNALED,
                         imm_data=IMMEDIATE)
        if atomic is not None:
            request.set_wr_atomic(self.peer["rkey"], self.peer["address"] + remote, *atomic)
        elif remote is not None:
            request.set_wr_rdma(self.peer["rkey"], self.peer["address"] + remote)
        self.qp.post_send(request)

    def receive(self, offset, length):
        sges = self.sges(offset, length)
        self.qp.post_recv(RecvWR(wr_id=2, num_sge=len(sges), sg=sges))

    def completion(self):
        end = time.monotonic() + POLL_SECONDS
        while time.monotonic() < end:
            count, found = self.cq.poll(1)
            if count:
                if found[0].status != e.IBV_WC_SUCCESS:
                    sys.exit(f"a completion with status {found[0].status}, vendor error {found[0].vendor_err}")
                return found[0]
            time.sleep(0.0005)  # no spinner beside an emulator
        sys.exit("no completion")

    def digest(self):
        return hashlib.sha256(self.mr.read(BYTES, 0)).hexdigest()


def exchange(lines, message):
    lines.write(json.dumps(message) + "\n")
    lines.flush()
    answer = lines.readline()
    if not answer:
        sys.exit("the other end is gone")
    return json.loads(answer)


def serve(end):
    listener = socket.create_server(("", PORT), family=socket.AF_INET)
    lines = listener.accept()[0].makefile("rw")
    answer = end.card()
    while line := lines.readline():
        order = json.loads(line)
        if "card" in order:
            end.connect(order["card"])
        elif "receive" in order:
            end.receive(*order["receive"])
            answer = {}
        elif "completion" in order:
            found = end.completion()
            answer = {"bytes": found.byte_len, "immediate": found.imm_data if found.wc_flags & e.IBV_WC_WITH_IMM else None}
        elif "hash" in order:
            answer = {"hash": end.digest()}
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


class Client:
    def __init__(self, end, server):
        self.end, self.lines = end, socket.create_connection((server, PORT), timeout=POLL_SECONDS).makefile("rw")
        self.end.connect(exchange(self.lines, {"card": self.end.card()}))
        self.remote = contents("server")

    def check(self, what):
        theirs = exchange(self.lines, {"hash": True})["hash"]
        if theirs != hashlib.sha256(self.remote).hexdigest():
            sys.exit(f"{what}: the server's memory is not as it should be")
        if self.end.digest() != hashlib.sha256(self.end.model).hexdigest():
            sys.exit(f"{what}: the client's memory is not as it should be")

    def write(self, size, at, to, opcode=e.IBV_WR_RDMA_WRITE):
        self.end.post(opcode, at, size, to)
        self.end.completion()
        self.remote[to:to + size] = self.end.model[at:at + size]
        self.check(f"WRITE of {size}")

    def read(self, size, at, to):
        self.end.post(e.IBV_WR_RDMA_READ, to, size, at)
        self.end.completion()
        self.end.model[to:to + size] = self.remote[at:at + size]
        self.check(f"READ of {size}")

    def send(self, size, at, to, opcode):
        exchange(self.lines, {"receive": [to, size]})
        self.end.post(opcode, at, size)
        self.end.completion()
        reported = exchange(self.lines, {"completion": True})
        immediate = IMMEDIATE if opcode == e.IBV_WR_SEND_WITH_IMM else None
        if reported != {"bytes": size, "immediate": immediate}:
            sys.exit(f"SEND of {size}: the server got {reported}")
        self.remote[to:to + size] = self.end.model[at:at + size]
        self.check(f"SEND of {size}")

    def write_with_immediate(self, size, at, to):
        exchange(self.lines, {"receive": [0, 0]})
        self.write(size, at, to, e.IBV_WR_RDMA_WRITE_WITH_IMM)
        reported = exchange(self.lines, {"completion": True})
        if reported != {"bytes": size, "immediate": IMMEDIATE}:
            sys.exit(f"WRITE with immediate of {size}: the server got {reported}")

    def atomics(self, at):
        word = lambda memory, place: int.from_bytes(memory[place:place + 8], sys.byteorder)
        old = word(self.remote, at)
        for opcode, atomic, new in (
            (e.IBV_WR_ATOMIC_FETCH_AND_ADD, (7, 0), (old + 7) % 2**64),
            (e.IBV_WR_ATOMIC_CMP_AND_SWP, ((old + 7) % 2**64, 0x1122334455667788), 0x1122334455667788),
            (e.IBV_WR_ATOMIC_CMP_AND_SWP, (old, 0), 0x1122334455667788),
        ):
            before = word(self.remote, at)
            self.end.post(opcode, 64, 8, at, atomic)
            self.end.completion()
            self.end.model[64:72] = before.to_bytes(8, sys.byteorder)
            self.remote[at:at + 8] = new.to_bytes(8, sys.byteorder)
            self.check(f"atomic {atomic}")

    def burst(self):
        """Many at once, READs among them; in order."""
        for number in range(4):
            at = 20000 * number
            self.end.post(e.IBV_WR_RDMA_WRITE, at + 1, 15001, at + 2)
            self.remote[at + 2:at + 15003] = self.end.model[at + 1:at + 15002]
            self.end.post(e.IBV_WR_RDMA_READ, at + 100003, 15001, at + 3)
            self.end.model[at + 100003:at + 115004] = self.remote[at + 3:at + 15004]
        for _ in range(8):
            self.end.completion()
        self.check("a burst")


def call(end, server):
    client = Client(end, server)
    for number, size in enumerate(SIZES):
        at, to = 4097 + number, 8190 + 3 * number
        client.write(size, at, to)
        client.read(size, to + 1, at + 5)
        client.send(size, at + 2, to + 7, e.IBV_WR_SEND_WITH_IMM if number % 2 else e.IBV_WR_SEND)
        client.write_with_immediate(size, at + 1, to + 3)
    client.atomics(128)
    client.burst()
    print("OK")


def main():
    gid_index, mtu, *server = sys.argv[1:]
    end = End("client" if server else "server", int(gid_index), int(mtu))
    if server:
        call(end, server[0])
    else:
        serve(end)


if __name__ == "__main__":
    main()
