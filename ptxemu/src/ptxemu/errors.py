"""The error tree: every error that ptxemu raises on purpose says where in the PTX it arose."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol


@dataclass(frozen=True, slots=True)
class Span:
    """Position in the text: the PTX line, and the source line where the PTX has `.loc`."""

    ptx_line: int
    source_file: str | None = None
    source_line: int | None = None
    library: str | None = None
    """File and line of the code of a library that is inlined there."""

    def __str__(self) -> str:
        where = f"PTX line {self.ptx_line}"
        if self.source_file is not None:
            inside = f", in {os.path.basename(self.library)}" if self.library else ""
            where += f" ({self.source_file}:{self.source_line}{inside})"
        return where


class PtxEmuError(Exception):
    """Root of all errors raised on purpose by ptxemu."""


class PtxSyntaxError(PtxEmuError, ValueError):
    """The text is not PTX that the parser knows."""

    def __init__(self, message: str, span: Span | None = None) -> None:
        super().__init__(message if span is None else f"{span}: {message}")
        self.span = span


class UnreadableFileError(PtxEmuError, OSError):
    """A file that is missing, a folder, or not the text that it should be."""


class StoppedError(PtxEmuError):
    """A launch that was ended before its end, or that came after the end."""

    findings: Sequence[Any] = ()
    """Findings of the check until then, if it was on."""
    warp_instructions: int = 0
    """Number of warp instructions of the launch until then."""


class Interruption(KeyboardInterrupt):
    """A signal or a time limit ends a command."""

    findings: Sequence[Any] = ()
    """Findings of the check in the launch that was under way, if it was on."""
    warp_instructions: int = 0
    """Number of its warp instructions."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


class UnsupportedInstructionError(PtxEmuError, NotImplementedError):
    """The kernel needs instructions that ptxemu does not have; raised before anything runs."""


class ModuleError(PtxEmuError, ValueError):
    """A module that is too large for ptxemu as a whole."""


class IllegalInstructionError(PtxEmuError, ValueError):
    """An instruction or a combination that the PTX ISA or ptxas refuses."""

    def __init__(self, message: str, span: Span | None = None) -> None:
        super().__init__(message if span is None else f"{span}: {message}")
        self.span = span


class UnknownDeviceError(PtxEmuError, ValueError):
    """An architecture that ptxemu does not emulate."""


class LaunchError(PtxEmuError, ValueError):
    """A launch that the driver would refuse: shared memory, cluster, block or arguments."""


class ExecutionError(PtxEmuError, RuntimeError):
    """Execution cannot go on: an illegal address, a trap, a misaligned access."""

    findings: Sequence[Any] = ()
    """Findings of the check until then, if it was on."""
    warp_instructions: int = 0
    """Number of warp instructions of the launch until then."""


class StepLimitError(ExecutionError):
    """The run was stopped because it had executed as many instructions as it may."""


class DeadlockError(ExecutionError):
    """No warp and no asynchronous operation can make progress; says who waits for what."""


class HazardError(PtxEmuError):
    """The check found at least one error; `findings` holds them."""

    def __init__(self, message: str, findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = list(findings)


class Located(Protocol):
    """An instruction."""

    @property
    def opcode(self) -> str:
        """The opcode as written."""
        ...

    @property
    def span(self) -> Span:
        """Its position in the text."""
        ...


def fault(instruction: Located, message: str) -> NoReturn:
    """Stop: hardware would trap here, or nobody knows what it does."""
    raise ExecutionError(f"{instruction.span}: {instruction.opcode}: {message}")


def illegal(instruction: Located, message: str) -> NoReturn:
    """Refuse what the PTX ISA forbids."""
    raise IllegalInstructionError(f"{instruction.opcode}: {message}", instruction.span)
