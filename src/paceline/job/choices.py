"""The words a user may choose from; kept apart, because the command line shows them without loading anything else."""

from typing import Literal

ProcessTransport = Literal["shm", "tcp"]  # between processes; the keys of `job/carriers.py`
TransportName = Literal[ProcessTransport, "memory"]
ScaleName = Literal["sum", "mean", "samples"]
TraceLevel = Literal["steps", "full"]
Engine = Literal["local", "ray"]
OnCrash = Literal["continue", "stop", "restart"]
OnServerCrash = Literal["resume", "stop"]
OnError = Literal["stop", "continue"]
