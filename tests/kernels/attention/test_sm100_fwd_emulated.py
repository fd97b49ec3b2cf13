"""The Blackwell forward's compiled kernels on ptxemu: within the contract, without a finding."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm100.sparse_mla import bind_plan, write_apart
from flashdsa.errors import UnsupportedError
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import KERNELS, SPARSE_MLA_FWD_SM100
from flashdsa.ops.attention import SparseMlaOutOperands
from flashdsa.plan.kernel_spec import find_kernel
from flashdsa.toolchain import Assembler, Disassembler
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward, judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import EVERY_FEATURE
from tests.support.attention_launches import forward_operands
from tests.support.compilations import ptx_of
from workbench.analysis.compile_kernel import compile_and_keep

PLAN = FwdPlan()
HEADS = 128
SEVEN_TILES = SparseMlaCase(
    "seven tiles: every ring goes round", 1, 300, HEADS, 420, duplicates=True, invalid=True,
    poison=True, max_logits=True,
)  # fmt: skip


ALL_AT_ONCE = SparseMlaCase(
    "every feature", 3, 60, HEADS, 70, attn_sink="infinite", max_logits=True, **EVERY_FEATURE
)


def run(case: SparseMlaCase, plan: FwdPlan = PLAN, policy: Policy | None = None) -> Emulator:
    """The case by that plan; its results are judged, and nothing may be found."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    emulator = Emulator(policy=policy, on_finding="collect")
    operands = forward_operands(emulator, inputs)
    scale = case.d_qk**-0.5 if case.sm_scale is None else case.sm_scale
    with emulator.launching():
        bind_plan(emulator, plan, operands.inputs, scale)(operands)
    assert failures(judge_forward(inputs, *operands[3:6], backend="emulate-sm100")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return emulator


@pytest.mark.parametrize("when", ["eager", "late"])
def test_it_does_not_matter_when_asynchronous_work_happens(when: str) -> None:
    run(SEVEN_TILES, policy=Policy(asynchronous=when, seed=3))


def test_the_public_operation_takes_every_feature() -> None:
    """Lengths, sinks, gaps; queries without a valid slot."""
    inputs = make_sparse_mla_inputs(ALL_AT_ONCE, 0, "cpu")
    assert failures(check_forward(inputs, "emulate-sm100")) == []


@pytest.mark.parametrize("scale", [-0.05, pytest.param(0.0, marks=pytest.mark.slow)])
def test_any_finite_scale(scale: float) -> None:
    run(SparseMlaCase("scale", 1, 50, HEADS, 64, sm_scale=scale, invalid=True, max_logits=True))


@pytest.mark.slow
def test_finite_inputs_do_not_overflow_however_large_the_logits() -> None:
    run(SparseMlaCase("huge", 1, 50, HEADS, 130, logit_scale=1e30))


@pytest.mark.parametrize("group", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_groups_of_queries_with_fewer_heads(group: int) -> None:
    case = SparseMlaCase(
        "a group and a half", group + group // 2 + 1, 60, HEADS // group, 20, duplicates=True,
        invalid=True, topk_length=True, empty_rows=True,
    )  # fmt: skip
    run(case, FwdPlan(group=group))


def test_nothing_to_do_and_heads_that_it_does_not_take() -> None:
    for case in (
        SparseMlaCase("no key", 2, 0, HEADS, 32),
        SparseMlaCase("no query", 0, 9, HEADS, 32),
    ):
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        assert failures(check_forward(inputs, "emulate-sm100")) == []
    inputs = make_sparse_mla_inputs(SparseMlaCase("20 heads", 1, 40, 20, 32), 0, "cpu")
    with pytest.raises(UnsupportedError, match=r"num_heads: takes .*; got 20"):
        check_forward(inputs, "emulate-sm100")


class TinyModel(nn.Module):
    """One attention layer of 128 heads over a few tokens, whose keys come from the tokens too."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=draw) * shape[0] ** -0.5)

        self.tokens = weight(num_tokens, width)
        self.to_q, self.to_kv = weight(width, HEADS * 576), weight(width, 576)
        self.to_out = weight(512, width)

    def forward(self, indices: Tensor, backend: str) -> Tensor:
        """A loss that depends on every weight."""
        q = (self.tokens[-2:] @ self.to_q).view(2, HEADS, 576).bfloat16()
        kv = (self.tokens @ self.to_kv).bfloat16()
        out = flashdsa.sparse_mla(q, kv, indices, backend=backend)
        return (out.float().mean(dim=1) @ self.to_out - self.tokens[:2]).square().sum()


def test_a_training_step_of_a_tiny_model() -> None:
    """Forward and backward, end to end: the gradients are those of the CPU, and the loss falls."""
    indices = torch.tensor([[0, 3, 5, -1], [7, 2, 2, 6]], dtype=torch.int32)
    model, twin = TinyModel(16, 8), TinyModel(16, 8)
    before = model(indices, "emulate-sm100")
    before.backward()
    twin(indices, "cpu").backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 5e-3, f"{name}: {error:.1e}"
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    assert model(indices, "cpu") < 0.95 * before


def test_the_launch_is_what_the_plan_says() -> None:
    (setup,) = run(SparseMlaCase("one tile", 1, 50, HEADS, 64)).setups
    assert setup.smem == PLAN.smem.total
    assert (setup.grid[0], setup.block[0], setup.cluster[0]) == (2, PLAN.threads, 2)
    text = ptx_of(SPARSE_MLA_FWD_SM100, PLAN)
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    initialised = re.findall(r"mbarrier\.init\.shared\.b64\s+\[[^]]+\],\s*(%?\w+);", text)
    counts = Counter(int(constants.get(count, count)) for count in initialised)
    wanted: Counter[int] = Counter()
    for barrier in PLAN.barriers:
        wanted[barrier.arrivals] += barrier.stages
    assert counts == wanted


def test_the_instructions_that_make_it_this_kernel() -> None:
    text = ptx_of(SPARSE_MLA_FWD_SM100, PLAN)
    products = re.findall(r"tcgen05\.mma\S*\s+\[[^]]+\], (\[?)%", text)
    from_tmem = products.count("[")
    # Q K^T of the first tile and of those behind it: 18 steps of 16 dims; P V: 4 steps, twice.
    assert (from_tmem, len(products) - from_tmem) == (2 * 18, 2 * 4)
    assert set(re.findall(r"cta_group::\d", text)) == {"cta_group::2"}
    assert text.count("tile::gather4") == 5
    registers = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", text)}
    assert registers == {role.registers for role in PLAN.roles}


@pytest.mark.slow
def test_nothing_is_spilled_and_no_arrival_waits_for_memory_of_the_gpu() -> None:
    """MEMBAR.ALL.GPU stands at the first cluster barrier and nowhere else."""
    disassembler, assembler = Disassembler.find(), Assembler.find()
    if disassembler is None or assembler is None:
        pytest.skip("needs nvdisasm and ptxas: pip install 'flashdsa[assemble]'")
    (kept,) = compile_and_keep(find_kernel(KERNELS, "mla_fwd", "sm_100a"))
    assembler.assemble(kept.ptx, "sm_100a")  # raises where ptxas refuses it
    code = disassembler.text(kept.cubin, "-c")
    assert code.count("MEMBAR.ALL.GPU") == 1
    assert "STL" not in code and "LDL" not in code


CASE = SparseMlaCase("3 queries of 16 heads, two tiles", 3, 90, 16, 50, invalid=True,
                     duplicates=True, empty_rows=True, topk_length=True)  # fmt: skip
ROW = 77


def operands_of(inputs: SparseMlaInputs, kv: Tensor) -> SparseMlaOutOperands:
    """The call's operands with poisoned results."""
    out = torch.full((*inputs.q.shape[:2], 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full(inputs.q.shape[:2], torch.nan)
    indices = inputs.indices.reshape(CASE.num_queries, CASE.topk)
    return SparseMlaOutOperands(inputs.q, kv, indices, out, lse, None, inputs.topk_length)


@pytest.mark.parametrize("poison", [pytest.param(False, marks=pytest.mark.slow), True])
def test_results_are_those_of_whole_rows_bit_for_bit(poison: bool) -> None:
    """With a row of NaN and infinite RoPE columns, too, that one query names: the others of its
    group are computed again."""
    inputs = make_sparse_mla_inputs(CASE, 0, "cpu")
    rows = inputs.kv.view(-1, 576)
    if poison:
        assert inputs.topk_length is not None
        reads = int(inputs.topk_length.argmax())
        inputs.indices[inputs.indices == ROW] = -1
        inputs.indices[reads, ..., 0] = ROW
        rows[ROW, 3], rows[ROW, 570] = torch.nan, torch.inf
    whole, apart = operands_of(inputs, rows), operands_of(inputs, rows[:, :512].contiguous())
    emulator, scale = Emulator(on_finding="collect"), 576**-0.5
    with emulator.launching():
        bind_plan(emulator, FwdPlan(8), whole.inputs, scale)(whole)
    write_apart(emulator, apart, rows[:, 512:].contiguous(), scale)
    assert [str(finding) for finding in emulator.findings] == []
    for ours, expected in ((apart.out, whole.out), (apart.lse, whole.lse)):
        assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(ours.isnan(), expected.isnan())
    judged = judge_forward(inputs, apart.out, apart.lse, None, backend="emulate-sm100")
    assert failures(judged) == []
    assert poison == bool(apart.out.isnan().any())
