"""Scenario of a simulation: the cluster, the speed of its workers, and the delays and faults that they meet."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from paceline.core.consistency import Consistency, bsp
from paceline.errors import UsageError

StragglerKind = Literal["none", "transient", "persistent"]
_MOST_FACTOR: Final = 1e9


class Stragglers(msgspec.Struct, frozen=True):
    """Which workers are slow, how often and by how much.

    Args:
        kind: "transient" slows a random share of the clocks of every worker, "persistent" always slows rank 0.
        share: share of clocks that are slow (transient only).
        factor: how many times longer a slow clock takes.
    """

    kind: StragglerKind = "none"
    share: float = 0.1
    factor: float = 4.0

    @staticmethod
    def parse(text: str) -> Stragglers:
        """Read `none`, `transient:SHARE:FACTOR` or `persistent:FACTOR`.

        Raises:
            UsageError: the text is none of these.

        Example:
            >>> Stragglers.parse("transient:0.1:4")
            Stragglers(kind='transient', share=0.1, factor=4.0)
        """
        name, *numbers = text.split(":")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = [-1.0]
        if name == "none" and not values:
            return Stragglers()
        if name == "transient" and len(values) == 2 and 0 <= values[0] <= 1 and 1 <= values[1] <= _MOST_FACTOR:
            return Stragglers("transient", share=values[0], factor=values[1])
        if name == "persistent" and len(values) == 1 and 1 <= values[0] <= _MOST_FACTOR:
            return Stragglers("persistent", factor=values[0])
        raise UsageError(
            f"unknown straggler model '{text}'. Expected none, transient:SHARE:FACTOR (transient:0.1:4 makes one "
            "clock in ten take four times as long) or persistent:FACTOR (rank 0 is always slower)."
        )

    def slowdown(self, worker: int, rng: Random) -> float:
        """Return the factor on the duration of this worker's next clock."""
        if self.kind == "persistent":
            return self.factor if worker == 0 else 1.0
        return self.factor if self.kind == "transient" and rng.random() < self.share else 1.0


class Network(msgspec.Struct, frozen=True):
    """Faults of the network. Probabilities are per message.

    Args:
        latency_s: least and largest latency of a message.
        drop: the message is lost, and the connection stays.
        duplicate: it arrives twice.
        reorder: it may overtake others.
        cut: the connection ends with it, and is restored soon.
        spoil: a push arrives with invalid values.
    """

    latency_s: tuple[float, float] = (0.0001, 0.0005)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    cut: float = 0.0
    spoil: float = 0.0

    @property
    def keeps_order(self) -> bool:
        """Return whether pushes arrive in order; after a cut, all later ones are repeated."""
        return not (self.reorder or self.drop)


class SimulatedLines(msgspec.Struct, frozen=True):
    """Lines of a rehearsal: each worker, server and data server has one of its own, which sends and receives at once.

    Args:
        bytes_per_s: what a line carries in a second in each direction; infinite in memory that processes share.
        gradient_bytes: bytes of a push, to all servers together.
        value_bytes: bytes of the values of a read, from all servers together.
        beside: whether server k stands beside worker k, and shares its line; what these two send each other costs
            nothing. Servers beyond the workers have lines of their own.
        early: whether values leave while pushes still come, as between machines: in lockstep, where a server's part is
            long enough to travel in pieces.
    """

    bytes_per_s: float = inf
    gradient_bytes: float = 0.0
    value_bytes: float = 0.0
    beside: bool = False
    early: bool = False


class DataServers(msgspec.Struct, frozen=True):
    """Data servers of a rehearsal, which make batches for workers, one after another; worker w asks server w mod n.

    Args:
        num_servers: how many there are; with 0, workers have their batches.
        batch_s: seconds that one takes to make a batch.
        batch_bytes: bytes of a batch.
        ahead: batches that a worker requests ahead of the one that it computes on.
    """

    num_servers: int = 0
    batch_s: float = 0.0
    batch_bytes: float = 0.0
    ahead: int = 2


