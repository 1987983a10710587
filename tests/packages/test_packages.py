"""Debian packages and the tarball in a bare root: installed, upgraded, removed and purged; the unit's own promises.

The cases go in this order, in one root: what one leaves, the next one finds. One case of each kind: rpms, the
image, other releases and lintian are in test_formats.py, systemd itself is in test_systemd.py (`make test-packages`).
"""

import json
import re
import shlex

import pytest

import harness
from harness import need, packages
from harness.packages import MACHINE, NEXT, VERSION, deb_names, life
from harness.roots import Root

# Of freeflow.service, in tenths: what `systemd-analyze security` may say at most.
EXPOSURE_TENTHS_MAX = 45
LINKS = {"/usr/bin/freeflow-runtime": "freeflow", "/usr/bin/freeflow-cni": "freeflow",
         "/usr/lib/cni/freeflow-cni": "../../bin/freeflow"}
QUICK = ("--level", "0", "--without-symbols")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Of two versions."""
    output = tmp_path_factory.mktemp("packages")
    packages.make(output, "deb", version=NEXT, options=QUICK)
    return packages.make(output, "deb", "tarball", options=QUICK)


@pytest.fixture(scope="module")
def root():
    with Root() as root:
        yield root


def install(root, made, version):
    return root.run("dpkg", "--install", *root.take(*(made[name] for name in deb_names(version))))


def test_owners_and_modes(made):
    seen = set()
    for name in deb_names(names=(*packages.NAMES, "freeflow-kubernetes")):
        for line in harness.run(["dpkg-deb", "--contents", made[name]]).splitlines():
            mode, owner, _, _, _, path = line.split(None, 5)
            path, _, target = path.partition(" -> ")
            seen.add(path.removeprefix("."))
            need(owner == "root/root", line)
            if mode.startswith("l"):
                need(LINKS.get(path.removeprefix(".")) == target, line)
                continue
            wanted = "drwxr-xr-x" if path.endswith("/") else "-rwxr-xr-x" if re.search(r"/freeflow(-router|-kubernetes)?$", path) and (
                "/bin/" in path or "/lib/freeflow/" in path) else "-rw-r--r--"
            need(mode == wanted, f"{line}: not {wanted}")
    for path in (*LINKS, "/usr/bin/freeflow", "/usr/lib/freeflow/freeflow-router", "/usr/lib/systemd/system/freeflow.service",
                 "/usr/lib/sysusers.d/freeflow.conf", "/usr/lib/tmpfiles.d/freeflow.conf", "/etc/default/freeflow",
                 "/usr/share/man/man1/freeflow.1.gz", "/usr/share/man/man1/freeflow-up.1.gz",
                 "/usr/share/bash-completion/completions/freeflow", "/usr/share/zsh/vendor-completions/_freeflow",
                 "/usr/share/fish/vendor_completions.d/freeflow.fish", "/usr/include/freeflow/verbs.h",
                 *(f"/usr/lib/freeflow/{name}" for name in packages.LIBRARIES)):
        need(path in seen, f"{path} is in no package")


def test_deb_is_installed(root, made):
    install(root, made, VERSION)
    need(root.run("freeflow", "--version").split() == ["freeflow", VERSION], "another version")
    need(not root.file("/etc/systemd/system/multi-user.target.wants/freeflow.service").is_symlink(), "the unit is enabled")
    for group in ("freeflow-admin", "freeflow-viewer"):
        need(f"\n{group}:" in root.file("/etc/group").read_text(), f"no group {group}")
    need(root.file("/var/lib/freeflow").stat().st_mode & 0o7777 == 0o700, "others may read what is declared")


def test_host_lives_on_an_installed_package(root):
    printed = root.script(life("--state /var/lib/freeflow"))
    need("ended well" in printed, printed)
    need(root.file("/var/lib/freeflow/state.redb").is_file(), "nothing is kept over `down`")


def test_deb_is_upgraded(root, made):
    settings = root.file("/etc/default/freeflow")
    settings.write_text(settings.read_text() + "# by the operator\n")
    install(root, made, NEXT)
    status = root.run("dpkg-query", "--show", "--showformat", "${Status} ${Version}\n", "freeflow", "freeflow-libs")
    need(status.splitlines() == [f"install ok installed {NEXT}-1"] * 2, status)
    need("# by the operator" in settings.read_text(), "the operator's settings are gone")
    # The same version again: the libraries and the command go together.
    code = root.run("dpkg", "--install", *root.take(made[deb_names(VERSION, ["freeflow"])[0]]), codes=(0, 1))
    need("depends on freeflow-libs" in code, code)
    install(root, made, NEXT)


SETTINGS = '{"log-driver": "journald", "unknown": [1, 2]}'


def daemon(root, text=None):
    """Docker's settings and a program of its name. What there is, without a text."""
    file = root.file("/etc/docker/daemon.json")
    if text is None:
        return file.read_text() if file.exists() else None
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    program = root.file("/usr/bin/dockerd")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return text


