"""The table of operand forms: each one's kernel assembled, emulated and compared with float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashdsa.toolchain.ptxas import Assembler, Verdict
from workbench.lab.forms_catalog import OperandForm, catalog
from workbench.lab.forms_emulation import Emulated, emulate_form
from workbench.lab.forms_refused import Refusal, judge_refused, refused_forms
from workbench.lab.forms_together import Together, judge_together
from workbench.lab.forms_witnesses import Confirmation, confirmation

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class FormRow:
    """What was found out about one form that the ISA has.

    Attributes:
        assembled: ptxas's verdict; None where it was not asked.
        emulated: None where the emulator refused the kernel; `refusal` says why.
    """

    form: OperandForm
    assembled: Verdict | None
    emulated: Emulated | None
    refusal: str
    confirmed: Confirmation
    seconds: float

    @property
    def passed(self) -> bool:
        """Assembled, right, and nothing found."""
        is_assembled = self.assembled is None or self.assembled.accepted
        return is_assembled and self.emulated is not None and self.emulated.passed


@dataclass(frozen=True)
class FormsReport:
    """Everything `python -m workbench lab forms` shows.

    Attributes:
        together: None where ptxas was not asked.
    """

    arch: str
    seed: int
    ptxas: str | None
    rows: tuple[FormRow, ...]
    refused: tuple[Refusal, ...]
    together: Together | None
    seconds: float

    @property
    def failed(self) -> int:
        """Forms that the ISA has and that failed, and others that a judge let pass."""
        forms = sum(not row.passed for row in self.rows)
        others = sum(not refusal.passed for refusal in self.refused)
        return forms + others + int(self.together is not None and not self.together.plan)


def examine(
    forms: Sequence[OperandForm],
    assembler: Assembler | None,
    *,
    seed: int = 0,
    others: bool = True,
    on_progress: OnProgress = lambda done, total, what: None,
) -> FormsReport:
    """Run forms.

    Args:
        assembler: None: do not ask ptxas.
        others: also judge what the ISA refuses, and which forms may live together.
    """
    start = time.monotonic()
    total = len(forms) + (len(refused_forms()) + 1 if others else 0)
    done = 0
    rows = []
    for form in forms:
        on_progress(done, total, form.name)
        rows.append(_examine_one(form, assembler, seed))
        done += 1
    refused: list[Refusal] = []
    together = None
    if others:
        for refusal in judge_refused(assembler):
            refused.append(refusal)
            done += 1
            on_progress(done, total, refusal.form.name)
        if assembler is not None:
            together = judge_together(
                assembler, catalog(), lambda what: on_progress(done, total, what)
            )
    on_progress(total, total, "")
    version = assembler.version if assembler is not None else None
    seconds = time.monotonic() - start
    return FormsReport("sm_100a", seed, version, tuple(rows), tuple(refused), together, seconds)


def _examine_one(form: OperandForm, assembler: Assembler | None, seed: int) -> FormRow:
    from ptxemu.errors import PtxEmuError

    start = time.monotonic()
    emulated, verdict, refusal = None, None, ""
    try:
        emulated = emulate_form(form, seed)
    except PtxEmuError as error:
        refusal = " ".join(str(error).split())
    if emulated is not None and assembler is not None:
        verdict = assembler.judge(emulated.ptx)
    return FormRow(form, verdict, emulated, refusal, confirmation(form), time.monotonic() - start)
