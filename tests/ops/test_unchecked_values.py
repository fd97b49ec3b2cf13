"""Values that are refused where they are read have the promised result where they are not."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, small_device
from flashdsa.backends.emulated.packages import missing_packages
from flashdsa.backends.emulated.runner import emulation
from flashdsa.errors import UnsupportedError
from tests.support.hopper_gpu import poison_freed_memory
from tests.support.refused_values import REFUSED, Refused, Trial

SOURCES = Path(flashdsa.__file__).parent
FAST = ("entries, a first offset", "entries, offsets padded by 0")
"""Of which the emulator runs kernels always."""
ASKS = {"are_values_read", "values_are_checked"}
"""Functions that say whether values are read."""
ELSEWHERE = {
    "ops/entries.py:_offsets": "bounds what is not read",
    "adapters/flashinfer.py:_destination": "its docstring says what torch does on a device",
}
"""Functions that ask and have no row, each with the reason."""


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty fills memory with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def trial(row: Refused, backend: str) -> object:
    """A refused value on a backend as pytest's parameters."""
    emulated = backend.startswith("emulate")
    marks = [pytest.mark.slow] if emulated and row.name not in FAST else []
    return pytest.param(row, backend, marks=marks, id=f"{row.name}, {backend}")


TRIALS = [trial(row, backend) for row in REFUSED for backend in row.backends]


def device_of(backend: str) -> AbstractContextManager[object]:
    """The device of an emulated backend."""
    if not backend.startswith("emulate"):
        return nullcontext()
    if missing_packages():
        pytest.skip(f"needs {missing_packages()}")
    return emulation(SMALL if backend == "emulate-sm90" else small_device((8, 0)))


@pytest.mark.parametrize(("row", "backend"), TRIALS)
def test_it_is_refused_if_that_is_asked(
    row: Refused, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    with device_of(backend), pytest.raises(ValueError, match=f"^{row.message}"):
        row.call(Trial(backend, 0, seed))


@pytest.mark.parametrize(("row", "backend"), TRIALS)
def test_where_it_is_not_read_it_has_the_promised_result(
    row: Refused, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashdsa.dispatch.checks.are_values_read", lambda tensor: False)
    with device_of(backend):
        require_promised(row, Trial(backend, 0, seed))


ON_A_GPU = [
    pytest.param(row, name, id=f"{row.name}, {name}")
    for row in REFUSED
    for name in (x.removeprefix("emulate-") for x in row.backends)
    if not row.of_ranks
]


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "backend"), ON_A_GPU)
def test_a_gpu_has_the_promised_result(row: Refused, backend: str, seed: int) -> None:
    """No check is taken out: the host reads no value there."""
    try:
        require_promised(row, Trial(backend, 0, seed, "cuda"))
    except UnsupportedError as error:
        pytest.skip(str(error))


def require_promised(row: Refused, at: Trial) -> None:
    """Each number of the outputs is that of a call that the refused one should equal."""
    results = []
    for choice in range(row.choices + 1):
        if at.device == "cuda":
            poison_freed_memory()
        results.append(row.call(at._replace(choice=choice)))
    found, *allowed = results
    for number, own in enumerate(found):
        choices = torch.stack([one[number] for one in allowed])
        same = (own == choices) | (own != own) & (choices != choices)
        assert same.any(0).all(), f"output {number}"


@cache
def refusal_of(row: Refused) -> ValueError:
    with pytest.raises(ValueError, match=f"^{row.message}") as caught:
        row.call(Trial("cpu", 0, 0))
    return caught.value


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_the_cpu_refuses_it(row: Refused) -> None:
    refusal_of(row)


def places_of(error: BaseException | None) -> Iterator[tuple[str, int | None]]:
    """Modules and lines that an error and those behind it came through."""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if SOURCES in Path(frame.filename).parents:
                yield Path(frame.filename).relative_to(SOURCES).as_posix(), frame.lineno
        error = error.__cause__ or error.__context__


