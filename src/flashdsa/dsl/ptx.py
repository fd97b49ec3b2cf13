"""Inline PTX: `{$w0}`, `{$w1}`, ... are its results, `{$r0}`, ... what is given to it."""

from typing import Any

from cutlass import Float32, Int32, cute


def run(code: str, *given: Any) -> None:
    """Instructions without a result."""
    cute.arch.inline_ptx(code, read_only_args=list(given))


def word(code: str, *given: Any) -> Any:
    """The word that instructions give."""
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=list(given))


def words(code: str, count: int, *given: Any) -> list[Any]:
    """The words that instructions give."""
    return _several(code, [Int32] * count, given)


def number(code: str, *given: Any) -> Any:
    """The fp32 that instructions give."""
    return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=list(given))


def numbers(code: str, count: int, *given: Any) -> list[Any]:
    """The fp32 that instructions give."""
    return _several(code, [Float32] * count, given)


def _several(code: str, types: list[Any], given: tuple[Any, ...]) -> list[Any]:
    found = cute.arch.inline_ptx(code, write_only_types=types, read_only_args=list(given))
    return [found] if len(types) == 1 else list(found)
