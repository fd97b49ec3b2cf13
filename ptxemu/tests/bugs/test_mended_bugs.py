"""Faults of public repositories in programs of our own: they stop before the fix, not behind it."""

import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxemu import api
from ptxemu.check import Finding
from ptxemu.cli.report import is_failure
from ptxemu.cuda import nvcc
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.errors import ExecutionError
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.policy import Policy

FOLDER = Path(__file__).parent
SOURCES = {"sm_90a": FOLDER / "mended_bugs.cu", "sm_100a": FOLDER / "mended_bugs_sm100.cu"}
PAGE = FOLDER.parents[1] / "docs" / "reference" / "real-bugs.md"
POLICIES = (Policy(), Policy(seed=1, asynchronous="late"), Policy(seed=2, asynchronous="eager"))
NUMBERS = 1024
Ints = NDArray[np.int32]


class Bug(NamedTuple):
    """A program of mended_bugs.cu: its launch, and what comes."""

    found: str
    """Codes, one of which is found and an error; "stops": the launch ends at once or hangs."""
    block: int
    expected: Callable[[Ints], Any]
    """The first numbers of `out` behind the fix, by x."""
    grid: int = 1
    cluster: int | None = None
    start: int | None = None
    """The numbers are x's from here on, not out's."""
    arch: str = "sm_90a"
    missed: str = ""
    """Why there is no error; `found` has the warning, if there is one."""


def tiles(x: Ints) -> Ints:
    """Three tiles of 64 numbers."""
    return x[:384].reshape(3, 128)[:, :64]


def totals(x: Ints) -> Ints:
    last = tiles(x)[:, 63]
    return np.full(64, 10 * last[0] + last[0] + last[1])


def equal_pairs(x: Ints) -> Ints:
    low = tiles(x) & 3
    same: Ints = (low[:, :, None] == low[:, None, :]).sum((0, 2)) - 3
    return same


def swapped(x: Ints) -> Ints:
    """Each CTA of two has the other's tile."""
    return x[:128].reshape(2, 64)[::-1].reshape(-1) + 1


def halves(x: Ints) -> Ints:
    return np.concatenate([x[:16] + np.roll(x[:16], 8), x[16:32][::-1]])


BLACKWELL: dict[str, Any] = {"grid": 2, "cluster": 2, "arch": "sm_100a"}
PAIR: dict[str, Any] = {"grid": 2, "cluster": 2}
BUGS = {
    "llamacpp_13742": Bug("race", 64, lambda x: x[:256].reshape(4, 64)[:, ::-1].sum(0)),
    "llamacpp_24360": Bug(
        "race", 64, lambda x: sum(t[:16] @ t[16:32] for t in tiles(x)) + np.arange(64)
    ),
    "popsift_82": Bug("race", 64, totals),
    "gpujpeg_23": Bug("race", 64, lambda x: np.full(64, (x[:64] > 200).sum())),
    "hecbench_253": Bug(
        "race", 64, lambda x: sum(np.roll(tiles(x), -i, 1).sum(0) for i in (0, 16, 32, 48))
    ),
    "hecbench_254": Bug("volatile-race", 64, lambda x: x[:64] + x[63]),
    "pippenger_is_unique": Bug("race lane-race", 64, equal_pairs),
    "flashinfer_636": Bug("stops", 32, lambda x: x[:128:4][::-1]),
    "llamacpp_28475": Bug("shuffle-order", 32, lambda x: x[:32][::-1] + 496),
    "raft_679": Bug("lane-race", 64, lambda x: x[:64].reshape(32, 2)[:, ::-1].reshape(-1)),
    "ccminer_75": Bug("lane-race", 32, lambda x: np.roll(x[:32], -6) + 6),
    "tilelang_1257": Bug("lane-race", 64, lambda x: x[:64:32].repeat(32) + np.arange(64)),
    "cudf_2983": Bug("lane-race", 32, lambda x: [*x[:32], *x[:32][::-1]]),
    "colibri_1099": Bug("lane-race", 32, lambda x: np.full(32, 16)),
    "kokkos_4855": Bug("lane-race", 32, lambda x: np.full(32, x[:32].sum())),
    "kokkos_1958": Bug("not-a-member", 32, lambda x: x[:32].reshape(4, 8).sum(1).repeat(8)),
    "cucollections_337": Bug("shuffle-order", 32, lambda x: np.roll(x[:32], 16)),
    "vilib_5": Bug("divergent-members", 32, halves),
    "pytorch_128455": Bug("race", 64, lambda x: x[:64] + x[64:128] + 2, grid=2),
    "fuser_2391": Bug("race", 64, lambda x: x[:64], grid=2),
    "gunrock_829": Bug(
        "mixed-race", 64, lambda x: np.maximum(x[:64], x[64:128]) + 1, grid=2, start=512
    ),
    "qmcpack_2876": Bug("uninitialised-result", 32, lambda x: x[:32].astype("f4").view("i4")),
    "cccl_5456": Bug("missing-grid-wait", 64, lambda x: x[:64] + 1),
    "transformerengine_3417": Bug("race", 64, lambda x: tiles(x)[:2].reshape(-1)),
    "transformerengine_2695": Bug(
        "missing-proxy-fence-after-read", 64, lambda x: tiles(x)[:2, ::-1].sum(0),
        missed="CUTLASS's pipelines leave the fence out, too",
    ),
    "deepep_642": Bug("missing-proxy-fence", 64, lambda x: x[:64], grid=2),
    "tilelang_3087": Bug("stops", 64, lambda x: tiles(x)[:2, ::-1].sum(0)),
    "triton_10035": Bug("mbarrier-overrun", 96, lambda x: np.full(64, x[:3].sum())),
    "flashkda_24": Bug(
        "missing-mbarrier-init-fence", 64, lambda x: x[:64],
        missed="within one CTA kernels that ship leave the fence out",
    ),
    "csarofeen_2457": Bug("missing-wait", 64, lambda x: x[:64][::-1]),
    "mkernel_18": Bug("missing-wait", 64, lambda x: [*(x[:64] + 1), *x[128:192]]),
    "fuser_3865": Bug(
        "", 128, lambda x: np.full(128, 16),
        missed="360 launches on an H200 were right without the barrier",
    ),
    "triton_10656": Bug("dsmem-exit", 64, swapped, **PAIR),
    "triton_11731": Bug("dsmem-exit", 64, lambda x: x[:64], **PAIR),
    "tlx_2292": Bug("dsmem-entry", 64, swapped, **PAIR),
    "tilelang_2699": Bug("race", 64, lambda x: [x[63], *x[:63][::-1]], arch="sm_100a"),
    "cutlass_3316": Bug("tmem-alloc-entry", 32, lambda x: x[:32], **BLACKWELL),
    "cutlass_3643_wait": Bug("missing-wait", 32, lambda x: x[:256], **BLACKWELL),
    "cutlass_3643_scope": Bug("remote-mbarrier-scope", 32, lambda x: x[:256], **BLACKWELL),
}  # fmt: skip


