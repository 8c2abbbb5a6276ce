"""How examples divide a step's samples, so that they see as many under every strategy."""

import paceline


def batch_of_replica(ps: paceline.Session, batch: int) -> int:
    """Return how many samples each replica takes of a step in which all of them together take `batch`."""
    num_replicas = ps.arrangement.grid.replicas
    if batch % num_replicas:
        raise SystemExit(f"--batch {batch} does not divide among {num_replicas} replicas.")
    return batch // num_replicas
