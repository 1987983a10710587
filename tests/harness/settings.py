"""How the tests were asked to run: pytest's options, or the FREEFLOW_TEST_* variables, over which options go.

Read them as `settings.SEED`, after `configure`: a name that is imported at the top of the harness has the old value.
"""

import os
import pathlib
import random
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"
PROGRAMS = TESTS / "programs"
DIST = pathlib.Path(os.environ.get("FREEFLOW_DIST", ROOT / "dist"))
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SEED_DEFAULT = "20261121"
PORT = 18515  # perftest's own; each container has its own ports
# The accounting of these programs' memory must go on: see crates/cli/src/cgroup.rs.
os.environ.setdefault("FREEFLOW_CGROUP_KEEP", "memory")
# `python3` is the one that runs the tests: another one may lie where users of less rights don't reach it.
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"

FULL = False
SEED = int(SEED_DEFAULT)
SAMPLE = 1  # one of so many cases runs, where a test has many
# Routers have so many workers, which then copy all that they can; else as a host does by itself.
WORKERS = None
# So many shards, each with the vNICs of some tenants, or over which vNICs are spread.
SHARDS = None
SHARD_BY = "vnic"
DATA_PATH = "auto"
# How routers reach processes: themselves, or by another process.
ATTACHMENT = "local"


def configure(**options):
    """Takes pytest's options (None: not given) over the environment, where programs that tests start see them too."""
    global FULL, SEED, SAMPLE, WORKERS, SHARDS, SHARD_BY, DATA_PATH, ATTACHMENT
    for name, value in options.items():
        if value is not None:
            os.environ[f"FREEFLOW_TEST_{name.upper()}"] = str(value)
    FULL = os.environ.get("FREEFLOW_TEST_FULL") == "1"
    SEED = int(os.environ.get("FREEFLOW_TEST_SEED") or SEED_DEFAULT)
    SAMPLE = int(os.environ.get("FREEFLOW_TEST_SAMPLE") or 1)
    WORKERS = os.environ.get("FREEFLOW_TEST_WORKERS") or None
    SHARDS = os.environ.get("FREEFLOW_TEST_SHARDS") or None
    SHARD_BY = os.environ.get("FREEFLOW_TEST_SHARD_BY") or "vnic"
    DATA_PATH = os.environ.get("FREEFLOW_TEST_DATA_PATH") or "auto"
    if not re.fullmatch(r"auto|routed|switch:\d+", DATA_PATH):
        raise ValueError(f"the data path is {DATA_PATH}: it has to be auto, routed or switch:SEED")
    ATTACHMENT = os.environ.get("FREEFLOW_TEST_ATTACHMENT") or "local"
    if ATTACHMENT not in ("local", "remote"):
        raise ValueError(f"the attachment is {ATTACHMENT}: it has to be local or remote")


def up_options(given=()):
    """Of `freeflow up`, for a host that gets these besides."""
    workers = ("--workers", WORKERS, "--move-bytes-min", "1") if WORKERS and "--workers" not in given else ()
    attachment = ("--attachment", ATTACHMENT) if ATTACHMENT != "local" and "--attachment" not in given else ()
    shards = ("--shards", SHARDS, "--shard-by", SHARD_BY) if SHARDS and "--shards" not in given else ()
    return (*workers, *attachment, *shards, *given)


def sample(names):
    """All of them, or those that the seed chooses; never none."""
    chosen = random.Random(SEED)
    return [name for name in names if chosen.randrange(SAMPLE) == 0] or list(names)[:1]


configure()
