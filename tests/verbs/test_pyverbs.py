"""rdma-core's pyverbs tests (Debian's python3-pyverbs), unmodified, in one container.

`pyverbs-expected.txt` names the 170 tests that are not for a vendor's device, and what each does here: `ok`, or
`skipped: ` and the test's own reason; where the reason depends on the machine, several with ` | ` in between. No test may
fail; one that begins to pass, or skips for another reason, is reported so that the list is brought up to date (`--update`
writes it again).
"""

import gzip
import json
import pathlib
import shutil

import pytest

import harness
from harness import need
from harness.cases import selected

EXPECTED = pathlib.Path(__file__).resolve().parent / "pyverbs-expected.txt"
SHIPPED = pathlib.Path("/usr/share/doc/rdma-core/tests")
PYTHON = "/usr/bin/python3"
PASSES_MIN = 135
TEST_SECONDS_MAX = 40


def read_expected():
    expected = {}
    for line in EXPECTED.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, outcome = line.partition(" ")
            expected[name] = outcome
    return expected


def as_expected(outcome, wanted):
    return outcome in wanted.split(" | ")


def write_expected(outcomes):
    """A test that did not run stays as it was."""
    head = [line for line in EXPECTED.read_text().splitlines() if line.startswith("#")]
    expected = read_expected()
    rows = [f"{name} {expected[name] if as_expected(outcome, expected[name]) else outcome}"
            for name, outcome in {**expected, **outcomes}.items()]
    EXPECTED.write_text("\n".join(head + rows) + "\n")


def unpack(into):
    """The documentation folder keeps the larger files compressed."""
    tests = into / "tests"
    tests.mkdir(parents=True)
    for source in SHIPPED.iterdir():
        if source.suffix == ".gz":
            (tests / source.stem).write_bytes(gzip.decompress(source.read_bytes()))
        elif source.suffix == ".py":
            shutil.copy(source, tests)
    return into


def outcome_of(report):
    reason = " ".join(report["reason"].split())
    return "ok" if report["outcome"] == "ok" else f"{report['outcome']}: {reason}"


def judge(report, wanted):
    outcome = outcome_of(report)
    need(report["outcome"] in ("ok", "skipped"), f"{outcome}\n{report['detail']}")
    need(outcome != "skipped: ", "skipped without a reason")
    need(as_expected(outcome, wanted), f"is now `{outcome}`, but {EXPECTED.name} says `{wanted}` (--update)")


def run_all(host, names):
    """One report for each test that ran."""
    container = host.container("pyverbs")
    # The container has its own view of the host's files: what it shall read goes in where it can see it.
    inside = pathlib.Path(f"/var/tmp/{host.directory.name}")
    unpack(inside)
    try:
        script = pathlib.Path(__file__).resolve().parent / "pyverbs_inside.py"
        output = container.exec(PYTHON, script, inside, TEST_SECONDS_MAX, *names, seconds=600)
    finally:
        shutil.rmtree(inside, ignore_errors=True)
    reports = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    need(len(reports) == len(names), f"only {len(reports)} of {len(names)} tests reported:\n{output[-3000:]}")
    return {report["name"]: report for report in reports}


@pytest.fixture(scope="module")
def reports(request, host):
    harness.require_commands(str(SHIPPED))
    reports = run_all(host, selected(request, test_pyverbs))
    if request.config.option.update:
        write_expected({name: outcome_of(report) for name, report in reports.items()})
    return reports


@pytest.mark.parametrize("case", list(read_expected()))
def test_pyverbs(reports, case):
    """One that skips itself, for the listed reason, is as expected."""
    need(case in reports, "it did not run")
    judge(reports[case], read_expected()[case])


def test_enough_of_them_pass(reports):
    passes = sum(report["outcome"] == "ok" for report in reports.values())
    if len(reports) == len(read_expected()):  # not where -k chose
        need(passes >= PASSES_MIN, f"only {passes} pass, not {PASSES_MIN}")