class Faults(msgspec.Struct, frozen=True):
    """Faults of workers and servers.

    A rehearsal has deaths, restarts, joins and leaves; a world under checkers has all but the leaves.

    Args:
        deaths: number of kills of workers at random times, also after a restart.
        pauses: number of workers that stop and continue; a long pause makes a zombie.
        stops: number of workers that stop and keep their connections, so that no server is told.
        stalls: number of times that a server stops.
        restart: whether a killed worker restarts as its next incarnation.
        joins: number of workers that join at random times.
        early: probability that a worker is killed while it joins.
        leaves: number of workers that leave at random times, before their last clock.
        restart_s: in a rehearsal, seconds after which a killed worker runs again.
    """

    deaths: int = 0
    pauses: int = 0
    stops: int = 0
    stalls: int = 0
    restart: bool = False
    joins: int = 0
    early: float = 0.0
    leaves: int = 0
    restart_s: float = 0.0


class Scenario(msgspec.Struct, frozen=True):
    """One simulation, deterministic for a given seed. Times are virtual seconds.

    `others`: policies of further tables. Each server declares them at random times, and each worker opens those that it
    finds. `rows`: policies of further row tables; about half of them exist from the start.
    `num_pushes`: maximum number of pushes of a worker to each table in a clock.

    A rehearsal has one dense table with one push a clock, and a network that loses nothing; only a rehearsal has what
    is below `seed`.

    `recorded`: by worker, the seconds of computation of each clock, in place of `compute_s` and `stragglers`; from the
    beginning again after the last. `starts`: by worker, when it starts, in place of 0. `handle_s`: seconds of a server
    for a message, beside its updates. `num_reads`: reads of a worker in a clock, spread over its computation;
    `fetches_once`: of these only the first has `refresh`. `loss`: whether workers train a model, see `Quadratic`, and
    `rate`: the learning rate of the mean gradient of a clock.
    """

    consistency: Consistency = msgspec.field(default_factory=bsp)
    others: tuple[Consistency, ...] = ()
    rows: tuple[Consistency, ...] = ()
    num_pushes: int = 1
    num_workers: int = 4
    num_servers: int = 2
    num_clocks: int = 50
    compute_s: tuple[float, float] = (0.009, 0.011)
    apply_s: float = 0.0  # seconds of an update; in a rehearsal, of each push in it
    stragglers: Stragglers = msgspec.field(default_factory=Stragglers)
    network: Network = msgspec.field(default_factory=Network)
    fate: Faults = msgspec.field(default_factory=Faults)
    # Probability that a read with fresh cached values goes to the servers.
    refresh: float = 1.0
    lease_s: float = 0.05
    # Long if no message is lost silently: no worker may need a retry then, and a worker that waits in vain is found.
    retry_s: float = 0.02
    # Probability that a worker drops a cached row when it begins a read.
    evicted: float = 0.1
    seed: int = 0
    lines: SimulatedLines = msgspec.field(default_factory=SimulatedLines)
    data: DataServers = msgspec.field(default_factory=DataServers)
    recorded: tuple[tuple[float, ...], ...] = ()
    starts: tuple[float, ...] = ()
    handle_s: float = 0.0
    num_reads: int = 1
    fetches_once: bool = False
    loss: bool = False
    rate: float = 0.4

    @property
    def patience_s(self) -> float:
        """Return the virtual time after which an unfinished worker counts as waiting in vain."""
        clock_s = self.compute_s[1] * self.stragglers.factor + self.apply_s + self.network.latency_s[1]
        return 200 * self.num_clocks * clock_s + 1000 * self.lease_s


def under_policy(scenario: Scenario, policy: Consistency, *, lazy: bool) -> Scenario:
    """Return the scenario under a policy; a worker without a bound would never fetch lazily, so it does so once."""
    is_lazy = policy.deliver == "on_clock" or (lazy and policy.bound is not None)
    return replace(scenario, consistency=policy, refresh=0.0 if is_lazy else 1.0, fetches_once=lazy and not is_lazy)
