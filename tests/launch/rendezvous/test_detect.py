"""What the environment of each launcher means, and what is refused."""

import json
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.launch.rendezvous.detect import Detected, detect

Variables = dict[str, str]

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "PMIX_NAMESPACE": "1393360897",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",  # of the allocation
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NNODES": "1",
}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "DMLC_PS_ROOT_URI": "here",
    "DMLC_PS_ROOT_PORT": "9000",
}
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def tensorflow(kind: str, index: int) -> Variables:
    return {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            TORCHRUN,
            {
                "launcher": "torchrun",
                "rank": 3,
                "size": 4,
                "local_rank": 1,
                "local_size": 2,
                "node_rank": 1,
                "num_nodes": 2,
                "restart": 2,
                "master": ("here", 29500),
                "has_store": True,
                "key": "torchrun-a7-here-29500-2",
            },
        ),
        (
            OPEN_MPI,
            {"launcher": "Open MPI", "rank": 1, "size": 4, "local_rank": 1, "num_nodes": 1, "job": "1393360897"},
        ),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": "77"}, {"job": "77"}),
        (MPICH, {"launcher": "MPICH", "rank": 1, "size": 2, "local_rank": 1, "master": ("here", 29500)}),
        (
            SLURM,
            {"launcher": "Slurm", "rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "key": "Slurm-7-0-0"},
        ),
        ({**SLURM, "SLURM_RESTART_COUNT": "1"}, {"restart": 1, "key": "Slurm-7-0-1"}),
        (TORCH, {"launcher": "torch.distributed", "rank": 0, "size": 2, "local_rank": None, "has_store": False}),
        (DMLC, {"launcher": "DMLC", "rank": None, "size": 2, "role": "worker", "num_servers": 1}),
        ({**DMLC, "DMLC_WORKER_ID": "1"}, {"rank": 1, "role": "worker"}),
        ({**DMLC, "DMLC_ROLE": "server", "DMLC_SERVER_ID": "0"}, {"rank": 0, "role": "server"}),
        ({**DMLC, "DMLC_ROLE": "scheduler"}, {"rank": None, "role": "scheduler"}),
        (tensorflow("chief", 0), {"launcher": "TF_CONFIG", "rank": 0, "size": 3, "role": "worker", "num_servers": 1}),
        (tensorflow("worker", 1), {"rank": 2, "size": 3, "role": "worker"}),
        (tensorflow("ps", 0), {"rank": 0, "size": 3, "role": "server"}),
    ],
)
def test_each_launcher_is_understood(variables: Variables, expected: dict[str, Any]) -> None:
    found = detect({**variables, "PATH": "/bin"})

    assert isinstance(found, Detected)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, (2, 1, True)),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, (1, 0, False)),
        (OPEN_MPI, (1, 0, False)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, None, True)),
        ({**MPICH, "PMI_SIZE": "4"}, (1, None, True)),
        ({**SLURM, "SLURM_NODEID": "1", "SLURM_NNODES": "2"}, (2, 1, True)),
        (TORCH, (1, None, True)),  # on as many as there may be
        ({**TORCH, "MASTER_ADDR": "localhost"}, (1, 0, False)),
        ({**TORCH, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (1, 0, False)),
        (DMLC, (1, None, True)),
        ({**DMLC, "DMLC_PS_ROOT_URI": "127.0.0.1"}, (1, 0, False)),
        (tensorflow("worker", 0), (4, None, True)),
    ],
)
def test_a_job_may_be_on_several_machines_unless_its_launcher_says_that_it_is_not(
    variables: Variables, expected: tuple[int, int | None, bool]
) -> None:
    found = detect(variables)

    assert found is not None
    assert (found.num_nodes, found.node_rank, found.may_span) == expected


@pytest.mark.parametrize(
    ("outer", "inner", "launcher"),
    [
        (SLURM, TORCHRUN, "torchrun"),
        (OPEN_MPI, TORCHRUN, "torchrun"),
        (SLURM, OPEN_MPI, "Open MPI"),
        (SLURM, MPICH, "MPICH"),
        (SLURM, TORCH, "Slurm"),  # scripts for srun set those of torch for torch's own sake
    ],
)
def test_of_launchers_inside_of_each_other_the_one_that_started_the_script_counts(
    outer: Variables, inner: Variables, launcher: str
) -> None:
    found = detect({**outer, **inner})

    assert found is not None
    assert found.launcher == launcher


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TF_CONFIG": ""},
        {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2"},  # a shell of salloc
        {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # the script of sbatch
        {**SLURM, "SLURM_STEP_ID": str(0xFFFF_FFFA)},  # a shell of salloc as a step of its own
        {**SLURM, "SLURM_PTY_PORT": "37933"},  # `srun --pty bash`
    ],
)
def test_what_is_no_job(variables: Variables) -> None:
    assert detect(variables) is None


@pytest.mark.parametrize("variables", [TORCHRUN, OPEN_MPI, MPICH, SLURM, TORCH, {**DMLC, "DMLC_WORKER_ID": "0"}])
def test_half_a_convention_is_refused_by_the_names_of_what_is_missing(variables: Variables) -> None:
    optional = {name for name in variables if name.startswith(("TORCHELASTIC", "GROUP_WORLD", "DMLC_WORKER_ID"))}
    optional |= {"SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_STEP_ID", "MPI_LOCALNRANKS", "DMLC_ROLE"}
    for name in set(variables) - optional:
        rest = {other: value for other, value in variables.items() if other != name}
        with pytest.raises(UsageError, match=name):
            detect(rest)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**TORCHRUN, "RANK": "4"}, "torchrun says that this is rank 4 of 4 .*RANK, WORLD_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "9"}, "rank 9 of 4 .*OMPI_COMM_WORLD_RANK"),
        ({**SLURM, "SLURM_PROCID": "2"}, "rank 2 of 2 .*SLURM_PROCID"),
        ({**TORCH, "WORLD_SIZE": "0"}, "rank 0 of 0 .*RANK, WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2 .*LOCAL_RANK"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "local rank 1 of 5 on this node, of 4 in all"),
        ({**TORCH, "RANK": "-1"}, "RANK must be a whole number >= 0, got '-1'"),
        ({**TORCH, "MASTER_PORT": "x"}, "MASTER_PORT must be a whole number"),
        ({**DMLC, "DMLC_ROLE": "boss"}, "DMLC_ROLE is 'boss', expected worker, server or scheduler"),
        ({**DMLC, "DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER is 0"),
        ({**DMLC, "DMLC_WORKER_ID": "2"}, "rank 2 of 2 .*DMLC_WORKER_ID"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not the description"),
        ({"TF_CONFIG": '{"cluster": {}}'}, "TF_CONFIG is not the description.*task"),
        (tensorflow("worker", 2), "the task is worker 2, of which the cluster has 2; .* chief, worker, ps"),
        (tensorflow("evaluator", 0), "the task is evaluator 0, of which the cluster has 0"),
    ],
)
def test_contradictions_are_refused_by_the_names_of_the_variables(variables: Variables, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect(variables)


def test_the_order_of_a_cluster_is_no_difference() -> None:
    turned = json.dumps({"task": {"index": 0, "type": "ps"}, "cluster": dict(reversed(CLUSTER.items()))})
    one, other = detect(tensorflow("chief", 0)), detect({"TF_CONFIG": turned})

    assert one is not None
    assert other is not None
    assert one.key == other.key
