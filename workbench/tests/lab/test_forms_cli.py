"""`python -m workbench lab forms` and `python -m workbench lab precision` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashdsa.toolchain import ptxas
from workbench.cli.lab_forms import forms
from workbench.cli.lab_precision import precision
from workbench.lab import forms_emulation


def run(command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.fixture
def needs_compiler() -> None:
    pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")
    pytest.importorskip("llvmlite", reason="llvmlite is not installed")


@pytest.mark.usefixtures("needs_compiler")
def test_one_form_shows_its_line_and_its_descriptors() -> None:
    result = run(forms, "--form", "ss-m64-n32", "--no-assemble")
    assert result.exit_code == 0, result.output
    assert "1 forms that the ISA has passed" in result.output
    assert "instruction descriptor 0x04080490: M 64, N 32" in result.output
    assert "0x4000404000010002" in result.output
    assert "CUTLASS dense_gemm" in result.output


@pytest.mark.usefixtures("needs_compiler")
def test_json_is_one_document_and_pictures_are_written(tmp_path: Path) -> None:
    result = run(forms, "--form", "ss-m64-n32", "--no-assemble", "--json", "--picture", tmp_path)
    document = json.loads(result.stdout)
    assert document["failed"] == 0 and len(document["forms"]) == 1
    assert document["forms"][0]["emulated"]["max_abs_integers"] == 0
    assert (tmp_path / "ss-m64-n32.png").exists()


@pytest.mark.usefixtures("needs_compiler")
def test_a_form_that_fails_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms_emulation, "_ROUNDING", 0.0)
    result = run(forms, "--form", "ss-m64-n32", "--no-assemble")
    assert result.exit_code == 1
    assert "FAILED" in result.output and "1 of 1 failed" in result.output


def test_an_unknown_form_and_a_missing_ptxas_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "expected one of" in str(run(forms, "--form", "x", "--no-assemble").exception)
    monkeypatch.setattr(ptxas, "find_assembler", lambda: None)
    message = str(run(forms, "--form", "ss-m64-n32").exception)
    assert "pip install nvidia-cuda-nvcc" in message and "--no-assemble" in message


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms_emulation, "find_spec", lambda name: None)
    result = run(forms, "--form", "ss-m64-n32", "--no-assemble")
    assert "cutlass and llvmlite: pip install 'flashdsa[emulate]'" in str(result.exception)


def test_precision_prints_tables_and_writes_the_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = run(precision, "--dtype", "e4m3", "--out", plot)
    assert result.exit_code == 0, result.output
    assert "+fp32" in result.output and "8192" in result.output
    assert plot.exists()


def test_help_needs_neither_the_compiler_nor_the_emulator() -> None:
    code = (
        "import sys; from click.testing import CliRunner\n"
        "from workbench.cli.lab_forms import forms\n"
        "from workbench.cli.lab_precision import precision\n"
        "for command in (forms, precision):\n"
        "    assert 'Examples' in CliRunner().invoke(command, ['--help']).output\n"
        "heavy = {'cutlass', 'torch', 'ptxemu', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
