"""Of thousands of combinations of modifiers and types, ptxemu takes those that ptxas takes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.isa.pure_forms import DECLARED, FAMILIES

from ptxemu.cuda.nvcc import NvccError, find_nvcc
from ptxemu.errors import PtxEmuError
from ptxemu.isa import registry
from ptxemu.syntax.parser import parse_module


def _found() -> str | None:
    """ptxas of this machine, or beside the nvcc that ptxemu finds."""
    try:
        beside = Path(find_nvcc()[0]).with_name("ptxas")
    except NvccError:
        beside = Path()
    return shutil.which("ptxas") or (str(beside) if beside.is_file() else None)


PTXAS = _found()
HEAD = f".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{{ {DECLARED}\n"
FIRST_LINE = HEAD.count("\n") + 1
PER_RUN = 400

MISSING = re.compile(
    r"rcp\.r.\.ftz\.f64"  # .ftz without effect
    r"|(addc|subc|madc\.lo|madc\.hi)\.[us]16|addc\.sat|lop3.*, 256;"  # not in the manual
    r"|cvt\.(f16\.bf16|bf16\.f16) "  # without the rounding mode that the manual demands
)
"""What ptxas takes and ptxemu refuses on purpose."""

NEWER = re.compile(
    r"cvt\.rn(\.relu)?\.satfinite\.(e\dm\dx2\.bf16x2|(e2m3x2|e3m2x2|e2m1x2)\.f16x2)"
    r"|cvt\.rn(\.relu)?(\.satfinite)?(\.relu)?\.bf16x2\.e\dm\dx2"
)
"""What is of PTX ISA 9.1 and 9.2 and unknown to older versions of ptxas."""


def ptxas_refuses(forms: list[str], folder: Path) -> set[str]:
    """The forms at whose lines ptxas finds errors."""
    refused = set()
    for at in range(0, len(forms), PER_RUN):
        some = forms[at : at + PER_RUN]
        source = folder / f"{at}.ptx"
        source.write_text(HEAD + "\n".join(some) + "\nret;\n}\n")
        command = [PTXAS, "-arch=sm_100a", source, "-o", folder / "out.cubin"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = {int(n) - FIRST_LINE for n in re.findall(r"line (\d+); error", run.stderr)}
        assert lines or run.returncode == 0, run.stderr
        refused |= {some[line] for line in lines}
    return refused


def ptxemu_refuses(form: str) -> bool:
    try:
        instruction = parse_module(f"{HEAD}{form}\nret;\n}}\n").functions["k"].instructions[0]
        registry.decode(instruction)
    except PtxEmuError:
        return True
    return False


@pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_ptxemu_takes_what_ptxas_takes(family, tmp_path):
    forms = list(dict.fromkeys(FAMILIES[family]()))
    refused = ptxas_refuses(forms, tmp_path)
    assert 0 < len(refused) < len(forms)
    missing = [f for f in forms if f not in refused and ptxemu_refuses(f) and not MISSING.match(f)]
    lenient = [f for f in forms if f in refused and not ptxemu_refuses(f) and not NEWER.match(f)]
    assert (missing, lenient) == ([], [])
