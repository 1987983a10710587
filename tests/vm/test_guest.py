"""The vNIC of a virtual machine, in the machine: see tests/harness/vm_machine.py. The tests run in this order, in one machine."""

import re

import pytest

from harness import in_two_containers, need
from harness.vm_machine import SLOW_SECONDS, Machine

TEXT = "bytes of the guest"
ANSWER = b"bytes of the host"
AT = 1 << 20
PINGPONG = ["ibv_rc_pingpong", "-g", "0", "-n", "100"]
# Reads or writes at an offset of the device by a mapping: DAX devices know no read and write.
MAPPED = "import mmap, os, sys; m = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), {end}); "

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def machine(host):
    machine = Machine(host, "machine")
    machine.boot()
    yield machine
    machine.remove()


def missing(report):
    return [line.split()[1] for line in report.splitlines() if line.startswith("missing")]


def device(machine):
    made = re.fullmatch(r"(/dev/dax\S+) offset (\d+) bytes (\d+)\n", machine.guest("device"))
    need(made, "no device was made")
    return made[1], int(made[2]), int(made[3])


def test_doctor_names_what_is_missing(machine):
    report = machine.guest("doctor", codes=(1,))
    need(missing(report) == ["nfit", "nd_pmem", "device_dax", "dax_pmem", "NVDIMM", "device", "agent"], report)
    need("`modprobe nfit`" in report and "/dev/vport" in report, report)
    machine.load_modules()
    report = machine.guest("doctor", codes=(1,))
    need(missing(report) == ["device", "agent"], report)


def test_bytes_are_seen_from_either_side(machine):
    node, offset, size = device(machine)
    need(device(machine) == (node, offset, size), "a second call makes another device")
    with open(machine.memory, "r+b") as memory:
        machine.exec("python3", "-c", MAPPED.format(end=2 * AT) + f"m[{AT}:{AT + len(TEXT)}] = b'{TEXT}'", node)
        memory.seek(offset + AT)
        need(memory.read(len(TEXT)) == TEXT.encode(), "the host does not see the guest's bytes")
        memory.seek(offset + size - 4096)
        memory.write(ANSWER)
        memory.flush()
    end = f"m[{size - 4096}:{size - 4096 + len(ANSWER)}]"
    output = machine.exec("python3", "-c", MAPPED.format(end=size) + f"print({end})", node)
    need(ANSWER.decode() in output, "the guest does not see the host's bytes: " + output)


def test_programs(machine, container):
    machine.serve()
    need(missing(machine.guest("doctor")) == [], "doctor finds something missing")
    output = machine.exec("ibv_devinfo", "-v")
    need("freeflow0" in output and "PORT_ACTIVE" in output, output)
    for server, client in ((container, machine), (machine, container)):
        output = "".join(in_two_containers(server, client, PINGPONG, [*PINGPONG, "{ip}"], seconds=SLOW_SECONDS))
        need(output.count("iters in") == 2, output)


@pytest.mark.parametrize("how", ("the guest resets", "QEMU is killed"))
def test_the_next_boot_is_served(machine, container, how):
    if how == "QEMU is killed":
        machine.kill()
        machine.boot()
    else:
        machine.reboot()
    machine.load_modules()
    machine.serve()
    output = "".join(in_two_containers(container, machine, PINGPONG, [*PINGPONG, "{ip}"], seconds=SLOW_SECONDS))
    need(output.count("iters in") == 2, output)
    with open(machine.memory, "rb") as memory:
        need(TEXT.encode() not in memory.read(), "bytes of the boot before are left")
