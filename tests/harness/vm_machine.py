"""A virtual machine with a vNIC of a host's: QEMU in software emulation, with the arguments that `freeflow vm attach` prints.

The guest agent in it is the real one, on an NVDIMM and a virtio-serial port. Plain IP is QEMU's user network, in the
namespace of a container of its own (`cable`), at whose address forwarded ports of the guest are.
"""

import json
import shlex
import signal
import subprocess

from harness import rxe_guest, settings, vm
from harness.failure import need
from harness.processes import children
from harness.settings import PORT

SIZE = "256M"
MODULES = ("nfit", "nd_pmem", "device_dax", "dax_pmem")
SECONDS = 1200
# A guest in emulation, beside whatever else runs.
SLOW_SECONDS = 240


class Machine(rxe_guest.Guest):
    """`boot` starts QEMU; `serve` makes all ready in the guest."""

    def __init__(self, host, name):
        self.host, self.name = host, name
        self.vnic = json.loads(host.freeflow("vm", "attach", name, "--size", SIZE, "-o", "json"))
        self.memory, self.address = self.vnic["memory"], self.vnic["address"]
        self.cable = host.container(f"{name}-cable")
        self.ip = self.cable.ip

    def boot(self):
        words = ["--seconds", SECONDS, "--reboot", "--forward", PORT, "--vnic", shlex.join(self.vnic["qemu"])]
        self.begin(words, ["nsenter", "--net", f"--target={self.cable.pid}", "--"])
        self.wait_until_up()

    def wait_until_up(self):
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.ended, SLOW_SECONDS)
        need(self.ready and not self.ended, "the machine does not come up:\n" + "".join(self.said))

    def guest(self, *words, codes=(0,)):
        return super().exec(vm.agent_path(), *words, seconds=SLOW_SECONDS, codes=codes)

    def load_modules(self):
        super().exec("modprobe", "-a", *MODULES, seconds=SLOW_SECONDS)

    def serve(self):
        self.agent = super().start(vm.agent_path())
        self.agent.wait_for_output("serving /run/freeflow/router.sock", SLOW_SECONDS)

    # With our libraries, and as a container.

    def start(self, *command):
        return super().start("env", f"LD_LIBRARY_PATH={settings.DIST / 'lib'}", *command)

    def exec(self, *command, seconds=SLOW_SECONDS, codes=(0,)):
        return super().exec(*command, seconds=max(seconds, SLOW_SECONDS), codes=codes)

    def wait_for_port(self, running, port=PORT, seconds=SLOW_SECONDS):
        super().wait_for_port(running, port, seconds)

    def reboot(self):
        """The guest's own reset, without an orderly end of anything; QEMU goes on."""
        super().start("sh", "-c", "echo b >/proc/sysrq-trigger")
        with self.changed:
            self.ready = False
        self.wait_until_up()
        with self.changed:
            self.programs.clear()
            self.background.clear()

    def kill(self):
        """Kills QEMU, which is the last child of what was started."""
        for pid in children(self.process.pid):
            subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(pid)], check=True)
        self.process.wait(30)
        self.listener.join(30)

    def remove(self):
        if self.process.poll() is None:
            self.end()
        self.host.freeflow("vm", "detach", self.name)
        self.cable.remove()
