"""Update rules as you name them. Each of these returns plain data; the servers run the rule it names.

Example:
    >>> import paceline
    >>> paceline.update.SGD(lr=0.1, momentum=0.9).name
    'torch.optim.SGD'
    >>> paceline.update.torch_optim("NAdam", lr=2e-3).name
    'torch.optim.NAdam'
    >>> paceline.update.rule("my_package.rules:Lion", lr=1e-4).name
    'my_package.rules:Lion'
"""

from __future__ import annotations

import importlib
from collections.abc import Set as AbstractSet

from paceline.errors import UsageError
from paceline.tensors.kernels import Kernel, kernel_of
from paceline.tensors.rules import Granularity, Number, RuleSpec, UpdateRule
from paceline.tensors.torch_rule import PREFIX, TorchRule, from_optimizer, torch_optim

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "RuleSpec",
    "UpdateRule",
    "from_optimizer",
    "granularity",
    "resolve",
    "rule",
    "torch_optim",
]

_MEMBERS = ("granularity", "update", "state", "load_state")


def Add() -> RuleSpec:  # noqa: N802 - reads like the optimizers beside it
    """Return the rule that adds what is pushed: the worker already multiplied by its step size."""
    return RuleSpec("add", ({},))


def SGD(  # noqa: N802 - as in torch.optim
    lr: float, momentum: float = 0.0, dampening: float = 0.0, *, nesterov: bool = False, weight_decay: float = 0.0
) -> RuleSpec:
    """Return stochastic gradient descent, exactly `torch.optim.SGD`.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> SGD(lr=0.1, momentum=0.9).groups[0]["momentum"]
        0.9
    """
    return torch_optim(
        "SGD", lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=weight_decay
    )


def Adagrad(  # noqa: N802 - as in torch.optim
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    *,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> RuleSpec:
    """Return Adagrad, exactly `torch.optim.Adagrad`; raises UsageError when a number is out of its range."""
    return torch_optim(
        "Adagrad",
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        initial_accumulator_value=initial_accumulator_value,
        eps=eps,
    )


def Adam(  # noqa: N802 - as in torch.optim
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> RuleSpec:
    """Return Adam, exactly `torch.optim.Adam`; raises UsageError when a number is out of its range.

    Its averages decay once an update: under asynchronous consistency that is once a push, not once a round.
    """
    return torch_optim("Adam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def AdamW(  # noqa: N802 - as in torch.optim
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> RuleSpec:
    """Return Adam with decoupled weight decay, exactly `torch.optim.AdamW`; the decay acts once an update.

    Raises:
        UsageError: a number is out of its range.
    """
    return torch_optim("AdamW", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def rule(path: str, **numbers: Number | tuple[Number, ...]) -> RuleSpec:
    """Return your own rule by its import path; servers import it from what is installed there or beside the script.

    Raises:
        UsageError: the path does not have the form "package.module:Rule".

    Example:
        >>> rule("my_package.rules:Lion", lr=1e-4).groups
        ({'lr': 0.0001},)
    """
    _split(path)
    return RuleSpec(path, (dict(numbers),))


def granularity(spec: RuleSpec) -> Granularity:
    """Return whether the rule may be cut inside tensors; imports the module of a rule of your own.

    Raises:
        UsageError: the rule does not exist, or is not an update rule.
    """
    return resolve(spec, allowed=None).granularity


def resolve(spec: RuleSpec, allowed: AbstractSet[str] | None) -> UpdateRule | Kernel:
    """Return a new rule object for one shard: a kernel where there is one, as it is faster.

    Args:
        spec: what a worker asked for.
        allowed: the import paths that may be loaded; None allows all, which is for code that you wrote yourself.

    Raises:
        UsageError: the rule does not exist, may not be loaded, or is not an update rule.
    """
    kernel = kernel_of(spec)
    if kernel is not None:
        return kernel
    if spec.name.startswith(PREFIX):
        return TorchRule(spec.name)
    module_name, class_name = _split(spec.name)
    if allowed is not None and spec.name not in allowed:
        raise UsageError(
            f"The update rule {spec.name} may not be loaded here. Allowed: {', '.join(sorted(allowed)) or 'none'}. "
            "Start the servers with this path among their allowed rules."
        )
    return _load(module_name, class_name, spec.name)


def _split(path: str) -> tuple[str, str]:
    module_name, _, class_name = path.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and class_name.isidentifier()):
        raise UsageError(
            f"'{path}' names no update rule. Expected 'add', 'torch.optim.<class>', "
            "or the import path of a rule of your own: 'package.module:Rule'."
        )
    return module_name, class_name


def _load(module_name: str, class_name: str, path: str) -> UpdateRule:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"The update rule {path} cannot be imported: {error}. Is it installed on the servers?"
        ) from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        raise UsageError(f"Module {module_name} has no class {class_name}, which the update rule {path} names.")
    try:
        made = cls()
    except TypeError as error:
        raise UsageError(f"The update rule {path} must be built without arguments: {error}.") from error
    if not isinstance(made, UpdateRule):
        missing = ", ".join(name for name in _MEMBERS if name not in dir(made))
        raise UsageError(f"{path} is not an update rule: it has no {missing}. See paceline.update.UpdateRule.")
    if made.granularity not in ("element", "tensor"):
        raise UsageError(f"{path}: granularity is '{made.granularity}', expected 'element' or 'tensor'.")
    return made
