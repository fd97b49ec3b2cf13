"""The written distribution: the values of each operation's draws, in the order in which they come.

python -m workbench.draws.distribution    # prints them; workbench/DRAWS.md explains the words
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from flashdsa.problem import D_QK, D_V, INDEX_HEAD_DIM, INDEX_TOKEN_BYTES
from flashdsa.row_formats import V32

Values = Mapping[str, Any]
"""Values drawn before, by name: a term may name one of them as a limit."""


@dataclass(frozen=True)
class Term:
    """A random value, with its text."""

    text: str
    draw: Callable[[Random, Values], Any]

    def __str__(self) -> str:
        return self.text


Limit = int | float | str
"""A number, or the name of a value that was drawn before."""


def _number(limit: Limit, values: Values) -> float:
    return float(values[limit] if isinstance(limit, str) else limit)


def logu(low: int, high: Limit) -> Term:
    """Whole number whose logarithm is uniform; `low` is no more than `high`."""

    def draw(r: Random, values: Values) -> int:
        most = _number(high, values)
        return round(math.exp(r.uniform(math.log(min(low, most)), math.log(most))))

    return Term(f"logu({low}, {high})", draw)


def randint(low: int, high: int) -> Term:
    """Whole number, each as likely."""
    return Term(f"randint({low}, {high})", lambda r, _: r.randint(low, high))


def uniform(low: float, high: float) -> Term:
    """Real number."""
    return Term(f"uniform({low}, {high})", lambda r, _: r.uniform(low, high))


def choice(*values: int) -> Term:
    """One of some numbers, each as likely."""
    return Term(f"choice({', '.join(map(str, values))})", lambda r, _: r.choice(values))


def fixed(text: str, value: Any = None) -> Term:
    """A value that is not random, as the documents say it."""
    return Term(text, lambda *_: value)


def combine(text: str, make: Callable[..., Any], *terms: Term) -> Term:
    """`make` of terms drawn in this order; `text` has a {} for each."""

    def draw(r: Random, values: Values) -> Any:
        return make(*(term.draw(r, values) for term in terms))

    return Term(text.format(*terms), draw)


def pick(*cases: tuple[Any, float]) -> Term:
    """One of these by weight; only the one that is taken is drawn."""
    assert abs(sum(weight for _, weight in cases) - 1) < 1e-9

    def draw(r: Random, values: Values) -> Any:
        (one,) = r.choices([one for one, _ in cases], [weight for _, weight in cases])
        return one.draw(r, values) if isinstance(one, Term) else one

    inner = ", ".join(f"{one}: {weight:g}".replace(": 0.", ": .") for one, weight in cases)
    return Term(f"pick({{{inner}}})", draw)


def kind(name: str, *terms: Term) -> Term:
    """A named kind with its numbers: a tuple."""
    text = " ".join([name, *("{}",) * len(terms)])
    return combine(text, lambda *drawn: (name, *drawn), *terms)


MOST = (40e9, 20_000.0)
"""Bytes of the inputs and estimated microseconds: a draw with more is halved until it has less."""
FLOP_A_US, BYTES_A_US = 4.5e8, 3e6
"""450 TFLOPS and 3 TB/s: what the estimate assumes."""
COLUMNS, WINDOW = 512, 128
"""Columns of a row without RoPE, and tokens of a window beside the entries."""
MOST_ROWS = 1024
"""Queries of a decode step, all requests together."""
MOST_PACKED = 65_536
"""Keys of packed documents."""

_SHIFT = pick((0, 0.5), (logu(1, "topk"), 0.5))
_MTP = pick((1, 0.7), (2, 0.15), (3, 0.05), (4, 0.1))
_TOPK = pick(
    (2048, 0.5), (1024, 0.15), (512, 0.15), (256, 0.1),
    (combine("64 * {}", lambda n: 64 * n, logu(1, 32)), 0.1),
)  # fmt: skip
_INDEX_TOPK = pick((2048, 0.7), (1024, 0.15), (512, 0.15))
_HEADS = pick(
    (128, 0.3), (64, 0.25), (32, 0.15), (16, 0.15), (8, 0.05), (choice(20, 24, 40, 96), 0.1)
)
_TRAINED_HEADS = pick((128, 0.3), (64, 0.3), (32, 0.15), (16, 0.15), (8, 0.1))
_WIDE_HEADS = pick((128, 0.3), (64, 0.4), (32, 0.1), (16, 0.2))
_ENTRIES = pick((512, 0.4), (1024, 0.3), (combine("128 * {}", lambda n: 128 * n, logu(1, 16)), 0.3))
_IDS = pick(
    (kind("corr", uniform(0.02, 0.6)), 0.35),
    (kind("random"), 0.2),
    (kind("causal"), 0.15),
    (kind("window", logu(128, "topk")), 0.2),
    (kind("prefix", _SHIFT), 0.1),
)
_LENGTHS = pick(
    (None, 0.5),
    (kind("uniform", fixed("1", 0.0), fixed("topk", 1.0)), 0.2),
    (kind("uniform", fixed("0.7 topk", 0.7), fixed("topk", 1.0)), 0.1),
    (kind("prefix", _SHIFT), 0.1),
    (kind("uniform", fixed("1", 0.0), fixed("topk / 8", 0.125)), 0.1),
)
_INVALID = pick((0.0, 0.8), (0.3, 0.15), (0.9, 0.05))
_WAVES = "132 * {} + {}"
_QUERIES = pick(
    (logu(128, 8192), 0.5),
    (combine("2 ** {}", lambda n: 2**n, randint(9, 13)), 0.35),
    (combine(_WAVES, lambda n, m: 132 * n + m, randint(1, 16), choice(0, 1, 2)), 0.15),
)
_CONTEXTS = pick(
    (kind("chat", fixed("logu(300, 30_000) each", (300, 30_000))), 0.35),
    (kind("agents", fixed("logu(8_000, 200_000) each", (8_000, 200_000))), 0.25),
    (kind("equal", logu(1024, 300_000)), 0.2),
    (kind("one", logu(65_536, 300_000), fixed("others logu(1024, 8192)", 0)), 0.2),
)
_DOCUMENT = logu(50, 30_000)
_BLOCK_SIZE = pick((8, 0.6), (choice(1, 2, 4, 16, 32, 64), 0.4))
_LEVELS = {
    "heads": pick((64, 0.34), (32, 0.33), (16, 0.33)),
    "topk": pick((512, 0.3), (2048, 0.3), (logu(1, 2048), 0.4)),
    "candidates": pick(
        (None, 0.5), (kind("best", logu(1, 2048)), 0.25), (kind("any", logu(1, 2048)), 0.25)
    ),
    "block": Term(
        f"{_BLOCK_SIZE}, 2 for 1 without candidates",
        lambda r, v: max(_BLOCK_SIZE.draw(r, v), 1 if v["candidates"] else 2),
    ),
    "sorted": pick((True, 0.3), (False, 0.7)),
    "keys": pick(
        (None, 0.5), ("equal", 0.1), ("five", 0.15), ("rising", 0.1), ("falling", 0.05),
        ("NaN", 0.1),
    ),
}  # fmt: skip
_KEYS = logu(4096, 2**20)
_TAIL = {
    "heads": _HEADS,
    "topk": _TOPK,
    "ids": _IDS,
    "lengths": _LENGTHS,
    "invalid": _INVALID,
    "sink": pick((True, 0.2), (False, 0.8)),
}
_ENTRIES_AND_WINDOW = {
    "S_kv": logu(4096, 262_144),
    "heads": _WIDE_HEADS,
    "topk": _ENTRIES,
    "ids": _IDS,
    "lengths": _LENGTHS,
    "window": pick((None, 0.4), ("ids", 0.3), ("range", 0.3)),
    "sink": pick((True, 0.7), (False, 0.3)),
}
FIELDS: dict[str, dict[str, Term]] = {
    "forward": {
        "S": _QUERIES, "S_kv": _KEYS, **_TAIL, "max_logits": pick((True, 0.05), (False, 0.95)),
    },
    "decode": {
        "b": pick(
            (logu(1, 512), 0.6),
            (randint(1, 300), 0.25),
            (combine("66 * {} + {}", lambda n, m: 66 * n + m, randint(1, 4), choice(0, 1, 2)),
             0.15),
        ),
        "next_n": _MTP,
        "heads": pick((128, 0.35), (64, 0.25), (32, 0.1), (16, 0.2), (8, 0.1)),
        "contexts": _CONTEXTS,
        "topk": _TOPK,
        "ids": pick((kind("random"), 0.5), (kind("window", logu(128, "topk")), 0.5)),
        "lengths": pick((True, 0.3), (False, 0.7)),
        "rows": pick(("packed", 0.7), ("bf16", 0.3)),
        "scales": pick(("ue8m0", 0.8), ("fp32", 0.2)),
    },
    "prompts": {
        "S": pick((logu(16, 1500), 0.6), (logu(100, 4096), 0.4)),
        "before": pick((0, 0.5), (logu(1, 2048), 0.5)),
        "documents": pick((1, 0.7), (logu(2, 32), 0.3)),
        "heads": _HEADS,
        "topk": pick((2048, 0.7), (1024, 0.15), (512, 0.15)),
        "lengths": pick((True, 0.5), (False, 0.5)),
    },
    "chats": {
        "b": logu(1, 512),
        "next_n": _MTP,
        "heads": pick((128, 0.35), (64, 0.25), (32, 0.1), (16, 0.2), (8, 0.1)),
        "contexts": pick((kind("chat", fixed("logu(100, 20_000) each", (100, 20_000))), 1.0)),
        "topk": pick((2048, 0.7), (1024, 0.15), (512, 0.15)),
        "ids": kind("random"),
        "lengths": pick((True, 0.5), (False, 0.5)),
        "rows": pick(("packed", 0.7), ("bf16", 0.3)),
        "scales": fixed("ue8m0", "ue8m0"),
    },
    "backward": {"S": logu(256, 8192), "S_kv": _KEYS, **_TAIL, "heads": _TRAINED_HEADS},
    "indexer": {
        "b": logu(1, 512),
        "next_n": _MTP,
        "contexts": _CONTEXTS,
        "heads": pick((64, 0.7), (32, 0.2), (16, 0.1)),
        "topk": _INDEX_TOPK,
        "scores": pick(
            (None, 0.8), ("ascending", 0.05), ("descending", 0.05), ("equal", 0.05),
            ("one bin", 0.05),
        ),
    },
    "prefill": {
        "kind": pick(
            (kind("chunk", logu(16, 4096), logu(1024, 131_072)), 0.5),
            (kind("causal", logu(512, 32_768)), 0.25),
            (kind("documents", logu(2, 64)), 0.25),
        ),
        "heads": pick((64, 0.6), (32, 0.25), (16, 0.15)),
        "dtype": pick(("fp8", 0.7), ("bf16", 0.3)),
        "topk": _INDEX_TOPK,
    },
    "two-levels": {
        "b": logu(1, 512),
        "next_n": _MTP,
        "contexts": pick(
            (kind("short", fixed("logu(1, 700) each", (1, 700))), 0.3),
            (kind("chat", fixed("logu(300, 30_000) each", (300, 30_000))), 0.3),
            (kind("equal", logu(1024, 300_000)), 0.2),
            (kind("one", logu(65_536, 300_000), fixed("others logu(1024, 8192)", 0)), 0.2),
        ),
        "dtype": pick(("fp8", 0.6), ("mxfp4", 0.4)),
        "ids": pick(("slot", 0.5), ("position", 0.5)),
        **_LEVELS,
    },
    "two-levels-prefill": {
        "kind": pick(
            (kind("chunk", logu(16, 4096), logu(1, 131_072)), 0.3),
            (kind("causal", logu(16, 32_768)), 0.2),
            (kind("documents", logu(2, 64)), 0.25),
            (kind("any", logu(16, 4096), logu(1, 32_768)), 0.25),
        ),
        "dtype": pick(("fp8", 0.6), ("bf16", 0.4)),
        **_LEVELS,
    },
    "forward-512": {"S": _QUERIES, **_ENTRIES_AND_WINDOW},
    "backward-512": {"S": logu(256, 8192), **_ENTRIES_AND_WINDOW},
    "decode-512": {
        "b": pick((logu(1, 512), 0.7), (randint(1, 300), 0.3)),
        "next_n": _MTP,
        "heads": _WIDE_HEADS,
        "contexts": _CONTEXTS,
        "rows": pick(("v4", 0.5), ("v32_no_rope", 0.2), ("bf16", 0.3)),
        "ratio": combine("1 of v32_no_rope, else {}", lambda n: n, pick((4, 0.7), (128, 0.3))),
        "topk": _ENTRIES,
        "lengths": pick((True, 0.5), (False, 0.5)),
        "window": fixed("None of v32_no_rope, else ids", "ids"),
    },
    "training": {
        "S": logu(256, 8192),
        "S_kv": logu(4096, 131_072),
        "heads": _TRAINED_HEADS,
        "index_heads": pick((64, 0.7), (32, 0.3)),
        "topk": _TOPK,
        "ids": _IDS,
    },
}  # fmt: skip
OPERATIONS = tuple(FIELDS)


@dataclass(frozen=True, eq=False)
class Draw:
    """One draw.

    Attributes:
        values: of the operation's FIELDS, and `tensors`, the seed of its tensors.
        lengths: tokens of each request, or of each packed document.
        halved: how often it was halved.
    """

    operation: str
    seed: int
    number: int
    values: Mapping[str, Any]
    lengths: tuple[int, ...] = ()
    halved: int = 0

    @property
    def name(self) -> str:
        """The words by which the command finds it."""
        return f"{self.operation}/{self.seed}/{self.number}"

    @property
    def is_prefill(self) -> bool:
        """Whether queries choose among keys that they share."""
        return "kind" in self.values

    @property
    def queries(self) -> int:
        """Rows of the call."""
        v = self.values
        if self.is_prefill:
            return v["kind"][1] if v["kind"][0] in ("chunk", "any") else self.keys
        return int(v["S"]) if "S" in v else len(self.lengths) * int(v["next_n"])

    @property
    def keys(self) -> int:
        """Rows of kv, or tokens of all requests."""
        v = self.values
        if "before" in v:
            return int(v["S"] + v["before"])
        if not self.is_prefill:
            return int(v["S_kv"]) if "S_kv" in v else sum(self.lengths)
        name, *sizes = v["kind"]
        return sum(self.lengths) if name == "documents" else sum(sizes)

    @cached_property
    def line(self) -> str:
        """All of it in one line."""
        words = []
        for name, value in self.values.items():
            if isinstance(value, tuple):
                value = "-".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in value)
            if name != "tensors" and value not in (None, False, 0.0):
                words.append(f"{name}={value}")
        if self.lengths:
            many = f"{len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)}"
            words.append(f"({many}, {sum(self.lengths)} together)")
        if self.halved:
            words.append(f"halved {self.halved}x")
        return f"{self.name} {' '.join(words)}"

    def cost(self) -> tuple[float, float]:
        """Bytes of the inputs, and estimated microseconds of the longest of its calls."""
        v, rows, keys = self.values, self.queries, self.keys
        topk = v["topk"]
        if "S" in v:
            columns = {"backward": 3 * D_QK + 2 * D_V, "training": D_QK}
            flop = 2.0 * rows * max(64, v["heads"]) * topk
            flop *= columns.get(self.operation.removesuffix("-512"), D_QK + D_V)
            flop = max(flop, 6.0 * rows * v.get("index_heads", 0) * topk * INDEX_HEAD_DIM)
            size = rows * (v["heads"] * (D_QK + D_V) * 2 + topk * 4) + keys * D_QK * 2
            return float(size), flop / FLOP_A_US
        if self.is_prefill:
            seen = rows * (2 * keys - rows) / 2
            if v["kind"][0] == "documents":
                seen = sum(n * n for n in self.lengths) / 2
            size = (rows * v["heads"] + keys) * INDEX_HEAD_DIM * (1 if v["dtype"] == "fp8" else 2)
            return float(size), 2.0 * seen * v["heads"] * INDEX_HEAD_DIM / FLOP_A_US
        if self.operation in ("indexer", "two-levels"):
            size = keys * INDEX_TOKEN_BYTES
            return float(size), size / BYTES_A_US
        row = 2 * D_QK if v["rows"] == "bf16" else V32.row_bytes
        return float(keys * row / v.get("ratio", 1)), rows * topk * row / BYTES_A_US

    def half(self) -> Draw:
        """The same with half of the queries or requests."""
        v = dict(self.values)
        if self.is_prefill and v["kind"][0] != "documents":
            name, first, *rest = v["kind"]
            v["kind"] = (name, first // 2, *rest)
        elif "S" in v:
            v["S"] //= 2
        lengths = self.lengths[: max(1, len(self.lengths) // 2)]
        return replace(self, values=v, lengths=lengths, halved=self.halved + 1)

    def small(self) -> Draw:
        """A tiny form of the same kinds, which a CPU computes at once."""
        v = dict(self.values)
        share = 8 if v.get("contexts") == "short" else 400
        lengths = tuple(1 + n // share for n in self.lengths[:3])
        for name, most in (
            ("S", 7),
            ("before", 40),
            ("S_kv", 300),
            ("topk", 64),
            ("heads", 16),
            ("b", 3),
        ):
            if name in v:
                v[name] = min(v[name], most)
        if "kind" in v:
            v["kind"] = (v["kind"][0], *(min(n, 80) for n in v["kind"][1:]))
        if v.get("candidates"):
            v["candidates"] = (v["candidates"][0], min(v["candidates"][1], 20))
        return replace(self, values=v, lengths=lengths)


def draw(operation: str, seed: int, number: int, fixed: Values | None = None) -> Draw:
    """The draw of this number; values in `fixed` replace drawn ones, and change no other."""
    r = Random(f"{operation}/{seed}/{number}")
    values: dict[str, Any] = {}
    for name, term in FIELDS[operation].items():
        drawn_value = term.draw(r, values)
        values[name] = (fixed or {}).get(name, drawn_value)
    if "S_kv" in values:
        values["S_kv"] = max(values["topk"], values["S_kv"])
    if values.get("rows") == "v32_no_rope":
        values["ratio"], values["window"] = 1, None
    if "lengths" in values and values.get("ids", ("",))[0] == "prefix":
        values["lengths"] = values["ids"]
    drawn = Draw(operation, seed, number, values, _lengths(values, r))
    values["tensors"] = r.getrandbits(31)
    while max(size / most for size, most in zip(drawn.cost(), MOST, strict=True)) > 1:
        drawn = drawn.half()
    return drawn


def _lengths(values: dict[str, Any], r: Random) -> tuple[int, ...]:
    """Tokens of each request, or of each packed document; none elsewhere."""
    if values.get("kind", ("",))[0] == "documents":
        drawn: list[int] = []
        while len(drawn) < values["kind"][1] and sum(drawn) < MOST_PACKED:
            drawn.append(min(_DOCUMENT.draw(r, values), MOST_PACKED - sum(drawn)))
        return tuple(drawn)
    if "b" not in values:
        return ()
    while values["b"] * values["next_n"] > MOST_ROWS:
        values["b"] //= 2
    name, size, *_ = values["contexts"]
    others = logu(*(size if isinstance(size, tuple) else (1024, 8192)))
    lengths = [others.draw(r, values) for _ in range(values["b"])]
    if name == "equal":
        lengths = [size] * values["b"]
    elif name == "one":
        lengths[r.randrange(values["b"])] = size
    values["contexts"] = name
    return tuple(lengths)


def describe() -> str:
    """The distribution in words, an operation a block; a long term again names the first one."""
    first: dict[tuple[str, str], str] = {}
    blocks = []
    for operation, fields in FIELDS.items():
        lines: list[tuple[str, str]] = []
        for name, term in fields.items():
            text = str(term)
            there = first.setdefault((name, text), operation)
            text = f"as {there}" if there != operation and len(text) > 15 else text
            if lines and lines[-1][1] == text and text.startswith("as "):
                name = f"{lines.pop()[0]}, {name}"
            lines.append((name, text))
        blocks.append("\n".join([f"{operation}:", *(f"  {a:<11} {b}" for a, b in lines)]))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    sys.stdout.write(f"{describe()}\n")
