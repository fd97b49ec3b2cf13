"""Triton's kernels: compiled for each family of GPUs, and run and checked by ptxemu on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated import packages, triton_kernels
from flashdsa.backends.emulated.devices import Device, small_device
from flashdsa.backends.emulated.runner import emulation, running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.backends.triton import attention_bwd, launch
from flashdsa.bench.machine import Gpu, HostMachine
from flashdsa.cli.availability import reason_against
from flashdsa.dispatch import checks
from flashdsa.errors import UnsupportedError
from flashdsa.problem import Problem
from flashdsa.verify.calls import sparse_mla_fwd
from flashdsa.verify.check_cases import ATTENTION
from flashdsa.verify.check_list import _call_backward
from flashdsa.verify.compare import Comparison, failures
from flashdsa.verify.judge_sparse_mla import check_backward, check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Finding
from ptxemu.check import Site

COMPILED, RUN = [(8, 9), (10, 0), (12, 0)], [(8, 0), (9, 0), (12, 0)]
"""GPUs whose code is compiled only, and those whose code ptxemu runs. sm_120 has the products of
sm_80, sm_89 the tiles, the shared memory and the code of sm_120: what is compiled and run for both
are slow tests."""
EVERY_KERNEL = (
    "forward, splits", "backward, 3 blocks of heads", "in order, blocks beside a range",
)  # fmt: skip
"""Paths that reach them all."""
BACKEND = "emulate-triton"
Judge = Callable[[Any, str], list[Comparison]]
Call = Callable[[Any, str], Any]


class Path(NamedTuple):
    """A way through the kernels: the judge of a case's results, the call alone, the case."""

    judge: Judge
    call: Call
    case: SparseMlaCase
    marks: Any = ()


def forward(*given: Any, marks: Any = (), **named: Any) -> Path:
    return Path(check_forward, sparse_mla_fwd, SparseMlaCase(*given, **named), marks)


def backward(*given: Any, ordered: bool, **named: Any) -> Path:
    judge = partial(check_backward, deterministic=ordered)
    call = partial(_call_backward, deterministic=ordered)
    return Path(judge, call, SparseMlaCase(*given, **named))


SLOW = pytest.mark.slow
PATHS = [
    forward("forward, 3 blocks of heads", 2, 60, 40, 40, invalid=True, poison=True,
            topk_length=True, attn_sink="finite"),
    forward("forward, splits", 1, 300, 8, 256, d_qk=512, invalid=True, max_logits=True,
            attn_sink="infinite"),
    forward("forward, blocks beside a range", 2, 64, 8, 8, d_qk=512, index_block=4, extra_keys=60,
            extra_topk=20, ranges="extra_kv", invalid=True, topk_length=True, poison=True),
    forward("forward, fp16, a query without a key", 2, 40, 8, 24, dtype=torch.float16,
            invalid=True, empty_rows=True, marks=SLOW),
    forward("forward, ranges that end below 0", 4, 40, 8, 24, extra_keys=30, extra_topk=5,
            ranges="kv and extra_kv", empty_rows=True, poison=True),
    forward("v32, any scale", 2, 64, 40, 40, packed="fp32", invalid=True, poison=True),
    forward("v4", 2, 128, 8, 40, d_qk=512, packed="ue8m0", kv_format="v4", page_size=64,
            invalid=True, poison=True),
    forward("v41_fp4", 2, 64, 8, 24, d_qk=512, packed="ue8m0", kv_format="v41_fp4", page_size=64,
            invalid=True, poison=True),
    forward("v41 beside v41_fp4", 2, 64, 8, 24, d_qk=512, packed="ue8m0", kv_format="v41",
            page_size=64, extra_keys=40, extra_topk=20, extra_format="v41_fp4", invalid=True,
            poison=True, marks=SLOW),
    forward("both interleaved formats", 2, 64, 8, 16, d_qk=512, packed="ue8m0", page_size=64,
            kv_format="v41_interleaved", extra_keys=40, extra_topk=9, invalid=True, poison=True,
            extra_format="v41_fp4_interleaved", marks=SLOW),
    backward("backward, 3 blocks of heads", 2, 40, 40, 24, invalid=True, poison=True,
             duplicates=True, topk_length=True, attn_sink="finite", ordered=False),
    backward("in order, blocks beside a range", 2, 40, 8, 4, d_qk=512, index_block=4,
             extra_keys=40, extra_topk=20, ranges="extra_kv", invalid=True, poison=True,
             ordered=True),
    backward("backward, two ranges", 2, 60, 40, 24, extra_keys=70, extra_topk=5,
             ranges="kv and extra_kv", poison=True, attn_sink="finite", ordered=False),
]  # fmt: skip


