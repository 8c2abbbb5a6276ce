"""Update rules of torch.optim: conversion to and from plain numbers, and their steps on the values of a shard."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from paceline.core.calls import checked
from paceline.errors import ProtocolBug, UsageError
from paceline.torch_private import DYNAMO
from paceline.update.rules import Granularity, Hyper, Number, RuleSpec

PREFIX = "torch.optim."

# Their update of an element depends on that element alone, so a tensor may be cut anywhere. All other classes, such as
# Adafactor, Muon and future ones, get whole tensors.
_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_REFUSED = {
    "LBFGS": "it evaluates the model several times a step (a closure), which a server cannot do",
    "SparseAdam": "it takes sparse gradients only, and gradients travel dense",
    "Optimizer": "it is the abstract base of the others",
}
_NOT_HYPER = frozenset({"params", "param_names"})
# Ways of running a step that need the autograd graph or a CUDA graph.
_LOCAL_ONLY = ("differentiable", "capturable")
# How a step is computed, not what it computes: fixed when a table is declared, never changed by a push.
SWITCHES: Final = ("fused", "foreach", *_LOCAL_ONLY)
_MOST_STEPS: Final = 1 << 40  # for which the numbers of ASGD have to do
_REFUSALS: Final = (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError)  # of constructors of torch
_NO_PARAMETERS: Final = "empty parameter list"  # in torch's error for an empty list
# Each of these makes optimizers that have it keep one more state.
_MORE_STATE: Final[Hyper] = {"momentum": 0.9, "amsgrad": True, "centered": True}


@checked
def torch_optim(class_name: str, **numbers: Number | tuple[Number, ...]) -> RuleSpec:
    """Return the rule of a class of torch.optim, by its name and its arguments.

    Raises:
        UsageError: the class does not exist, cannot run on a server, or refuses an argument.

    Example:
        >>> torch_optim("NAdam", lr=0.002).name
        'torch.optim.NAdam'
    """
    cls = optimizer_class(PREFIX + class_name)
    stand_in = nn.Parameter(torch.zeros(1, 1))
    try:
        optimizer = _construct(cls, [{"params": [stand_in]}], numbers)
    except _REFUSALS as error:
        raise UsageError(f"{PREFIX}{class_name} refuses its arguments {numbers}: {error}") from error
    return from_optimizer(optimizer)


def from_optimizer(optimizer: torch.optim.Optimizer) -> RuleSpec:
    """Return the rule of a torch optimizer: its class by name and the hyperparameters of each of its groups.

    Raises:
        UsageError: the class is not in torch.optim or cannot run on a server, or a hyperparameter is not a plain
            number or a tuple of them.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> from_optimizer(torch.optim.SGD([weight], lr=0.1)).groups[0]["lr"]
        0.1
    """
    cls = type(optimizer)
    if not is_class_of_torch(cls):
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__} is not a class of torch.optim, so servers do not know it. "
            "Write it as an update rule and name it by its import path: paceline.update.rule('package.module:Rule')."
        )
    name = PREFIX + cls.__name__
    optimizer_class(name)
    groups = [{key: group[key] for key in optimizer.defaults} for group in optimizer.param_groups]
    return RuleSpec(name, tuple(_with_flags(name, hyper_of(group, name)) for group in groups))


def hyper_of(group: Mapping[str, object], owner: str = "the optimizer") -> Hyper:
    """Return the hyperparameters of one param group as plain numbers, for messages.

    Raises:
        UsageError: one is not a plain number, or selects a step that servers do not support.
    """
    for key in _LOCAL_ONLY:
        if group.get(key):
            raise UsageError(f"{owner} has {key}=True, but its steps run on the servers. Leave {key} out.")
    return {key: _plain(key, value, owner) for key, value in group.items() if key not in _NOT_HYPER}


def pushed_hyper(groups: Sequence[Mapping[str, object]], rule: RuleSpec) -> tuple[Hyper, ...]:
    """Return the hyperparameters of a push: current numbers of the param groups, and switches as declared.

    Other entries of the groups, from schedulers or users, are not sent.
    """
    return tuple(
        {
            **_with_flags(rule.name, hyper_of({key: group[key] for key in declared}, rule.name)),
            **{key: declared[key] for key in SWITCHES if key in declared},
        }
        for group, declared in zip(groups, rule.groups, strict=True)
    )


def check_groups(rule: RuleSpec) -> None:
    """Raise UsageError for a hyperparameter that the class of torch.optim does not have, or an unsupported switch.

    Switches other than `fused` and `foreach` stay off. These two select how a table computes its updates, so all groups
    of a table need the same.
    """
    known = {*inspect.signature(optimizer_class(rule.name)).parameters, "decoupled_weight_decay"} - _NOT_HYPER
    for number, group in enumerate(rule.groups):
        unknown = sorted(group.keys() - known)[:3]
        if unknown:
            raise UsageError(f"{rule.name} has no hyperparameter {unknown} (group {number}); it has {sorted(known)}.")
        odd = [key for key in SWITCHES if group.get(key) not in (None, False, True)]
        if odd or any(group.get(key) for key in _LOCAL_ONLY):
            raise UsageError(
                f"{rule.name} (group {number}): {', '.join(odd or _LOCAL_ONLY)} cannot be switched on a server."
            )
        problem = numbers_problem(rule.name, group)
        if problem:
            raise UsageError(f"{rule.name} (group {number}): {problem}")
    if any(group.get("fused") for group in rule.groups) and any(group.get("foreach") for group in rule.groups):
        raise UsageError(f"{rule.name} is to be fused and foreach at once: give all groups one of the two, or neither.")


def numbers_problem(rule: str, numbers: Hyper) -> str:
    """Return why a class of torch.optim refuses these hyperparameters, "" if it accepts them.

    Its constructor checks their ranges, and a step relies on them: with a beta of 1 it divides by zero. The step size
    may be any number, because schedulers change it.

    >>> numbers_problem("torch.optim.Adam", {"lr": -1.0, "betas": (0.9, 1.0), "eps": 1e-8})
    'Invalid beta parameter at index 1: 1.0'
    >>> numbers_problem("torch.optim.SGD", {"lr": 0.1, "momentum": True, "nesterov": 1})
    'momentum is True, expected a number; nesterov is 1, expected True or False'
    >>> numbers_problem("torch.optim.ASGD", {"lr": 0.1, "lambd": 1e38, "alpha": 1e30})
    'lr=0.1, lambd=1e+38 and alpha=1e+30 give no step size: lr / (1 + lambd * lr * step) ** alpha at step 1'
    """
    flags, kept = _flags(rule), {k: v for k, v in numbers.items() if k not in SWITCHES and v is not None}
    expected = {key: _expected(rule, key, value) for key, value in kept.items()}
    odd = [f"{key} is {str(kept[key])[:40]}, expected {what}" for key, what in expected.items() if what]
    refusal = "; ".join(odd) or _refusal(rule, frozenset((key, kept[key]) for key in kept.keys() - flags - {"lr"}))
    return refusal or (_asgd_problem(kept) if rule == f"{PREFIX}ASGD" else "")


def _asgd_problem(numbers: Mapping[str, object]) -> str:
    """Return why steps of ASGD would fail: it raises a number to the power alpha, in plain Python."""
    lr, lambd, alpha = (numbers.get(key, defaults_of(f"{PREFIX}ASGD")[key]) for key in ("lr", "lambd", "alpha"))
    for step in (1, _MOST_STEPS):
        try:
            size = cast("Any", lr) / (1 + cast("Any", lambd) * lr * step) ** alpha
        except ArithmeticError:
            size = None
        if not isinstance(size, float | int):  # a power of a negative number is complex
            formula = f"lr / (1 + lambd * lr * step) ** alpha at step {step}"
            return f"lr={lr}, lambd={lambd} and alpha={alpha} give no step size: {formula}"
    return ""


def _expected(rule: str, key: str, value: Number | tuple[Number, ...]) -> str:
    """Return what is expected of a hyperparameter, "" if its type and length are right."""
    default = defaults_of(rule).get(key)
    length = len(default) if isinstance(default, tuple) else 0
    if length and not (isinstance(value, tuple) and len(value) == length):
        return f"{length} numbers"
    is_flag = key in _flags(rule)
    if any(isinstance(item, bool) != is_flag for item in (value if isinstance(value, tuple) else (value,))):
        return "True or False" if is_flag else "a number"
    return "a whole number" if key in _whole_numbers(rule) and not isinstance(value, int) else ""


def lacks_state(given: Hyper, known: Hyper) -> list[str]:
    """Return the hyperparameters that are switched on and need a state that the declared ones lack.

    >>> lacks_state({"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0})
    ['momentum']
    """
    return [key for key in (*_MORE_STATE, "lr_decay") if given.get(key) and not known.get(key)]


@lru_cache(maxsize=256)
def _refusal(rule: str, numbers: frozenset[tuple[str, Number | tuple[Number, ...]]]) -> str:
    try:  # no parameters: a constructor checks its numbers first, and adding parameters imports much of torch
        _construct(optimizer_class(rule), [], dict(numbers))
    except _REFUSALS as error:
        return "" if _NO_PARAMETERS in str(error) else str(error)[:200]
    return ""


@lru_cache(maxsize=64)
def _flags(rule: str) -> frozenset[str]:
    """Return the hyperparameters of a class of torch.optim that are True or False, without the switches."""
    given = {key for key, default in defaults_of(rule).items() if isinstance(default, bool)}
    return frozenset({"decoupled_weight_decay", *given} - set(SWITCHES))


@lru_cache(maxsize=64)
def _whole_numbers(rule: str) -> frozenset[str]:
    """Return the hyperparameters that a class of torch.optim declares as int."""
    given = inspect.signature(optimizer_class(rule)).parameters
    return frozenset(key for key, each in given.items() if each.annotation in (int, "int"))


@lru_cache(maxsize=64)
def defaults_of(rule: str) -> Mapping[str, Any]:
    """Return the default hyperparameters of a class of torch.optim."""
    given = inspect.signature(optimizer_class(rule)).parameters
    return {key: each.default for key, each in given.items() if key != "params"}


def _with_flags(rule: str, numbers: Hyper) -> Hyper:
    """Return the numbers with bool and int converted into each other, as the class expects them."""
    flags = _flags(rule)
    return {
        key: bool(value) if key in flags else int(value) if isinstance(value, bool) and key not in SWITCHES else value
        for key, value in numbers.items()
    }


def _plain(key: str, value: object, owner: str) -> Number | tuple[Number, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_number(key, item, owner) for item in cast("Sequence[object]", value))
    return _number(key, value, owner)


def _number(key: str, value: object, owner: str) -> Number:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    advice = "Pass its value: float(...)." if isinstance(value, Tensor) else "Use a number, or None."
    raise UsageError(
        f"{key} of {owner} is a {type(value).__name__} ({value}), "
        f"but only plain numbers travel to the servers. {advice}"
    )


def granularity_of(optimizer: torch.optim.Optimizer) -> Granularity:
    """Return "element" if the step of an element depends on that element alone, else "tensor".

    The classes of torch are known. Other classes are tried on a small tensor, once whole and once cut in two. A class
    whose constructor needs more than parameters and its defaults cannot be tried, and counts as "tensor".

    Example:
        >>> granularity_of(torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(2, 2))]))
        'tensor'
    """
    cls = type(optimizer)
    if is_class_of_torch(cls):
        return "element" if cls.__name__ in _ELEMENTWISE else "tensor"
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 4, 6, generator=generator, dtype=torch.float64)
    try:
        for group in optimizer.param_groups:
            for dim in (0, 1):
                cut = [_stepped(optimizer, group, *part) for part in _halves(values, gradients, dim)]
                if not torch.allclose(torch.cat(cut, dim), _stepped(optimizer, group, values, gradients), rtol=1e-9):
                    return "tensor"
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return "tensor"
    return "element"


def _halves(values: Tensor, gradients: Sequence[Tensor], dim: int) -> list[tuple[Tensor, list[Tensor]]]:
    return [
        (half, [gradient.chunk(2, dim)[index] for gradient in gradients])
        for index, half in enumerate(values.chunk(2, dim))
    ]


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], values: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    """Return the values after steps of an optimizer of the same class, with the numbers of this group."""
    parameter = nn.Parameter(values.clone())
    numbers = {key: value for key, value in group.items() if key not in _NOT_HYPER}
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    made = _construct(type(optimizer), [{**numbers, "params": [parameter]}], cast("Hyper", defaults))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach()


def is_class_of_torch(cls: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class is one of torch.optim itself."""
    return getattr(torch.optim, cls.__name__, None) is cls


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class named "torch.optim.<class>".

    Raises:
        UsageError: there is no such class, or it cannot run on a server.
    """
    short = name.removeprefix(PREFIX)
    found = getattr(torch.optim, short, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UsageError(f"There is no optimizer class '{name}' in torch {torch.__version__}. Check its spelling.")
    if short in _REFUSED:
        raise UsageError(f"{name} cannot run on a server: {_REFUSED[short]}. Choose another, Adam for example.")
    return found


@final
class TorchRule:
    """Runs one class of torch.optim over the pieces of a shard: its parameters are views of the shard's values.

    Args:
        name: "torch.optim.<class>".

    Raises:
        UsageError: there is no such class, or it cannot run on a server.
    """

    def __init__(self, name: str) -> None:
        importlib.import_module(DYNAMO)  # before the first step
        self._class = optimizer_class(name)
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._loaded: dict[str, Tensor] = {}  # taken over by the next update; empty while there is an optimizer

    @property
    def granularity(self) -> Granularity:
        """Return "element" if tensors may be cut, else "tensor"."""
        return "element" if self._class.__name__ in _ELEMENTWISE else "tensor"

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        hyper: Sequence[Hyper],
        groups: Sequence[int],
    ) -> None:
        """Take one step of the optimizer; see `UpdateRule.update`."""
        optimizer = self._optimizer or self._build(values, hyper, groups)
        for group, numbers in zip(optimizer.param_groups, hyper, strict=True):
            group.update({**_allowed(numbers), "params": group["params"]})
        for parameter, gradient, group in zip(self._parameters, gradients, groups, strict=True):
            scribbles = gradient is not None and _writes_to_gradients(hyper[group], parameter)
            parameter.grad = gradient.clone() if scribbles and gradient is not None else gradient
        try:
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)  # gradients are the worker's memory, which must not stay alive

    def _build(self, values: Sequence[Tensor], hyper: Sequence[Hyper], groups: Sequence[int]) -> torch.optim.Optimizer:
        self._parameters = [nn.Parameter(value) for value in values]
        param_groups: list[dict[str, object]] = [{**_allowed(numbers), "params": []} for numbers in hyper]
        for parameter, group in zip(self._parameters, groups, strict=True):
            cast("list[nn.Parameter]", param_groups[group]["params"]).append(parameter)
        # Some classes, such as Adagrad, read arguments of the constructor, and not the groups.
        accepted = inspect.signature(self._class).parameters
        known = _allowed(hyper[0])
        arguments = {key: value for key, value in known.items() if key in accepted and key not in _NOT_HYPER}
        self._optimizer = _construct(self._class, param_groups, arguments)
        for key, value in self._loaded.items():
            index, _, name = key.partition(".")
            self._optimizer.state[self._parameters[int(index)]][name] = value
        self._loaded = {}
        return self._optimizer

    def state(self) -> dict[str, Tensor]:
        """Return the live state of every piece; see `UpdateRule.state`."""
        if self._optimizer is None:
            return dict(self._loaded)
        named: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    named[f"{index}.{name}"] = value
                elif value is not None:
                    raise ProtocolBug(f"State '{name}' of {self._class.__name__} is {value!r}, expected a tensor.")
        return named

    def check_state(self, state: Mapping[str, Tensor], values: Sequence[Tensor]) -> None:
        """Validate the name, shape and dtype of every state against those that torch makes; raises UsageError.

        Torch does not check shapes before it computes, and some of its operations never do.
        """
        by_piece: dict[int, dict[str, Tensor]] = {}
        for key, found in state.items():
            index, _, name = key.partition(".")
            by_piece.setdefault(int(index), {})[name] = found
        for index, given in by_piece.items():
            self._check_piece(index, given, values[index])

    def _check_piece(self, index: int, given: Mapping[str, Tensor], value: Tensor) -> None:
        elementwise = self.granularity == "element"
        shape = (2,) if elementwise else tuple(value.shape)
        least = _layouts(self._class, shape, value.dtype, more=False)
        lacking = sorted(least.keys() - given.keys())
        if lacking:
            raise UsageError(f"The state of piece {index} lacks {lacking}, which {self._class.__name__} needs.")
        expected = _layouts(self._class, shape, value.dtype, more=True)
        for name, found in given.items():
            if name not in expected:
                raise UsageError(f"{self._class.__name__} has no state '{name[:200]}', expected {sorted(expected)}.")
            wanted, dtype = expected[name]
            if elementwise and wanted == shape:
                wanted = tuple(value.shape)
            # Torch keeps numbers in its default dtype. A load casts all but `step` to the dtype of the parameter.
            numbers = {torch.float32, torch.float64, value.dtype} if not wanted and dtype.is_floating_point else set()
            if tuple(found.shape) != wanted or found.dtype not in {dtype, *numbers}:
                raise UsageError(
                    f"State '{index}.{name}' has shape {tuple(found.shape)} and {found.dtype}, expected {wanted} and "
                    f"{dtype}."
                )
            require_count(name, found)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of `state`; see `UpdateRule.load_state`."""
        self._loaded = {key: value.clone() for key, value in state.items()}
        self._optimizer = None


