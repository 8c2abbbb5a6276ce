"""Copies between devices and the host are ordered and memory is locked as it must be; no device is needed here."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import Recipe, adam, mlp, one_batch, parameters, train_alone
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.training.device_copies import DeviceCopies

GPU = torch.device("cuda", 0)

# -- what is asked of torch, and in which order ----------------------------------------------------------------------


class Log(list[str]):
    """Stands for the calls of torch.cuda that are used, and writes down each."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.switched_to = "current"

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(f"current of {device}", self)

    def synchronize(self, device: torch.device) -> None:
        self.append(f"wait for all of {device}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.switched_to = stream.name
        yield
        self.switched_to = "current"

    def Event(self, *, blocking: bool) -> Event:  # noqa: N802
        assert blocking, "or the thread that waits for it spins"
        return Event(self)

    def cudart(self) -> Log:
        return self

    def cudaHostRegister(self, place: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.append(f"lock {size_bytes} bytes")
        return self.code

    def cudaHostUnregister(self, place: int) -> int:  # noqa: N802
        self.append("unlock")
        return self.code


@dataclass
class Stream:
    name: str
    log: Log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@dataclass
class Event:
    log: Log

    def record(self, stream: Stream) -> None:
        self.log.append(f"event on {stream.name}")


@dataclass
class Remote:
    """Stands for a tensor of a device, or of locked memory."""

    name: str
    log: Log
    device: torch.device = GPU
    dtype: torch.dtype = torch.float32
    pinned: bool = False

    def is_pinned(self) -> bool:
        return self.pinned

    def copy_(self, source: Remote, *, non_blocking: bool) -> None:
        beside = " beside" if non_blocking else ""
        self.log.append(f"copy {source.name} to {self.name}{beside} on {self.log.switched_to}")

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"keep {self.name} for {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    for name in ("current_stream", "stream", "Event", "cudart", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def device_copies(log: Log) -> DeviceCopies:
    return DeviceCopies({GPU: Stream("side", log)}, log.append)  # pyright: ignore[reportArgumentType]


def test_a_gradient_is_copied_behind_what_computes_it_and_kept_until_then(log: Log) -> None:
    device_copies(log).fetch(Remote("gradient", log), Remote("push", log, pinned=True))  # pyright: ignore[reportArgumentType]
    assert log == [
        "side waits for current of cuda:0",
        "copy gradient to push beside on side",
        "keep gradient for side",
        "event on side",
    ]


@pytest.mark.parametrize(("pinned", "dtype"), [(False, torch.float32), (True, torch.float64)])
def test_the_host_waits_for_copies_that_do_not_go_straight_between_locked_memory_and_the_device(
    log: Log, pinned: bool, dtype: torch.dtype
) -> None:
    here, there = Remote("here", log, pinned=pinned, dtype=dtype), Remote("there", log)
    device_copies(log).fetch(there, here)  # pyright: ignore[reportArgumentType]
    device_copies(log).deliver(here, there)  # pyright: ignore[reportArgumentType]
    assert [line for line in log if "copy" in line] == ["copy there to here on side", "copy here to there on current"]


def test_values_take_their_place_on_the_current_stream(log: Log) -> None:
    device_copies(log).deliver(Remote("values", log, pinned=True), Remote("weight", log))  # pyright: ignore[reportArgumentType]
    device_copies(log).queued()
    assert log == ["copy values to weight beside on current", "event on current of cuda:0"]


class Owner:
    pass


def pages(num_bytes: int = mmap.PAGESIZE) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def test_memory_is_locked_as_long_as_its_owner_lives_and_goes_after_it_is_unlocked(log: Log) -> None:
    owner, bearer = Owner(), device_copies(log)
    memory = pages()
    bearer.lock(owner, memory)
    del memory
    gc.collect()
    assert log == ["lock 4096 bytes"]
    del owner
    gc.collect()
    assert log == ["lock 4096 bytes", "wait for all of cuda:0", "unlock"]


def test_memory_within_a_page_is_not_locked(log: Log) -> None:
    device_copies(log).lock(Owner(), pages()[64:])
    assert log == []


def test_memory_that_cannot_be_locked_is_told_once_and_the_runtime_forgets_it(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.code = 2

    def next_kernel(*_: object, **__: object) -> Tensor:
        log.append("kernel")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", next_kernel)
    bearer = device_copies(log)
    for _ in range(2):
        bearer.lock(Owner(), pages())
    assert log[:2] == ["lock 4096 bytes", "kernel"]
    assert len(log) == 3
    assert "cannot be locked for the GPU (CUDA error 2)" in log[2]


# -- models of the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_of_the_host_has_nothing_to_do_with_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.cuda was called")

    for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "cudart", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)

    def work(worker: Session) -> Tensor:
        model = mlp()
        optimizer = paceline.distributed(adam(model), overlap=overlap, model=model)
        for step in range(6):
            optimizer.zero_grad()
            one_batch(model, worker.rank, step)
            optimizer.step()
        optimizer.wait_for_values()
        return parameters(model)

    expected = train_alone(Recipe(num_steps=6), 1)[0]
    assert torch.equal(run_job(tmp_path, work, carrier="shm")[0], expected)
