"""The house rules that a linter cannot hold: sizes, docstrings, quick start-up."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PYTHON_FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *(ROOT / "tools").glob("*.py")]

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 120
MAX_PARAMETERS = 10
# Functions whose arguments the contract, or what a launch takes, fixes. This list only shrinks.
MORE_PARAMETERS = {
    "src/flashdsa/api.py:mla_bwd",
    "src/flashdsa/backends/cpu/sparse_mla.py:backward",
    "src/flashdsa/ops/attention.py:mla_bwd",
    "src/flashdsa/ops/attention.py:_",
    "src/ptxemu/api.py:launch",
}


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)


def _is_entry_point(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a launch fixes the parameters: `@cute.kernel`, and `@cute.jit` named launch...

    What these call takes contexts (NamedTuples) and obeys the limit.
    """
    decorators = {ast.unparse(one) for one in function.decorator_list}
    if "cute.kernel" in decorators:
        return True
    return "cute.jit" in decorators and function.name.startswith("launch")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PYTHON_FILES, ids=_name)
def test_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_functions_are_short_and_take_few_arguments(path: Path) -> None:
    for function in _functions(path):
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"
        count = _parameters(function)
        listed = f"{_name(path)}:{function.name}" in MORE_PARAMETERS
        if not listed and not _is_entry_point(function):
            assert count <= MAX_PARAMETERS, f"{function.name} has {count} parameters"


def test_the_list_of_exceptions_only_names_what_needs_it() -> None:
    needed = {
        f"{_name(path)}:{function.name}"
        for path in SOURCES
        for function in _functions(path)
        if _parameters(function) > MAX_PARAMETERS and not _is_entry_point(function)
    }
    assert needed == MORE_PARAMETERS


def test_public_names_have_docstrings() -> None:
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{_name(path)}: {node.name}"


@pytest.mark.parametrize("module", ["flashdsa", "flashdsa.cli.main"])
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
