"""The steps of a test that is one story: each is counted and shown, and one that fails does not stop the next."""

import subprocess
import time
import traceback

from harness.failure import Failure, need

# Exceptions of a step that does not hold; any other is a fault of the test.
FAILURES = (Failure, OSError, LookupError, StopIteration, subprocess.SubprocessError)


class Steps:
    def __init__(self):
        self.passed = self.failed = 0
        self.texts = []

    def __call__(self, name, function, *arguments):
        """Whether the function passed; its note is shown."""
        begin = time.monotonic()
        try:
            note = function(*arguments)
        except FAILURES as failure:
            self.failed += 1
            text = str(failure) if isinstance(failure, Failure) else traceback.format_exc()
            self.texts.append(f"FAILED    {name}\n" + "".join(f"    {line}\n" for line in text.splitlines()))
            print(self.texts[-1], flush=True)
            return False
        self.passed += 1
        print(f"ok        {name}  [{time.monotonic() - begin:.1f} s]{'  ' + note if note else ''}", flush=True)
        return True

    def conclude(self):
        """Fails the test if a step failed, or if there was none."""
        __tracebackhide__ = True
        need(self.passed + self.failed, "the test took no step")
        need(not self.failed, f"{self.failed} of {self.passed + self.failed} steps failed:\n" + "".join(self.texts))
