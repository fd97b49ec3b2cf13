"""Python's collector of cyclic garbage during a launch, or while a module is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 20)
"""Objects made between two collections, and collections between two of the next older generation.

A checked run keeps hundreds of thousands of objects and makes hardly any cycles, so that Python's
own thresholds look through all of them again and again: up to a third of the time."""

FROZEN_BY_PYTHON = 1_000
"""More objects than Python freezes itself when it starts: 375 in 3.12.1, none in 3.11.7, 3.13.0 and
3.14.8. A program that calls gc.freeze() freezes tens of thousands."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely, and only what is made inside; where collection is off, leave it so.

    Also a decorator.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or not 0 < before[0] < THRESHOLDS[0]:
        yield
        return
    is_mine = gc.get_freeze_count() < FROZEN_BY_PYTHON
    if is_mine:
        gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if is_mine:
            gc.collect()  # of what is made inside; unfrozen it would be old, and stay for long
            gc.unfreeze()
