"""The command's life of containers, end to end: what cli.sh does, a test for each of its functions."""

import pytest

import harness
from harness import scripts
from harness.cases import selected

SCRIPT = scripts.Script("cli.sh")


@pytest.fixture(scope="module")
def verdicts(request):
    harness.require_commands("ip", "python3", "setpriv")
    return SCRIPT.run(selected(request, test_cli))


@pytest.mark.parametrize("case", SCRIPT.names)
def test_cli(verdicts, case):
    verdicts.check(case)
