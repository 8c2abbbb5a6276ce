"""Servers with replicas on Ray: how their processes are started, and which one comes when another has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from msgspec.structs import replace

from paceline.job.views import FIRST, NUM_PLACES, Views
from paceline.launch.replicas import ServerPlace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.launch.child import Launch


@final
class ReplicatedServers:
    """The two processes of each server, and those that come in their places; see `launch.supervision.Succession`.

    Used by one thread. The registry of the job notes how processes have ended before this is asked.
    """

    def __init__(self, run_dir: Path, num_servers: int) -> None:
        """Plan them; `run_dir` has the views of servers when a process has ended."""
        self._views = [Views(run_dir, rank) for rank in range(num_servers)]
        self._places = {
            (rank, process): ServerPlace(views, process)
            for rank, views in enumerate(self._views)
            for process in (FIRST.head, FIRST.replica)
        }

    def equip(self, launches: Sequence[Launch]) -> list[Launch]:
        """Return how to start the processes of a job, and a replica behind each server."""
        return [
            each
            for launch in launches
            for each in ((launch, as_process(launch, FIRST.replica)) if launch.role == "server" else (launch,))
        ]

    def objection(self, rank: int) -> str:
        """Return why the run cannot go on, now that a process of this server has died; "" while another is left."""
        return "no process of it is left to serve" if self._views[rank].how_ended() else ""

    def following(self, launch: Launch, exit_code: int, /) -> Launch | None:
        """Return how to start the process in the place of the one that has ended so; None after too many failures."""
        process = self._places[launch.rank, launch.process % NUM_PLACES].next_process(exit_code)
        return None if process is None else as_process(launch.again(), process)

    def is_spare(self, launch: Launch, /) -> bool:
        """Return whether a process neither serves nor is a replica by now, or no longer."""
        view = self._views[launch.rank].newest()
        return launch.role == "server" and view is not None and launch.process not in (view.head, view.replica)


def as_process(launch: Launch, process: int) -> Launch:
    """Return how to start this process of a server."""
    return replace(launch, process=process, name=f"server {launch.rank}.{process}")
