"""Common parts of the end-to-end tests: hosts and labs, containers on them, programs with time limits."""

from harness import paths, settings
from harness.failure import Failure, need, skip_lacking
from harness.host import Container, Host, RunDirectory, end_router, in_two_containers, kill_router, router_of
from harness.lab import Lab, LabHost
from harness.processes import GIVES_UP, Running, again_after, children, descendants, run, steady, waiting
from harness.programs import program, require_commands, require_root
from harness.resources import near_halves_of, router_memory_kib, router_resources, wait_for_resources
from harness.settings import PORT
