"""Tensor-parallel plan: which layers are split over the ranks, and how; checked before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final, TypeGuard

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from paceline.errors import UsageError
from paceline.torch_private import has_one_width

Plan = Mapping[str, str]

COLUMN: Final = "column"  # "column:3" where three layers are concatenated in one, as query, key and value
ROW: Final = "row"
VOCABULARY: Final = "vocabulary"
ATTENTION: Final = "attention"
SPLITTABLE: Final[Mapping[str, tuple[type[nn.Module], ...]]] = {
    COLUMN: (nn.Linear,),
    ROW: (nn.Linear,),
    VOCABULARY: (nn.Linear, nn.Embedding),
    ATTENTION: (nn.MultiheadAttention,),
}
_KINDS: Final = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
# Attributes of torch with the hooks of forward, backward, saving and loading.
_HOOKS: Final = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OWN: Final[Mapping[type[nn.Module], frozenset[str]]] = {
    nn.Linear: frozenset({"weight", "bias"}),
    nn.Embedding: frozenset({"weight"}),
    nn.MultiheadAttention: frozenset({"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}),
}

# Names of the number of heads in attention layers.
HEADS: Final = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "num_key_value_heads")
# Names of the number of features of a head.
HEAD_WIDTHS: Final = ("head_width", "head_dim", "head_size")
_STACKED: Final = ("qkv", "in_proj", "qkv_proj", "to_qkv", "c_attn")
_QUERY_KEY_VALUE: Final = (
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
_OUTPUTS: Final = ("out", "out_proj", "o_proj", "proj", "c_proj", "to_out", "wo", "output")
_PAIRS: Final = (
    *(("linear1", "linear2"), ("fc1", "fc2"), ("up", "down"), ("up_proj", "down_proj"), ("c_fc", "c_proj")),
    *(("w1", "w2"), ("wi", "wo"), ("widen", "narrow")),
)
_GATES: Final = ("gate", "gate_proj", "w3")
# Modules that compute each feature by itself, so that a rank can run them on its part.
_ELEMENTWISE: Final = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh, nn.ReLU6),
    *(nn.Mish, nn.Hardswish, nn.Dropout, nn.Identity),
)


def plan_for(model: nn.Module, given: Plan | None, size: int) -> dict[str, str]:
    """Return how each layer is split, by full name.

    The first of these counts: the given plan, the model's own `tensor_plan` (a mapping, or a method that returns one),
    a plan found from its layers.

    Raises:
        UsageError: a pattern matches no layer, a layer cannot be split as planned, or there is nothing to split.
    """
    own: Plan | Callable[[], Plan] | None = getattr(model, "tensor_plan", None)
    patterns = given if given is not None else own() if callable(own) else own
    plan = found_plan(model, size) if patterns is None else _matched(model, patterns)
    if not plan:
        whole = [f"'{name}' {why}" for name, one in model.named_modules() if (why := obstacle(one))]
        left = f" It has layers that stay whole: {'; '.join(whole[:3])}." if whole else ""
        raise UsageError(
            f"{type(model).__name__} has no layers known to be split over tensor ranks.{left} Say which: "
            'tensor_plan={"blocks.*.up": "column", "blocks.*.down": "row"}, for example.'
        )
    return plan


def obstacle(layer: nn.Module) -> str:
    """Return why a linear, embedding or attention layer cannot be split; empty where it can.

    A part computes what torch's own class computes, so an overridden forward or hooks would be lost.

    Example:
        >>> obstacle(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        'is a ParametrizedLinear, a subclass of Linear'
    """
    if not isinstance(layer, _KINDS) or isinstance(layer, NonDynamicallyQuantizableLinear):  # a part of attention
        return ""
    kind = type(layer)
    if kind not in _KINDS:
        base = next(one for one in kind.__mro__ if one in _KINDS)
        return f"is a {kind.__name__}, a subclass of {base.__name__}"
    if "forward" in vars(layer):
        return "has a forward of its own"
    if any(has_hooks(one) for one in layer.modules()):
        return "has hooks"
    held = [*layer.named_parameters(), *layer.named_buffers()]
    extra = sorted(name for name, _ in held if name not in _OWN[kind])
    if extra and kind is not nn.MultiheadAttention:  # of other kinds of attention the checks say more
        return f"has more than a {kind.__name__}: {', '.join(extra)}"
    hooked = [name for name, one in held if has_gradient_hooks(one)]
    return f"has a hook on its {hooked[0]}" if hooked else ""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks around forward, backward, or its state."""
    return any(getattr(module, name, None) for name in _HOOKS)


def has_gradient_hooks(tensor: Tensor, *, accumulated: bool = True) -> bool:
    """Return whether backward is to call something with the gradient of a tensor, or once that is accumulated."""
    return any(getattr(tensor, name, None) for name in _TENSOR_HOOKS[: 1 + accumulated])


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a module is known to compute each feature by itself.

    >>> is_elementwise(nn.GELU()), is_elementwise(nn.Softmax(-1))
    (True, False)
    """
    return type(module) in _ELEMENTWISE and "forward" not in vars(module) and not has_hooks(module)


def found_plan(model: nn.Module, size: int) -> dict[str, str]:
    """Return a plan found from the layers of a model: attention, pairs of linear layers, and its vocabulary.

    Args:
        model: the whole model.
        size: number of ranks.

    Example:
        >>> found_plan(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), size=2)
        {'0': 'column', '2': 'row'}
    """
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        linears = {name: child for name, child in module.named_children() if _is_linear(child)}
        found: Iterator[tuple[str, str]] = iter(())
        if isinstance(module, nn.MultiheadAttention):
            plan.update({path: ATTENTION} if path and not obstacle(module) else {})
        elif isinstance(module, nn.Sequential):
            found = _sequential(module) if type(module).forward is nn.Sequential.forward else found
        elif any(isinstance(getattr(module, name, None), int) for name in HEADS) and linears:
            found = iter([*_attention(linears), *_pairs(linears)])
        elif linears:
            found = _pairs(linears)
        plan.update({f"{path}.{name}" if path else name: kind for name, kind in found})
    return {**plan, **_vocabulary(model, plan, size)}


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and not obstacle(module)


def _attention(linears: Mapping[str, nn.Linear]) -> Iterator[tuple[str, str]]:
    """Find the projections of an attention layer by their names."""
    outputs = [name for name in _OUTPUTS if name in linears]
    stacked = [name for name in _STACKED if name in linears and linears[name].out_features % 3 == 0]
    apart = [names for names in _QUERY_KEY_VALUE if all(name in linears for name in names)]
    if outputs and (stacked or apart):
        yield from ((stacked[0], f"{COLUMN}:3"),) if stacked else ((name, COLUMN) for name in apart[0])
        yield outputs[0], ROW


def _pairs(linears: Mapping[str, nn.Linear]) -> Iterator[tuple[str, str]]:
    """Find a layer that widens and one that narrows by their names, and the gate beside the first if there is one."""
    for wide, narrow in _PAIRS:
        if wide in linears and narrow in linears and linears[wide].out_features == linears[narrow].in_features:
            width = linears[wide].out_features
            gates = [name for name in _GATES if name in linears and linears[name].out_features == width]
            yield from ((name, COLUMN) for name in (wide, *gates))
            yield narrow, ROW
            return


def _sequential(chain: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Find pairs of linear layers with only elementwise modules between them."""
    rest = [(name, layer) for name, layer in chain.named_children() if not is_elementwise(layer)]
    taken = ""
    for (first, wide), (second, narrow) in pairwise(rest):
        if first != taken and _is_linear(wide) and _is_linear(narrow):
            taken = second
            yield from ((first, COLUMN), (second, ROW))


