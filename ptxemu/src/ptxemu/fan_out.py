"""Several observers that act as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ptxemu.events import Observer


class FanOut(Observer):
    """Tells every event to each observer, in the order in which they were given."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers


def _tell_all(event: str) -> Callable[..., None]:
    def tell(self: FanOut, *facts: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(*facts)

    return tell


for _event, _method in vars(Observer).items():
    if callable(_method) and not _event.startswith("_"):
        setattr(FanOut, _event, _tell_all(_event))
