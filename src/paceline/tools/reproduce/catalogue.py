"""All claims, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.errors import UsageError
from paceline.tools.reproduce.claim import Claim
from paceline.tools.reproduce.claims import (
    access_plan,
    adaptive_revision,
    asynchronous_adagrad,
    asynchronous_embeddings,
    asynchronous_outer,
    backup_workers,
    best_delay,
    bound_holds,
    bounded_staleness,
    collisions,
    diloco,
    fully_sharded,
    gpipe,
    hogwild,
    key_caching,
    kkt_filter,
    managed_communication,
    model_parallel,
    no_stragglers,
    persistent_straggler,
    recovery,
    replication,
    ring,
    shared_lines,
    single_process,
    sketch_inserts,
    staleness_robustness,
    staleness_shape,
    streaming_exchange,
    sufficient_factors,
    tensor_parallel,
    uniform_workers,
    weight_stashing,
)

CLAIMS: Final[tuple[Claim, ...]] = (
    bounded_staleness.CLAIM,
    no_stragglers.CLAIM,
    persistent_straggler.CLAIM,
    staleness_shape.CLAIM,
    staleness_robustness.CLAIM,
    key_caching.CLAIM,
    kkt_filter.CLAIM,
    best_delay.CLAIM,
    replication.CLAIM,
    recovery.CLAIM,
    sketch_inserts.CLAIM,
    asynchronous_adagrad.CLAIM,
    model_parallel.CLAIM,
    backup_workers.CLAIM,
    managed_communication.CLAIM,
    adaptive_revision.CLAIM,
    access_plan.CLAIM,
    uniform_workers.CLAIM,
    sufficient_factors.CLAIM,
    ring.CLAIM,
    shared_lines.CLAIM,
    gpipe.CLAIM,
    weight_stashing.CLAIM,
    tensor_parallel.CLAIM,
    fully_sharded.CLAIM,
    diloco.CLAIM,
    asynchronous_outer.CLAIM,
    streaming_exchange.CLAIM,
    asynchronous_embeddings.CLAIM,
    collisions.CLAIM,
    hogwild.CLAIM,
    bound_holds.CLAIM,
    single_process.CLAIM,
)
_ALL: Final = "all"


def find_claims(names: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims of these names or anchors, each once and in the order of the list.

    Raises:
        UsageError: there is no such claim.

    Example:
        >>> [claim.name for claim in find_claims(["A7", "4"])]
        ['4', '8']
    """
    known = {claim.name for claim in CLAIMS} | {anchor for claim in CLAIMS for anchor in claim.anchors}
    by_upper = {name.upper(): name for name in (*known, _ALL)}
    unknown = [name for name in names if name.upper() not in by_upper]
    if unknown:
        raise UsageError(
            f"there is no claim '{unknown[0]}'. Expected a number from 1 to 31, an anchor from A1 to A12, or all; "
            "`paceline reproduce` lists them."
        )
    wanted = {by_upper[name.upper()] for name in names}
    return tuple(claim for claim in CLAIMS if wanted & {claim.name, *claim.anchors, _ALL})
