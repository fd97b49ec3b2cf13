"""pytest's subtests for loops over cases, of which a kernel backend may lack some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flashdsa.errors import UnsupportedError


class CaseLoop:
    """`with subtests.test(name):` runs one case; the others run too if it fails.

    A case that the backend declares it lacks is a skip with that reason, but on the CPU. pytest
    lists such skips with `-o verbosity_subtests=1`.
    """

    def __init__(self, subtests: pytest.Subtests, backend: str) -> None:
        self._subtests = subtests
        self._backend = backend
        self.number_run = 0
        self.reasons: list[str] = []

    @contextmanager
    def test(self, name: object) -> Iterator[None]:
        """Run one case under its name."""
        with self._subtests.test(str(name)):
            try:
                yield
            except UnsupportedError as error:
                if self._backend == "cpu":
                    raise
                self.reasons.append(str(error))
                pytest.skip(str(error))
            finally:
                self.number_run += 1

    @property
    def lacks_every_case(self) -> bool:
        """Whether nothing was judged."""
        return 0 < self.number_run == len(self.reasons)
