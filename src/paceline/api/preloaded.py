"""The modules that workers and servers need, some only at first use: the fork server imports them in advance."""

import paceline.api.script as script
import paceline.data.sharding as sharding
import paceline.data.slicing as slicing
import paceline.launch.rendezvous.roster as roster
import paceline.launch.server as server
import paceline.launch.worker as worker
import paceline.model_parallel.parallelize as parallelize
import paceline.server.node as node
import paceline.training.arguments as arguments

__all__ = ["arguments", "node", "parallelize", "roster", "script", "server", "sharding", "slicing", "worker"]
