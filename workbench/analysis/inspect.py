"""Reports of a name or a file."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from flashdsa.errors import ArgumentValueError
from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import Variant, find_kernel
from flashdsa.toolchain import Assembler, Disassembler, OldCubinError
from workbench.analysis.compile_kernel import compile_and_keep
from workbench.analysis.cubin import is_elf, read_cubin
from workbench.analysis.report import KernelReport, report_kernel
from workbench.analysis.sass import read_code

logger = logging.getLogger("flashdsa.inspect")

_PROPERTIES = re.compile(
    r"Function properties for (\S+)\s*\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
)
_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)


def inspect_target(
    target: str, arch: str | None = None, *, kernel: str = "", reassemble: bool = False
) -> list[KernelReport]:
    """Reports of every kernel of a target, the largest code first.

    Args:
        target: a name that `find_kernel` knows, or the path of a .cubin or .ptx file.
        arch: that it is for; None: what the name or the file says.
        kernel: report only kernels with this in their names.
        reassemble: kernels by name: with the ptxas found here, not the one inside CuTe DSL; done
            unasked where the latter is of CUDA 12.

    Raises:
        ArgumentValueError: no such kernel or file, not a cubin, another architecture.
        UnsupportedError: a tool is missing; says what to install.
    """
    path = Path(target)
    if path.suffix in (".cubin", ".ptx") or path.is_file():
        reports = _inspect_file(path, arch)
    else:
        variant = find_kernel(KERNELS, target, arch)
        Disassembler.required()  # before minutes of compiling
        reports = inspect_variant(variant, reassemble)
    found = [report for report in reports if kernel in report.name]
    if not found:
        names = ", ".join(report.name for report in reports)
        raise ArgumentValueError(f"--kernel {kernel}: not in {names}")
    return sorted(found, key=lambda report: -report.code_bytes)


def inspect_variant(kernel: Variant, reassemble: bool = False) -> list[KernelReport]:
    """Reports of what a plan of ours is compiled to."""
    reports = []
    for kept in compile_and_keep(kernel):
        if not reassemble:
            try:
                reports += inspect_cubin(kept.cubin, kernel)
                continue
            except OldCubinError:  # CuTe DSL with the libraries of CUDA 12
                logger.info("%s: its ptxas is older than this needs; assembled anew", kernel.name)
        reports += inspect_ptx(kept.ptx, kernel.spec.arch, kernel)
    return reports


def _inspect_file(path: Path, arch: str | None) -> list[KernelReport]:
    image = path.read_bytes()
    Disassembler.required()
    if path.suffix == ".ptx" and not is_elf(image):
        return inspect_ptx(image.decode(errors="replace").rstrip("\0"), arch)
    try:
        reports = inspect_cubin(image)
    except ArgumentValueError as error:
        raise ArgumentValueError(f"{path}: {error}") from error
    for report in reports:
        if arch is not None and report.arch != arch:
            raise ArgumentValueError(f"{path}: made for {report.arch}; got --arch {arch}")
    return reports


def inspect_ptx(
    ptx: str, arch: str | None = None, ours: Variant | None = None
) -> list[KernelReport]:
    """Reports of what ptxas makes of a PTX text, for its .target where `arch` is None."""
    target = _TARGET.search(ptx)
    if target is None:
        raise ArgumentValueError("not PTX: it has no .target")
    assembled = Assembler.required().assemble(ptx, arch or target.group(1))
    spills = {m[1]: (int(m[2]), int(m[3])) for m in _PROPERTIES.finditer(assembled.log)}
    return inspect_cubin(assembled.image, ours, spills)


def inspect_cubin(
    image: bytes, ours: Variant | None = None, spills: dict[str, tuple[int, int]] | None = None
) -> list[KernelReport]:
    """Reports of a cubin's kernels.

    Args:
        ours: what the kernel with its row's `entry` in its name is compiled from.
        spills: kernel -> bytes of (stores, loads), as ptxas says.
    """
    records = read_cubin(image)
    tool = Disassembler.required()
    arch, codes = read_code(image, tool)
    return [
        report_kernel(
            record,
            codes[record.name],
            arch,
            ours if ours and ours.spec.entry in record.name else None,
            (spills or {}).get(record.name),
        )
        for record in records
        if record.name in codes and codes[record.name].instructions
    ]
