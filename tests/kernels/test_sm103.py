"""GPUs of capability 10.3 run Blackwell's kernels, as far as an assembler and ptxemu can say."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.errors import ArgumentValueError
from flashdsa.hw import SM100
from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.toolchain import Assembler
from flashdsa.verify.compare import Comparison, failures
from flashdsa.verify.judge_sparse_mla import check_backward, check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.kernels.indexer.inputs import Inputs, make_inputs
from tests.support.compilations import ptx_of

SPECS = [pytest.param(spec, id=spec.name) for spec in KERNELS if spec.arch == SM100.name]
GPUS = ("sm_100a", "sm_103a")
EMULATED = {
    "indexer": "sm100_indexer_h16_clusters",
    "indexer_logits": "sm100_indexer_logits_h16",
    "indexer_order": "sm100_order_512",
}
"""Plans that the calls below reach; of other kernels it is the first one."""
ONE_PAIR = Device(2, MappingProxyType({1: 2, 2: 1}))
LENGTHS = [130, 1, 0]
ONE_BLOCK = SparseMlaCase("one block", 1, 50, 128, 32, invalid=True)


def module_of(instruction: str, target: str) -> str:
    """PTX of a kernel with that instruction."""
    return f""".version 9.0
.target {target}
.address_size 64
.visible .entry k()
{{
.reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<1>;
{instruction}
ret;
}}
"""


@pytest.mark.slow  # `tools/fingerprints.py` assembles every variant whose instructions change
@pytest.mark.parametrize("spec", SPECS)
def test_both_gpus_take_the_code_of_each_kernel(spec: KernelSpec) -> None:
    plans = {one.name: one for one in spec.plans}
    plan = plans[EMULATED.get(spec.name, next(iter(plans)))]
    text, assembler = ptx_of(spec, plan), Assembler.find()
    assert re.findall(r"^\.target (\w+)", text, re.MULTILINE) == [SM100.target]
    if assembler is None:
        pytest.skip("needs ptxas: pip install 'flashdsa[assemble]'")
    for gpu in GPUS:
        assert assembler.assemble(text, gpu).image


@pytest.mark.parametrize(
    ("instruction", "gpu"),
    [
        ("tcgen05.mma.cta_group::1.kind::i8 [%r0], %rd0, %rd1, %r1, %p0;", "sm_100a"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r0, %r1}, %r2, [%r3];", "sm_103a"),
        ("tcgen05.shift.cta_group::1.down [%r0];", "sm_100a"),
    ],
)
def test_what_is_not_of_the_family_does_not_assemble_for_its_target(
    instruction: str, gpu: str
) -> None:
    """The target keeps kernels from instructions of one GPU, and of each GPU's own target."""
    assembler = Assembler.find()
    if assembler is None:
        pytest.skip("needs ptxas: pip install 'flashdsa[assemble]'")
    assert assembler.assemble(module_of(instruction, gpu), gpu).image
    with pytest.raises(ArgumentValueError, match=f"not supported on .target '{SM100.target}'"):
        assembler.assemble(module_of(instruction, SM100.target), SM100.target)


def forward() -> list[Comparison]:
    return check_forward(make_sparse_mla_inputs(ONE_BLOCK, 0, "cpu"), "emulate-sm100")


def backward() -> list[Comparison]:
    return check_backward(make_sparse_mla_inputs(ONE_BLOCK, 0, "cpu"), "emulate-sm100")


def as_the_cpu(call: Callable[[Inputs, str], torch.Tensor]) -> Callable[[], list[Any]]:
    """Return a judge of scores that are exact in any order of additions."""

    def judge() -> list[Any]:
        inputs = make_inputs(LENGTHS, num_heads=16)
        assert torch.equal(call(inputs, "emulate-sm100"), call(inputs, "cpu"))
        return []

    return judge


def selected(inputs: Inputs, backend: str, sorted: bool = False) -> torch.Tensor:
    ids = inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, ids, sorted=sorted, backend=backend)
    return ids


def scores(inputs: Inputs, backend: str) -> torch.Tensor:
    return flashdsa.indexer_logits(*inputs, 192, backend=backend)


CALLS = {
    "mla_fwd": forward,
    "mla_bwd": backward,
    "indexer": as_the_cpu(selected),
    "indexer_order": as_the_cpu(partial(selected, sorted=True)),
    "indexer_logits": as_the_cpu(scores),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_call_of_each_kernel_on_an_emulated_sm_103a(spec: KernelSpec) -> None:
    """ptxemu loads no code there that is for sm_100a alone."""
    with emulation(ONE_PAIR, arch="sm_103a") as emulator:
        assert failures(CALLS[spec.name]()) == []
    assert {setup.module.device.arch for setup in emulator.setups} == {"sm_103a"}
    assert any(spec.entry in setup.kernel for setup in emulator.setups)
