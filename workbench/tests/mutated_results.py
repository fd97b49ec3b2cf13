"""Kinds of files that flashdsa reads, for `tests.mutated_files`."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.mutated_files import Kind, mutated_bytes, mutated_text

from flashdsa.bench.result import BenchResult, MemoryRow, Row, read_result
from flashdsa.bench.timer import Times
from flashdsa.errors import ArgumentValueError
from flashdsa.toolchain import Assembler
from workbench.draws.run import DRAWS_SCHEMA, read_draws
from workbench.tests.analysis.ptx_texts import roles_of, sums_of

ERROR = "flashdsa: error: "


def _inspect(path: Path) -> int:
    from workbench.__main__ import cli

    cli(["inspect", str(path)], prog_name="flashdsa")
    return 0


def _reading(read: Callable[[Path], Any], suffix: str) -> Callable[[Path], int]:
    """A command that reads a file with the suffix, as the command line would."""

    def command(path: Path) -> int:
        named = path.with_suffix(suffix)
        named.write_bytes(path.read_bytes())
        try:
            read(named)
        except ArgumentValueError as error:
            sys.stderr.write(f"{ERROR}{' '.join(str(error).split())}\n")
            return 2
        return 0

    return command


def _documents() -> list[bytes]:
    """A result of the benchmark and one of the draws."""
    times = {"hot": {"flashdsa": Times(10.0, 9.0, 11.0), "peer": Times(12.0, late=1)}}
    result = BenchResult(
        *("2026-11-20T10:00:00+00:00", {"commit": "0123", "dirty": False}),
        *({"cpu": "a CPU", "gpus": []}, {"torch": "2.13"}, 2, "in turns"),
        rows=[Row("mla", "V3.2", "cpu", {"S": 4}, 1.0, "B", "copy", 2.0, times, {"flashdsa": 5.0})],
        memory=[MemoryRow("mla", "cpu", {"S": 4}, 10, 20, 30, "VmHWM")],
    )
    draws = json.loads(result.to_json()) | {"schema": DRAWS_SCHEMA, "asked": 1, "done": 1}
    return [result.to_json().encode(), json.dumps(draws, indent=1).encode()]


def _mutated_document(draw: Random, document: bytes) -> bytes:
    changed = (mutated_bytes if draw.random() < 0.1 else mutated_text)(draw, document)
    if draw.random() < 0.5:
        return changed
    packed = gzip.compress(changed)
    return mutated_bytes(draw, packed) if draw.random() < 0.5 else packed


def _cubins() -> list[bytes]:
    tool = Assembler.required()
    texts = (
        (sums_of(8), "sm_90a"),
        (roles_of(20, 200), "sm_90a"),
        (sums_of(8, "sm_100a"), "sm_100a"),
    )
    return [tool.assemble(text, arch).image for text, arch in texts]


RESULTS = Kind(
    _documents(),
    _mutated_document,
    [_reading(read_result, ".json"), _reading(read_draws, ".json"), _reading(read_draws, ".gz")],
    ERROR,
)


def __getattr__(name: str) -> Kind:
    """Assemble cubins where they are asked for, as not every machine has ptxas."""
    if name != "CUBINS":
        raise AttributeError(name)
    return Kind(_cubins(), mutated_bytes, [_inspect], ERROR)
