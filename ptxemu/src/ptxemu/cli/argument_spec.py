"""The command line's spelling of kernel arguments: f32[4,8]=random, i32=5, map:bf16[64,128]=..."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.swizzle import Swizzle
from ptxemu.descriptors.tensor_map import DRIVER_TYPES, encode_tiled
from ptxemu.numerics.minifloat import BF16, E4M3, E5M2, Format

HELP = """\
one kernel argument, in order; repeat for each:
  f32[64,128]=random  array: random, zeros, ones, arange, nan, a number, or @file.npy
  i32=5  number (also u64=0x10, f32=1.5)
  bytes[16]=00ff...  a struct, as hexadecimal digits, or =@file
  map:bf16[64,128]=random;box=64,64;swizzle=128B
    tensor map of an array (row-major; box as the array, outermost first)
types: f64 f32 f16 bf16 e4m3 e5m2, i8..i64, u8..u64"""

_FORMATS: dict[str, tuple[Format, np.dtype[Any]]] = {
    "bf16": (BF16, np.dtype(np.uint16)),
    "e4m3": (E4M3, np.dtype(np.uint8)),
    "e5m2": (E5M2, np.dtype(np.uint8)),
}
_DTYPES: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    **{
        f"{sign}{bits}": np.dtype(f"{name}{bits}")
        for sign, name in (("i", "int"), ("u", "uint"))
        for bits in (8, 16, 32, 64)
    },
}
_MAP_TYPES = {"e4m3": "u8", "e5m2": "u8", "i8": "u8", "i16": "u16", "i32": "s32", "i64": "s64"}
_SWIZZLES = {"none": Swizzle.NONE, "32B": Swizzle.B32, "64B": Swizzle.B64, "128B": Swizzle.B128}
_SPEC = re.compile(r"(?P<map>map:)?(?P<type>\w+)(?:\[(?P<shape>[\d,x ]*)\])?=(?P<value>.*)", re.S)


@dataclass(slots=True)
class Argument:
    """One argument: what is passed to the launch, and the array that it points to, if any."""

    text: str
    type: str
    value: Any
    array: NDArray[Any] | None = None
    before: NDArray[Any] | None = None
    """A copy of the array from before the launch."""

    def numbers(self) -> NDArray[Any]:
        """The array's elements as numbers (bf16 and fp8 decoded)."""
        assert self.array is not None
        return decoded(self.array, self.type)


def decoded(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Codes of a small format as float64; other arrays as they are."""
    if dtype in _FORMATS:
        numbers: NDArray[Any] = _FORMATS[dtype][0].decode(array)
        return numbers
    return array


def parse(text: str, rng: np.random.Generator) -> Argument:
    """One `--arg`.

    Raises:
        ValueError: naming the argument and what is expected.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"--arg: expected TYPE[SHAPE]=INIT or TYPE=NUMBER; got {text!r}")
    kind, shape, value = match["type"], match["shape"], match["value"]
    if kind == "bytes":
        return Argument(text, kind, _bytes(text, shape, value))
    if kind not in _DTYPES and kind not in _FORMATS:
        known = ", ".join([*_DTYPES, *_FORMATS, "bytes"])
        raise ValueError(f"--arg: expected a type out of {known}; got {kind!r} in {text!r}")
    if shape is None:
        if match["map"]:
            raise ValueError(f"--arg: a tensor map needs a shape; got {text!r}")
        return Argument(text, kind, _number(text, kind, value))
    dims = _numbers(text, shape)
    init, *options = value.split(";")
    array = _array(text, kind, dims, init, rng)
    argument = Argument(text, kind, array, array)
    if match["map"]:
        argument.value = _tensor_map(text, kind, array, dict(o.split("=", 1) for o in options))
    return argument


def _numbers(text: str, listed: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in re.split("[,x]", listed) if part.strip())
    except ValueError:
        numbers = ()
    if not numbers or any(number < 1 for number in numbers):
        raise ValueError(
            f"--arg: expected positive numbers like 64,128; got {listed!r} in {text!r}"
        )
    return numbers


