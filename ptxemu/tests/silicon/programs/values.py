"""Seeded inputs: edge values of every type, then random ones. The stream is PCG64's raw words."""

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

INTEGER_EDGES = (0, 1, 2, 3, -1, -2, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256)
F32_EDGES = (
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
    0x7F812345, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x00800001,
    0x7F7FFFFF, 0xFF7FFFFF, 0x3F800001, 0x3F7FFFFF, 0x4B800000, 0x4B7FFFFF, 0x3F000000, 0x3FC00000,
    0x40200000, 0x4F000000, 0x4EFFFFFF, 0xCF000000, 0x5F000000, 0x42FF0000, 0x34000000, 0x00400000,
)  # fmt: skip
F64_EDGES = (
    0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000, 0xFFF0000000000000,
    0x7FF8000000000000, 0xFFF8123400000000, 0x7FF0000000000123, 1, (1 << 63) | 1,
    0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF,
    0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF, 0x4340000000000000, 0x433FFFFFFFFFFFFF,
    0x3FE0000000000000, 0x3FF8000000000000, 0x4004000000000000, 0x41E0000000000000,
    0xC1E0000000000000, 0x41DFFFFFFFC00000, 0x43E0000000000000, 0x47EFFFFFE0000000,
    0x47EFFFFFF0000000, 0x36A0000000000000, 0x3690000000000001, 0x380FFFFFFFFFFFFF,
    0x3810000000000000,
)  # fmt: skip
F16_EDGES = (
    0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE12, 0x7C01, 0x0001, 0x8001, 0x03FF,
    0x83FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x3C01, 0x3BFF, 0x6400, 0x6BFF, 0x3800, 0x3E00, 0x4100,
    0x5BF8, 0x5C00, 0x7800, 0x0200, 0x1000, 0x2E66, 0x4900, 0xC248,
)  # fmt: skip
BF16_EDGES = (
    0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0x007F,
    0x807F, 0x0080, 0x8080, 0x7F7F, 0xFF7F, 0x3F81, 0x3F7F, 0x4300, 0x437F, 0x3F00, 0x3FC0, 0x4020,
    0x4B80, 0x4F00, 0xCF00, 0x5F00, 0x0040, 0x3400, 0x42C8, 0xC2C8,
)  # fmt: skip
FLOAT_EDGES = {"f16": F16_EDGES, "bf16": BF16_EDGES, "f32": F32_EDGES, "f64": F64_EDGES}
EXPONENTS = {"f16": (10, 5), "bf16": (7, 8), "f32": (23, 8), "f64": (52, 11)}
BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def raw(label: str, count: int) -> NDArray[np.uint64]:
    """`count` random 64-bit words that depend on `label` alone."""
    words = np.random.PCG64(zlib.crc32(label.encode())).random_raw(count)
    return np.asarray(words, dtype=np.uint64)