def _vocabulary(model: nn.Module, plan: Plan, size: int) -> dict[str, str]:
    """Find embeddings whose words the last linear layer scores, if the words divide by the ranks."""
    embeddings = {name: one for name, one in model.named_modules() if type(one) is nn.Embedding and not obstacle(one)}
    linears = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    last, num_words = (linears[-1][0], linears[-1][1].out_features) if linears else ("", 0)
    if linears and not _is_linear(linears[-1][1]):
        return {}
    of_words = [name for name, one in embeddings.items() if one.num_embeddings == num_words]
    claimed = any(last == name or last.startswith(f"{name}.") for name in plan)
    return {} if claimed or num_words % size or not of_words else dict.fromkeys((*of_words, last), VOCABULARY)


def _matched(model: nn.Module, patterns: Plan) -> dict[str, str]:
    """Return the layers that match the patterns; of several matching patterns, the first counts."""
    layers: dict[str, nn.Module] = {name: one for name, one in model.named_modules() if isinstance(one, _KINDS)}
    plan: dict[str, str] = {}
    for pattern, kind in patterns.items():
        word, _, stacked = kind.partition(":")
        if word not in SPLITTABLE or (stacked and not (word == COLUMN and stacked.isdigit() and int(stacked) > 0)):
            raise UsageError(f"'{pattern}' is to be split by '{kind}', expected {', '.join(SPLITTABLE)} or column:3.")
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        wrong = [name for name in matching if not isinstance(layers[name], SPLITTABLE[word])]
        if wrong or not matching:
            expected = " or ".join(one.__name__ for one in SPLITTABLE[word])
            what = f"'{wrong[0]}' is a {type(layers[wrong[0]]).__name__}" if wrong else "no layer has such a name"
            raise UsageError(f"'{pattern}' is to be split by '{kind}', which is for {expected}: {what}.")
        lost = [f"'{name}' {why}" for name in matching if (why := obstacle(layers[name]))]
        if lost:
            raise UsageError(
                f"'{pattern}' is to be split by '{kind}', but {lost[0]}, and a part computes what torch's own class "
                "does: leave the layer out of the plan, or build it without."
            )
        plan.update({name: kind for name in matching if name not in plan})
    return plan


def require_splittable(model: nn.Module, planned: Mapping[str, str], size: int) -> None:
    """Raise UsageError when layers cannot be split as planned over this many ranks."""
    _require_pairs(planned)
    for name, kind in planned.items():
        _require_division(model, name, kind, size)
    _require_apart(model, planned)


