"""Claim 13: what splitting a model over machines brings depends on how much its parts tell each other."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot

_MACHINES: Final = (1, 2, 4, 8, 16, 32, 64, 81, 128)
_FLOPS: Final = 50e9  # of a machine of that time, single precision
_BYTES_PER_S: Final = 125e6  # 1 Gbit/s
_LATENCY_S: Final = 100e-6
_NUMBER: Final = 4  # bytes


class _Dense(msgspec.Struct, frozen=True):
    """Layers in which every unit sees all of the layer below."""

    widths: tuple[int, ...]
    batch: int

    def flops(self) -> float:
        """Return what forward and backward of a batch take."""
        return sum(6.0 * below * above * self.batch for below, above in zip(self.widths, self.widths[1:], strict=False))

    def exchanged(self, machines: int) -> tuple[float, int]:
        """Return the bytes that a machine receives, and in how many messages: all other parts of every layer, twice."""
        inner = self.widths[1:-1]
        received = sum(2.0 * self.batch * width * (machines - 1) / machines * _NUMBER for width in inner)
        return received, 2 * len(inner) * (machines - 1)


class _Local(msgspec.Struct, frozen=True):
    """Layers of maps in which a unit sees a small square of the layer below: only edges cross from part to part."""

    side: int
    maps: int
    reach: int
    layers: int
    batch: int

    def flops(self) -> float:
        """Return what forward and backward of a batch take; no weights are shared."""
        return 6.0 * self.batch * self.layers * (self.side * self.maps * self.reach) ** 2

    def exchanged(self, machines: int) -> tuple[float, int]:
        """Return the bytes of the borders of a machine's square, four of them, twice a layer."""
        border = 4 * (self.side / machines**0.5) * (self.reach // 2) * self.maps
        return 2.0 * self.layers * border * self.batch * _NUMBER, 8 * self.layers


def _speedups(net: _Dense | _Local, bytes_per_s: float = _BYTES_PER_S) -> tuple[float, ...]:
    alone_s = net.flops() / _FLOPS

    def seconds(machines: int) -> float:
        received, messages = net.exchanged(machines) if machines > 1 else (0.0, 0)
        return alone_s / machines + received / bytes_per_s + messages * _LATENCY_S

    return tuple(alone_s / seconds(machines) for machines in _MACHINES)


def _run(options: ClaimOptions) -> Finding:
    del options
    speech = _Dense((440, 2560, 2560, 2560, 2560, 8192), batch=32)
    image = _Local(side=64, maps=8, reach=10, layers=3, batch=32)
    dense, local, thin = _speedups(speech), _speedups(image), _speedups(speech, _BYTES_PER_S / 50)
    best = _MACHINES[dense.index(max(dense))]
    machines = tuple(map(float, _MACHINES))
    return Finding(
        (
            Check("dense net: best number of machines", "a few (paper: 8)", f"{best}", 4 <= best <= 16),
            Check("its speed-up there", "1.5 to 4 (paper: 2.2)", f"{max(dense):.1f}", 1.5 <= max(dense) <= 4),
            Check(
                "local net on 81 machines",
                "more than 10 (paper: above 12)",
                f"{local[_MACHINES.index(81)]:.1f}",
                local[_MACHINES.index(81)] > 10,
            ),
            Check("dense net on 2 machines, a fiftieth of the bandwidth", "at most 1", f"{thin[1]:.2f}", thin[1] <= 1),
        ),
        (
            Plot(
                "Speed-up by the number of machines",
                "machines",
                "times one machine",
                (
                    Curve("dense, 42 million parameters", machines, dense),
                    Curve("local connections", machines, local),
                    Curve("dense, 20 Mbit/s", machines, thin),
                ),
                is_log_x=True,
                is_log_y=True,
            ),
        ),
        "Computed and not measured: the operations and the numbers that cross between parts, at 50 GFLOP/s a "
        "machine, 1 Gbit/s and 0.1 ms a message; a batch "
        "of 32. The paper names neither its network nor its batch, so the shape is what is shown: dense layers need "
        "all of each other's "
        "outputs, local ones a border.",
    )


CLAIM: Final = Claim(
    "13",
    "Model parallelism pays where little crosses between the parts",
    "Dean et al. 2012 (DistBelief)",
    "2.2 times at 8 machines (dense), over 12 at 81 (local)",
    "virtual",
    (0.1, 0.1),
    _run,
)