def random_bytes(label: str, count: int) -> Bytes:
    """`count` random bytes."""
    return raw(label, -(-count // 8)).view(np.uint8)[:count].copy()


def below(label: str, count: int, limit: int) -> NDArray[np.int64]:
    """`count` random integers in 0..limit-1."""
    return (raw(label, count) >> np.uint64(11)).astype(np.int64) % limit


def _shuffled(label: str, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return values[np.argsort(raw(label + "/order", len(values)), kind="stable")]


def integers(label: str, bits: int, count: int) -> Bytes:
    """Edges of `bits`-bit integers in a random order, then random ones."""
    edges = [*INTEGER_EDGES, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
    edges += [-(1 << (bits // 2)), 1 << (bits // 2), 0x5555555555555555, 0xAAAAAAAAAAAAAAAA]
    mask = (1 << bits) - 1
    known = np.array([e & mask for e in edges], dtype=np.uint64)
    noise = raw(label, max(count - len(known), count // 4))
    noise >>= (raw(label + "/shift", len(noise)) % np.uint64(bits)).astype(np.uint64)
    pool = np.concatenate([known[: count - count // 4], noise])[:count] & np.uint64(mask)
    return _shuffled(label, pool).astype(f"u{bits // 8}").view(np.uint8)


def floats(label: str, kind: str, count: int, near: int = 12) -> Bytes:
    """Edges of a float type in a random order, then random ones of `near` exponents around 1."""
    bits, (mantissa, exponent) = BITS[kind], EXPONENTS[kind]
    known = np.array(FLOAT_EDGES[kind], dtype=np.uint64)
    noise = raw(label, max(count - len(known), count // 4))
    bias = (1 << (exponent - 1)) - 1
    power = bias - near // 2 + (noise >> np.uint64(56)).astype(np.int64) % near
    sign = (noise >> np.uint64(55)) & np.uint64(1)
    noise = noise & np.uint64((1 << mantissa) - 1)
    noise |= (power.astype(np.uint64) << np.uint64(mantissa)) | (sign << np.uint64(bits - 1))
    pool = np.concatenate([known[: count - count // 4], noise])[:count]
    return _shuffled(label, pool).astype(f"u{bits // 8}").view(np.uint8)


def normals(label: str, kind: str, count: int) -> Bytes:
    """Random values of a float type in (-1, 1), uniform."""
    unit = (raw(label, count) >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0
    return encode(unit, kind)


def encode(values: NDArray[np.float64], kind: str) -> Bytes:
    """Values that the type holds exactly (others are truncated) as its bytes."""
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if kind in ("f16", "f32", "f64"):
        return values.astype(f"f{BITS[kind] // 8}").view(np.uint8)
    if kind in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint8)
    if kind in ("e4m3", "e5m2"):
        return _encode_float8(values, kind)
    raise ValueError(f"kind: got {kind!r}")


def _encode_float8(values: NDArray[np.float64], kind: str) -> Bytes:
    mantissa, bias = (3, 7) if kind == "e4m3" else (2, 15)
    fraction, power = np.frexp(np.abs(values))
    field = (power - 1 + bias) << mantissa
    code = field + ((fraction * 2 - 1) * (1 << mantissa)).astype(np.int64)
    code = np.where((values == 0) | (power - 1 + bias < 1), 0, code)
    return (code | np.where(values < 0, 0x80, 0)).astype(np.uint8)


def typed(label: str, kind: str, count: int) -> Bytes:
    """Inputs of a PTX type: f32, s64, b16, f16x2, bf16x2, u16x2, ..."""
    if kind.endswith("x2"):
        return typed(label, kind[:-2], 2 * count)
    if kind in FLOAT_EDGES:
        return floats(label, kind, count)
    return integers(label, int(kind[1:]), count)


def factors(label: str, kind: str, size: int, spread: Mapping[str, int], *, random: bool) -> Bytes:
    """`size` bytes of a product's A or B: integers of a small spread, or values in (-1, 1).

    Integer types have any bits; `random` values of 8 bits and TF32 are those that the type holds.
    """
    if kind in ("s8", "u8", "s4", "u4", "b1"):
        return random_bytes(label, size)
    storage = "f32" if kind == "tf32" else kind
    count = size // {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}.get(storage, 1)
    if not random:
        most = spread[kind]
        return encode((below(label, count, 2 * most + 1) - most).astype(np.float64), storage)
    if kind in ("e4m3", "e5m2"):
        return encode(np.round(normals(label, "f64", count).view(np.float64) * 64) / 64, kind)
    words = normals(label, storage, count)
    return (
        words if kind != "tf32" else (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.uint8)
    )


def sums(label: str, kind: str, size: int, *, saturate: bool, random: bool) -> Bytes:
    """`size` bytes of a product's C; s32 has room for what is added, but where it saturates."""
    if kind == "s32":
        words = random_bytes(label, size).view(np.int32)
        return (words if saturate else words >> 4).astype(np.int32).view(np.uint8)
    count = size // {"f64": 8, "f16": 2}.get(kind, 4)
    if random:
        return normals(label, kind, count)
    return encode((below(label, count, 65) - 32).astype(np.float64), kind)