class Raise(NamedTuple):
    """A statement of a function that raises."""

    path: str
    function: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.path}:{self.first} ({self.function})"


class Module(NamedTuple):
    """A module's functions, and where its imported names come from: paths of modules, and names
    in them ("" of a module itself)."""

    functions: dict[str, ast.FunctionDef]
    imports: dict[str, tuple[str, str]]


@cache
def module_of(path: str) -> Module:
    """A module of the library."""
    tree = ast.parse((SOURCES / path).read_text())
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashdsa"):
            folder = "/".join((node.module or "").split(".")[1:])
            for alias in node.names:
                inside = f"{folder}/{alias.name}.py".removeprefix("/")
                is_module = (SOURCES / inside).exists()
                place = (inside, "") if is_module else (f"{folder}.py", alias.name)
                imports[alias.asname or alias.name] = place
    return Module({x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}, imports)


def place_of(call: ast.Call, path: str) -> tuple[str, str]:
    """The module and the name of a function of the library that a module calls."""
    module, function = module_of(path), call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return module.imports.get(function.value.id, ("", ""))[0], function.attr
    name = function.id if isinstance(function, ast.Name) else ""
    return module.imports.get(name, (path, name))


def asks(node: ast.AST, names: set[str]) -> bool:
    """Whether a call of one of the names is within the node."""
    calls = [x.func for x in ast.walk(node) if isinstance(x, ast.Call)]
    return any(getattr(x, "attr", getattr(x, "id", "")) in names for x in calls)


def guarded_parts(function: ast.FunctionDef, names: set[str]) -> list[ast.stmt]:
    """Statements that run only where values are read: of an `if` that asks, or all where such an
    `if` returns."""
    found: list[ast.stmt] = []
    for node in ast.walk(function):
        if isinstance(node, ast.If) and asks(node.test, names):
            returns = isinstance(node.body[-1], ast.Return)
            found += function.body if returns else node.body
    return found


def raises_of(
    path: str, name: str, parts: list[ast.stmt], seen: set[tuple[str, str]]
) -> set[Raise]:
    """What statements of a function, and the functions that they call, raise."""
    found: set[Raise] = set()
    for node in (x for part in parts for x in ast.walk(part)):
        if isinstance(node, ast.Raise):
            found.add(Raise(path, name, node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.Call):
            place = place_of(node, path)
            functions = module_of(place[0]).functions if (SOURCES / place[0]).is_file() else {}
            if place[1] in functions and place not in seen:
                seen.add(place)
                found |= raises_of(*place, functions[place[1]].body, seen)
    return found


def checks_of_values() -> dict[str, set[Raise]]:
    """What each function raises that asks whether values are read."""
    found = {}
    for source in SOURCES.rglob("*.py"):
        if not any(name in source.read_text() for name in ASKS):
            continue
        path = source.relative_to(SOURCES).as_posix()
        functions = module_of(path).functions.items()
        wraps = {
            name
            for name, one in functions
            if any(isinstance(x, ast.Return) and asks(x, ASKS) for x in ast.walk(one))
        }
        for name, one in functions:
            if name not in ASKS | wraps and asks(one, ASKS | wraps):
                parts = guarded_parts(one, ASKS | wraps)
                found[f"{path}:{name}"] = raises_of(path, name, parts, set())
    return found


def test_every_check_of_values_has_a_row() -> None:
    """A check that is new fails here, until a row of `REFUSED` says what happens without it."""
    checks = checks_of_values()
    assert set(ELSEWHERE) <= set(checks)
    own = {name: raised for name, raised in checks.items() if name not in ELSEWHERE}
    assert len(own) >= 20 and [name for name, raised in own.items() if not raised] == []
    reached = {place for row in REFUSED for place in places_of(refusal_of(row))}
    missing = [
        str(one)
        for one in sorted(set().union(*own.values()))
        if not any((one.path, line) in reached for line in range(one.first, one.last + 1))
    ]
    assert missing == []
