"""Arguments of cuTensorMapEncodeTiled, legal and not, whose result the driver recorded."""

import random
from typing import Any

BASE: dict[str, Any] = {
    "dtype": 6,
    "rank": 3,
    "address": 0x7F0000000000,
    "dims": [64, 32, 16],
    "strides": [128, 8192],
    "box": [16, 4, 2],
    "element_strides": [1, 1, 1],
    "interleave": 0,
    "swizzle": 0,
    "l2_promotion": 0,
    "oob_fill": 0,
}
BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)


def _vary(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def _types() -> list[dict[str, Any]]:
    cases = []
    for dtype, size in enumerate(BYTES):
        for fill in (0, 1):
            inner = 64 // size
            cases.append(
                _vary(dtype=dtype, dims=[128 // size, 32, 16], box=[inner, 4, 2], oob_fill=fill)
            )
    for dtype in (13, 14, 15):
        packed = _vary(dtype=dtype, dims=[256, 32, 16], strides=[256, 8192], box=[128, 4, 2])
        cases += [
            packed,
            {**packed, "swizzle": 3},
            {**packed, "swizzle": 4},
            {**packed, "swizzle": 6},
        ]
        cases += [{**packed, "dims": [129, 32, 16]}, {**packed, "box": [64, 4, 2]}]
        cases += [{**packed, "oob_fill": 1}, {**packed, "strides": [272, 8192]}]
        cases.append({**packed, "address": BASE["address"] + 16})
    cases += [_vary(dtype=16), _vary(dtype=-1)]
    return cases


def _ranks() -> list[dict[str, Any]]:
    dims, strides = [64, 33, 17, 9, 5], [144, 8192, 1 << 18, 1 << 24]
    box, steps = [16, 5, 6, 7, 3], [1, 2, 3, 4, 5]
    cases = [
        _vary(
            rank=r,
            dims=dims[:r],
            strides=strides[: r - 1],
            box=box[:r],
            element_strides=[1] * r if plain else steps[:r],
        )
        for r in range(1, 6)
        for plain in (True, False)
    ]
    return [*cases, _vary(rank=0), _vary(rank=6, dims=[2] * 6, strides=[16] * 5, box=[8] * 6)]


def _limits() -> list[dict[str, Any]]:
    cases = [_vary(swizzle=s) for s in range(-1, 8)]
    cases += [
        _vary(swizzle=s, box=[w, 4, 2]) for s in range(1, 7) for w in (8, 16, 24, 32, 40, 64, 72)
    ]
    cases += [_vary(interleave=i, swizzle=s) for i in range(4) for s in range(4)]
    cases += [_vary(interleave=2, swizzle=1, strides=[144, 8192]), _vary(interleave=1, rank=2)]
    cases += [_vary(interleave=2, swizzle=1, address=BASE["address"] + 16)]
    cases += [_vary(l2_promotion=p) for p in range(-1, 5)]
    cases += [_vary(oob_fill=f) for f in (0, 1, 2)]
    for axis in range(3):
        for value in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
            steps = [1, 1, 1]
            steps[axis] = value
            cases.append(_vary(element_strides=steps))
        for value in (0, 1, 2, 8, 16, 255, 256, 257):
            box = [16, 4, 2]
            box[axis] = value
            cases.append(_vary(box=box))
        for value in (0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1):
            dims = [64, 32, 16]
            dims[axis] = value
            cases.append(_vary(dims=dims))
    for axis in range(2):
        for value in (0, 8, 16, 24, 112, 2**36 - 16, 2**36, 2**40 - 16, 2**40, 2**40 + 16):
            strides = [128, 8192]
            strides[axis] = value
            cases.append(_vary(strides=strides))
    high = [3 << 36, 5 << 36, 9 << 36, 15 << 36]
    five = {"rank": 5, "dims": [64, 8, 8, 8, 8], "box": [8, 2, 2, 2, 2], "element_strides": [1] * 5}
    cases += [
        _vary(**five, strides=[h if k == j else 1 << (10 + 4 * j) for j, h in enumerate(high)])
        for k in range(4)
    ]
    cases += [_vary(address=BASE["address"] + k) for k in (1, 8, 16, 32)]
    cases += [_vary(address=0), _vary(address=0xFFFF_FFFF_FFFF_FFF0)]
    cases += [_vary(box=[64, 256, 256]), _vary(box=[256, 256, 1]), _vary(box=[256, 256, 2])]
    cases += [_vary(box=[8, 256, n]) for n in (40, 48, 50, 52, 54, 55, 56, 57, 58, 60, 62, 63, 64)]
    cases += [_vary(box=[256, 256, 2], element_strides=[1, 2, 1])]
    cases += [_vary(box=[8, 256, n], swizzle=3) for n in (7, 8, 16, 24, 32, 48)]
    cases += [_vary(address=1 << k) for k in range(44, 64)]
    cases += [_vary(box=[64, 32, 16], element_strides=[1, 8, 8])]
    return cases


def _random() -> list[dict[str, Any]]:
    rng = random.Random(7)
    cases = []
    for _ in range(60):
        rank = rng.randint(1, 5)
        dtype = rng.choice([k for k in range(13) if k not in (3, 5)])
        size = BYTES[dtype]
        swizzle = rng.randint(0, 3)
        span = {0: 256, 1: 32, 2: 64, 3: 128}[swizzle]
        cases.append(
            _vary(
                dtype=dtype,
                rank=rank,
                address=rng.randrange(2**47) & ~15,
                dims=[rng.randint(1, 2 ** rng.randint(1, 32)) for _ in range(rank)],
                strides=[16 * rng.randrange(1, 2**36) for _ in range(rank - 1)],
                box=[
                    rng.randint(1, span // 16) * 16 // size,
                    *(rng.randint(1, 6) for _ in range(rank - 1)),
                ],
                element_strides=[rng.randint(1, 8) for _ in range(rank)],
                swizzle=swizzle,
                l2_promotion=rng.randint(0, 3),
                oob_fill=rng.randint(0, int(dtype >= 6)),
            )
        )
    return cases


def encode_cases() -> list[dict[str, Any]]:
    """All of them."""
    return [BASE, *_types(), *_ranks(), *_limits(), *_random()]
