"""Mutants that somebody has understood to be harmless, with the reasons."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence

from ptxemu.mutate.sites import Mutation

_ENTRY = re.compile(r"(?P<place>\S+)\s+(?P<name>[^:]+?)\s*:\s*(?P<reason>.+)")
_COMMENT = re.compile(r"(^|\s)#.*")
ANY = "*"


class Equivalents:
    """Mutants that are known to be as good as the original, with the reasons."""

    def __init__(self, entries: Sequence[tuple[str, str, str]] = ()) -> None:
        """Entries of place, name of the mutation (or *) and reason.

        A place is a PTX line, or file:line of the source, the file without its folders, or
        category#n, the n-th site of the category.
        """
        self._reasons = {(place, name): reason for place, name, reason in entries}

    @classmethod
    def parse(cls, text: str) -> Equivalents:
        """Lines of "place mutation: reason" and # comments.

        Raises:
            ValueError: naming the line.
        """
        entries = []
        for line in text.splitlines():
            content = _COMMENT.sub("", line).strip()
            match = _ENTRY.fullmatch(content)
            if match is not None:
                entries.append((match["place"], match["name"], match["reason"]))
            elif content:
                raise ValueError(f"expected 'place mutation: reason'; got {line!r}")
        return cls(entries)

    def reason(self, mutation: Mutation) -> str | None:
        """Why a mutant is equivalent, or None."""
        return next((self._reasons[key] for key in _keys(mutation) if key in self._reasons), None)

    def strangers(self, mutations: Iterable[Mutation]) -> list[str]:
        """Entries that none of the mutants is meant by, as "place mutation": the kernel has
        changed since."""
        known = {key for mutation in mutations for key in _keys(mutation)}
        return [" ".join(key) for key in self._reasons if key not in known]


def _keys(mutation: Mutation) -> Iterable[tuple[str, str]]:
    span = mutation.site.instruction.span
    places = [mutation.site.name, str(span.ptx_line)]
    if span.source_file is not None:
        places.append(f"{os.path.basename(span.source_file)}:{span.source_line}")
    return itertools.product(places, (mutation.name, ANY))
