"""A RayJob for KubeRay: `kubectl apply -f FILE`.

The form of the file stands here as text, because people read it and change it; every value in it is quoted as JSON,
which is YAML too, so that none can become a line of its own.
"""

import json
import re
import shlex
from textwrap import indent
from typing import Final

from paceline.errors import UsageError
from paceline.launch.manifests.job import ManifestJob

IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
GIB_PER_PROCESS: Final = 4
RAY_VERSION: Final = "2.52.0"  # the first that knows its users by a token

MANIFEST: Final = """\
# {summary}; written by `paceline launch --emit kuberay`.
# Look at the lines with "change": they depend on the cluster. Start it with `kubectl apply -f`.
# KubeRay 1.5.1 or newer makes a Secret with a token, which all of Ray then asks for.
apiVersion: "ray.io/v1"
kind: "RayJob"
metadata:
  name: {name}
spec:
  entrypoint: {entrypoint}
  activeDeadlineSeconds: {limit_s}
  backoffLimit: 0
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  submitterPodTemplate:
    spec:
      restartPolicy: "Never"
      automountServiceAccountToken: false
      containers:
{submitter}
  rayClusterSpec:
    rayVersion: {ray_version}  # change: that of the image
    authOptions:
      mode: "token"
    headGroupSpec:
      serviceType: "ClusterIP"  # the dashboard cannot be reached from outside of the cluster
      enableIngress: false
      rayStartParams:
        num-cpus: "0"  # no worker and no server beside the head
      template:
        spec:
          automountServiceAccountToken: false
          containers:
{head}
    workerGroupSpecs:
      - groupName: "nodes"
        replicas: {num_nodes}
        minReplicas: {num_nodes}
        maxReplicas: {num_nodes}
        rayStartParams: {{}}
        template:
          spec:
            automountServiceAccountToken: false
            containers:
{node}
"""

CONTAINER: Final = """\
- name: {name}
  image: {image}
  resources:  # change: what its processes need
    requests: {requests}
    limits: {limits}
  securityContext:
    runAsNonRoot: true
    allowPrivilegeEscalation: false
    capabilities:
      drop: ["ALL"]
    seccompProfile:
      type: "RuntimeDefault"
"""


def rayjob(job: ManifestJob, image: str) -> str:
    """Return the manifest; raises UsageError for an image that has no name of one.

    Each node is a pod that has room for its part of the workers and of the servers.
    """
    if not IMAGE.fullmatch(image):
        raise UsageError(f"--image is {image!r}, expected the name of an image such as registry.example/train:1")
    workers, servers = _share(job.num_workers, job.num_nodes), _share(job.num_servers, job.num_nodes)
    return MANIFEST.format(
        summary=job.summary,
        name=json.dumps(job.name),
        entrypoint=json.dumps(_entrypoint(job), ensure_ascii=False),
        limit_s=job.limit_s,
        ray_version=json.dumps(RAY_VERSION),
        num_nodes=job.num_nodes,
        submitter=_container("ray-job-submitter", image, cpus=1, gib=1, margin=6),
        head=_container("ray-head", image, cpus=1, gib=GIB_PER_PROCESS, margin=10),
        node=_container(
            "ray-worker",
            image,
            cpus=workers * job.num_cpus + servers,
            gib=(workers + servers) * GIB_PER_PROCESS,
            gpus=workers * job.num_gpus,
            margin=12,
        ),
    )


def _entrypoint(job: ManifestJob) -> str:
    options = ["--workers", job.num_workers, "--servers", job.num_servers, "--worker-cpus", job.num_cpus]
    if job.num_gpus:
        options += ["--worker-gpus", job.num_gpus]
    run = shlex.join(["paceline", "run", "--engine", "ray", "--address", "auto", *map(str, options)])
    return f"{run} {job.command}"


def _share(count: int, num_nodes: int) -> int:
    """Return how many of `count` a node has at most."""
    return -(-count // num_nodes)


def _container(name: str, image: str, *, cpus: int, gib: int, gpus: int = 0, margin: int) -> str:
    needs = {"cpu": str(cpus), "memory": f"{gib}Gi"}
    if gpus:
        needs["nvidia.com/gpu"] = str(gpus)
    text = CONTAINER.format(
        name=json.dumps(name), image=json.dumps(image), requests=json.dumps(needs), limits=json.dumps(needs)
    )
    return indent(text.rstrip("\n"), " " * margin)