def each_path(capabilities: list[tuple[int, int]], *later: tuple[int, int]) -> pytest.MarkDecorator:
    """Every path on sm_90, every kernel on the others but `later`; the rest is slow tests'."""
    found = []
    for path, capability in product(PATHS, capabilities):
        rare = path.case.name not in EVERY_KERNEL and capability != (9, 0)
        marks = SLOW if rare or capability in later else path.marks
        name = f"{path.case.name}, sm_{capability[0]}{capability[1]}"
        found.append(pytest.param(path, capability, id=name, marks=marks))
    return pytest.mark.parametrize(("path", "capability"), found)


@pytest.fixture(autouse=True, scope="module")
def kept_kernels(pytestconfig: pytest.Config, tmp_path_factory: Any) -> Iterator[None]:
    """What Triton compiles outlasts the run if pytest has its cache; its keys hold the sources."""
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield


class Compiler(Recorder):
    """A GPU that compiles Triton's kernels and runs none."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.device = device

    def launch_triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        """A kernel that ptxas takes, and whose tiles the GPU has shared memory for."""
        made, _ = triton_kernels.compiled(self.capability, kernel, arguments, **options)
        assert made.metadata.shared <= self.device.smem_bytes
        super().launch_triton(kernel, grid, arguments, **options)


@each_path(COMPILED, (8, 9), (12, 0))
def test_what_ptxemu_does_not_run_is_compiled(path: Path, capability: tuple[int, int]) -> None:
    compiler = Compiler(small_device(capability))
    with running_on(compiler):
        path.call(make_sparse_mla_inputs(path.case, seed=0), BACKEND)
    assert compiler.of_triton


@each_path(RUN, (12, 0))
def test_every_path_is_right_and_free_of_races(
    path: Path, capability: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_bwd, "WORKSPACE_BYTES", 0)  # a query at a time
    with emulation(small_device(capability)):
        assert failures(path.judge(make_sparse_mla_inputs(path.case, seed=seed), BACKEND)) == []


def test_old_versions_of_triton_get_a_fence_for_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lack one; the tests above see that none is missing in the version that is here."""
    ampere, hopper = (Recorder(small_device(one)) for one in ((8, 0), (9, 0)))
    for found, needed in (((3, 6), True), ((3, 7), False), ((4, 0), False)):
        monkeypatch.setattr(launch, "triton_version", lambda found=found: found)
        assert launch.fenced(hopper) is needed
        assert not launch.fenced(ampere)
    assert launch.tile("forward", (9, 0), 64) == launch.TILES["forward"]["hopper"]
    assert launch.tile("forward", (8, 0), 64) == launch.TILES["forward"]["others"]


def test_only_sums_in_order_have_no_other_order() -> None:
    """ptxemu notes additions whose order is the schedule's."""
    inputs = make_sparse_mla_inputs(SparseMlaCase("two queries", 2, 20, 8, 16), seed=0)
    for ordered in (False, True):
        with emulation(small_device((8, 0))) as emulator:
            _call_backward(inputs, BACKEND, deterministic=ordered)
        # Several warps hold a small tile, and write it alike.
        noted = {finding.code for finding in emulator.findings} - {"same-value-race"}
        assert noted == ({"unordered-float-additions"} if not ordered else set())


