"""Records of a failed case: the routers' logs and the programs' output, in a folder of its own."""

import contextlib
import pathlib
import re
import shutil

from harness import processes
from harness.host import Host


def folder_of(directory, case):
    return pathlib.Path(directory) / re.sub(r"[^\w.,=-]+", "_", case.removeprefix("tests/")).strip("_")[:180]


def keep(directory, case):
    """Copies what there is of the hosts that are up, and of the programs that the case started; gives the folder."""
    folder = folder_of(directory, case)
    folder.mkdir(parents=True, exist_ok=True)
    for number, host in enumerate(Host.current, 1):
        for log in host.run_dir.glob("*.log*"):
            with contextlib.suppress(OSError):
                shutil.copy(log, folder / f"host{number}-{log.name}")
    for number, running in enumerate(list(processes.started), 1):
        name = pathlib.Path(running.command[0]).name
        with contextlib.suppress(OSError, ValueError):
            text = f"$ {running.text()}\n{running.output()}\n--- exit code: {running.process.poll()}\n"
            (folder / f"program{number:02}-{name}.txt").write_text(text)
    return folder


def forget():
    """Programs that have ended are no longer of the case that begins."""
    alive = [running for running in processes.started if running.process.poll() is None]
    processes.started.clear()
    processes.started.extend(alive)