def require_row(row: Sequence[tuple[str, nn.Module]], planned: Mapping[str, str]) -> set[str]:
    """Return the layers of a row that are themselves split by columns or rows, not layers inside of them.

    Raises:
        UsageError: a module between columns and rows is not known to compute each feature by itself.
    """
    found: set[str] = set()
    opened = ""
    for name, layer in row:
        kind = planned.get(name, "")
        if kind.startswith(COLUMN) or kind == ROW:
            found.add(name)
            if bool(opened) == (kind == ROW):
                opened = name if kind != ROW else ""
                continue
        elif not opened or is_elementwise(layer):
            continue
        raise UsageError(
            f"layer '{opened or name}' is split by its features, but '{name}', a {type(layer).__name__}, does not go "
            "with that in a model that is cut into a row of layers: only activations and dropout may stand between "
            "one split by columns and one by rows. Put the three into one module, or leave them out of tensor_plan."
        )
    if opened:
        raise UsageError(f"layer '{opened}' is split by columns, but no layer behind it in the row is by rows.")
    return found


def heads_of(module: nn.Module) -> list[tuple[str, int]]:
    """Return the attributes of a module that are numbers of heads, with their values."""
    numbers = [(name, getattr(module, name, None)) for name in HEADS]
    return [(name, number) for name, number in numbers if isinstance(number, int)]


def _head_width(module: nn.Module) -> int:
    """Return the number of features of a head of a module; 1 if it has no such attribute."""
    widths = [getattr(module, name, None) for name in HEAD_WIDTHS]
    return next((width for width in widths if isinstance(width, int) and width > 0), 1)


def _require_pairs(planned: Mapping[str, str]) -> None:
    """Refuse columns without rows that sum them, and rows without columns."""
    columns = [name for name, kind in planned.items() if kind.startswith(COLUMN)]
    rows = [name for name, kind in planned.items() if kind == ROW]
    if bool(columns) != bool(rows):
        given, missing = ("column", "row") if columns else ("row", "column")
        raise UsageError(
            f"layer '{(columns or rows)[0]}' is to be split by '{given}', but none by '{missing}': a layer split by "
            "columns needs one split by rows behind it, which adds up the parts."
        )


def _require_division(model: nn.Module, name: str, kind: str, size: int) -> None:
    """Refuse a layer that does not divide by the number of ranks."""
    layer = model.get_submodule(name)
    word, _, stacked = kind.partition(":")
    if word == COLUMN:
        for what, number in heads_of(model.get_submodule(name.rpartition(".")[0])):
            _require(name, f"{what}={number} around it", number, size)
    if isinstance(layer, nn.MultiheadAttention):
        _require(name, f"{layer.num_heads} heads", layer.num_heads, size)
        if not has_one_width(layer) or layer.bias_k is not None or layer.add_zero_attn:
            raise UsageError(f"attention '{name}' cannot be split: it has kdim, vdim, add_bias_kv or add_zero_attn.")
    elif isinstance(layer, nn.Embedding):
        _require(name, f"{layer.num_embeddings} words", layer.num_embeddings, size)
    elif isinstance(layer, nn.Linear) and word == ROW:
        _require(name, f"{layer.in_features} input features", layer.in_features, size)
    elif isinstance(layer, nn.Linear):
        num_stacked = int(stacked or 1)
        what = f"{layer.out_features} output features" + (f" in {num_stacked} parts" if num_stacked > 1 else "")
        _require(name, what, layer.out_features, size * num_stacked)
        width = _head_width(model.get_submodule(name.rpartition(".")[0])) if word == COLUMN else 1
        if layer.out_features // num_stacked % width == 0:
            num_heads = layer.out_features // num_stacked // width
            _require(name, f"{num_heads} heads of {width} features", num_heads, size)


def _require(name: str, what: str, number: int, size: int) -> None:
    if number % size:
        raise UsageError(
            f"layer '{name}' cannot be split over {size} parts: it has {what}, which do not divide evenly. Choose "
            "another number of tensor ranks, or leave the layer out of the plan."
        )


def _require_apart(model: nn.Module, planned: Mapping[str, str]) -> None:
    """Refuse parameters shared by a split layer and one that is whole or split another way."""
    way_of: dict[int, tuple[str, int]] = {}
    for name, kind in planned.items():
        way = 1 if kind == ROW else 0
        for own, parameter in model.get_submodule(name).named_parameters():
            if kind == ROW and own != "weight":
                continue
            other, other_way = way_of.setdefault(id(parameter), (f"{name}.{own}", way))
            if other_way != way:
                raise UsageError(f"'{name}.{own}' is '{other}', which is to be split another way: give both the same.")
    for path, module in model.named_modules(remove_duplicate=False):
        if not any(
            path == name or (kind == ATTENTION and path.startswith(f"{name}.")) for name, kind in planned.items()
        ):
            for own, parameter in module.named_parameters(recurse=False):
                if id(parameter) in way_of:
                    raise UsageError(
                        f"'{path}.{own}' is '{way_of[id(parameter)][0]}', which is to be split, but '{path}' is not: "
                        "have both split, or give them parameters of their own."
                    )
