"""Several servers clip an update by one norm, to which each has a part, also where they are killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.nodes.cluster import open_table, read_values, table
from tests.nodes.test_checks_in_updates import Kill
from tests.nodes.test_faults import NUM_WORKERS
from tests.nodes.test_replicas import replicated
from tests.nodes.test_successors import KillableServer, killable
from torch import Tensor, nn

from paceline.core.events import ClippedPush, Measured
from paceline.core.messages import Closed, Follow
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.launch.replaying import replay_server
from paceline.server.record_file import RecordFile, record_path
from paceline.server.replica_link import ReplicaLink
from paceline.update.clipping import with_clip
from paceline.update.named_rules import SGD
from paceline.update.shard import Shard
from paceline.worker.node import WorkerNode

SIZE, NUM_CLOCKS, MAX_NORM = 257, 8, 2.0
RULE = SGD(lr=0.1, momentum=0.9)


def is_clipped(clock: int) -> bool:
    return clock % 3 != 2


def gradient_of(rank: int, clock: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * clock + rank)
    return torch.randn(SIZE, generator=generator) * (0.01 if clock == 1 else 1.0)  # smaller than the limit in clock 1


def expected() -> Tensor:
    value = nn.Parameter(torch.linspace(-1, 1, SIZE))
    optimizer = torch.optim.SGD([value], lr=0.1, momentum=0.9)
    for clock in range(NUM_CLOCKS):
        value.grad = torch.stack([gradient_of(rank, clock) for rank in range(NUM_WORKERS)]).mean(0)
        if is_clipped(clock):
            nn.utils.clip_grad_norm_([value], MAX_NORM)
        optimizer.step()
    return value.detach()


class Trained:
    """What workers end with."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}

    def work(self, node: WorkerNode) -> None:
        spec, rank = table("model", SIZE, "bsp", rule=RULE, scale="samples"), node.settings.sender.worker
        open_table(node, spec, torch.linspace(-1, 1, SIZE))
        seen = torch.empty(SIZE)
        for clock in range(NUM_CLOCKS):
            read_values(node, "model", seen)
            hyper = with_clip(RULE.groups, MAX_NORM) if is_clipped(clock) else RULE.groups
            node.client("model").push(gradient_of(rank, clock), count=1.0, hyper=hyper)
            node.tick()
        read_values(node, "model", seen)
        self.values[rank] = seen

    def require_expected(self) -> None:
        for rank in range(NUM_WORKERS):
            torch.testing.assert_close(self.values[rank], expected(), rtol=1e-6, atol=1e-6)
            assert torch.equal(self.values[rank], self.values[0])


def trained(kind: str, directory: Path, strides: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Return what workers end with, and how many servers were killed; a server at every so many points."""
    directory.mkdir(mode=0o700)
    job = Trained()
    with killable(kind, directory, strides) as (servers, places):
        servers.run(NUM_WORKERS, job.work)
    return [job.values[rank] for rank in range(NUM_WORKERS)], sum(place.fate.num_kills for place in places)


@pytest.mark.parametrize(
    ("kind", "strides"),
    [
        ("shm", (53, 71)),
        ("tcp", (61, 0)),
        pytest.param("shm", (0, 41), marks=pytest.mark.campaign),
        pytest.param("tcp", (43, 47, 59), marks=pytest.mark.campaign),
        pytest.param("memory", (37, 37), marks=pytest.mark.campaign),
    ],
)
def test_one_norm_is_clipped_by_wherever_servers_are_killed(
    kind: str, strides: tuple[int, ...], tmp_path: Path
) -> None:
    undisturbed, _ = trained(kind, tmp_path / "undisturbed", (0,) * len(strides))
    values, num_kills = trained(kind, tmp_path / "killed", strides)
    assert num_kills > 1
    for found, before in zip(values, undisturbed, strict=True):
        torch.testing.assert_close(before, expected(), rtol=1e-6, atol=1e-6)
        assert torch.equal(found, before)


def test_servers_that_are_killed_as_they_tell_of_norms_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tells(kind: type, has_norm: bool) -> object:
        return lambda _, written, *__: (
            isinstance(written, kind) and (getattr(written, "norm", None) is None) != has_norm
        )

    kills = [
        Kill(KillableServer, "_write_down", 4, is_before=False, counts=tells(ClippedPush, has_norm=False)),
        Kill(KillableServer, "_write_down", 1, is_before=False, counts=tells(Closed, has_norm=False)),
        Kill(Shard, "measure", 3, is_before=False),
        Kill(KillableServer, "_write_down", 4, is_before=True, counts=tells(Measured, has_norm=True)),
        Kill(KillableServer, "_write_down", 6, is_before=False, counts=tells(Measured, has_norm=True)),
        Kill(KillableServer, "_write_down", 2, is_before=True, counts=tells(Follow, has_norm=True)),
        Kill(KillableServer, "_write_down", 4, is_before=False, counts=tells(Follow, has_norm=True)),
        Kill(KillableServer, "_write_down", 2, is_before=True, counts=tells(Closed, has_norm=True)),
        Kill(KillableServer, "_write_down", 4, is_before=False, counts=tells(Closed, has_norm=True)),
    ]
    for kill in kills:
        kill.install(monkeypatch)
    job = Trained()
    with killable("shm", tmp_path, (0, 0)) as (servers, _):
        servers.run(NUM_WORKERS, job.work)
    assert [kill for kill in kills if not kill.is_done] == []
    job.require_expected()


@pytest.mark.parametrize(("points", "lag"), [((41, 57), 0), ((0, 83), 2), ((97, 0), 2)])
def test_replicas_know_the_norms_that_updates_were_made_with(points: tuple[int, ...], lag: int, tmp_path: Path) -> None:
    job = Trained()
    with replicated(tmp_path / "job", points, lag=lag) as (servers, pairs):
        servers.run(NUM_WORKERS, job.work)
    assert [pair.fate.num_kills for pair in pairs] == [int(point > 0) for point in points]
    for pair in pairs:
        if not pair.told:
            head, other = pair.states
            assert head == other
    job.require_expected()


def test_a_record_has_the_norms_as_well(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    spec = ClusterSpec(job="clip", num_workers=NUM_WORKERS, num_servers=2, transport="shm", run_dir=str(run_dir))
    spec.write(run_dir / SPEC_NAME)

    def link(rank: int) -> ReplicaLink:
        return ReplicaLink(record=RecordFile(record_path(run_dir, rank), 1 << 30, pytest.fail))

    job = Trained()
    with killable("shm", run_dir, (83, 71), link) as (servers, _):
        servers.run(NUM_WORKERS, job.work)
    job.require_expected()
    for rank in range(2):
        assert replay_server(run_dir, rank).is_proved
