"""How a framework learns the ranks of a job: by the default process group of torch and the variables of torchrun."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakSet

from paceline.api.script import distributed, init
from paceline.errors import UsageError
from paceline.job.environment import tell_ranks
from paceline.job.machines import this_machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from paceline.api.session import Session
    from paceline.training.strategy import Distributed

_MACHINE_BYTES: Final = 64  # of a machine's identity that workers compare
# Of a model the optimizers that step it, and of these the last steps at which a script has loaded something into it.
_optimizers: Final[WeakKeyDictionary[nn.Module, WeakSet[Distributed]]] = WeakKeyDictionary()
_loaded: Final[WeakKeyDictionary[Distributed, tuple[int, int]]] = WeakKeyDictionary()


def require(package: str, extra: str) -> None:
    """Import a framework.

    Raises:
        UsageError: it is not installed; the message says how to.
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"paceline.integrations needs {package}, and Python found no module {error.name!r}: install it with "
            f"pip install 'paceline[{extra}]'."
        ) from error


def join_with_ranks() -> Session:
    """Join the job, and give torch.distributed and the environment this worker's rank, for frameworks to find.

    Blocks until all workers have called it. A worker that is alone gets neither: frameworks then see one process.

    Raises:
        UsageError: workers are threads of one process, or torch.distributed is in use already.
    """
    session = init()
    if session.size > 1:
        session.arrangement.mesh(session.exchange)
        tell_ranks(session.rank, session.size, session.local_rank, _num_on_this_machine(session))
    return session


def _num_on_this_machine(session: Session) -> int:
    """Return the number of workers on this worker's machine; blocks until all have called it."""
    import torch

    name = repr(this_machine()).encode()[-_MACHINE_BYTES:].ljust(_MACHINE_BYTES)
    told = session.exchange.all_gather(torch.tensor(list(name), dtype=torch.uint8), None)
    return sum(bytes(each.tolist()) == name for each in session.exchange.finish(told, "all_gather", None))


def model_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> nn.Module | None:
    """Return which model an optimizer steps: the only one with parameters of it, or the smallest that has all."""
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    owned = [(model, set(map(id, model.parameters()))) for model in models]
    having = [pair for pair in owned if stepped & pair[1]]
    if len(having) > 1:
        having = [pair for pair in having if stepped <= pair[1]]
    return min(having, key=lambda pair: len(pair[1]), default=(None, ()))[0]


def distribute(optimizer: torch.optim.Optimizer, model: nn.Module | None, **options: object) -> Distributed:
    """Return the optimizer distributed as the job says, once; see `paceline.distributed` for the options."""
    from paceline.training.strategy import Distributed

    if isinstance(optimizer, Distributed):
        return optimizer
    made = distributed(optimizer, model=model, **options)  # pyright: ignore[reportArgumentType]
    # A scheduler was made with the other one, and would warn that this one never steps; they share their groups.
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
    if model is not None:
        if model not in _optimizers:
            _optimizers[model] = WeakSet()
            model.register_load_state_dict_post_hook(_note_load)
        _optimizers[model].add(made)
    return made


def _note_load(model: nn.Module, keys: object) -> None:
    """Note that something was loaded into a model since the last step of its optimizers."""
    del keys
    for optimizer in _optimizers.get(model, ()):
        _loaded[optimizer] = optimizer.turns


@contextmanager
def evaluated(optimizers: Iterable[Distributed]) -> Generator[None]:
    """Put one consistent state of what is trained into the model for the length of a `with` block.

    What a script has loaded into the model since the last step stays: the best checkpoint, for example.
    """
    with ExitStack() as held:
        for optimizer in optimizers:
            if _loaded.get(optimizer) != optimizer.turns:
                held.enter_context(optimizer.snapshot())
        yield


@contextmanager
def accumulating(optimizers: Iterable[Distributed], model: nn.Module | None = None) -> Generator[None]:
    """Keep the gradients of the backward passes in the block local, because more are added before the step.

    With a model, those of the optimizers that step it.
    """
    with ExitStack() as held:
        for optimizer in optimizers:
            if model is None or model_of(optimizer, [model]) is not None:
                held.enter_context(optimizer.accumulate())
        yield


def clip_by_norm(
    optimizers: Sequence[Distributed], parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip the gradients of a step by their norm; return that of this worker's gradients before.

    Parameters that are not exactly those of one optimizer are clipped here, each worker by itself.
    """
    from torch.nn.utils import clip_grad_norm_

    wanted = _trained(parameters)
    for optimizer in optimizers:
        if wanted == _trained(each for group in optimizer.param_groups for each in group["params"]):
            return optimizer.clip_gradients(max_norm, norm_type)
    return clip_grad_norm_(parameters, max_norm, norm_type)


def _trained(parameters: Iterable[Tensor]) -> set[int]:
    return {id(each) for each in parameters if each.requires_grad}
