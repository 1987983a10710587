"""FreeFlow's own part of a Kubernetes for tests: its manifests, and an image with its programs."""

import json
import shutil

import yaml

from harness import made_images, settings
from harness.engines import wait_until
from harness.failure import need
from harness.processes import run

DEPLOY = settings.ROOT / "deploy" / "kubernetes"
CRDS = DEPLOY / "chart" / "crds" / "freeflow.yaml"
NAMESPACE = "freeflow-system"
LISTED = "listed"
IMAGE = ("example.org/freeflow", "test")
# Values of the chart by which all of it comes, and by which little does.
EVERYTHING = ("router.inPod=true", "controller.clusterSecret=freeflow-operator", "controller.replicas=2",
              "rbac.tenantsMakeNetworks=true", "node.nodeSelector={rdma: 'yes'}", "image.pullSecrets=[{name: registry}]",
              "node.options=[--no-dra, --shared-network, listed]", "image.tag=next", "controller.tolerations=[{operator: Exists}]",
              "node.resources={limits: {memory: 256Mi}}")
NOTHING = ("controller.enabled=false", "deviceClass.enabled=false")
PROGRAMS = ("freeflow", "freeflow-router", "freeflow-kubernetes")


def manifests(kubernetes, *values):
    """A file of what the chart gives with these values besides the image's."""
    repository, tag = IMAGE
    given = [f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never", *values]
    path = kubernetes.directory / "freeflow.yaml"
    path.write_text(run(["/usr/bin/python3", settings.ROOT / "scripts" / "render-manifests", "--print", *given]))
    return path


def documents(path):
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def import_image(node):
    """As `make packages` lays it out, of the programs in dist/, and with this machine's programs for the router."""
    missing = [name for name in PROGRAMS if not (settings.DIST / "bin" / name).exists()]
    need(not missing, f"not built in {settings.DIST}: {missing}: run `make`")
    root = made_images.make_root(node.directory / "freeflow", "sh", "tc")
    shutil.copytree(settings.DIST / "lib", root / "usr/lib/freeflow")
    for name in PROGRAMS:
        folder = "usr/lib/freeflow" if name == "freeflow-router" else "usr/bin"
        made_images.add_program(root, settings.DIST / "bin" / name, f"{folder}/{name}")
    node.import_image(":".join(IMAGE), root, {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]})


def wait_for_crds(kubernetes):
    names = [each["metadata"]["name"] for each in documents(CRDS)]
    kubernetes.kubectl("wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in names))


def install_once(kubernetes):
    """On the node's own router, with a network that the administrator lists for device plugins."""
    if kubernetes.has_freeflow:
        return
    file = kubernetes.directory / "listed.json"
    spec = {"cidrs": ["10.52.0.0/24"]}
    file.write_text(json.dumps({"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": LISTED}, "spec": spec}))
    kubernetes.node.host.freeflow("apply", "-f", file)
    options = ["--shared-network", "default", "--shared-network", LISTED]
    install(kubernetes, f"node.command={settings.DIST}/bin/freeflow", f"node.options={json.dumps(options)}")
    kubernetes.has_freeflow = True


def install(kubernetes, *values):
    """The chart; returns when all pods of it are ready."""
    apply_chart(kubernetes, *values)
    wait_until_ready(kubernetes)


def apply_chart(kubernetes, *values):
    """The definitions, then the chart's objects."""
    for node in kubernetes.nodes:
        import_image(node)
    kubernetes.kubectl("apply", "-f", CRDS)
    wait_for_crds(kubernetes)
    kubernetes.kubectl("create", "namespace", NAMESPACE, codes=(0, 1))
    kubernetes.kubectl("apply", "-f", manifests(kubernetes, *values))


def logs(kubernetes):
    """Of FreeFlow's pods: their logs and events."""
    names = [row["metadata"]["name"] for row in kubernetes.get("pods", namespace=NAMESPACE)]
    return "\n".join(f"--- {name}\n{kubernetes.describe_pod(name, NAMESPACE)}\n"
                     f"{kubernetes.logs(name, NAMESPACE, ['--all-containers', '--tail=20'])}" for name in names)


def wait_for_controller(kubernetes, seconds=120):
    def is_ready():
        row = kubernetes.get("deployment", "freeflow-controller", NAMESPACE)
        return row["status"].get("readyReplicas") == row["spec"]["replicas"]
    wait_until(is_ready, lambda: f"the controller is ready:\n{logs(kubernetes)}", seconds)


def wait_until_ready(kubernetes, seconds=120):
    wait_for_controller(kubernetes)

    def are_ready():
        status, wanted = kubernetes.get("daemonset", "freeflow-node", NAMESPACE)["status"], len(kubernetes.nodes)
        return status.get("numberReady") == wanted and status.get("updatedNumberScheduled") == wanted
    wait_until(are_ready, lambda: f"the agents are ready:\n{logs(kubernetes)}", seconds)
    wait_until(lambda: len({row["spec"]["nodeName"] for row in slices(kubernetes)}) == len(kubernetes.nodes),
               lambda: f"the nodes offer vNICs:\n{logs(kubernetes)}", seconds)


def declared(kind, name, namespace=None, **spec):
    """An object of FreeFlow's."""
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": "freeflow.io/v1alpha1", "kind": kind, "metadata": {"name": name, **where}, "spec": spec}


def slices(kubernetes):
    return [row for row in kubernetes.get("resourceslices", namespace=None) if row["spec"]["driver"] == "freeflow.io"]


def condition(kubernetes, kind, name, wanted, namespace="default"):
    """A condition of an object of FreeFlow's, or nothing."""
    rows = kubernetes.get(f"{kind}.freeflow.io", name, namespace).get("status", {}).get("conditions", [])
    return next((row for row in rows if row["type"] == wanted), {})


def wait_for_condition(kubernetes, kind, name, wanted, status="True", namespace="default"):
    """Its message."""
    wait_until(lambda: condition(kubernetes, kind, name, wanted, namespace).get("status") == status,
               lambda: f"{kind} {name} is {wanted}: {kubernetes.get(f'{kind}.freeflow.io', name, namespace)}\n{logs(kubernetes)}")
    return condition(kubernetes, kind, name, wanted, namespace)["message"]
