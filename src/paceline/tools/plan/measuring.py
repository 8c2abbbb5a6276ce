"""Costs of the layers of a torch module from a file: loaded and run once on the meta device, without memory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec
import torch
from torch import Tensor, UntypedStorage
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import (
    Conv1d,
    Conv2d,
    Conv3d,
    Embedding,
    Linear,
    Module,
    ModuleDict,
    ModuleList,
    MultiheadAttention,
    Parameter,
    Sequential,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import UsageError
from paceline.model_parallel.layers import layers_of, starts_of
from paceline.model_parallel.tensor_plan import plan_for, require_splittable
from paceline.tools.plan.model import Model, PlannedLayer, Rules

_IDS: Final = "ids"


class Sample(msgspec.Struct, frozen=True):
    """Shape of one input without its batch, and whether its elements are ids of tokens."""

    shape: tuple[int, ...]
    is_ids: bool = False

    @staticmethod
    def parse(text: str) -> Sample:
        """Parse `3,224,224`, or `128:ids` for tokens.

        Raises:
            UsageError: the text is not a shape.

        Example:
            >>> Sample.parse("128:ids")
            Sample(shape=(128,), is_ids=True)
        """
        sizes, colon, kind = text.partition(":")
        numbers = [size.strip() for size in sizes.split(",")]
        whole = all(size.isascii() and size.isdigit() and int(size) > 0 for size in numbers)
        if (colon and kind != _IDS) or not whole:
            raise UsageError(
                f"--input is '{text}', expected the sizes of one sample without the batch, such as 3,224,224, or "
                f"128:{_IDS} for tokens."
            )
        return Sample(tuple(int(size) for size in numbers), bool(colon))


_T = TypeVar("_T")
_SUFFIX: Final = ".py"


def load_module(place: str) -> Module:
    """Call a function of a file, without arguments and on the meta device, and return its module.

    Args:
        place: "file.py:function".

    Raises:
        UsageError: the file cannot be loaded or lacks the function, or the function fails or returns another type.
    """
    path, _, name = place.rpartition(":")
    if not path or not name:
        raise UsageError(
            f"'{place}' does not name a function. Expected FILE.py:FUNCTION, which returns a torch.nn.Module."
        )
    with _as_script(Path(path)):
        make = getattr(_load(Path(path)), name, None)
        if not callable(make):
            raise UsageError(f"{path} has no function {name}.")
        with torch.device("meta"):
            module = attempt(f"{name} of {path} fails", make)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{name} of {path} returns a {type(module).__name__}, expected a torch.nn.Module.")
    return module.to("meta")


def attempt(what: str, call: Callable[[], _T]) -> _T:
    """Call the user's code; raise its errors as a UsageError that begins with `what`."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # user code may raise any of them
        raise UsageError(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def _as_script(path: Path) -> Generator[None]:
    """Have a file find what Python gives a script: the modules beside it, and arguments of its own, which are none."""
    arguments, places = sys.argv, list(sys.path)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, places


def _load(path: Path) -> ModuleType:
    """Run a file as a module of its own."""
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; its name must end in {_SUFFIX}.")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules.setdefault(spec.name, module)  # where dataclasses look up the types of their fields
    attempt(f"{path} cannot be loaded", lambda: loader.exec_module(module))
    return module


def rules_of(module: Module, units: Sequence[Module]) -> Rules:
    """Return where a module can be cut into stages, and over how many ranks it can be split.

    Args:
        module: the whole module, which may wrap the model to add the loss.
        units: the layers of the plan, in the order in which they run.
    """
    model = _model_of(module)

    def no_split(size: int) -> str:
        try:
            require_splittable(model, plan_for(model, None, size), size)
        except UsageError as error:
            return str(error)
        return ""

    try:
        row = layers_of(model)
    except UsageError as error:
        return Rules(starts=(), no_row=str(error), no_split=no_split)
    index_of = {id(part): index for index, layer in enumerate(row) for part in layer.module.modules()}
    places = [next((index_of[id(part)] for part in unit.modules() if id(part) in index_of), None) for unit in units]
    starts = [places.index(start) for start in starts_of(row) if start in places]
    return Rules(starts=tuple(sorted(starts)), no_split=no_split)


def _model_of(module: Module) -> Module:
    """Return the module that a script passes to `parallelize`: without a wrapper that adds the loss."""
    own = set(module.parameters())
    inner = [child for child in module.children() if own and set(child.parameters()) == own]
    try:
        layers_of(module)
    except UsageError:
        return _model_of(inner[0]) if len(inner) == 1 else module
    return module


_CONTAINERS: Final = (Sequential, ModuleList, ModuleDict)
_ATTENTION_AND_PERCEPTRON: Final = 4  # linear layers, at least


@dataclass(slots=True)
class _Cost:
    """Measured costs of one layer, in bytes of the whole batch."""

    name: str
    width: int = 0  # of its input
    flops: int = 0
    input_flops: int = 0
    output_bytes: float = 0.0
    saved: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])  # width and bytes of each tensor


