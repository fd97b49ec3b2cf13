"""The house rules that a linter cannot hold: sizes, docstrings, quick start-up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSES = ("src", "tests", "tools", "ptxemu/src", "ptxemu/tests", "workbench", "examples")
PYTHON_FILES = sorted(path for house in HOUSES for path in (ROOT / house).rglob("*.py"))
TESTS = {path for path in PYTHON_FILES if "tests" in path.relative_to(ROOT).parts}
SOURCES = [path for path in PYTHON_FILES if path not in TESTS]

MAX_FILE_LINES = 500
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 120
MAX_PARAMETERS = 10
# Functions whose arguments the contract, or what a launch takes, fixes. This list only shrinks.
MORE_PARAMETERS = {
    "src/flashdsa/integrations/megatron/dsa.py:run_fused_dsa_attention",
    "src/flashdsa/integrations/megatron/dsa.py:run_fused_qk_topk_with_loss",
    "src/flashdsa/ops/attention_backward.py:mla_bwd",
    "src/flashdsa/ops/attention.py:sparse_mla",
    "src/flashdsa/ops/attention.py:sparse_mla_fwd",
    "src/flashdsa/ops/entries.py:compress_kv",
    "src/flashdsa/ops/entries.py:compress_kv_bwd",
    "src/flashdsa/ops/indexer.py:dsa_topk_indexer",
    "src/flashdsa/ops/indexer_loss.py:indexer_kl_loss",
    "src/flashdsa/ops/indexer_loss_dense.py:indexer_kl_loss_dense",
    "src/flashdsa/ops/prefill.py:dsa_topk_prefill",
    "src/flashdsa/reference/indexer.py:dsa_topk_indexer",
    "ptxemu/src/ptxemu/api.py:launch",
}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_tree(path)))


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)


def _is_a_peers(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether another library's function of this name fixes the parameters."""
    return "adapters" in path.relative_to(ROOT).parts and not function.name.startswith("_")


def _is_entry_point(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a launch fixes the parameters: `@cute.kernel`, and `@cute.jit` named launch...

    What these call takes contexts (NamedTuples) and obeys the limit; Triton's functions have none.
    """
    decorators = {ast.unparse(one).partition("(")[0] for one in function.decorator_list}
    if decorators & {"cute.kernel", "triton.jit"}:
        return True
    return "cute.jit" in decorators and function.name.startswith("launch")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _folder_of_library(path: Path) -> str:
    """ "dispatch" of src/flashdsa/dispatch/spec.py; empty outside the library."""
    parts = path.relative_to(ROOT).parts
    return parts[2] if parts[:2] == ("src", "flashdsa") else ""


def test_files_are_short() -> None:
    longer = []
    for path in PYTHON_FILES:
        most = MAX_TEST_FILE_LINES if path in TESTS else MAX_FILE_LINES
        if len(path.read_text().splitlines()) > most:
            longer.append(_name(path))
    assert longer == []


def test_docstrings_open_with_their_subject() -> None:
    """A sentence that opens with "Of" or "What" makes the reader wait for its subject."""
    late = re.compile(r"(Of|What|Where|How|So many|So much)\b")
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in SOURCES
        for node in _nodes(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and late.match(node.value.value.strip())
    ]
    assert found == []


def test_functions_are_short() -> None:
    long = [
        f"{_name(path)}:{function.name}"
        for path in SOURCES
        for function in _functions(path)
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_functions_take_few_arguments() -> None:
    """Not one more than the list names, and the list names nothing that needs no exception."""
    many = {
        f"{_name(path)}:{function.name}"
        for path in SOURCES
        for function in _functions(path)
        if _parameters(function) > MAX_PARAMETERS
        and not _is_entry_point(function)
        and not _is_a_peers(path, function)
    }
    assert many == MORE_PARAMETERS


def test_public_names_have_docstrings() -> None:
    silent = [
        f"{_name(path)}:{node.name}"
        for path in SOURCES
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("module", ["flashdsa", "flashdsa.cli.main"])
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Kernels that speak to mbarriers without dsl/: studies that leave waits out on purpose.
OWN_PHASES: set[str] = {
    "workbench/lab/kernels/majorness/sm100/hazards.py",
    "workbench/lab/kernels/majorness/sm100/kernel.py",
}


def _last_name(node: ast.AST) -> str:
    """ "stages" of `plan.stages`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_parity(node: ast.AST) -> bool:
    """`x & 1`, `x ^ 1`, `1 - x` or `x % 2` somewhere in an expression."""
    for one in ast.walk(node):
        if isinstance(one, ast.BinOp):
            pair = (type(one.op), getattr(one.right, "value", None))
            if pair in ((ast.BitAnd, 1), (ast.BitXor, 1), (ast.Mod, 2)):
                return True
            if isinstance(one.op, ast.Sub) and getattr(one.left, "value", None) == 1:
                return True
    return False


def _phase_arithmetic(path: Path) -> Iterator[str]:
    """Where a kernel computes a stage or a phase, or speaks to an mbarrier, without dsl/."""
    for node in _nodes(path):
        found = False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv):
            found = "stages" in _last_name(node.right)
        elif isinstance(node, ast.Call):
            name = _last_name(node.func)
            waits = "wait" in name and any(_is_parity(one) for one in node.args)
            found = waits or "mbarrier_" in name
            text = node.args[0] if node.args else None
            found |= "mbarrier." in str(getattr(text, "value", ""))
        elif isinstance(node, ast.Assign):
            names = " ".join(_last_name(target) for target in node.targets)
            found = ("phase" in names or "parity" in names) and _is_parity(node.value)
        if found:
            yield f"{_name(path)}:{node.lineno}"  # type: ignore[attr-defined]


