"""The promises of test_memory.py on cgroup v2, and the router's own cgroup there, in an emulated guest.

This machine may have cgroup v1 only; the guest of scripts/rxe-guest has what its command mounts. `freeflow up` is
called from a cgroup with limits, as from a session. With FREEFLOW_TEST_WITHOUT_USERFAULTFD=1 the router gets no
userfaultfd, so that pages are charged to it: then the checks of who pays have to fail, which shows that they would.
"""

import os
import re
import sys

import pytest

import harness
from harness import need, rxe_guest
from harness.settings import DIST, TARGET, TESTS

SECONDS = 800
INSIDE = TESTS / "lifecycle" / "memory_v2_inside.py"
CASES = re.findall(r"^def test_(\w+)", INSIDE.read_text(), re.M)
WITHOUT = "FREEFLOW_TEST_WITHOUT_USERFAULTFD"


@pytest.fixture(scope="module")
def verdicts():
    """Of each case, and all that was said: the guest boots once."""
    harness.program("memory")
    settings = {"FREEFLOW_DIST": DIST.resolve(), "CARGO_TARGET_DIR": TARGET.resolve(),
                WITHOUT: os.environ.get(WITHOUT, ""), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = [f"{name}={value}" for name, value in settings.items()]
    pytest_ = [sys.executable, "-m", "pytest", "-v", "--color=no", "--timeout", SECONDS, INSIDE]
    command = [rxe_guest.SCRIPT, "--packages", "--seconds", SECONDS, "--", "env", *environment, *pytest_]
    output = harness.run(command, SECONDS + 60, codes=range(256))
    return dict(re.findall(r"::test_(\w+) ([A-Z]+)", output)), output


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("case", CASES)
def test_on_cgroup_v2(verdicts, case):
    found, output = verdicts
    need(found.get(case) == "PASSED", f"{case}: {found.get(case, 'did not run')}\n{output}")
