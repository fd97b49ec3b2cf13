"""What small calls of one kernel share: compile it, launch it on a GPU and judge, emulate it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar


class KernelCase(ABC):
    """A launch of one kernel, judged. CuTe DSL is asked for only where it is compiled."""

    catalog_name: ClassVar[str]
    """Of the kernel in `flashdsa.kernels.catalog`."""

    @property
    @abstractmethod
    def plan(self) -> Any:
        """What it is compiled for."""

    @abstractmethod
    def wrong(self, function: Any) -> str:
        """What is wrong with the results on the GPU; "" if nothing is."""

    @abstractmethod
    def _launch(self, function: Any, runner: Any, device: str) -> Any:
        """Inputs and results."""

    @property
    def spec(self) -> Any:
        """The kernel's entry in the catalog."""
        from flashdsa.kernels import catalog

        return getattr(catalog, self.catalog_name)

    def compile(self) -> Any:
        """The kernel's function."""
        from flashdsa.jit.loader import compile_plan

        return compile_plan(self.spec, self.plan)

    def __call__(self) -> None:
        """Launch once, and judge."""
        from flashdsa.jit.loader import load

        wrong = self.wrong(load(self.spec, self.plan))
        if wrong:
            sys.exit(wrong)

    def emulator(self) -> Any:
        """That collects what is found."""
        from flashdsa.backends.emulated.runner import Emulator

        return Emulator(on_finding="collect")

    def emulated(self, function: Any) -> list[Any]:
        """ptxemu's findings."""
        emulator = self.emulator()
        self._launch(function, emulator, "cpu")
        findings: list[Any] = emulator.findings
        return findings