def test_stages_and_phases_are_computed_in_dsl_only() -> None:
    kernels = [path for path in SOURCES if "kernels" in path.relative_to(ROOT).parts]
    found = {path: list(_phase_arithmetic(path)) for path in kernels}
    assert {_name(path) for path, lines in found.items() if lines} == OWN_PHASES, found


# What a user's process calls; commands, judges and studies set their own stage.
LIBRARY = ("adapters", "backends", "dispatch", "distributed", "integrations", "ops")
# Factories of torch whose result has the default dtype, which is the caller's, or may have it.
# `arange` of integers is int64 whatever that is.
FACTORIES = {
    "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand",
    "randn", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def _factories_without_a_dtype(tree: ast.Module) -> Iterator[int]:
    """Lines in which a tensor's dtype is left to torch's default."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) != "torch":
            continue
        floats = any(isinstance(getattr(one, "value", None), float) for one in node.args)
        depends = node.func.attr in FACTORIES or (node.func.attr == "arange" and floats)
        if depends and "dtype" not in {one.arg for one in node.keywords}:
            yield node.lineno


def test_no_tensor_of_the_library_has_the_default_dtype() -> None:
    """It belongs to the process: model code sets bf16 or fp64 while it runs."""
    assert list(_factories_without_a_dtype(ast.parse("torch.zeros(3)\ntorch.arange(3.0)"))) == [
        1,
        2,
    ]
    library = [path for path in SOURCES if _folder_of_library(path) in LIBRARY]
    found = [
        f"{_name(path)}:{line}"
        for path in library
        for line in _factories_without_a_dtype(_tree(path))
    ]
    assert found == []


def test_no_two_test_modules_have_the_same_name() -> None:
    """pytest imports them by it: a second one is not run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def _lengths_of_tensors(tree: ast.Module) -> Iterator[int]:
    """Lines with `len` of a parameter that is a tensor."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            arguments = [*function.args.args, *function.args.kwonlyargs]
            kinds = {x.arg: ast.unparse(x.annotation) for x in arguments if x.annotation}
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "len":
                    kind = kinds.get(ast.unparse(node.args[0]))
                    if kind in ("Tensor", "Tensor | None"):
                        yield node.lineno


def test_the_operations_take_no_length_of_a_tensor() -> None:
    """A trace takes it for a constant, `x.shape[0]` for a symbol."""
    assert list(_lengths_of_tensors(ast.parse("def f(x: Tensor): return len(x)"))) == [1]
    traced = [path for path in SOURCES if _folder_of_library(path) in ("ops", "dispatch")]
    traced += [ROOT / f"src/flashdsa/backends/{name}.py" for name in ("entries", "packed_rows")]
    lines = [(path, line) for path in traced for line in _lengths_of_tensors(_tree(path))]
    assert [f"{_name(path)}:{line}" for path, line in lines] == []
