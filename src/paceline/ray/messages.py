"""The messages between the launcher and its actors, few and small, as bytes.

No class of ours is pickled on the way, and no tensor is in them: values and updates go from process to process.
"""

from typing import Literal

import msgspec

Role = Literal["server", "data", "worker"]


class ActorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Which process an actor is to start.

    `files` go into the `folder` of the process, by their names in it; `is_followed`: the launcher does not see that
    folder, and wants to hear of it. `process`: which one it is of those of its server.
    """

    role: Role
    name: str
    rank: int
    incarnation: int
    local_rank: int
    script: str
    args: tuple[str, ...]
    variables: dict[str, str]
    files: dict[str, bytes]
    folder: str
    is_followed: bool
    cwd: str | None
    host: str
    traceback: bool
    process: int = 0

    def __repr__(self) -> str:
        """Leave out the files: one of them is the job's secret."""
        return f"Order({self.name}, incarnation {self.incarnation})"


class ActorReady(msgspec.Struct, frozen=True):
    """Where an actor runs, a folder of its own, and what it wants to be signed."""

    host: str
    folder: str
    version: str
    request: bytes


class News(msgspec.Struct, frozen=True):
    """What has happened to a process since the last news.

    `lines` are what it wrote, each with whether to stderr; `trace` is what it added to its trace, in whole lines;
    `exit_code` comes after all else. `views` are those that a server asks for, as in `job.views`.
    """

    lines: list[tuple[bool, str]]
    address: str
    trace: bytes
    exit_code: int | None
    views: list[tuple[int, int, int]] = []  # each: its number, the process that serves, and the replica
