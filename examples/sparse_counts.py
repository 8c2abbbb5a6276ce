"""What all workers counted together: rows that filters dropped, and the bytes they sent."""

import numpy as np

import paceline


def sent(table: paceline.RowTable) -> dict[str, float]:
    """Return the bytes that this worker has sent so far, and those that plain pushes and pulls would have taken."""
    went = table.traffic.total
    return {
        "ids": went.key_bytes,
        "digests": went.digest_bytes,
        "numbers": went.value_bytes,
        "plain": went.plain_total_bytes,
    }


def count(ps: paceline.Session, table: paceline.RowTable, first: dict[str, float]) -> dict[str, float]:
    """Return what all workers counted, added up by a table of its own; "later" is what came after `first` was sent."""
    end = sent(table)
    later = {f"later {name}": end[name] - first[name] for name in end}
    counted = {"rows pushed": table.filtered.given, "rows filtered": table.filtered.dropped, **end, **later}
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
