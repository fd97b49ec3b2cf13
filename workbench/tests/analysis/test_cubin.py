"""The ELF reader: against cuobjdump, and on what is no cubin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashdsa.errors import ArgumentValueError
from flashdsa.toolchain import Assembler, Tool
from workbench.analysis.cubin import read_cubin, registers_by_threads
from workbench.tests.analysis.ptx_texts import sums_of


class Cuobjdump(Tool):
    """Of the toolkit, too."""

    name = "cuobjdump"
    package = "nvidia-cuda-cuobjdump"
    modules = ("nvidia.cu13",)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("directive", [".reqntid 64, 2 .maxnreg 40", ""])
def test_agrees_with_cuobjdump(
    assembler: Assembler, tmp_path: Path, arch: str, directive: str
) -> None:
    tool = Cuobjdump.find()
    if tool is None:
        pytest.skip("cuobjdump was not found: pip install nvidia-cuda-cuobjdump")
    ptx = sums_of(60, arch, directive).replace(
        "ld.param", ".shared .b8 s[512];\nbar.sync 3; bar.sync 0;\nld.param", 1
    )
    image = assembler.assemble(ptx, arch).image
    path = tmp_path / "k.cubin"
    path.write_bytes(image)
    said = subprocess.run(
        [str(tool.path), "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    (wanted,) = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said
    )
    (record,) = read_cubin(image)
    got = (record.registers, record.stack_bytes, record.shared_bytes, record.local_bytes)
    assert (record.name, *got) == (wanted[0], *map(int, wanted[1:]))
    assert record.threads == (128 if directive else None)
    assert record.barriers == 4
    assert record.register_cap == (40 if directive else 255)


@pytest.mark.parametrize("threads", [96, 256, 288, 384, 512, 544, 640, 768, 1024])
def test_ptxas_caps_registers_as_the_partitions_do(assembler: Assembler, threads: int) -> None:
    image = assembler.assemble(sums_of(8, directive=f".reqntid {threads}"), "sm_90a").image
    (record,) = read_cubin(image)
    assert record.register_cap == registers_by_threads(threads)


def test_says_what_is_wrong_with_other_files(assembler: Assembler) -> None:
    image = assembler.assemble(sums_of(8), "sm_90a").image
    with pytest.raises(ArgumentValueError, match="no ELF file"):
        read_cubin(b".version 8.6")
    with pytest.raises(ArgumentValueError, match=r"another machine.*cuobjdump -xelf"):
        read_cubin(Path(sys.executable).resolve().read_bytes())
    with pytest.raises(ArgumentValueError, match="damaged"):
        read_cubin(image[: len(image) // 2])