def measured_model(name: str, module: Module, sample: Sample, batch: int, number_bytes: int) -> Model:
    """Run a module on the meta device and return the costs of its layers.

    Args:
        name: of the model.
        module: on the meta device.
        sample: shape of one input.
        batch: samples to run it with; some modules need more than one.
        number_bytes: of an activation.

    Raises:
        UsageError: the module does not run on such an input, or on the meta device.
    """
    dtype = torch.long if sample.is_ids else torch.get_default_dtype()
    given = torch.zeros((batch, *sample.shape), dtype=dtype, device="meta")
    recorder = _Recorder(module, number_bytes)
    module.train()
    with torch.device("meta"):
        what = f"{name} cannot be run on the meta device with an input of {batch} x {tuple(sample.shape)}"
        if not sample.is_ids and any(isinstance(each, Embedding) for each in module.modules()):
            what += f" of numbers (it has embeddings: append :{_IDS} to --input for ids)"
        attempt(what, lambda: recorder.run(given))
    seen = set[Tensor]()
    costs = list(recorder.costs())
    layers = tuple(_layer(cost, unit, seen, batch) for unit, cost in costs)
    rules = rules_of(module, [unit for unit, _ in costs])
    return Model(name, layers, input_bytes=recorder.bytes_of(given) / batch, rules=rules)


def units_of(module: Module, name: str = "") -> Iterator[tuple[str, Module]]:
    """Yield the layers of a module, each with its name.

    Example:
        >>> [name for name, _ in units_of(Sequential(Linear(2, 2), Sequential(Linear(2, 2), Linear(2, 1))))]
        ['0', '1.0', '1.1']
    """
    children = list(module.named_children())
    for child_name, child in children:
        path = f"{name}.{child_name}" if name else child_name
        is_member = isinstance(module, Sequential | ModuleList)
        opened = isinstance(child, _CONTAINERS) if is_member else _holds_containers(child)
        if opened:
            yield from units_of(child, path)
        else:
            yield path, child


def _holds_containers(module: Module) -> bool:
    return any(isinstance(part, _CONTAINERS) for part in module.modules())


