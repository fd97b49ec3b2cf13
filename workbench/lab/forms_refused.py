"""Forms that tcgen05 does not have: the clause that says so, and who refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashdsa.dsl.umma import instruction_descriptor
from flashdsa.toolchain.ptxas import Assembler
from workbench.lab import forms_ptx
from workbench.lab.forms_ptx import Issue

SECTION = 'PTX ISA, "tcgen05.mma"'
GROUP = 'PTX ISA, "tcgen05.alloc", "tcgen05.mma", ...'


@dataclass(frozen=True)
class RefusedForm:
    """A form that the ISA does not allow.

    Attributes:
        users: who would want it.
        clause: section of the ISA and what it says, in our words where it is not quoted.
        parts: the instructions, by .cta_group.
        in_text: the PTX text shows it; else the limit concerns a register's value, which ptxas
            cannot know.
    """

    name: str
    title: str
    users: str
    clause: str
    parts: dict[int, list[Issue]]
    in_text: bool


@dataclass(frozen=True)
class Refusal:
    """A refused form with the judges' words; None where a judge did not run or accepts it."""

    form: RefusedForm
    ptxas: str | None
    ptxas_ran: bool
    emulator: str | None

    @property
    def passed(self) -> bool:
        """Whether all who can see it refuse it: the emulator always, ptxas what the text shows."""
        sees = self.ptxas is not None or not self.ptxas_ran or not self.form.in_text
        return self.emulator is not None and sees


def refused_forms() -> tuple[RefusedForm, ...]:
    """All of them."""
    ss1, ts1 = forms_ptx.mma(1, a_in_tmem=False), forms_ptx.mma(1, a_in_tmem=True)
    ss2 = forms_ptx.mma(2, a_in_tmem=False)
    ws1, ws2 = (forms_ptx.mma(g, a_in_tmem=False, ws=True) for g in (1, 2))
    fits1, fits2 = (instruction_descriptor(128, n, "K", "K") for n in (32, 64))
    shape = f'{SECTION}, "Matrix Shape"'
    return (
        RefusedForm(
            "two-groups",
            "cta_group::1 and ::2 in one kernel",
            "seed: 2-CTA P, dP, dQ beside per-CTA .ws dKV",
            f'{GROUP}: "All tcgen05 instructions within a kernel must specify the same value for '
            'the .cta_group qualifier"',
            {1: [Issue(ss1, fits1)], 2: [Issue(ss2, fits2)]},
            in_text=True,
        ),
        RefusedForm(
            "ws-pair",
            ".ws with cta_group::2",
            "seed: 2-CTA dKV",
            f"{shape}: .ws is invalid with .cta_group::2",
            {2: [Issue(ws2, instruction_descriptor(64, 64, "K", "K"))]},
            in_text=True,
        ),
        RefusedForm(
            "ws-n32",
            ".ws with N=32",
            "P and dP of one CTA for 32 keys",
            f"{shape}: .ws has N = 64, 128 or 256",
            {1: [Issue(ws1, instruction_descriptor(64, 32, "K", "K"))]},
            in_text=False,
        ),
        RefusedForm(
            "m32",
            "M=32 without .ws",
            "dKV of 32 keys beside a 2-CTA P",
            f"{shape}: M = 32 is a shape of .ws only; cta_group::1 has 64 and 128",
            {1: [Issue(ss1, instruction_descriptor(32, 64, "K", "K"))]},
            in_text=False,
        ),
        RefusedForm(
            "pair-m64",
            "2-CTA with M=64",
            "P of 64 heads on a pair",
            f"{shape}: cta_group::2 has M = 128 and 256",
            {2: [Issue(ss2, instruction_descriptor(64, 64, "K", "K"))]},
            in_text=False,
        ),
        RefusedForm(
            "ts-a-mn",
            "TS with A MN-major",
            "dKV with S as it lies in TMEM",
            f'{SECTION}, "Transpose and Negate operations": only matrices in shared memory can '
            "be transposed",
            {1: [Issue(ts1, instruction_descriptor(128, 64, "MN", "K"))]},
            in_text=False,
        ),
        RefusedForm(
            "b-in-tmem",
            "B in TMEM",
            "dKV = dO^T S with S as it lies in TMEM",
            f"{SECTION}: B is always a shared memory descriptor",
            {1: [Issue(ts1.replace("%d3", "[%r4]"), fits1)]},
            in_text=True,
        ),
    )


def judge_refused(
    assembler: Assembler | None, before: Callable[[RefusedForm], None] = lambda form: None
) -> Iterator[Refusal]:
    """Let ptxas (None: not asked) and the emulator judge every form."""
    for form in refused_forms():
        before(form)
        text = forms_ptx.kernel(form.parts)
        said = None
        if assembler is not None:
            verdict = assembler.judge(text)
            said = None if verdict.accepted else verdict.message
        yield Refusal(form, said, assembler is not None, emulator_refusal(text))


def emulator_refusal(ptx: str) -> str | None:
    """What the emulator says of a kernel that it does not run; None if it runs it."""
    from ptxemu import load
    from ptxemu.errors import PtxEmuError

    try:
        module = load(ptx)
        cluster = (2, 1, 1) if ".reqnctapercluster 2" in ptx else (1, 1, 1)
        module.launch("form", cluster, 32, cluster=cluster)
    except PtxEmuError as error:
        return " ".join(str(error).split())
    return None
