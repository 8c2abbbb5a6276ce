"""Communication times by published formulas. Bandwidth is bytes a second in one direction, free in both at once."""

from __future__ import annotations

from paceline.tools.plan.machine import NetworkLink


def ring_bytes(num_ranks: int, size_bytes: float) -> float:
    """Return what each rank of an all-reduce sends over a ring: 2 (n - 1) / n of its bytes.

    Example:
        >>> ring_bytes(4, 100.0)
        150.0
    """
    return 2 * (num_ranks - 1) / num_ranks * size_bytes


def ring_s(num_ranks: int, size_bytes: float, link: NetworkLink) -> float:
    """Return the seconds of such an all-reduce: its bytes, and 2 (n - 1) messages one after another."""
    return ring_bytes(num_ranks, size_bytes) / link.bytes_per_s + 2 * (num_ranks - 1) * link.latency_s


def server_shares(num_workers: int, num_servers: int) -> tuple[float, float]:
    """Return which shares of the values a server alone and one beside a worker keep, so that both end together.

    BytePS: a machine with a server alone 2 (n - 1) / (n² + k n - 2 k), one beside a worker (n - k) / (n² + k n - 2 k).
    From as many servers as workers on, nothing is left for those beside workers.

    Example:
        >>> server_shares(4, 2)
        (0.3, 0.1)
        >>> server_shares(4, 8)
        (0.125, 0.0)
    """
    if num_servers >= num_workers:
        return 1 / num_servers, 0.0
    parts = num_workers**2 + num_servers * num_workers - 2 * num_servers
    return 2 * (num_workers - 1) / parts, (num_workers - num_servers) / parts


def colocated_bytes(num_workers: int, num_servers: int, size_bytes: float) -> float:
    """Return what each machine sends when the values are shared out so: 2 n (n - 1) / (n² + k n - 2 k) of the bytes.

    Without servers of their own it is a ring's, with as many as workers the bytes themselves.

    Example:
        >>> [round(colocated_bytes(4, servers, 1.0), 3) for servers in range(5)]
        [1.5, 1.333, 1.2, 1.091, 1.0]
    """
    if num_servers >= num_workers:
        return size_bytes
    _, beside = server_shares(num_workers, num_servers)
    # A worker's machine pushes what others keep, and sends the values that it keeps to all other workers.
    return ((1 - beside) + (num_workers - 1) * beside) * size_bytes


def alone_bytes(num_workers: int, num_servers: int, size_bytes: float) -> float:
    """Return what the busiest machine sends when only servers of their own keep values: max(1, n / k) of the bytes.

    Example:
        >>> [round(alone_bytes(4, servers, 1.0), 2) for servers in (1, 2, 3, 4)]
        [4.0, 2.0, 1.33, 1.0]
    """
    return max(1.0, num_workers / num_servers) * size_bytes


def bubble_share(num_stages: int, num_micro_batches: int) -> float:
    """Return for which share of a step a stage of a pipeline has nothing to do: (K - 1) / (M + K - 1).

    Example:
        >>> [round(bubble_share(2, number), 2) for number in (1, 2, 4, 8)]
        [0.5, 0.33, 0.2, 0.11]
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
