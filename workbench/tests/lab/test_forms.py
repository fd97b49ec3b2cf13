"""The operand forms on the emulator and before ptxas: right results, refusals, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from flashdsa.dsl.umma import instruction_descriptor
from flashdsa.toolchain import ptxas
from workbench.lab import forms_inputs, forms_ptx
from workbench.lab.forms import examine
from workbench.lab.forms_catalog import catalog, form_named
from workbench.lab.forms_document import document
from workbench.lab.forms_picture import draw_form
from workbench.lab.forms_ptx import Issue
from workbench.lab.forms_refused import emulator_refusal, judge_refused
from workbench.lab.forms_together import judge_together
from workbench.lab.forms_witnesses import WITNESSES

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
emulation = pytest.importorskip("workbench.lab.forms_emulation")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

ROOT = Path(__file__).parents[3]
FAST = (
    "ss-m64-n32-amn",  # layout F, both MN-major
    "ts-m128-n32-mn64",  # layout D
    "pair-ts-m128-n64-half",  # layout B
    "ws-ts-m32-n64",  # layout G
    "ws-ts-m64-two-a",  # layout E
    "pair-ts-exchange",
    "ws-ts-transpose-cp",
)
SLOW = tuple(form.name for form in catalog() if form.name not in FAST)
needs_ptxas = pytest.mark.skipif(ptxas.find_assembler() is None, reason=ptxas.MISSING)


def _emulate(name: str) -> None:
    measured = emulation.emulate_form(form_named(name))
    assert measured.findings == ()
    assert measured.integers == 0
    assert measured.random <= measured.limit
    assert measured.untouched
    judge = ptxas.find_assembler()
    if judge is not None:
        assert judge.judge(measured.ptx) == ptxas.Verdict(True, "")


@pytest.mark.parametrize("name", FAST)
def test_form_is_right(name: str) -> None:
    _emulate(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_form_is_right(name: str) -> None:
    _emulate(name)


def test_a_tile_that_is_not_swizzled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def straight(tile, rows, columns):
        box, inside = np.divmod(columns, tile.width)
        return tile.at + box * tile.box_bytes + rows * tile.swizzle + inside * 2

    monkeypatch.setattr(forms_inputs, "addresses", straight)
    report = examine([form_named("ts-m128-n32-mn64")], None, others=False)
    assert report.rows[0].emulated.integers > 0
    assert report.failed == 1


def test_a_kernel_without_its_barriers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.lab.kernels.operand_forms.sm100 import kernel

    monkeypatch.setattr(kernel, "_sync", lambda c: None)
    measured = emulation.emulate_form(form_named("ts-m128-n32-mn64"))
    assert any("tcgen05.st" in finding and "error" in finding for finding in measured.findings)
    assert not measured.passed


def test_refused_forms_are_refused_by_all_who_can_see_it() -> None:
    judge = ptxas.find_assembler()
    refusals = {refusal.form.name: refusal for refusal in judge_refused(judge)}
    assert all(refusal.passed for refusal in refusals.values())
    for refusal in refusals.values():
        assert 'PTX ISA, "' in refusal.form.clause
        if judge is not None:
            assert (refusal.ptxas is not None) == refusal.form.in_text
    assert "N = 64, 128 or 256; got 32" in refusals["ws-n32"].emulator
    assert "A in TMEM cannot be transposed" in refusals["ts-a-mn"].emulator
    assert ".cta_group::1" in refusals["two-groups"].emulator
    assert "invalid with .cta_group::2" in refusals["ws-pair"].emulator


@pytest.mark.parametrize("group", [1, 2])
def test_the_same_text_with_a_legal_form_is_accepted(group: int) -> None:
    line = forms_ptx.mma(group, a_in_tmem=False)
    text = forms_ptx.kernel({group: [Issue(line, instruction_descriptor(128, 64, "K", "K"))]})
    assert emulator_refusal(text) is None
    judge = ptxas.find_assembler()
    if judge is not None:
        assert judge.judge(text).accepted


@needs_ptxas
def test_forms_live_together_within_one_cta_group_only() -> None:
    together = judge_together(ptxas.assembler(), catalog())
    assert [{one.cta_group for one in group} for group in together.groups] == [{1}, {2}]
    assert sum(map(len, together.groups)) == len(together.classes)
    assert together.plan
    assert all(one.cta_group != other.cta_group for one, other in together.refused)
    assert all("not allowed" in message for message in together.refused.values())


@needs_ptxas
def test_ptxas_says_what_is_wrong_and_ignores_a_nul() -> None:
    judge = ptxas.assembler()
    good = ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k() { ret; }\n"
    assert judge.judge(good + "\0").accepted
    verdict = judge.judge(good.replace("ret;", "retreat;"))
    assert not verdict.accepted
    assert "retreat" in verdict.message or "Parsing error" in verdict.message


def test_report_and_pictures(tmp_path: Path) -> None:
    form = form_named("ts-m64-n32")
    report = examine([form], None, others=False)
    row = json.loads(json.dumps(document(report)))["forms"][0]
    assert row["passed"] and row["ptxas"] is None
    steps = row["products"][0]["steps"]
    assert [step["A"]["tmem_column"] for step in steps] == [32, 40, 48, 56]
    assert [step["B"]["start"] for step in steps] == [0, 32, 64, 96]
    assert steps[0]["B"]["swizzle"] == "128"
    draw_form(form, tmp_path / "new" / "form.png")
    assert (tmp_path / "new" / "form.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["nonsense", ""])
def test_unknown_form_names_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of ss-m128-n32, .*got"):
        form_named(name)


@pytest.mark.slow
def test_the_witness_still_uses_the_forms(tmp_path: Path) -> None:
    if find_spec("cudnn") is None:
        pytest.skip("cudnn is not installed: make test-peers installs it")
    script = ROOT / "ptxemu/tests/peers/scripts/dsa_forward.py"
    recorder = ROOT / "workbench/probes/record_operand_forms.py"
    out = tmp_path / "forms.json"
    subprocess.run(
        [sys.executable, recorder, out, "--arch", "sm_100a", "--quiet", script, "64", "576"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
        capture_output=True,
    )
    seen = {tuple(row[1:8]) for row in json.loads(out.read_text())}
    claimed = {
        (w.cta_group, w.ws, w.m, w.n, w.a, w.b, w.distinct)
        for w in WITNESSES
        if w.kernel == "cuDNN DSA fwd h64"
    }
    assert seen == claimed
