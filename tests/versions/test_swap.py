"""A module that follows what is published: each forward pass has the weights of one version, whole."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, UsageError
from paceline.versions.swap import ForwardGate, ModuleUpdates, pairs_of

PATIENCE_S = 60.0


class Alike(nn.Module):
    """Three parameters whose elements are all the number of their version; a forward pass returns what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(300))
        self.inner = nn.Linear(7, 11)
        for parameter in self.inner.parameters():
            nn.init.zeros_(parameter)

    def forward(self, again: bool = False) -> set[float]:
        seen = set(self.first.tolist())
        if again:
            seen |= self(again=False)
        for parameter in self.inner.parameters():
            seen |= set(parameter.flatten().tolist())
        return seen


def publish_ones(ps: Session, model: Alike, optimizer: torch.optim.Optimizer) -> int:
    """Add one to each element, and publish; return the number, when it is there."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    optimizer.step()
    with paceline.subscribe(ps) as reader:
        return reader.wait(ps.models.publish(model, keep=2).number, timeout_s=PATIENCE_S).number


@pytest.mark.parametrize("servers", [1, 2])
def test_a_forward_pass_sees_one_version_while_others_come_in(servers: int, tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        model = Alike()
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        publish_ones(ps, model, optimizer)
        served, seen, over = Alike(), [list[float](), list[float]()], threading.Event()
        with paceline.subscribe(ps) as reader, reader.into(served, timeout_s=PATIENCE_S) as updates:

            def run(own: list[float]) -> None:
                while not over.is_set():
                    (value,) = served(again=True)
                    own.append(value)

            running = [threading.Thread(target=run, args=(own,)) for own in seen]
            for thread in running:
                thread.start()
            try:
                for _ in range(20):
                    number = publish_ones(ps, model, optimizer)
                assert updates.wait(number, timeout_s=PATIENCE_S) == number
            finally:
                over.set()
                for thread in running:
                    thread.join(PATIENCE_S)
            assert served() == {float(number)}
            assert updates.num_swaps >= 2
        for own in seen:
            assert own == sorted(own), "no forward pass goes back"
        publish_ones(ps, model, optimizer)
        assert served() == {float(number)}, "a closed one keeps its weights"

    run_job(tmp_path, work, carrier="shm", servers=servers)


def test_a_version_that_does_not_fit_leaves_the_module_as_it_is(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(300,), update=paceline.update.Add())
        ps.models.publish(w, "policy", keep=1).wait()
        with paceline.subscribe(ps) as reader:
            with pytest.raises(UsageError, match=r"has no 'first', 'inner.weight', 'inner.bias'"):
                reader.into(Alike())
            with pytest.raises(UsageError, match=r"the shapes differ of 'w'"):
                pairs_of(nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))}), reader.latest())
        nothing = "there is none yet; none is published under this name"
        with paceline.subscribe(ps, name="another") as reader, pytest.raises(DeadlineExceeded, match=nothing):
            reader.into(Alike(), timeout_s=0.05)

    run_job(tmp_path, work, carrier="shm")


def test_a_compiled_model_is_published_and_followed_under_the_names_of_the_model(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        ps.models.publish(torch.compile(model, backend="eager"), "policy", keep=1).wait()
        with paceline.subscribe(ps) as reader:
            assert set(reader.latest()) == {"weight", "bias"}
            follower = torch.compile(nn.Linear(2, 1), backend="eager")
            with reader.into(follower):
                torch.testing.assert_close(follower(torch.ones(1, 2)), model(torch.ones(1, 2)))
        assert optimizer.param_groups, "an optimizer that is dropped holds no tables"

    run_job(tmp_path, work, carrier="shm")


def test_a_swap_waits_for_the_forward_passes_that_run_and_is_not_put_off_by_others() -> None:
    gate, tensor = ForwardGate(), torch.zeros(1)
    begun, in_second = threading.Event(), threading.Event()

    def second() -> None:
        begun.set()
        gate.enter()
        in_second.set()
        gate.leave()

    gate.enter()
    gate.enter()  # one inside another
    gate.offer(1, [(tensor, torch.ones(1))])
    gate.offer(2, [(tensor, torch.full((1,), 2.0))])
    thread = threading.Thread(target=second)
    thread.start()
    assert begun.wait(PATIENCE_S)
    gate.leave()
    assert (tensor.item(), in_second.is_set()) == (0.0, False)
    gate.leave()
    assert in_second.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    gate.leave()  # after a hook that failed before `enter`
    assert tensor.item() == 2.0
    gate.offer(3, [(tensor, torch.full((1,), 3.0))])
    assert tensor.item() == 3.0, "while none runs it is swapped at once"


class Interrupted(nn.Module):
    """Has one weight; a forward pass returns it, or is ended as Ctrl-C ends it, also one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, how: str = "") -> float:
        if how == "ended":
            raise KeyboardInterrupt
        if how == "ended inside":
            self("ended")
        if how == "goes on":
            with pytest.raises(KeyboardInterrupt):
                self("ended inside")
        return self.weight.item()


