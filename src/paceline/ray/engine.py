"""Loads Ray, and connects to a cluster or starts one."""

from __future__ import annotations

import math
import secrets
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

import msgspec

from paceline.errors import PeerError, UsageError
from paceline.job.environment import ray_authenticates, set_missing
from paceline.job.machines import cores_here, is_loopback, parse_host_port

if TYPE_CHECKING:
    from types import ModuleType

    from paceline.launch.output import Console
    from paceline.launch.plan import LocalRun
    from paceline.ray.options import RayOptions

OBJECT_STORE_BYTES: Final = 80 << 20  # about the least that Ray takes; we put nothing there
REACH_TIMEOUT_S: Final = 5.0
# Of a cluster of our own: all of it on loopback and behind a token of this process, without usage reports.
OWN_CLUSTER: Final[Mapping[str, str]] = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Cluster(msgspec.Struct, frozen=True):
    """A Ray cluster that this process is connected to.

    `is_own`: it was started for this run, and no more will come of anything than it has.
    """

    node_id: str
    is_own: bool

    def total(self) -> dict[str, float]:
        """Return what all nodes have, by resource."""
        return _counted(load_ray().cluster_resources())

    def num_nodes_with(self, needs: Mapping[str, float]) -> int:
        """Return how many nodes have these resources, free or not."""
        nodes = (node["Resources"] for node in load_ray().nodes() if node["Alive"])
        return sum(all(has.get(name, 0) >= amount for name, amount in needs.items()) for has in nodes)

    def name_of(self, node_id: str) -> str:
        """Return what a node is called in messages: its address, and the beginning of its number at Ray."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in load_ray().nodes()}
        return f"{addresses.get(node_id, 'a lost node')} (node {node_id[:8]})"

    def free(self) -> dict[str, float]:
        """Return the free resources."""
        return _counted(load_ray().available_resources())


def load_ray() -> ModuleType:
    """Import Ray; raises UsageError when it is not installed."""
    try:
        return import_module("ray")  # by name: types are checked without it, too
    except ImportError:
        raise UsageError("--engine ray needs Ray, which is not installed: pip install 'paceline[ray]'") from None


def prepare(options: RayOptions) -> ModuleType:
    """Import Ray, told in time how a cluster of our own is to be, and see whether another can be reached.

    Raises UsageError when Ray is not installed, must not be started so, or the address is not valid, and
    PeerError when it does not answer.
    """
    if options.address is None and "ray" not in sys.modules:  # it looks at these variables when it is imported
        set_missing({**OWN_CLUSTER, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    ray = load_ray()
    if options.address is None:
        check_dashboard(options.dashboard_host, authenticates=ray_authenticates())
    elif options.address != "auto":
        check_reachable(options.address)
    return ray


@contextmanager
def joined(ray: ModuleType, run: LocalRun, options: RayOptions, console: Console) -> Generator[Cluster]:
    """Connect to the cluster that was asked for, or start one; leave or end it afterwards.

    A connection that this process has already is used and left as it is. Raises PeerError when there is no cluster,
    and UsageError for one that must not be started.
    """
    if ray.is_initialized():
        if options.address is not None or options.pip or options.working_dir is not None:
            raise UsageError("this process has joined a Ray cluster already: leave out address, pip and working_dir")
        yield Cluster(_node_id(ray), is_own=False)
        return
    try:
        _init(ray, run, options)
        _look_at_dashboard(ray, console)
        yield Cluster(_node_id(ray), is_own=options.address is None)
    finally:
        ray.shutdown()


def _init(ray: ModuleType, run: LocalRun, options: RayOptions) -> None:
    folder = options.folder(run.script)
    environment = ({"working_dir": str(folder)} if folder else {}) | ({"pip": list(options.pip)} if options.pip else {})
    own = {} if options.address is not None else _own_settings(run, options)
    try:
        ray.init(
            address=options.address or "local",
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env=environment or None,
            **own,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "start a Ray cluster here" if options.address is None else f"join the Ray cluster {options.address!r}"
        raise PeerError(f"cannot {where}: {_first_line(error)}") from error


def _own_settings(run: LocalRun, options: RayOptions) -> dict[str, object]:
    """Return how a cluster of our own is started: as on one machine, more processes than cores share these."""
    num_servers = run.num_servers * (1 + options.replicas)
    wanted = run.num_workers * options.worker_cpus + num_servers * options.server_cpus
    dashboard = {} if options.dashboard_host is None else {"dashboard_host": options.dashboard_host}
    return {
        "num_cpus": max(len(cores_here()), math.ceil(wanted)),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": options.dashboard_host is not None,
        **dashboard,
    }


def check_dashboard(host: str | None, *, authenticates: bool) -> None:
    """Refuse a dashboard that other machines reach without authentication: it runs any code it is sent."""
    if host is not None and not authenticates and not is_loopback(host.strip("[]")):
        raise UsageError(
            f"--dashboard-host {host} lets every client that reaches it run code here, because Ray's authentication is "
            "off: let it listen on 127.0.0.1, or set RAY_AUTH_MODE=token"
        )


def _look_at_dashboard(ray: ModuleType, console: Console) -> None:
    url: str = ray.get_runtime_context().worker.node.address_info.get("webui_url") or ""
    host = url.rpartition(":")[0]
    if host and not ray_authenticates() and not is_loopback(host.strip("[]")):
        console.announce(
            f"warning: the dashboard of this Ray cluster listens at {url} without authentication: every client that "
            "reaches it can run code on all nodes; start Ray with RAY_AUTH_MODE=token"
        )


def check_reachable(address: str) -> None:
    """Check that a cluster listens at this address, because Ray itself would try for a long time.

    Raises UsageError when this is not HOST:PORT, and PeerError when nothing listens.
    """
    try:
        host, port = parse_host_port(address)
    except UsageError as error:
        raise UsageError(f"--address is neither auto nor HOST:PORT: {error}") from None
    try:
        socket.create_connection((host, port), REACH_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be the name of a host
        raise PeerError(
            f"no Ray cluster answers at {address}: {error}; `ray start --head` prints its address"
        ) from None


def _node_id(ray: ModuleType) -> str:
    return ray.get_runtime_context().get_node_id()


def _counted(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out what Ray makes up itself: a resource for each node and each placement group."""
    return {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
