"""What torch does not promise is used in one module, `torch_private`; others import its public names."""

from __future__ import annotations

import ast

from tests.tidy.tree import SOURCE, parsed, place, python_files

from paceline import torch_private

HOME = SOURCE / "torch_private.py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_inside_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def of_torch(tree: ast.Module) -> set[str]:
    """The names under which a module has parts of torch."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or "torch") for alias in node.names if is_inside_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_inside_torch(node.module or ""):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def private_uses(tree: ast.Module, known: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """Private parts of torch that some code imports, names or reaches for; `known`: attributes of its objects."""
    torch_names, found = of_torch(tree), list[tuple[int, str]]()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if is_inside_torch(module):
                parts = [*module.split("."), *(alias.name for alias in node.names)]
                found += [(node.lineno, part) for part in parts if is_private(part)]
            case ast.Import():
                names = [alias.name for alias in node.names if is_inside_torch(alias.name)]
                found += [(node.lineno, name) for name in names if any(map(is_private, name.split(".")))]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name, value=value) if is_private(name):
                root = value
                while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                    root = root.func if isinstance(root, ast.Call) else root.value
                is_torch = isinstance(root, ast.Name) and root.id in torch_names
                found += [(node.lineno, name)] if is_torch or name in known else []
            case ast.Constant(value=str(text)) if text.startswith("torch._") or text in known:
                found.append((node.lineno, text))
            case _:
                pass
    return found


def test_private_parts_of_torch_are_used_in_one_module() -> None:
    home = parsed(HOME)
    texts = {node.value for node in ast.walk(home) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    attributes = {node.attr for node in ast.walk(home) if isinstance(node, ast.Attribute)} | texts
    known = frozenset(name for name in attributes if is_private(name) and name.isidentifier())
    assert {"_version", "_modules", "_execution_engine"} <= known
    others = [path for path in python_files("src") if path != HOME]
    assert [f"{place(path, line)}: {name}" for path in others for line, name in private_uses(parsed(path), known)] == []


def test_whatever_way_it_is_reached_it_is_found() -> None:
    code = """
import torch._dynamo
from torch.utils._pytree import tree_map
from torch.nn.modules.batchnorm import _BatchNorm
import torch.distributed as dist
from torch import nn
torch._fused_sgd_
dist.GroupMember._nothing()
nn.Linear(2, 2)._parameters
"torch._inductor"
self._version
layer._modules
"""
    names = [name for _, name in private_uses(ast.parse(code), frozenset({"_version", "_modules"}))]
    wanted = {"torch._dynamo", "_pytree", "_BatchNorm", "_fused_sgd_", "_nothing", "_parameters", "torch._inductor"}
    assert set(names) == wanted | {"_modules"}


def test_all_of_it_is_used() -> None:
    wanted = {
        alias.name
        for path in python_files("src")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module == torch_private.__name__
        for alias in node.names
    }
    assert wanted == set(torch_private.__all__)
