"""Partition of a dense table over servers: lengths in, one range of elements per server out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from math import isfinite
from typing import Literal

import msgspec

from paceline.errors import UsageError

Cut = Literal["anywhere", "between_tensors"]

# Cuts inside a tensor lie on multiples of this many elements. So the vector loops over a piece take the same path as
# those over the whole tensor, and bsp over several servers stays bit-identical to one process.
ALIGNMENT = 64


class Range(msgspec.Struct, frozen=True):
    """Elements `[start, stop)` of a flat table, owned by one server; empty when the table is too small for it."""

    server: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def partition(
    lengths: Sequence[int], num_servers: int, *, cut: Cut = "anywhere", shares: Sequence[float] = ()
) -> tuple[Range, ...]:
    """Cut a table of tensors with `lengths` elements into one contiguous range per server, balanced by size.

    Args:
        lengths: elements of each tensor, in the table's order.
        num_servers: how many ranges to make; some may be empty when the table is small.
        cut: "anywhere" for element-wise rules, "between_tensors" for rules that need whole tensors.
        shares: how much each server holds, as proportions; empty for equal parts.

    Raises:
        UsageError: there are more servers with a share than elements (or than tensors, where these cannot be cut), or
            the shares are not valid.

    Example:
        >>> [(r.start, r.stop) for r in partition([100, 100], 2)]
        [(0, 100), (100, 200)]
        >>> [r.length for r in partition([1024], 3, shares=(2, 1, 1))]
        [512, 256, 256]
    """
    weights = check_shares(shares, num_servers) or (1,) * num_servers
    total, num_holders = sum(lengths), sum(weight > 0 for weight in weights)
    pieces = total if cut == "anywhere" else len(lengths)
    if num_holders > pieces and total:  # a table without elements has no holder
        what = "parameters" if cut == "anywhere" else "tensors, and its update rule needs each of them whole"
        raise UsageError(
            f"{num_holders} servers for a table of {pieces} {what}. Use at most {pieces} server(s) for it."
        )
    starts = list(accumulate(lengths, initial=0))
    before = list(accumulate(weights))
    wanted = [round(total * weight / before[-1]) for weight in before[:-1]]
    cuts = [0, *(_nearest_cut(starts, each, cut) for each in wanted), total]
    return tuple(Range(server, a, max(a, b)) for server, (a, b) in enumerate(pairwise(_rising(cuts))))


def holders(spans: Sequence[Range]) -> tuple[int, ...]:
    """Return the servers that hold part of a table; of a table without elements the first, which answers for it.

    Example:
        >>> holders(partition([100], 2)), holders(partition([0], 2))
        ((0, 1), (0,))
    """
    return tuple(span.server for span in spans if span.length) or (spans[0].server,)


def check_shares(shares: Sequence[float], num_servers: int) -> tuple[float, ...]:
    """Return `shares` if they are valid: empty, or one finite number >= 0 per server and not all 0.

    Raises:
        UsageError: they are not valid.
    """
    fine = all(isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    if shares and not (fine and len(shares) == num_servers):
        raise UsageError(
            f"the shares of {num_servers} server(s) are {', '.join(f'{share:g}' for share in shares)}, expected one "
            "number >= 0 for each, such as 2,1,1 for three, and not all 0"
        )
    return tuple(shares)


class Effort(msgspec.Struct, frozen=True):
    """The bytes that a server has moved, in and out, and how many seconds it was busy with that."""

    size_bytes: float
    busy_s: float


def shares_by_speed(former: Sequence[float], efforts: Sequence[Effort]) -> tuple[float, ...]:
    """Return the shares under which all servers would have been busy equally long; they add up to 1.

    Shares are proportional to measured bytes per second. A server that moved nothing keeps its share.

    Args:
        former: the shares under which the efforts were measured; empty for equal parts.
        efforts: of each server, by rank.

    Example:
        >>> shares_by_speed((), [Effort(100, 1.0), Effort(100, 3.0)])
        (0.75, 0.25)
    """
    weights = check_shares(former, len(efforts)) or (1.0,) * len(efforts)
    before = [weight / sum(weights) for weight in weights]
    speeds = [effort.size_bytes / effort.busy_s if effort.busy_s > 0 else 0.0 for effort in efforts]
    shared_out = sum(share for share, speed in zip(before, speeds, strict=True) if speed > 0)
    total = sum(speeds)
    return tuple(
        shared_out * speed / total if speed > 0 else share for share, speed in zip(before, speeds, strict=True)
    )


def shares_over_hosts(workers: Sequence[Hashable], servers: Sequence[Hashable]) -> tuple[float, ...]:
    """Return the share of each server so that the network links of all hosts finish at about the same time.

    The formula of BytePS (Jiang et al., OSDI 2020), applied to hosts. Of n hosts with workers, some hold servers too,
    each a share b of the values; a host with servers alone holds a share a. A link carries n * a bytes per byte of
    values at the latter, and 1 + (n - 2) * b at the former; the shares make both equal. Servers on one host divide its
    share equally.

    Args:
        workers: the host of each worker, about as many on each.
        servers: the host of each server, by rank.

    Example:
        >>> [round(share, 3) for share in shares_over_hosts(["a", "b", "c", "d"], ["e", "a", "b", "c", "d"])]
        [0.333, 0.167, 0.167, 0.167, 0.167]
        >>> shares_over_hosts(["a", "a", "b", "b"], ["a", "c", "d", "d"])
        (0.0, 0.5, 0.25, 0.25)
    """
    at_work, per_host = set(workers), Counter(servers)
    num_both, num_hosts = len(per_host.keys() & at_work), len(at_work)
    num_alone = len(per_host) - num_both
    beside = 0.0
    if num_both and num_alone < num_hosts:
        beside = (num_hosts - num_alone) / (num_both * num_hosts + num_alone * (num_hosts - 2))
    alone = (1 - num_both * beside) / num_alone if num_alone else 0.0
    return tuple((beside if host in at_work else alone) / per_host[host] for host in servers)


def _nearest_cut(starts: list[int], wanted: int, cut: Cut) -> int:
    """Return the allowed cut nearest to `wanted`: tensor boundaries, and inside a tensor multiples of ALIGNMENT."""
    below = max(start for start in starts if start <= wanted)
    above = min(start for start in starts if start >= wanted)
    if cut == "anywhere" and below < above:
        inside = below + (wanted - below + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT
        return min(inside, above)
    return below if wanted - below <= above - wanted else above


def _rising(cuts: list[int]) -> list[int]:
    return list(accumulate(cuts, max))