def test_rows_of_one_source_and_none() -> None:
    """Slots are those of both sources; queries and rows may be none, tensors have gaps."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 1024), (9, 512)
    q, rows = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    ids = torch.tensor([[3, 8, -1], [0, 0, 9]], dtype=torch.int32)
    extra: dict[str, Any] = {"extra_kv": rows, "extra_indices": ids}
    for queries, kv, lists in (
        (q[..., :512], rows[:0], extra),
        (q[:0, :, :512], rows, {}),
        (q[..., 512:], rows[:0], {}),
    ):
        given = queries, kv, ids[: len(queries)]
        with emulation(small_device((8, 0))):
            found = flashdsa.sparse_mla_fwd(*given, backend=BACKEND, **lists)
        wanted = flashdsa.sparse_mla_fwd(*given, backend="cpu", **lists)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=1e-2)


WITHOUT_ROWS = [case for case in ATTENTION if "without rows" in case.name]


@pytest.mark.parametrize("case", WITHOUT_ROWS, ids=lambda case: case.name)
def test_a_source_without_rows_beside_one_with(case: SparseMlaCase, seed: int) -> None:
    """Its list names nothing, so no kernel writes or reads its slots, of which nobody has any."""
    inputs = make_sparse_mla_inputs(case, seed=seed)
    with emulation(small_device((8, 0))):
        verdicts = [*check_forward(inputs, BACKEND), *check_backward(inputs, BACKEND)]
        verdicts += check_backward(inputs, BACKEND, deterministic=True)
    assert failures(verdicts) == []
    assert {case.num_keys > 0 for case in WITHOUT_ROWS} == {False, True}


def test_a_gpu_with_too_little_shared_memory_is_an_error() -> None:
    small = replace(small_device((8, 0)), smem_bytes=1000)
    q, kv = torch.zeros(1, 8, 576).bfloat16(), torch.zeros(4, 576).bfloat16()
    with (
        emulation(small),
        pytest.raises(UnsupportedError, match="at most 1000 bytes of shared memory"),
    ):
        flashdsa.sparse_mla_fwd(q, kv, torch.zeros(1, 4).int(), backend=BACKEND)


def test_races_of_equal_values_by_one_instruction_do_not_count() -> None:
    def site(pc: int, action: str = "generic write") -> Site:
        return Site("k", action, "cta (0,0,0) warp 0", None, 0, "st", 1, None, None, pc)

    said = "both of shared memory of cta (0,0,0) 0x0: the value was the same in this run"

    def found(text: str, second: Site, code: str = "race") -> Finding:
        return Finding("error", code, text, site(1), second, 1)

    assert not triton_kernels.counts(found(said, site(1)))
    for finding in (
        found(said.partition(":")[0], site(1)),
        found(said.replace("shared", "global"), site(1)),
        found(said, site(2)),
        found(said, site(1, "generic read")),
        found(said, site(1), "mixed-race"),
    ):
        assert triton_kernels.counts(finding)


def test_without_triton_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdsa.backends.registry.is_installed", lambda name: False)
    monkeypatch.setattr(registry, "_selected", {})
    call = Problem("sparse_mla_fwd", "cuda", "bfloat16", d_qk=576, d_v=512, capability=(8, 0))
    with pytest.raises(UnsupportedError) as error:
        registry.select(call, "triton")
    said = "needs the Python package triton; pip install 'triton'"
    assert str(error.value).endswith(f"triton: {said}")
    assert registry.select(call).backend == "torch"
    there = ModuleSpec("there", None, origin="here")
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "triton" else there)
    for backend in ("triton", BACKEND):
        assert reason_against(backend, HostMachine("", 1, 1, 1, 1, "", ())) == said
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    every = "needs the Python packages ptxemu, cutlass, llvmlite, tvm_ffi, triton; pip install"
    assert str(reason_against(BACKEND, HostMachine("", 1, 1, 1, 1, "", ()))).startswith(every)
    with pytest.raises(UnsupportedError, match=every):
        registry.select(replace(call, device="cpu"), BACKEND)


def test_it_needs_a_gpu_since_ampere() -> None:
    old, new = (Gpu("some GPU", one, 2**34) for one in ((7, 5), (8, 6)))
    machine = HostMachine("", 1, 1, 1, 1, "", (old,))
    assert reason_against("triton", machine) == (
        "needs a GPU of compute capability 8.0 or newer; found some GPU (7.5)"
    )
    assert reason_against("triton", replace(machine, gpus=(old, new))) is None


def test_capabilities_of_gpus_that_are_not_nvidias_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu, capability = torch.device("cuda", 0), checks.capability.__wrapped__
    assert (capability(gpu), capability(torch.device("cpu"))) == ((9, 0), None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert capability(gpu) == (0, 0)
