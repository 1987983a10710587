"""Certificates and kubeconfig files of a Kubernetes for tests: one authority, and a client's certificate for each program."""

import json

from harness.processes import run

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
DAYS = "2"


class Authority:
    def __init__(self, directory):
        self.directory = directory
        directory.mkdir()
        self.openssl("req", "-x509", "-subj", "/CN=freeflow-test", "-keyout", "ca.key", "-out", "ca.pem", "-days", DAYS, *NEW_KEY)
        # Of tokens of service accounts.
        self.openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", "accounts.key")
        self.openssl("pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")

    def openssl(self, *words):
        run(["env", f"--chdir={self.directory}", "openssl", *words], 30)

    def path(self, name):
        return self.directory / name

    def issue(self, name, subject, addresses=(), names=()):
        """A certificate for both ends of a connection."""
        alternatives = ",".join([f"IP:{address}" for address in addresses] + [f"DNS:{each}" for each in names])
        lines = ["extendedKeyUsage=serverAuth,clientAuth", *([f"subjectAltName={alternatives}"] if alternatives else [])]
        self.path(f"{name}.ext").write_text("\n".join(lines) + "\n")
        self.openssl("req", "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr", *NEW_KEY)
        self.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS,
                     "-extfile", f"{name}.ext", "-out", f"{name}.pem")

    def kubeconfig(self, name, server, token=None):
        """A file by which the client of that name, or who has a token, reaches the API server. JSON is YAML."""
        user = {"token": token} if token else {"client-certificate": str(self.path(f"{name}.pem")),
                                               "client-key": str(self.path(f"{name}.key"))}
        path = self.path(f"{name}.kubeconfig")
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(self.path("ca.pem"))}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}]}))
        path.chmod(0o600)
        return path
