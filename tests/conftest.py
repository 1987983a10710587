"""pytest's side of the harness: options, fixtures, what is kept of a failed case, and that nothing stays behind.

A test takes hosts, labs and containers as fixtures, which live as long as its file runs. One that would
disturb the others makes its own by `Host` or `Lab`. The last line says the totals for
`scripts/test-stages`; a skipped test is a failure, unless the kernel or the machine lacks something
(`harness.skip_lacking`).
"""

import contextlib
import os
import signal
import time

import pytest

from harness import Host, Lab, RunDirectory, logs, places, require_root, router_resources, settings
from harness.failure import LACKING, Failure
from harness.programs import make
from harness.steps import Steps

OPTIONS = ("data_path", "workers", "attachment", "sample", "seed", "full")
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
FULL_SECONDS = 3600  # of a test with --full; pytest.ini has the usual time
totals = {"passed": 0, "failed": 0, "skipped": 0, "steps": 0}
lacking = []


def pytest_addoption(parser):
    group = parser.getgroup("freeflow", "FreeFlow")
    group.addoption("--data-path", metavar="PATH", help="auto, routed, or switch:SEED (changes at random)")
    group.addoption("--workers", metavar="N", type=int, help="workers of each router, which copy all that they can")
    group.addoption("--attachment", metavar="KIND", help="how routers reach processes: local, or remote (by another process)")
    group.addoption("--sample", metavar="N", type=int, help="run one of N cases of the large matrices")
    group.addoption("--seed", metavar="N", type=int, help="the seed of all that is random")
    group.addoption("--full", action="store_const", const=1, help="longer runs of what is random")
    group.addoption("--update", action="store_true", help="write recorded expectations to what is now")
    group.addoption("--logs", metavar="DIR", help="where logs of failed cases go (default: under the target directory)")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config):
    try:
        settings.configure(**{name: config.getoption(name) for name in OPTIONS})
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if settings.FULL and config.option.timeout is None:
        config.option.timeout = FULL_SECONDS
    if not config.option.logs:
        config.option.logs = settings.TARGET / "test-logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for number in SIGNALS:
        signal.signal(number, end_in_order)


def end_in_order(number, _):
    """As on Ctrl-C: the fixtures tidy up. Once: another signal would break that off."""
    for each in (*SIGNALS, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    pytest.exit(f"ended by signal {number}", returncode=128 + number)


def pytest_report_header():
    workers, shards = settings.WORKERS or "as usual", settings.SHARDS or "as usual"
    return (f"freeflow: seed {settings.SEED}, data path {settings.DATA_PATH}, workers {workers}, shards {shards}, "
            f"attachment {settings.ATTACHMENT}, "
            f"sample 1 of {settings.SAMPLE}{', full' if settings.FULL else ''}")


@pytest.hookimpl(trylast=True)  # after -k and its like
def pytest_collection_modifyitems(config, items):
    """Leaves out what is only for the usual workers, data path or attachment. Of each test that is `sampled` as many
    cases run as the seed chooses; never none."""
    unusual = {"usual_workers": settings.WORKERS, "usual_path": settings.DATA_PATH != "auto",
               "usual_shards": settings.SHARDS, "usual_attachment": settings.ATTACHMENT != "local"}
    left = [item for item in items if any(value and item.get_closest_marker(name) for name, value in unusual.items())]
    tests = {}
    for item in items:
        if item not in left and item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = set(settings.sample(cases))
        left += [item for item in cases if item not in kept]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_runtestloop(session):
    """The C programs are built now, so that no test's time goes into it; a test whose program is missing says why."""
    if not session.config.option.collectonly:
        with contextlib.suppress(Failure):
            make(settings.PROGRAMS)


# ---- a case


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    logs.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test with steps fails at its end if one of them did."""
    if "check" not in pyfuncitem.fixturenames:
        return None
    steps = pyfuncitem.funcargs["check"]
    try:
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        steps.conclude()
    finally:
        totals["steps"] += steps.passed + steps.failed
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.failed:
        folder = logs.keep(item.config.option.logs, item.nodeid)
        report.sections.append(("kept of this case", str(folder)))


def pytest_runtest_logreport(report):
    if report.skipped and LACKING in str(report.longrepr):
        lacking.append(report.nodeid)
    if report.when == "call" or not report.passed:
        totals[report.outcome] += 1


# ---- the end


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    for host in list(Host.current):
        host.close()
    if totals["skipped"] > len(lacking) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if totals["failed"]:
        terminalreporter.write_line(f"logs of failed cases: {config.option.logs} (seed {settings.SEED})")
    if totals["skipped"] > len(lacking):
        terminalreporter.write_line("a skipped test is a failure: scripts/install-deps installs what the tests need")


def pytest_unconfigure(config):
    if not config.option.collectonly and not hasattr(config, "workerinput"):
        steps = f" ({totals['steps']} steps)" if totals["steps"] else ""
        print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals) + steps, flush=True)


# ---- fixtures


@pytest.fixture(scope="module", autouse=True)
def listed_system_calls_only():
    """The routers' threads make only system calls of their lists (crates/router/src/base/system_calls.rs)."""
    require_root()
    RunDirectory.refused_calls.clear()
    yield
    refused = sorted(RunDirectory.refused_calls)
    assert not refused, "\n".join(refused)


@pytest.fixture
def check():
    """For a test that is one story: `check(name, function, *arguments)` is a step of it."""
    return Steps()


@pytest.fixture(scope="module")
def host():
    """A host for all tests of a file."""
    with Host() as host:
        yield host


@pytest.fixture(scope="module")
def pair(host):
    """Two containers of the host, `one` and `two`."""
    return host.pair()


@pytest.fixture(scope="module")
def server(pair):
    return pair[0]


@pytest.fixture(scope="module")
def client(pair):
    return pair[1]


@pytest.fixture(scope="module")
def container(host):
    """A single container, where no pair is needed."""
    return host.container("one")


@pytest.fixture(scope="module")
def held(host):
    """The router's holdings before the tests that come after it: at the end `wait_for_resources` wants them back."""
    return router_resources(host)


@pytest.fixture(scope="module")
def lab():
    """Two hosts that are connected, with an MTU that carries RoCE's largest."""
    with Lab(2, 4200) as lab:
        lab.wait_for_peers()
        yield lab


@pytest.fixture(scope="module", params=places.ONE_OR_TWO)
def ends(request):
    """A server, a client and a third container, on one host and then on two."""
    with places.ends(request.param) as ends:
        yield ends
