"""The public names: few, described, and with examples that run."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType

import pytest
from tests.examples.snippets import PAGES
from tests.tidy.tree import ROOT, SOURCE

import paceline
from paceline.api.script import current
from paceline.data.source_loader import FedLoader
from paceline.model_parallel.parallelize import Parallel
from paceline.worker.parts import PartedTable

# Programs: importing them is running them.
PROGRAMS = {"paceline.__main__"}
# An adapter of what the environment of development has not; its own tests run its examples where it is.
ADAPTERS = {"paceline.integrations.torchtitan": "torchtitan"}

# Public members that other folders of Paceline use, and scripts do not: the page of calls is without them.
NOT_FOR_SCRIPTS: dict[type, set[str]] = {
    FedLoader: {"through"},
    Parallel: {"held", "when_backward"},
    PartedTable: {"cut", "finish_pull", "start_read"},
    paceline.Distributed: {
        *("accumulate_slices", "add_param_group", "detach", "drop_slices", "freeze_values", "held_tensors"),
        *("is_watched", "receive", "retire", "send", "send_without_batch", "shares_parameters", "step_without_batch"),
        "stepped_by_another_thread",
        "wait_for_values",
    },
    paceline.Embedding: {"extra_repr"},
    paceline.EmbeddingBag: {"extra_repr"},
    paceline.RowTable: {"finish", "keys", "require_ahead", "server_statistics"},
    paceline.Session: {
        *("abandon", "barrier_at", "detach_at_close", "distributed", "exit_if_preempted", "finish_clock"),
        *("leave_at_exit", "policy", "scale_of", "sharding"),
    },
    paceline.Table: {"finish_pull", "finish_read", "push_reserved", "read", "start_read"},
}


def modules() -> Iterator[str]:
    """The names of all modules of the package."""
    yield "paceline"
    found = pkgutil.walk_packages(paceline.__path__, "paceline.")
    missing = {name for name, framework in ADAPTERS.items() if find_spec(framework) is None}
    yield from (module.name for module in found if module.name not in PROGRAMS | missing)


@pytest.mark.parametrize("name", paceline.__all__)
def test_a_public_name_is_described_by_an_example(name: str) -> None:
    described = inspect.getdoc(getattr(paceline, name)) or ""
    assert ">>> " in described, f"paceline.{name} has no example"


def test_a_public_name_is_on_the_page_of_calls() -> None:
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text()
    assert [name for name in paceline.__all__ if not re.search(rf"\bpaceline\.{name}\b", page)] == []


def test_examples_and_pages_import_public_names_alone() -> None:
    texts = {path: path.read_text() for path in (*PAGES, *ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.ipynb"))}
    found = {
        f"{path.name}: {module}"
        for path, text in texts.items()
        for module in re.findall(r"^\W*(?:from|import) paceline\.([\w.]+)", text, re.MULTILINE)
        if path.name != "big_mlp_plan.py"  # there is no public call for what `paceline plan` computes
        if module != "errors" and not module.startswith("integrations.")
    }
    assert found == set()


def test_the_public_names_are_the_ones_that_can_be_had() -> None:
    assert dir(paceline) == sorted(paceline.__all__)
    assert all(getattr(paceline, name) is not None for name in paceline.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(paceline, "nonsense")  # noqa: B009 - the type checker knows that it is not there


@pytest.fixture
def session() -> Iterator[None]:
    """Leave no session behind that an example has begun."""
    yield
    current().close()


@pytest.mark.usefixtures("session")
def test_every_example_in_the_source_runs() -> None:
    results = {name: doctest.testmod(import_module(name)) for name in modules()}
    assert sum(result.attempted for result in results.values()) > 20
    assert {name: result.failed for name, result in results.items() if result.failed} == {}


def test_the_page_of_calls_names_members_that_are_there() -> None:
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text()
    entries = re.findall(r"\.\. auto(?:class|module):: (\S+)\n   :members: ([^\n]+)", page)
    missing = [
        f"{home}.{member}"
        for home, members in entries
        for member in members.split(", ")
        if not hasattr(pkgutil.resolve_name(home), member)
    ]
    assert len(entries) > 10
    assert missing == []


def members_of(cls: type) -> set[str]:
    """The public methods and properties of a class that Paceline defines, but for those that stand for attributes."""
    defined = {
        name: value
        for base in cls.__mro__
        if base.__module__.startswith("paceline.")
        for name, value in vars(base).items()
    }
    return {
        name
        for name, value in defined.items()
        if not name.startswith("_") and isinstance(value, FunctionType | property | classmethod | staticmethod)
    }


def test_the_page_of_calls_has_every_member_that_is_for_scripts() -> None:
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text()
    entries = re.findall(r"\.\. autoclass:: (\S+)\n((?:   :.*\n)*)", page)
    listed = {
        pkgutil.resolve_name(home): set(re.findall(r"\w+", options.partition(":members:")[2].partition("\n")[0]))
        for home, options in entries
        if ":members:\n" not in options  # else the page has all
    }
    unlisted: dict[type, set[str]] = {}
    for cls, names in listed.items():
        inherited = [listed.get(base, set()) | NOT_FOR_SCRIPTS.get(base, set()) for base in cls.__mro__[1:]]
        unlisted[cls] = members_of(cls).difference(names, *inherited)
    assert {cls: names for cls, names in unlisted.items() if names} == NOT_FOR_SCRIPTS