def require_count(name: str, found: Tensor) -> None:
    """Raise UsageError for an invalid number of steps."""
    if name == "step" and not 0 <= found.item() < math.inf:
        raise UsageError(f"State 'step' is {found.item()}, expected a number of steps.")


def state_shapes(cls: type[torch.optim.Optimizer], shape: tuple[int, ...], *, more: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each state of a parameter after a step; with `more`, also of optional states.

    >>> state_shapes(torch.optim.SGD, (3,), more=True), state_shapes(torch.optim.SGD, (3,), more=False)
    ({'momentum_buffer': (3,)}, {})
    """
    # Tried on a small tensor: of the classes of torch, a dimension of a state is that of the parameter, or 1.
    small = _layouts(cls, (2,) * len(shape), torch.float32, more=more)
    return {
        name: tuple(own if size == 2 else size for own, size in zip(shape, of, strict=True)) if of else ()
        for name, (of, _) in small.items()
    }


@lru_cache(maxsize=256)
def _layouts(
    cls: type[torch.optim.Optimizer], shape: tuple[int, ...], dtype: torch.dtype, *, more: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each state of a parameter after a step; with `more`, also of optional states."""
    accepted = inspect.signature(cls).parameters
    stand_in = nn.Parameter(torch.zeros(shape, dtype=dtype))
    numbers = {key: value for key, value in _MORE_STATE.items() if more and key in accepted}
    optimizer = _construct(cls, [{"params": [stand_in]}], numbers)
    stand_in.grad = torch.ones_like(stand_in)
    optimizer.step()
    found = cast("Mapping[str, object]", optimizer.state[stand_in])
    return {name: (tuple(s.shape), s.dtype) for name, s in found.items() if isinstance(s, Tensor)}


def _allowed(numbers: Hyper) -> Hyper:
    """Return hyperparameters for torch, with switches that select no code that relies on shapes.

    Of the declared switches only `foreach` counts: it selects one of torch's two loops.
    """
    chosen: Hyper = {key: key == "foreach" and bool(numbers.get(key)) for key in SWITCHES}
    return {key: chosen.get(key, value) for key, value in numbers.items()}


def _construct(
    cls: Callable[..., torch.optim.Optimizer], param_groups: list[dict[str, object]], arguments: Hyper
) -> torch.optim.Optimizer:
    return cls(param_groups, **arguments)


def _writes_to_gradients(hyper: Hyper, parameter: Tensor) -> bool:
    """Return whether torch's multi-tensor loop may run the step, which uses gradients as scratch memory."""
    return bool(hyper.get("foreach")) or parameter.device.type != "cpu"
