"""Which instructions are sites, and what a mutant's syntax tree looks like."""

import pytest
from tests.kernel_run import source

from ptxemu import api
from ptxemu.isa import registry
from ptxemu.machine.decoded import PureOp
from ptxemu.mutate import find_sites, mutations_of
from ptxemu.syntax.ast import IntImmediate
from tests import producer_consumer


def kernel(text):
    return api.load(text).syntax.kernels["k"]


def of(instruction, arch="sm_100a"):
    """The mutants of one instruction, by category and name, as opcodes and operands."""
    function = kernel(source(f"mov.u32 %r9, 64;\nmov.b64 %rd1, 0;\n{instruction}", {}, arch=arch))
    return {
        (m.site.category, m.name): [(i.opcode, i.operands) for i in m.replacement]
        for m in mutations_of(function)
    }


def opcodes(instruction):
    return {key: [opcode for opcode, _ in new] for key, new in of(instruction).items()}


def test_sites_of_a_producer_consumer_kernel_in_program_order():
    sites = find_sites(kernel(producer_consumer.TEXT))
    assert [site.category for site in sites] == [
        "init-fence", "barrier", "arrive", "expect-tx", "mbarrier-wait", "barrier", "proxy-fence",
        "barrier", "commit", "group-wait",
    ]  # fmt: skip
    assert sites[0].line == producer_consumer.line_of("fence.mbarrier_init")


@pytest.mark.parametrize(
    ("instruction", "mutants"),
    [
        ("fence.proxy.async;", {("proxy-fence", "removed"): []}),
        ("fence.acq_rel.gpu;", {("memory-fence", "removed"): []}),
        ("tcgen05.fence::after_thread_sync;", {("tcgen05-fence", "removed"): []}),
        ("tcgen05.wait::ld.sync.aligned;", {("tcgen05-wait", "removed"): []}),
        ("wgmma.fence.sync.aligned;", {("wgmma-fence", "removed"): []}),
        ("cp.async.commit_group;", {("commit", "removed"): []}),
        ("cp.async.wait_all;", {("group-wait", "removed"): []}),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r9];", {("arrive", "removed"): []}),
        ("bar.arrive 1, 64;", {("barrier", "removed"): []}),
        ("griddepcontrol.wait;", {}),
        ("bar.warp.sync -1;", {}),
        (
            "barrier.cluster.arrive.aligned;",
            {
                ("cluster-barrier", "removed"): [],
                ("cluster-barrier", "relaxed"): ["barrier.cluster.arrive.relaxed.aligned"],
            },
        ),
        (
            "barrier.cluster.arrive.release.aligned;",
            {
                ("cluster-barrier", "removed"): [],
                ("order", "relaxed"): ["barrier.cluster.arrive.relaxed.aligned"],
            },
        ),
        ("barrier.cluster.wait.acquire.aligned;", {("cluster-barrier", "removed"): []}),
        (
            "ld.acquire.gpu.global.u32 %r1, [%rd1];",
            {("order", "relaxed"): ["ld.relaxed.gpu.global.u32"]},
        ),
        (
            "cp.async.bulk.wait_group 1;",
            {
                ("group-wait", "removed"): [],
                ("group-wait", "one group more"): ["cp.async.bulk.wait_group"],
                ("group-wait", ".read"): ["cp.async.bulk.wait_group.read"],
            },
        ),
        (
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r9], 0;",
            {
                ("mbarrier-wait", "true at once"): ["mov.pred"],
                ("order", "relaxed"): ["mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64"],
            },
        ),
    ],
)
def test_mutants_of_an_instruction(instruction, mutants):
    assert opcodes(instruction) == mutants


def test_a_group_wait_leaves_one_group_more():
    ((_, operands),) = of("wgmma.wait_group.sync.aligned 1;")["group-wait", "one group more"]
    assert operands == (IntImmediate(2),)


@pytest.mark.parametrize(("step", "wrong"), [(16, 528), (-16, 496)])
def test_a_constant_byte_count_is_off_by_16(step, wrong):
    text = "mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 512;"
    ((_, operands),) = of(text)["expect-tx", f"{step:+d} bytes"]
    assert operands[-1] == IntImmediate(wrong)


def test_a_byte_count_in_a_register_gets_an_addition_in_a_new_register():
    text = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], %r9;"
    module = api.load(source(f"mov.u32 %r9, 64;\n{text}", {})).syntax
    more = next(m for m in mutations_of(module.kernels["k"]) if m.name == "+16 bytes")
    mutant = more.apply(module, "k").kernels["k"]
    add, expect = mutant.instructions[1:3]
    assert add.opcode == "add.s32"
    assert add.operands[0] == expect.operands[-1] == mutant.registers[-1]
    assert [r.slot for r in mutant.registers] == list(range(len(mutant.registers)))
    assert [i.pc for i in mutant.instructions] == list(range(len(mutant.instructions)))


def test_labels_follow_the_instruction_that_they_stand_before():
    module = api.load(producer_consumer.TEXT).syntax
    original = module.kernels["k"]
    for mutation in mutations_of(original):
        mutant = mutation.apply(module, "k").kernels["k"]
        for name, pc in original.labels.items():
            before = original.instructions[pc]
            if before is not mutation.site.instruction:
                assert mutant.instructions[mutant.labels[name]].text == before.text
    assert module.kernels["k"] is original


def test_every_mutant_of_the_kernel_decodes():
    module = api.load(producer_consumer.TEXT).syntax
    for mutation in mutations_of(module.kernels["k"]):
        for instruction in mutation.replacement:
            decoded = registry.decode(instruction)
            assert isinstance(decoded, PureOp) or callable(decoded)