def gated(module: nn.Module) -> ForwardGate:
    gate = ForwardGate()
    module.register_forward_pre_hook(gate.enter)
    module.register_forward_hook(gate.leave, always_call=True)
    return gate


@pytest.mark.parametrize("how", ["ended", "ended inside"])
def test_a_forward_pass_that_ctrl_c_ends_is_over_for_this_thread_and_others(how: str) -> None:
    module = Interrupted()
    gate = gated(module)

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            module(how)

    interrupted()
    gate.offer(1, [(module.weight, torch.ones(1))])
    assert (module.weight.item(), gate.number, gate.problem) == (1.0, 1, "")
    thread = threading.Thread(target=interrupted)
    thread.start()
    thread.join(PATIENCE_S)
    gate.offer(2, [(module.weight, torch.full((1,), 2.0))])
    assert (module(), gate.number, gate.num_swaps) == (2.0, 2, 2)


def test_a_forward_pass_that_goes_on_after_one_inside_was_ended_keeps_its_weights() -> None:
    module = Interrupted()
    gate = gated(module)

    def offer(*_: object) -> None:
        if not gate.num_swaps:
            gate.offer(1, [(module.weight, torch.ones(1))])
            assert gate.number == -1
            assert gate.problem == "version 1 is here, and is swapped in when no forward pass runs any more"

    module.register_forward_pre_hook(offer)
    assert module("goes on") == 0.0
    assert (module.weight.item(), gate.number, gate.problem) == (1.0, 1, "")


def test_a_forward_pass_that_waits_goes_on_once_another_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.versions.swap._FORWARD_TIMEOUT_S", 10 * PATIENCE_S)
    module, begun, go, seen = Interrupted(), threading.Event(), threading.Event(), list[float]()
    gate = gated(module)

    def hold(*_: object) -> None:
        if not begun.is_set():
            begun.set()
            assert go.wait(PATIENCE_S)
            raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            module()

    module.register_forward_pre_hook(hold)
    first, second = threading.Thread(target=interrupted), threading.Thread(target=lambda: seen.append(module()))
    first.start()
    assert begun.wait(PATIENCE_S)
    gate.offer(1, [(module.weight, torch.ones(1))])
    second.start()
    go.set()
    for thread in (first, second):
        thread.join(PATIENCE_S)
    assert seen == [1.0]


class FirstShortOfMemory:
    """A subscription that has version 1, and no memory for the next one at first."""

    name = "policy"

    def __init__(self) -> None:
        self.is_closed = threading.Event()
        self.coming = iter([OSError(12, "Cannot allocate memory"), VersionOfOne(2)])

    def latest(self, *, timeout_s: float) -> VersionOfOne:
        del timeout_s
        return VersionOfOne(1)

    def wait(self, *, timeout_s: float) -> VersionOfOne:
        del timeout_s
        found = next(self.coming, None)
        if isinstance(found, OSError):
            raise found
        if found is None:
            self.is_closed.wait(PATIENCE_S)
            raise UsageError("it is closed")
        return found

    def close(self) -> None:
        self.is_closed.set()


