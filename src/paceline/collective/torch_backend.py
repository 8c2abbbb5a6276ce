"""The backend "paceline" of torch.distributed: `init_process_group("paceline")`, also in scripts without a job.

This loads nothing of torch: it is imported with the package, so that torch knows the name.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import DeadlineExceeded, UsageError

if TYPE_CHECKING:
    from paceline.collective.meeting import FarAccess
    from paceline.collective.process_group import OwnGroup
    from paceline.torch_private import Store

NAME: Final = "paceline"
_TORCH_MODULE: Final = "torch.distributed.distributed_c10d"


# Returns how other machines reach this process, where it is a worker of a job.
FindAccess = Callable[[], "FarAccess | None"]


def connect(store: Store, rank: int, size: int, timeout: timedelta, find_access: FindAccess = lambda: None) -> OwnGroup:
    """Connect the workers of a group, which find each other in a store of torch; blocks until all have.

    Raises:
        UsageError: shared memory is not available, or they are on several machines and have no certificates.
        PeerError: a worker has died, or has not come in time.
    """
    from paceline.collective.meeting import MemberAddresses, Offer, can_meet, private_folder
    from paceline.collective.process_group import OwnGroup

    folder = private_folder()
    offer = Offer.make(folder, find_access())
    try:
        number = store.add(f"groups/{rank}", 1)  # a group that is made again meets in the store of the former one
        store.set(f"offer/{number}/{rank}", offer.told.text)
        told = [MemberAddresses.read(_told(store, number, rank, other)) for other in range(size)]
        if not can_meet(told):
            raise UsageError(
                f"worker {rank}: the backend {NAME!r} joins workers on one machine of type x86_64 by shared memory, "
                "and those of several machines where paceline.init() has given them certificates; these have neither. "
                "Use the backend gloo."
            )
        return OwnGroup(*offer.accept(rank, told, timeout.total_seconds()), timeout.total_seconds())
    finally:
        offer.close()
        shutil.rmtree(folder, ignore_errors=True)


def _told(store: Store, number: int, rank: int, other: int) -> str:
    """Return what another worker has told for the group of this number in a store; blocks until it has."""
    try:
        return store.get(f"offer/{number}/{other}").decode()
    except RuntimeError as error:
        raise DeadlineExceeded(f"worker {rank}: worker {other} did not come in time: {error}") from error


def register(find_access: FindAccess = lambda: None) -> None:
    """Make the backend known to torch.distributed: now if it is loaded, else as soon as it is.

    `find_access` is called for each group.
    """
    loaded = sys.modules.get(_TORCH_MODULE)
    if loaded is None:
        sys.meta_path.insert(0, _WhenLoaded(find_access))
    else:
        _register_with(loaded, find_access)


def _register_with(torch_module: ModuleType, find_access: FindAccess) -> None:
    backend: Any = getattr(torch_module, "Backend", None)  # torch may be built without it
    if backend is not None and NAME not in backend.backend_list:
        backend.register_backend(NAME, partial(connect, find_access=find_access), devices=["cpu", "cuda"])


class _WhenLoaded(MetaPathFinder):
    """Finds one module of torch, and registers the backend once that is loaded."""

    def __init__(self, find_access: FindAccess) -> None:
        self._find_access = find_access

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of this one module, whose loading registers the backend."""
        if fullname != _TORCH_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def load(module: ModuleType) -> None:
            execute(module)
            _register_with(module, self._find_access)

        spec.loader.exec_module = load
        return spec
