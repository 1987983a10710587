"""FreeFlow's programs on a host whose clock a test steps."""

import shutil
import struct

from harness import settings
from harness.processes import run
from harness.programs import dynamic, make


class SteppedPrograms:
    """Copies of both programs in a directory of their own, by which a host goes: a library gives them CLOCK_REALTIME
    (`tests/programs/stepped_clock.c`), as `step` says. `prefix` runs them with a CLOCK_MONOTONIC that is so many
    seconds ahead, as that of a machine that began to run earlier."""

    def __init__(self, directory, ahead_s):
        programs = directory / "bin"
        programs.mkdir(parents=True)
        (directory / "lib").symlink_to(settings.DIST / "lib")
        library = make(settings.PROGRAMS) / "stepped_clock.so"
        for name in ("freeflow", "freeflow-router"):
            run(["patchelf", "--add-needed", library, shutil.copy(dynamic(name), programs)], 60)
        self.path, self.clock = programs / "freeflow", programs / "clock"
        self.prefix = ("unshare", "--time", "--monotonic", str(ahead_s), "--")
        self.clock.touch()
        self.step(0)

    def step(self, seconds):
        """The clock is so far ahead from now on."""
        with open(self.clock, "r+b", buffering=0) as file:
            file.write(struct.pack("=q", seconds * 10**9))