def compiled(source: Path, folder: Path, arch: str) -> api.Module:
    """A source as nvcc makes it, or the test is skipped."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler, which nvcc calls first")
    try:
        nvcc.find_nvcc()
    except nvcc.NvccError as error:
        pytest.skip(str(error))
    nvcc.compile_ptx(source, folder / arch, arch=arch)
    return api.load(folder / arch)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, api.Module]:
    """The programs, by architecture."""
    folder = tmp_path_factory.mktemp("bugs")
    return {arch: compiled(source, folder, arch) for arch, source in SOURCES.items()}


@pytest.fixture
def device() -> Iterator[EmulatedMemory]:
    """Two arrays of device memory, which nobody has written."""
    with closing(EmulatedMemory(9)) as memory:
        for number in (0, 1):
            memory.allocated(memory.base + (number << 16), 4 * NUMBERS, 0)
        yield memory


def numbers(seed: int) -> Ints:
    """x as the programs expect it."""
    x = np.zeros(NUMBERS, np.int32)
    x[:512] = np.random.default_rng(seed).integers(1, 512, 512)
    x[64:128] = 0
    return x


def run(
    module: api.Module, name: str, device: EmulatedMemory, x: Ints, policy: Policy
) -> tuple[Ints, list[Finding]]:
    """What a launch of the kernel leaves, and what is found in it."""
    bug, base = BUGS[name.removesuffix("_mended")], device.base
    given = device.view(base, x.nbytes).view(np.int32)
    given[:] = x
    memory = GlobalMemory()
    device.register_in(memory)
    args = [base, base + (1 << 16)]
    how: dict[str, Any] = {"args": args, "memory": memory, "policy": policy, "check": True}
    before = f"{name.removesuffix('_mended')}_before"
    if before in module.kernels:
        how["earlier"] = module.launch(before, 1, bug.block, **how).earlier
    result = module.launch(name, bug.grid, bug.block, cluster=bug.cluster, **how)
    left = (
        device.view(args[1], x.nbytes).view(np.int32) if bug.start is None else given[bug.start :]
    )
    return left.copy(), result.findings


@pytest.mark.parametrize("seed", range(len(POLICIES)))
@pytest.mark.parametrize("name", BUGS)
def test_behind_its_fix_nothing_is_found(
    modules: dict[str, api.Module], device: EmulatedMemory, name: str, seed: int
) -> None:
    bug, x = BUGS[name], numbers(seed)
    left, findings = run(modules[bug.arch], f"{name}_mended", device, x, POLICIES[seed])
    assert [f.message for f in findings if f.level != "note"] == []
    expected = np.asarray(bug.expected(x))
    np.testing.assert_array_equal(left[: len(expected)], expected)


@pytest.mark.parametrize("seed", range(len(POLICIES)))
@pytest.mark.parametrize("name", BUGS)
def test_before_its_fix_it_stops(
    modules: dict[str, api.Module], device: EmulatedMemory, name: str, seed: int
) -> None:
    bug = BUGS[name]
    try:
        _, findings = run(modules[bug.arch], name, device, numbers(seed), POLICIES[seed])
    except ExecutionError as error:
        assert bug.found == "stops", error
        return
    level = "warning" if bug.missed else "error"
    found = {f.code for f in findings if f.level == level}
    assert found.intersection(bug.found.split()) or not (found or bug.found), findings
    assert is_failure(findings, "isa") != bool(bug.missed)


def listed() -> Iterator[str]:
    """The page's lines on the programs."""
    text = "".join(source.read_text() for source in SOURCES.values())
    faults = re.findall(r"^// (.+): (.+)\nKERNEL\((\w+)\)", text, re.MULTILINE)
    assert [name for _, _, name in faults] == list(BUGS)
    for where, fault, name in faults:
        bug = BUGS[name]
        codes = "stops" if bug.found == "stops" else f"`{'` or `'.join(bug.found.split())}`"
        if bug.missed:
            codes = f"**missed**{f', a warning {codes}' if bug.found else ''}: {bug.missed}"
        line = f"- {where}: {fault}: {codes}"
        yield textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False)
    reports = {where for where, _, _ in faults}
    missed = {where for where, _, name in faults if BUGS[name].missed}
    yield f"**{len(reports - missed)} of {len(reports)} stop; none of the mended ones does.**"


def test_the_page_lists_each_program() -> None:
    page, (*lines, count) = PAGE.read_text(), listed()
    assert "\n".join(lines) in page, "\n".join(lines)
    assert count in page, count
