"""Terms of a distribution: each draws a value, and its text is what the documents say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

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
