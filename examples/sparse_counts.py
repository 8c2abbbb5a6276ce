"""What all workers counted together: rows that filters dropped, and the bytes they sent."""

import numpy as np

import paceline
from paceline.update.filters.traffic import WireBytes


def count(ps: paceline.Session, table: paceline.RowTable, first: WireBytes) -> dict[str, float]:
    """Return what all workers counted, added up by a table of its own."""
    end = table.traffic.total
    counted = {
        "rows pushed": table.filtered.given,
        "rows filtered": table.filtered.dropped,
        "ids": end.key_bytes,
        "digests": end.digest_bytes,
        "numbers": end.value_bytes,
        "plain": end.plain_total_bytes,
        "later ids": end.key_bytes - first.key_bytes,
        "later digests": end.digest_bytes - first.digest_bytes,
        "later numbers": end.value_bytes - first.value_bytes,
        "later plain": end.plain_total_bytes - first.plain_total_bytes,
    }
    sums = ps.table(
        f"{table.name}, counts",
        shape=(len(counted),),
        update=paceline.update.Add(),
        scale="sum",
        consistency="ssp:0",
        dtype="float64",
    )
    sums.push(np.array(list(counted.values()), np.float64))
    ps.barrier()
    return dict(zip(counted, sums.pull(exact=True).tolist(), strict=True))