class VersionOfOne(dict[str, Tensor]):
    """A version of a module with one weight, which is the number of the version."""

    absent = frozenset[str]()

    def __init__(self, number: int) -> None:
        super().__init__(weight=torch.full((1, 1), float(number)))
        self.number = number

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_module_is_given_the_next_version_though_memory_for_one_was_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.versions.swap._WAIT_S", 0.0)
    module = nn.Linear(1, 1, bias=False)
    subscription: Any = FirstShortOfMemory()
    with ModuleUpdates(module, subscription, PATIENCE_S) as updates:
        assert updates.wait(2, timeout_s=PATIENCE_S) == 2
        assert module(torch.ones(1)).item() == 2.0
    assert "stays at version 1 of 'policy': OSError: [Errno 12] Cannot allocate memory" in capsys.readouterr().err


def test_a_module_whose_thread_cannot_start_is_left_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    module, subscription = nn.Linear(1, 1, bias=False), FirstShortOfMemory()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ModuleUpdates(module, subscription, PATIENCE_S)  # pyright: ignore[reportArgumentType]
    assert subscription.is_closed.is_set()
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_copies_of_a_module_that_is_kept_up_to_date_keep_their_weights() -> None:
    module, subscription = nn.Linear(1, 1, bias=False), FirstShortOfMemory()
    subscription.coming = iter(())
    saved, x = io.BytesIO(), torch.ones(1)
    with ModuleUpdates(module, subscription, PATIENCE_S) as updates:  # pyright: ignore[reportArgumentType]
        torch.save(module, saved)
        saved.seek(0)
        copies = [copy.deepcopy(module), torch.load(saved, weights_only=False)]
        updates._gate.offer(2, [(module.weight, torch.full((1, 1), 2.0))])
        assert [each(x).item() for each in (module, *copies)] == [2.0, 1.0, 1.0]
    with ModuleUpdates(copies[0], FirstShortOfMemory(), PATIENCE_S) as updates:  # pyright: ignore
        assert updates.wait(1, timeout_s=PATIENCE_S) >= 1


def test_frozen_and_tied_parameters_of_a_module_stay_what_they_are(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 3).requires_grad_(False)
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.base(self.embed(ids)))

    def work(ps: Session) -> None:
        model, served = Adapted(), Adapted()
        served.base.load_state_dict(model.base.state_dict())
        frozen = served.base.weight.data_ptr()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = paceline.distributed(torch.optim.SGD(trained, lr=0.1), model=model)
        model(torch.arange(4)).square().sum().backward()
        optimizer.step()
        paceline.publish(model)
        with paceline.subscribe(ps) as reader, reader.into(served, timeout_s=PATIENCE_S) as updates:
            assert updates.number == 1
            assert reader.latest().absent == {"base.weight", "base.bias"}
            assert torch.equal(served(torch.arange(4)), model(torch.arange(4)))
            assert served.head.weight is served.embed.weight
            assert served.base.weight.data_ptr() == frozen

    run_job(tmp_path, work, carrier="shm")


def test_values_take_the_dtype_of_the_module() -> None:
    module = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    given: dict[str, Tensor] = {"weight": torch.tensor([[1.0, 2.0]])}
    (pair,) = pairs_of(module, given)
    assert pair[0] is module.weight
    assert pair[1].dtype == torch.bfloat16


def test_a_module_that_lacks_what_was_published_or_has_no_memory_gets_no_version() -> None:
    given: dict[str, Tensor] = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    for module, words in (
        (nn.Linear(2, 1, bias=False), "the module has no 'bias'"),
        (nn.ReLU(), "the module has no 'weight', 'bias'"),
        (
            nn.Linear(2, 1, device="meta"),
            "the module is on device meta, .* with 'weight', 'bias'",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            pairs_of(module, given)
    assert len(pairs_of(nn.Linear(2, 1), given)) == 2
