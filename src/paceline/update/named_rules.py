"""Update rules for the user to choose. Each function returns plain data; the servers run the rule that it names."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from paceline.core.calls import checked
from paceline.errors import UsageError
from paceline.update import torch_rule
from paceline.update.kernels import OWN_NUMBERS, Kernel, kernel_of
from paceline.update.rules import Granularity, Hyper, Number, Quorum, RuleSpec, UpdateRule, require_finite
from paceline.update.torch_rule import PREFIX, TorchRule, check_groups, torch_optim
from paceline.update.user_code import build_own, missing_members, own_code, split_path

_MEMBERS = ("granularity", "update", "state", "load_state")
_ROWS_ONLY = {
    "ftrl": "FTRL",
    "rowwise_adagrad": "RowwiseAdagrad",
    "adaptive_revision": "AdaptiveRevision",
    "proximal": "Proximal",
}


@checked
def Add() -> RuleSpec:  # noqa: N802 - reads like the optimizers beside it
    """Return the rule that adds what is pushed: the worker already multiplied by its step size."""
    return RuleSpec("add", ({},))


@checked
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


@checked
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


@checked
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


@checked
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


@checked
def DelayedNesterov(  # noqa: N802 - as the optimizers beside it
    lr: float, momentum: float = 0.9, *, every: int
) -> RuleSpec:
    """Return SGD whose Nesterov momentum is delayed, for updates that come one by one from workers out of step.

    Momentum acts once in `every` updates, on their mean; until then each takes its part of a plain step. So `every`
    updates make together what `SGD(lr, momentum, nesterov=True)` makes of their mean, and stale updates are not
    repeated by a momentum that each of them sets going.

    Args:
        lr: the step size of the mean of so many updates.
        momentum: 0 to below 1.
        every: how many updates it waits for; as many as there are workers, for example.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> DelayedNesterov(lr=0.7, every=4).groups
        ({'lr': 0.7, 'momentum': 0.9, 'every': 4},)
    """
    if not 0 < lr < math.inf:
        raise UsageError(f"lr of DelayedNesterov is {lr}, expected a number above 0.")
    if not 0 <= momentum < 1:
        raise UsageError(f"momentum of DelayedNesterov is {momentum}, expected 0 or more, and less than 1.")
    if every < 1:
        raise UsageError(f"DelayedNesterov waits for {every} updates, expected 1 or more.")
    return RuleSpec("delayed_nesterov", ({"lr": lr, "momentum": momentum, "every": every},))


@checked
def Merging(  # noqa: N802 - as the optimizers beside it
    rule: RuleSpec, *, quorum: int, num_workers: int, grace_s: float = 0.0
) -> RuleSpec:
    """Return a rule that acts on several pushes at once, on asynchronous tables of a shape.

    A server collects pushes until it has `quorum` of them, waits `grace_s` for more, but not after all workers have
    pushed, and passes them to `rule` as one update, scaled as the table says. Later pushes wait for the next update: no
    push is lost, and none is counted twice. Reads never wait: a read before the update returns the values without it.
    Each server decides for its part of the table, by its own time.

    Args:
        rule: what acts on the merged push.
        quorum: 1 to `num_workers`.
        num_workers: of the job.
        grace_s: how long to wait for further pushes once the quorum is there.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> Merging(SGD(lr=0.7), quorum=2, num_workers=4, grace_s=0.5).quorum
        Quorum(num_pushes=2, grace_s=0.5, num_workers=4)
    """
    if not 1 <= quorum <= num_workers:
        raise UsageError(f"a quorum of {quorum} of {num_workers} workers cannot come, expected 1 to {num_workers}.")
    if not 0 <= grace_s < math.inf:
        raise UsageError(f"grace_s is {grace_s}, expected 0 s or more.")
    return replace(rule, quorum=Quorum(quorum, grace_s, num_workers))


@checked
def FTRL(  # noqa: N802 - as in the paper
    alpha: float = 0.1, beta: float = 1.0, *, l1: float = 0.0, l2: float = 0.0
) -> RuleSpec:
    """Return FTRL-proximal, for row tables: step sizes per number, and with `l1` weights that are exactly 0.

    Args:
        alpha: the step size; a few tenths at most suit most problems.
        beta: keeps the first steps small.
        l1: what the absolute sum of gradients has to exceed before a weight leaves 0.
        l2: strength of the squared penalty.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> FTRL(alpha=0.05, l1=1.0).name
        'ftrl'
    """
    return _rows_only("ftrl", {"alpha": alpha, "beta": beta}, {"l1": l1, "l2": l2})


@checked
def RowwiseAdagrad(  # noqa: N802 - as the optimizers beside it
    lr: float = 1e-2, *, initial_accumulator_value: float = 0.0, eps: float = 1e-10
) -> RuleSpec:
    """Return Adagrad with one accumulator a row, the mean of its squares, for row tables: one number of state a row.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> RowwiseAdagrad(lr=0.1).groups[0]["lr"]
        0.1
    """
    rest = {"initial_accumulator_value": initial_accumulator_value, "eps": eps}
    return _rows_only("rowwise_adagrad", {"lr": lr}, rest)


@checked
def AdaptiveRevision(  # noqa: N802 - as the optimizers beside it
    lr: float = 1e-2, *, initial_accumulator_value: float = 1.0
) -> RuleSpec:
    """Return Adagrad for stale gradients, for row tables: a step looks back at what came between read and push.

    What a reader saw travels with the values that it reads and comes back with its gradients, so servers keep no
    snapshots; reads and pushes are twice as large for it.

    Args:
        lr: the step size: that of a row is `lr` over the root of what its accumulator has reached.
        initial_accumulator_value: more than 0.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> AdaptiveRevision(lr=0.1).name
        'adaptive_revision'
    """
    return _rows_only("adaptive_revision", {"lr": lr, "initial_accumulator_value": initial_accumulator_value}, {})


@checked
def Proximal(lr: float, *, l1: float) -> RuleSpec:  # noqa: N802 - as the optimizers beside it
    """Return a gradient step followed by a soft threshold at `lr * l1`, for row tables: small weights become exactly 0.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> Proximal(lr=0.1, l1=0.01).groups
        ({'lr': 0.1, 'l1': 0.01},)
    """
    return _rows_only("proximal", {"lr": lr}, {"l1": l1})


def _rows_only(name: str, positive: dict[str, float], rest: dict[str, float]) -> RuleSpec:
    for key, value in positive.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{key} of {_ROWS_ONLY[name]} is {value}, expected a number above 0.")
    for key, value in rest.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"{key} of {_ROWS_ONLY[name]} is {value}, expected 0 or a number above.")
    return RuleSpec(name, ({**positive, **rest},))


@checked
def rule(path: str, **numbers: Number | tuple[Number, ...]) -> RuleSpec:
    """Return your own rule by its import path; servers import it from what is installed there or beside the script.

    Dense tables take a class with the members of `UpdateRule`, row tables one with those of `RowRule`.

    Raises:
        UsageError: the path does not have the form "package.module:Rule".

    Example:
        >>> rule("my_package.rules:Lion", lr=1e-4).groups
        ({'lr': 0.0001},)
    """
    split_path(path)
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
    _check_hyper(spec)
    kernel = kernel_of(spec)
    if kernel is not None:
        return kernel
    if spec.name.startswith(PREFIX):
        return TorchRule(spec.name)
    if spec.name in _ROWS_ONLY:
        raise UsageError(
            f"The update rule {_ROWS_ONLY[spec.name]} works on row tables only, and this table is dense. "
            "Declare it with rows=<numbers a row>, or choose SGD, Adagrad or Adam."
        )
    made = build_own(spec.name, allowed)
    with own_code(f"The update rule {spec.name}"):
        if not isinstance(made, UpdateRule):
            missing = missing_members(made, _MEMBERS)
            raise UsageError(f"{spec.name} is not an update rule: it has no {missing}. See paceline.update.UpdateRule.")
        if made.granularity not in ("element", "tensor"):
            raise UsageError(f"{spec.name}: granularity is '{made.granularity}', expected 'element' or 'tensor'.")
    return made


def runs_in_torch(spec: RuleSpec) -> bool:
    """Return whether a rule of torch.optim has no kernel here, so that torch itself takes the steps."""
    return spec.name.startswith(PREFIX) and kernel_of(spec) is None


def numbers_problem(rule: str, numbers: Hyper) -> str:
    """Return why a rule does not take the values of these hyperparameters, "" if it does, or is not one of ours."""
    if rule.startswith(PREFIX):
        return torch_rule.numbers_problem(rule, numbers)
    if rule in _ROWS_ONLY:
        plain = [(key, value) for key, value in numbers.items() if isinstance(value, int | float)]
        low = [f"{key} is {value}" for key, value in plain if value < 0 or (key == "alpha" and not value)]
        return f"{', '.join(low)}, expected 0 or more, and alpha above 0" if low else ""
    every = numbers.get("every", 1)
    if rule == "delayed_nesterov" and not (type(every) is int and every >= 1):
        return f"every is {every}, expected a whole number of at least 1"
    return ""


def _check_hyper(spec: RuleSpec) -> None:
    """Raise UsageError for hyperparameters that a rule of ours does not have."""
    if not isinstance(spec, RuleSpec):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"an update rule is a {type(spec).__name__}, expected one of paceline.update.")
    require_finite(spec)
    if spec.name.startswith(PREFIX):
        check_groups(spec)
    elif spec.name in OWN_NUMBERS:
        known = OWN_NUMBERS[spec.name]
        unknown = sorted({key for group in spec.groups for key in group} - set(known))[:3]
        if unknown:
            raise UsageError(f"The update rule {spec.name} has no hyperparameter {unknown}, expected {list(known)}.")
        for problem in filter(None, (numbers_problem(spec.name, group) for group in spec.groups)):
            raise UsageError(f"The update rule {spec.name}: {problem}.")


def scales_pushes(rule: str, group: Hyper) -> bool:
    """Return whether a push changes values by a multiple of itself: addition, and plain SGD.

    >>> scales_pushes("add", {}), scales_pushes("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9})
    (True, False)
    """
    more = ("momentum", "weight_decay", "nesterov", "maximize")
    return rule == "add" or (rule == "torch.optim.SGD" and not any(group.get(key) for key in more))