def _bytes(text: str, size: str | None, value: str) -> bytes:
    if value.startswith("@"):
        with open(value[1:], "rb") as file:
            data = file.read()
    else:
        try:
            data = bytes.fromhex(value)
        except ValueError:
            raise ValueError(f"--arg: expected hexadecimal digits; got {text!r}") from None
    return data.ljust(_numbers(text, size)[0], b"\0") if size else data


def _number(text: str, kind: str, value: str) -> Any:
    try:
        number = float(value) if kind[0] in "fbe" else int(value, 0)
    except ValueError:
        raise ValueError(f"--arg: expected a number behind {kind}=; got {text!r}") from None
    if kind in _FORMATS:
        fmt, dtype = _FORMATS[kind]
        return fmt.encode(np.array([number], np.float64), "rn").astype(dtype).tobytes()
    try:
        return np.array(number, dtype=_DTYPES[kind]).tobytes()
    except OverflowError:
        raise ValueError(f"--arg: {value} does not fit {kind}") from None


def _array(
    text: str, kind: str, shape: tuple[int, ...], init: str, rng: np.random.Generator
) -> NDArray[Any]:
    dtype = _FORMATS[kind][1] if kind in _FORMATS else _DTYPES[kind]
    if init.startswith("@"):
        loaded: NDArray[Any] = np.load(init[1:])
        if loaded.dtype.itemsize != dtype.itemsize or loaded.size != math.prod(shape):
            raise ValueError(
                f"--arg: {init[1:]} holds {loaded.dtype}{list(loaded.shape)}: {text!r}"
            )
        return np.ascontiguousarray(loaded).view(dtype).reshape(shape)
    is_float = kind in _FORMATS or dtype.kind == "f"
    values = _values(text, init, math.prod(shape), rng, is_float=is_float)
    if not is_float and np.isnan(values).any():
        raise ValueError(f"--arg: {kind} has no nan: {text!r}")
    if dtype.kind == "u" and not is_float:
        values = np.abs(values)
    if kind in _FORMATS:
        values = _FORMATS[kind][0].encode(values, "rn")
    return np.ascontiguousarray(values.astype(dtype).reshape(shape))


def _values(
    text: str, init: str, size: int, rng: np.random.Generator, *, is_float: bool
) -> NDArray[Any]:
    """`size` numbers as float64 (small integers where the type is one)."""
    if init == "random":
        return rng.standard_normal(size) if is_float else rng.integers(-8, 8, size).astype(float)
    if init == "arange":
        return np.arange(size, dtype=np.float64)
    named = {"zeros": 0.0, "ones": 1.0, "nan": math.nan}
    try:
        number = named[init] if init in named else float(init)
    except ValueError:
        raise ValueError(
            "--arg: expected random, zeros, ones, arange, nan, a number or @file.npy; "
            f"got {init!r} in {text!r}"
        ) from None
    return np.full(size, number)


def _tensor_map(text: str, kind: str, array: NDArray[Any], options: dict[str, str]) -> bytes:
    unknown = set(options) - {"box", "swizzle"}
    if unknown:
        raise ValueError(f"--arg: expected box= and swizzle=; got {', '.join(unknown)} in {text!r}")
    box = _numbers(text, options["box"]) if "box" in options else array.shape
    swizzle = options.get("swizzle", "none")
    if swizzle not in _SWIZZLES:
        raise ValueError(f"--arg: swizzle: expected one of {', '.join(_SWIZZLES)}; got {swizzle!r}")
    return encode_tiled(
        DRIVER_TYPES.index(_MAP_TYPES.get(kind, kind)),
        int(array.ctypes.data),
        array.shape[::-1],
        array.strides[::-1][1:],
        box[::-1],
        swizzle=int(_SWIZZLES[swizzle].value),
    )
