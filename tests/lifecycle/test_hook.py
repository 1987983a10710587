"""The CDI device in podman containers: what hook.sh does, a test for each of its functions."""

import pytest

import harness
from harness import scripts
from harness.cases import selected

SCRIPT = scripts.Script("hook.sh")


@pytest.fixture(scope="module")
def verdicts(request):
    harness.require_commands("podman", "runc")
    return SCRIPT.run(selected(request, test_hook))


@pytest.mark.parametrize("case", SCRIPT.names)
def test_hook(verdicts, case):
    verdicts.check(case)
