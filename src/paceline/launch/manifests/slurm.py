"""A batch script for Slurm: `sbatch FILE`."""

import re
from typing import Final

from paceline.errors import UsageError
from paceline.launch.manifests.job import ManifestJob

PARTITION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*")
GRACE_S: Final = 60  # between being told to leave and the end of the time

SCRIPT: Final = """\
#!/bin/bash
# {summary}; written by `paceline launch --emit slurm`.
# Look at the lines behind "change": they depend on the cluster. Check with `sbatch --test-only`, start with `sbatch`.
{options}

set -eu

# change: make `python` the one that has Paceline, here or in the shell that calls sbatch.

# change: a folder that all nodes see; it keeps the traces of the job.
export PACELINE_RUN_DIR="$SLURM_SUBMIT_DIR/{name}-runs"
export PACELINE_SERVERS={servers}
export OMP_NUM_THREADS={num_cpus}

# Processes that serve beside a worker may use all cores of the job; a worker that dies ends no other.
exec srun --cpus-per-task={num_cpus} --cpu-bind=none --kill-on-bad-exit=0 python {command}
"""


def slurm_script(job: ManifestJob, partition: str | None) -> str:
    """Return the script; raises UsageError for a partition that has no name of one.

    With one node, servers are beside rank 0. With several, as many are beside the first rank of each node where that
    comes out even; else the last ranks are servers, each with cores of its own.
    """
    if partition is not None and not PARTITION.fullmatch(partition):
        raise UsageError(f"--partition is {partition!r}, expected letters, digits and _ . - (or several, by commas)")
    servers = _servers(job)
    return SCRIPT.format(
        summary=job.summary,
        options="\n".join(f"#SBATCH --{option}" for option in _options(job, partition, servers)),
        name=job.name,
        servers=servers,
        num_cpus=job.num_cpus,
        command=job.command,
    )


def _servers(job: ManifestJob) -> str:
    """Return where servers are, as PACELINE_SERVERS takes it."""
    if job.num_nodes == 1:
        return f"first:{job.num_servers}"
    each, left_over = divmod(job.num_servers, job.num_nodes)
    return f"ranks:{job.num_servers}" if left_over else f"node:{each}"


def _options(job: ManifestJob, partition: str | None, servers: str) -> list[str]:
    apart = servers.startswith("ranks")
    options = [
        f"job-name={job.name}",
        f"nodes={job.num_nodes}",
        f"ntasks={job.num_workers + (job.num_servers if apart else 0)}",
        f"cpus-per-task={job.num_cpus}",
        f"time={_clock(job.limit_s)}",
        "output=%x-%j.out",
        "open-mode=append",  # a job that was started again writes on
        "requeue",
        f"signal=TERM@{GRACE_S}",
    ]
    if apart:
        options.append("distribution=cyclic")  # the last ranks, which are servers, come to different nodes
    if job.num_gpus:
        options.append(f"gpus-per-task={job.num_gpus}")
    if partition is not None:
        options.append(f"partition={partition}")
    return options


def _clock(seconds: int) -> str:
    days, rest = divmod(seconds, 24 * 3600)
    time = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{time}" if days else time