class _Recorder:
    """Records one run of a module, layer by layer."""

    def __init__(self, module: Module, number_bytes: int) -> None:
        self._module = module
        self._number_bytes = number_bytes
        self._counter = FlopCounterMode(display=False)
        self._on_input = _OnInput(self._counter)
        # By layer.
        self._costs = {unit: _Cost(name) for name, unit in units_of(module)}
        self._ran: dict[Module, None] = {}
        self._rest = _Cost("between the layers")
        self._running = [self._rest]
        held = (*module.parameters(), *module.buffers())
        # Invariant: holds every counted storage, so that a later one cannot get its address.
        self._known: set[UntypedStorage] = {tensor.untyped_storage() for tensor in held}

    def run(self, given: Tensor) -> None:
        """Run the module forward once."""
        handles = [unit.register_forward_pre_hook(self._begin) for unit in self._costs]
        handles += [unit.register_forward_hook(self._end) for unit in self._costs]
        try:
            keeping = saved_tensors_hooks(self._keep, lambda tensor: tensor)
            with self._counter, FusedAttention(), self._on_input, keeping:
                self._module(given)
        finally:
            for handle in handles:
                handle.remove()
        self._rest.flops = self._counter.get_total_flops() - sum(cost.flops for cost in self._costs.values())

    def costs(self) -> Iterator[tuple[Module, _Cost]]:
        """Yield the layers in the order of the run, then the parameters and activations outside of layers, if any."""
        for unit in (*self._ran, *(unit for unit in self._costs if unit not in self._ran)):
            yield unit, self._costs[unit]
        inside = {parameter for unit in self._costs for parameter in unit.parameters()}
        if self._rest.saved or any(parameter not in inside for parameter in self._module.parameters()):
            yield self._module, self._rest

    def bytes_of(self, tensor: Tensor) -> float:
        """Return the bytes of the storage of a tensor, with elements of the size in training."""
        size = tensor.element_size()
        held = tensor.untyped_storage().nbytes() / size
        return held * (self._number_bytes if tensor.is_floating_point() else size)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self._running[-1].saved.append((tensor.shape[-1] if tensor.dim() else 0, self.bytes_of(tensor)))
        return tensor

    def _begin(self, unit: Module, inputs: tuple[object, ...]) -> None:
        cost = self._costs[unit]
        self._ran[unit] = None
        self._running.append(cost)
        cost.width = next((given.shape[-1] for given in inputs if isinstance(given, Tensor) and given.dim()), 0)
        cost.flops -= self._counter.get_total_flops()
        cost.input_flops -= self._on_input.flops

    def _end(self, unit: Module, _inputs: tuple[object, ...], output: object) -> None:
        cost = self._costs[unit]
        self._running.pop()
        cost.flops += self._counter.get_total_flops()
        cost.input_flops += self._on_input.flops
        tensors = output if isinstance(output, tuple | list) else [output]
        cost.output_bytes = sum(self.bytes_of(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _layer(cost: _Cost, unit: Module, seen: set[Tensor], batch: int) -> PlannedLayer:
    """Return the layer for one sample. Shared parameters count in the first layer."""
    own = [parameter for parameter in unit.parameters() if parameter not in seen]
    matrices = [matrix for matrix in _matrices(unit) if matrix not in seen]
    buffers = [buffer for buffer in unit.buffers() if buffer not in seen]
    seen.update(own, buffers)
    is_split = len(matrices) > 1
    split = [size for width, size in cost.saved if is_split and width != cost.width]
    largest = max((size for _, size in cost.saved), default=0.0)
    return PlannedLayer(
        cost.name,
        sum(parameter.numel() for parameter in own),
        flops=cost.flops / batch,
        input_flops=cost.input_flops / batch,
        split_parameters=sum(matrix.numel() for matrix in matrices) if is_split else 0,
        kept_bytes=(sum(size for _, size in cost.saved) - sum(split)) / batch,
        split_bytes=sum(split) / batch,
        output_bytes=cost.output_bytes / batch,
        working_bytes=_copies(unit) * max(largest, cost.output_bytes) / batch,
        largest_parameters=max((parameter.numel() for parameter in own), default=0),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        num_all_reduces=(2 if len(matrices) >= _ATTENTION_AND_PERCEPTRON else 1) if is_split else 0,
    )


def _copies(unit: Module) -> int:
    """Return the number of tensors of the largest size in the backward pass: gradients of output and input.

    Convolutions copy both into another layout, which doubles the number.
    """
    return 4 if any(isinstance(part, Conv1d | Conv2d | Conv3d) for part in unit.modules()) else 2


def _matrices(unit: Module) -> Iterator[Tensor]:
    """Yield the matrices that tensor parallelism splits by columns or rows."""
    for part in unit.modules():
        if isinstance(part, Linear | Embedding):
            yield part.weight
        elif isinstance(part, MultiheadAttention):
            yield from part.parameters(recurse=False)


class _OnInput(TorchFunctionMode):
    """Counts operations on values that no parameter has changed: backward computes no gradient of these."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counter = counter
        self.flops = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function, and look at what it is called with."""
        before = self._counter.get_total_flops()
        found = func(*args, **(kwargs or {}))
        values = [given for given in args if isinstance(given, Tensor) and not isinstance(given, Parameter)]
        if not any(given.requires_grad for given in values):
            self.flops += self._counter.get_total_flops() - before
        return found


class FusedAttention(TorchFunctionMode):
    """Mode in which `scaled_dot_product_attention` keeps only queries, keys, values and its result.

    On the meta device torch runs separate operations, which keep more than the kernels of real devices.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Replace the one function; call all others."""
        if func is scaled_dot_product_attention and len(args) >= 3:
            return _Attention.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Attention(Function):
    """Attention as two products, so that their operations are counted; runs forward only."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        """Save the tensors that fused kernels save."""
        found = torch.softmax(queries @ keys.transpose(-2, -1), dim=-1) @ values
        ctx.save_for_backward(queries, keys, values, found)
        return found
