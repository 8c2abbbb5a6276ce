"""`paceline launch`: writes a batch script or a manifest for another launcher."""

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from paceline.errors import UsageError
from paceline.launch.manifests.job import ManifestJob, name_of, read_limit
from paceline.launch.manifests.kuberay import rayjob
from paceline.launch.manifests.slurm import slurm_script

Target = Literal["slurm", "kuberay"]
START: Final[dict[Target, str]] = {"slurm": "sbatch", "kuberay": "kubectl apply -f"}


def launch(
    script: str,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    emit: Target,
    out: Path | None = None,
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    servers: Annotated[int, Parameter(alias="-m")] = 1,
    nodes: int = 1,
    cpus: int = 1,
    gpus: int = 0,
    time: str = "01:00:00",
    name: str | None = None,
    partition: str | None = None,
    image: str | None = None,
) -> int:
    """Write a batch script for Slurm, or a manifest for Ray on Kubernetes, that runs a script on many machines.

    Options stand before the script; everything after it goes to the script untouched.

    Parameters
    ----------
    script
        The Python script that every worker runs, by the path that it has there; for Slurm also -m and the name of a
        module.
    args
        Its arguments.
    emit
        What to write: a batch script for sbatch, or a RayJob for KubeRay.
    out
        The new file to write to; by default it is printed.
    workers
        Number of worker processes.
    servers
        Number of server processes, which hold the parameters between them.
    nodes
        Number of machines, or of pods.
    cpus
        Cores of each worker.
    gpus
        GPUs of each worker.
    time
        How long it may take, as HH:MM:SS or D-HH:MM:SS.
    name
        Name of the job; by default that of the script.
    partition
        Partition of Slurm.
    image
        Image of every pod, with Ray, torch, Paceline and the script.
    """
    is_module = script == "-m"
    if is_module:
        if not args:
            raise UsageError("-m needs the name of a module: paceline launch --emit slurm -m package.module")
        script, args = args[0], args[1:]
    job = ManifestJob(
        script=script,
        is_module=is_module,
        args=args,
        name=name or name_of(script.rpartition(".")[2] if is_module else script),
        num_workers=workers,
        num_servers=servers,
        num_nodes=nodes,
        num_cpus=cpus,
        num_gpus=gpus,
        limit_s=read_limit(time),
    )
    text = _slurm(job, partition, image) if emit == "slurm" else _kuberay(job, partition, image)
    if out is None:
        _print(text)
        return 0
    _write_new(out, text)
    print(f"paceline: {out} is written; look at it, then start it: {START[emit]} {out}", file=sys.stderr)
    return 0


def _slurm(job: ManifestJob, partition: str | None, image: str | None) -> str:
    if image is not None:
        raise UsageError("--image is for --emit kuberay; Slurm runs the script with the Python that it finds")
    return slurm_script(job, partition)


def _kuberay(job: ManifestJob, partition: str | None, image: str | None) -> str:
    if partition is not None:
        raise UsageError("--partition is for --emit slurm; Kubernetes has none")
    if job.is_module:
        raise UsageError(
            f"-m {job.script} is for --emit slurm; Ray brings scripts to its nodes as files: name one that imports it"
        )
    if image is None:
        raise UsageError(
            "--emit kuberay needs --image: the name of an image with Ray, torch, Paceline and the script in it"
        )
    return rayjob(job, image)


def _print(text: str) -> None:
    """Print a file of commands; raises UsageError where the terminal would change its letters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"standard output, in {sys.stdout.encoding}, lacks letters of the script or its arguments: name a file "
            "with --out"
        ) from error
    sys.stdout.write(text)


def _write_new(path: Path, text: str) -> None:
    created = False
    try:
        with path.open("x", encoding="utf-8") as file:
            created = True
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--out names {path}, which is there already: remove it, or name another file") from None
    except OSError as error:
        if created:
            path.unlink()
        raise UsageError(f"--out names {path}, which cannot be written: {error.strerror}") from error