def test_docker_gets_its_runtime_once_and_loses_it(root, made):
    deb = root.take(made[deb_names(NEXT, ["freeflow"])[0]])

    def install_again():
        # With /proc, by which the command finds itself.
        return root.script(f"dpkg --install {deb[0]} 2>&1")

    need(daemon(root) is None, "settings were made for a Docker that is not there")
    daemon(root, "{broken")
    printed = install_again()
    need(daemon(root) == "{broken" and "it is no JSON" in printed, f"{daemon(root)}: {printed}")
    daemon(root, SETTINGS)
    # As where Docker is installed later.
    root.script("dpkg-trigger --by-package=base-files /usr/bin/dockerd\ndpkg --triggers-only --pending")
    settings = json.loads(daemon(root))
    need(settings["runtimes"] == {"freeflow": {"path": "/usr/bin/freeflow-runtime"}}, settings)
    need({**json.loads(SETTINGS), "runtimes": settings["runtimes"]} == settings, "other keys have changed")
    registered = daemon(root)
    # The operator has taken it out.
    daemon(root, SETTINGS)
    install_again()
    need(daemon(root) == SETTINGS, "it was registered again")
    daemon(root, registered)
    root.script("dpkg --remove freeflow")
    need(daemon(root) == SETTINGS, f"left: {daemon(root)}")
    for name in ("/etc/docker/daemon.json", "/usr/bin/dockerd"):
        root.file(name).unlink()
    root.file("/etc/docker").rmdir()
    install_again()


def test_deb_of_kubernetes_stands_alone(root, made):
    root.run("dpkg", "--install", *root.take(made[deb_names(NEXT, ["freeflow-kubernetes"])[0]]))
    need(NEXT.split("+")[0] in root.run("freeflow-kubernetes", "--version"), "another version")
    need("CustomResourceDefinition" in root.run("freeflow-kubernetes", "crds"), "no definitions")
    for name in ("share/man/man1/freeflow-kubernetes.1.gz", "share/man/man1/freeflow-kubernetes-node.1.gz",
                 "share/freeflow/kubernetes/chart/Chart.yaml", "share/freeflow/kubernetes/freeflow.yaml"):
        need(root.file(f"/usr/{name}").is_file(), f"{name} is missing")
    root.run("dpkg", "--purge", "freeflow-kubernetes")
    left = [name for name in root.names() if "kubernetes" in name]
    need(not left, f"left: {left}")


def test_deb_is_removed_with_a_host_that_is_up_and_leaves_state(root):
    # Also hosts of other run directories, of which one has lost its router, and those of a lab; not another installation's.
    printed = root.script("""
freeflow up --state /var/lib/freeflow >/dev/null
freeflow run -d -- sleep 600
freeflow --run-dir /run/other up >/dev/null
freeflow --run-dir /run/crashed up >/dev/null
freeflow lab up --hosts 2 >/dev/null
mkdir -p /opt/mine/bin /opt/mine/lib
cp -R /usr/bin/freeflow /opt/mine/bin
cp -R /usr/lib/freeflow /opt/mine/lib
/opt/mine/bin/freeflow --run-dir /run/mine up >/dev/null
kill -9 "$(cat /run/crashed/router.pid)"
dpkg --remove freeflow
kill -0 "$(cat /run/mine/router.pid)"
for pid in $(pidof freeflow-router); do test "$(readlink /proc/$pid/exe)" = /opt/mine/lib/freeflow/freeflow-router; done
for host in freeflow other crashed freeflow/labs; do test ! -e /run/$host/up.json; done
test -z "$(ls -A /run/freeflow/labs 2>/dev/null)"
/opt/mine/bin/freeflow down --all
if pidof freeflow-router; then exit 1; fi
rm -r /opt/mine
echo removed well
""")
    need("removed well" in printed, printed)
    left = root.names()
    for name in ("etc/default/freeflow", "var/lib/freeflow"):
        need(name in left, f"{name} is gone: {left}")
    need("usr/bin/freeflow" not in left, f"left: {left}")


def test_deb_is_purged(root):
    root.run("dpkg", "--purge", "freeflow", "freeflow-libs")
    left = [name for name in root.names() if "deb-systemd-helper" not in name]
    need(not left, f"left: {left}")


