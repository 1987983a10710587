"""etcd with TLS, and rights by the names in certificates: a member in each host of a lab."""

import json
import os
import shutil
import signal
import subprocess
import time

from harness.failure import need
from harness.processes import run

CLIENT_PORT, PEER_PORT = 2379, 2380
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Etcd:
    """A cluster of etcd's; `file(user)` is the cluster file of a user. Without users its certificates, and the files of
    the operator and of controllers, are those of `freeflow cluster authority`."""

    def __init__(self, lab, directory, users=None, options=(), is_made=False, election_ms=2000, more=()):
        self.lab, self.directory, self.election_ms, self.more = lab, directory, election_ms, more
        self.addresses = [row["address"] for row in lab.status()["hosts"]]
        self.members = {}
        self.has_own_server_files = users is None
        try:
            if is_made:
                pass
            elif self.has_own_server_files:
                words = ["cluster", "authority", directory, "--etcd", ",".join(self.addresses), *options]
                self.flags = run([lab.host(1).freeflow_path, *words], 20)
            else:
                directory.mkdir()
                self.make_certificates(["server", "root", *users])
            for number in range(1, len(self.addresses) + 1):
                self.start(number)
        except BaseException:
            self.close()
            raise

    def make_certificates(self, names):
        def openssl(*words):
            run(["env", f"--chdir={self.directory}", "openssl", *words], 20)

        for name in ("ca", "peer-ca"):
            openssl("req", "-x509", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", *NEW_KEY)
        addresses = ",".join(f"IP:{address}" for address in self.addresses)
        (self.directory / "server.ext").write_text(f"subjectAltName={addresses}\nextendedKeyUsage=serverAuth,clientAuth\n")
        (self.directory / "user.ext").write_text("extendedKeyUsage=clientAuth\n")
        for name in ("server-peer", *names):
            authority, kind = ("peer-ca" if name == "server-peer" else "ca"), ("server" if name.startswith("server") else "user")
            openssl("req", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr", *NEW_KEY)
            openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                    "-CAcreateserial", "-days", "2", "-extfile", f"{kind}.ext", "-out", f"{name}.pem")

    def url(self, number):
        return f"https://{self.addresses[number - 1]}:{CLIENT_PORT}"

    def urls(self):
        return [self.url(number) for number in range(1, len(self.addresses) + 1)]

    def start(self, number):
        """Starts a member, with what it had."""
        address = self.addresses[number - 1]
        all_members = ",".join(f"m{i}=https://{other}:{PEER_PORT}" for i, other in enumerate(self.addresses, 1))
        words = ["etcd", "--name", f"m{number}", "--data-dir", f"m{number}", "--initial-cluster", all_members,
                 "--initial-cluster-state", "new", *self.more,
                 "--heartbeat-interval", str(self.election_ms // 10), "--election-timeout", str(self.election_ms)]
        server = f"etcd-{address}" if self.has_own_server_files else "server"
        for side, pair, port in (("", server, CLIENT_PORT), ("peer-", f"{server}-peer", PEER_PORT)):
            # Whoever has a certificate that members take from each other is etcd's root.
            words += [f"--{side}cert-file", f"{pair}.pem", f"--{side}key-file", f"{pair}.key", f"--{side}trusted-ca-file", f"{side}ca.pem",
                      f"--{side}client-cert-auth"]
            words += [f"--listen-{side or 'client-'}urls", f"https://{address}:{port}"]
            words += ["--initial-advertise-peer-urls" if side else "--advertise-client-urls", f"https://{address}:{port}"]
        with open(self.directory / f"m{number}.log", "ab") as log:
            self.members[number] = subprocess.Popen(
                self.lab.host(number).enter(*words), cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)

    def kill(self, number):
        member = self.members.pop(number, None)
        if member:
            os.killpg(member.pid, signal.SIGKILL)
            member.wait(20)

    def forget(self, number):
        """Of a member that was killed: it begins with nothing."""
        shutil.rmtree(self.directory / f"m{number}")

    def keep(self):
        """Backs up what all members have, with etcd's own order of files: none of them runs meanwhile."""
        for number in list(self.members):
            self.kill(number)
        for number in range(1, len(self.addresses) + 1):
            shutil.copytree(self.directory / f"m{number}", self.directory / f"kept{number}")
            self.start(number)
        self.wait_until_healthy()

    def restore(self):
        for number in list(self.members):
            self.kill(number)
        for number in range(1, len(self.addresses) + 1):
            self.forget(number)
            (self.directory / f"kept{number}").rename(self.directory / f"m{number}")
            self.start(number)

    def leader(self):
        rows = json.loads(self.ctl("endpoint", "status", "-w", "json"))
        leaders = [number for number, row in enumerate(rows, 1) if row["Status"]["leader"] == row["Status"]["header"]["member_id"]]
        need(leaders, f"etcd has no leader: {rows}")
        return leaders[0]

    def ctl(self, *words, seconds=20, at=1):
        command = ["etcdctl", "--endpoints", ",".join(self.urls()), "--cacert", "ca.pem", "--cert", "root.pem", "--key", "root.key", *words]
        words = self.lab.host(at).enter("env", f"--chdir={self.directory}", "ETCDCTL_API=3", *command)
        return run(words, seconds)

    def wait_until_healthy(self, seconds=60):
        end = time.monotonic() + seconds
        while True:
            try:
                return self.ctl("put", "/test/healthy", "yes")
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def give_rights(self, operator, hosts, controllers):
        """As docs/CLUSTER.md has them."""
        lines = ["user add root --no-password", "role add root", "user grant-role root root",
                 f"role add {operator}", f"role grant-permission {operator} readwrite --prefix /freeflow/"]
        for host in hosts:
            lines += [f"role add {host}", f"role grant-permission {host} read --prefix /freeflow/"]
            lines += [f"role grant-permission {host} readwrite --prefix /freeflow/{part}/{host}/" for part in ("hosts", "said", "vnics")]
            if host in controllers:
                lines += [f"role grant-permission {host} readwrite --prefix /freeflow/{part}/" for part in ("blocks", "places")]
        for user in (operator, *hosts):
            lines += [f"user add {user} --no-password", f"user grant-role {user} {user}"]
        for line in (*lines, "auth enable"):
            self.ctl(*line.split())

    def file(self, user, **fields):
        path = self.directory / f"{user}.json"
        path.write_text(json.dumps({"etcd": self.urls(), "cacert": "ca.pem", "cert": f"{user}.pem", "key": f"{user}.key", **fields}))
        return path

    def close(self):
        for number in list(self.members):
            self.kill(number)
        shutil.rmtree(self.directory, ignore_errors=True)
