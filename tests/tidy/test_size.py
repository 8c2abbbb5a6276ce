"""Functions fit on a screen or two; a file past 800 lines is looked at again."""

from __future__ import annotations

import ast
from statistics import median

from tests.tidy.tree import SOURCE, parsed, place, python_files

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_EXAMPLE_LINES = 150
MAX_MEDIAN_FILE_LINES = 200
MAX_MEDIAN_FUNCTION_LINES = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef


def num_lines(function: Function) -> int:
    """Lines of a function without its decorators and its docstring."""
    first, last = function.body[0], function.end_lineno or function.lineno
    documented = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return last - function.lineno + 1 - docstring


def test_no_file_is_long() -> None:
    sizes = {place(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_an_example_is_read_in_a_sitting() -> None:
    examples = list((SOURCE.parents[1] / "examples").glob("*.py"))
    sizes = {path.name: len(path.read_text().splitlines()) for path in examples}
    assert len(sizes) > 20
    assert {name: size for name, size in sizes.items() if size > MAX_EXAMPLE_LINES} == {}


def test_no_function_is_long() -> None:
    long = {
        f"{place(path, node.lineno)} {node.name}": num_lines(node)
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, Function) and num_lines(node) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_most_files_and_functions_are_short() -> None:
    files = [path for path in python_files("src") if path.is_relative_to(SOURCE)]
    functions = [node for path in files for node in ast.walk(parsed(path)) if isinstance(node, Function)]
    assert median(len(path.read_text().splitlines()) for path in files) <= MAX_MEDIAN_FILE_LINES
    assert median(num_lines(function) for function in functions) <= MAX_MEDIAN_FUNCTION_LINES