def test_tarball_is_installed_and_uninstalled(root, made):
    harness.run(["tar", "-xzf", made[f"freeflow-{VERSION}-{MACHINE}.tar.gz"], "-C", root.file("/tmp")])
    script = f"/tmp/freeflow-{VERSION}-{MACHINE}/install.sh"
    root.run(script, "--prefix", "/opt/freeflow")
    root.run(script, "--prefix", "/opt/freeflow")
    unit = root.file("/etc/systemd/system/freeflow.service").read_text()
    need("ExecStart=/opt/freeflow/bin/freeflow up " in unit, unit)
    printed = root.script("export PATH=/opt/freeflow/bin:$PATH\n" + life())
    need("ended well" in printed, printed)
    root.run(script, "--uninstall", "--prefix", "/opt/freeflow")
    left = [name for name in root.names() if name != "etc/default/freeflow"]
    need(not left, f"left: {left}")


def test_tarball_that_was_half_installed_is_uninstalled(root):
    script = f"/tmp/freeflow-{VERSION}-{MACHINE}/install.sh"
    printed = root.script(f"""
mount -t tmpfs -o size=24m tmpfs /opt
if {script} --prefix /opt/freeflow; then exit 1; fi
test -s /opt/freeflow/lib/freeflow/installed-files
test -n "$(ls /opt/freeflow/bin)"
{script} --uninstall --prefix /opt/freeflow
test -z "$(ls -A /opt)"
echo undone
""")
    need("is incomplete: run this again, or with --uninstall" in printed and "undone" in printed, printed)


def test_tarball_refuses_where_something_is_missing(root):
    script = f"/tmp/freeflow-{VERSION}-{MACHINE}/install.sh"
    for words, said in ((["--prefix", "relative"], "an absolute path is needed"), (["--frobnicate"], "./install.sh"),
                        (["--uninstall", "--prefix", "/nowhere"], "nothing was installed")):
        printed = root.run(script, *words, codes=(1, 2))
        need(said in printed, f"{words}: {printed}")
    root.run("mv", "/sbin/tc", "/sbin/tc.away")
    try:
        printed = root.run(script, "--prefix", "/opt/freeflow", codes=(1,))
    finally:
        root.run("mv", "/sbin/tc.away", "/sbin/tc")
    need("the program tc is missing" in printed and not root.file("/opt/freeflow").exists(), printed)


def test_unit_is_known_to_systemd_and_confined(root, made, tmp_path):
    install(root, made, VERSION)
    installed = root.file("/usr/lib/systemd/system/freeflow.service").read_text()
    # By this machine's systemd, which does not have the program.
    unit = tmp_path / "freeflow.service"
    unit.write_text(installed.replace("/usr/bin/freeflow ", "/bin/true "))
    printed = harness.run(["systemd-analyze", "verify", "--man=no", unit], codes=(0, 1))
    need("freeflow" not in printed, printed)
    harness.run(["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_TENTHS_MAX}", unit])


def test_completions_know_names(root):
    """Of bash, by the command itself; of a host that is down they are none, and that is no error."""
    words = ("source /usr/share/bash-completion/completions/freeflow; complete -p freeflow; COMP_WORDS=({0}); "
             "COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _freeflow_names freeflow \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; "
             "printf '%s\\n' \"${{COMPREPLY[@]}}\"")
    lines = "".join(f"bash -c {shlex.quote(words.format(typed))}\n" for typed in ("freeflow logs we", "freeflow run --network def"))
    printed = root.script(f"{lines}freeflow up >/dev/null\nfreeflow run --name web -d -- sleep 600\n{lines}freeflow down --force\n")
    need("-F _freeflow_names" in printed, printed)
    need([line for line in printed.splitlines() if line in ("web", "default")][-2:] == ["web", "default"], printed)


def test_completions_know_the_commands(root):
    """Of bash, which is in the root: a word of a subcommand, and an option of it."""
    words = ("source /usr/share/bash-completion/completions/freeflow; COMP_WORDS=({0}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
             "_freeflow freeflow \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"")
    for typed, wanted in (("freeflow netw", "network"), ("freeflow up --foreg", "--foreground"), ("freeflow network l", "ls")):
        printed = root.run("bash", "-c", words.format(typed))
        need(wanted in printed.split(), f"{typed}: {printed}")
    page = harness.run(["zcat", root.file("/usr/share/man/man1/freeflow-up.1.gz")])
    need("\\-\\-foreground" in page, page)
    need(not list((root.file("/usr/share/man/man1")).glob("freeflow-hook*")), "a hidden command has a page")
