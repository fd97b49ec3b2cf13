"""What CuTe DSL writes today for small kernels of several families is parsed whole."""

import re
from pathlib import Path

import pytest

from ptxemu.syntax.ast import Address, Register, Symbol, Vector
from ptxemu.syntax.parser import parse_module

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

WAIT = """{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared::cta.b64 P1, [{$r0}], {$r1};
@P1 bra DONE;
bra LAB_WAIT;
DONE:
}""".replace("{\n", "{{\n").replace("\n}", "\n}}")
GATHER = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}];"
)


@cute.struct
class Shared:
    bars: cute.struct.MemRange[Int64, 4]
    tmem: Int32


@cute.kernel
def reverse(a: cute.Tensor, b: cute.Tensor, scale: Float32):
    """Shared memory, arithmetic, a loop and printf (a call with parameters)."""
    thread, _, _ = cute.arch.thread_idx()
    rows = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(64))
    total = Float32(0)
    for i in cutlass.range(thread, 64, unroll=1):
        total += cute.math.exp2(a[i] * scale, fastmath=True)
    rows[thread] = total
    cute.arch.sync_threads()
    if thread == 3:
        cute.printf("total %f\n", total)
    b[thread] = rows[63 - thread]


@cute.kernel
def barriers(a: cute.Tensor, b: cute.Tensor, scale: Float32):
    """A cluster, remote arrives, two inline waits with the same names, a tensor copy."""
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    bars = cutlass.memory.SmemAllocator().allocate(Shared).bars.data_ptr()
    if thread == 0:
        for i in cutlass.range_constexpr(4):
            cute.arch.mbarrier_init(bars + i, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(bars, 1024)
        cute.arch.mbarrier_arrive(bars + 2, rank ^ 1)
        cute.arch.inline_ptx(
            GATHER,
            read_only_args=[bars, a.iterator.toint(), Int32(0), Int32(thread), bars + 1],
        )
    cute.arch.inline_ptx(WAIT, read_only_args=[Int32((bars + 2).toint()), Int32(0)])
    cute.arch.inline_ptx(WAIT, read_only_args=[Int32((bars + 3).toint()), Int32(1)])
    b[thread] = scale
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.kernel
def tensor_memory(a: cute.Tensor, b: cute.Tensor, scale: Float32):
    """tcgen05 allocation and loads of 32 registers."""
    from cutlass.experimental import primitives as prims

    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cutlass.memory.SmemAllocator().allocate(Shared)
    if warp == 0:
        cute.arch.alloc_tmem(64, shared.tmem)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    tmem = shared.tmem.ptr.load()
    values = prims.tcgen05_ld("32x32b", prims.make_tmem_ptr(tmem, Float32), num=32)
    prims.tcgen05_wait("load")
    for i in cutlass.range_constexpr(32):
        b[thread * 32 + i] = values[i] * scale


@pytest.fixture
def parse_compiled(tmp_path):
    """Compile one of the kernels for an architecture; its PTX text and what it parses to."""

    def compiled(kernel, arch, cluster):
        @cute.jit
        def host(a: cute.Tensor, b: cute.Tensor, scale: Float32):
            kernel(a, b, scale).launch(
                grid=(cluster, 1, 1), block=(64, 1, 1), cluster=(cluster, 1, 1)
            )

        tensors = [make_fake_compact_tensor(Float32, (2048,), assumed_align=16) for _ in "ab"]
        options = f"--gpu-arch {arch} --keep-ptx --generate-line-info --dump-dir={tmp_path}"
        cute.compile(host, *tensors, Float32(1.0), options=options)
        (path,) = Path(tmp_path).glob("*.ptx")
        text = path.read_text()
        module = parse_module(text, name=str(path))
        assert module.target == arch
        return text, module

    return compiled


@pytest.mark.parametrize(
    ("kernel", "arch", "cluster"),
    [
        (reverse, "sm_90a", 1),
        (barriers, "sm_90a", 2),
        (barriers, "sm_100a", 2),
        (tensor_memory, "sm_100a", 1),
    ],
    ids=["reverse-90", "barriers-90", "barriers-100", "tensor-memory-100"],
)
def test_a_kernel_is_parsed_whole(parse_compiled, kernel, arch, cluster):
    text, module = parse_compiled(kernel, arch, cluster)
    (entry,) = module.kernels.values()
    lines = text.split("\n")
    for instruction in entry.instructions:
        assert instruction.opcode in lines[instruction.span.ptx_line - 1]
    assert {i.span.source_file for i in entry.instructions} >= {__file__}
    written = [line for line in lines if re.match(r"\s*[@a-z][^:;]*(::[^;]*)?;", line)]
    assert len(entry.instructions) == len(written)
    assert entry.directives["reqntid"] == (64, 1, 1)
    assert [(p.size, p.offset) for p in entry.parameters] == [(8, 0), (8, 8), (4, 16)]
    assert ("%f" in text) or all(isinstance(r, Register) for r in entry.registers)


def test_the_waits_of_inline_asm_keep_apart(parse_compiled):
    _, module = parse_compiled(barriers, "sm_90a", 2)
    (entry,) = module.kernels.values()
    waits = sorted(label for label in entry.labels if label.startswith("LAB_WAIT@"))
    assert len(waits) == 2
    loops = [i for i in entry.instructions if i.operands and i.operands[0] == Symbol(waits[1])]
    assert [i.opcode for i in loops] == ["bra"]
    (copy,) = (i for i in entry.instructions if i.modifiers[:3] == ("cp", "async", "bulk"))
    assert isinstance(copy.operands[1], Address)
    assert len(copy.operands[1].coordinates) == 2


def test_a_load_of_tensor_memory_has_all_its_registers(parse_compiled):
    _, module = parse_compiled(tensor_memory, "sm_100a", 1)
    (entry,) = module.kernels.values()
    (load,) = (i for i in entry.instructions if i.modifiers[:2] == ("tcgen05", "ld"))
    assert isinstance(load.operands[0], Vector)
    assert len(set(load.operands[0].elements)) == 32


def test_printf_is_a_call_with_parameters(parse_compiled):
    _, module = parse_compiled(reverse, "sm_90a", 1)
    (entry,) = module.kernels.values()
    (call,) = (i for i in entry.instructions if i.modifiers[0] == "call")
    assert call.operands[1] == Symbol("vprintf")
    names = {v.name for v in entry.variables if v.space == "param"}
    assert {s.name for s in (*call.operands[0].elements, *call.operands[2].elements)} == names
    assert any((v.initial or b"").startswith(b"total %f\n") for v in module.variables)
