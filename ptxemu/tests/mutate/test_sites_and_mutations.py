"""Sites, mutants' syntax trees, groups of operations, a kernel's fingerprint."""

from types import SimpleNamespace

import pytest
from tests.kernel_run import source
from tests.producer_consumer import TEXT

from ptxemu import api
from ptxemu.events import Space
from ptxemu.isa import registry
from ptxemu.machine.decoded import PureOp
from ptxemu.mutate import find_sites, fingerprint, mutations_of
from ptxemu.mutate.groups import Groups, family_of
from ptxemu.syntax.ast import IntImmediate
from ptxemu.syntax.parser import parse_module
from tests import producer_consumer

# Which instructions are sites, and what a mutant's syntax tree looks like.


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


# Groups of asynchronous operations: which commits and waits could go without any effect.

WARP = 7
HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned {};"


class Run:
    """Groups of a straight line of instructions, executed one by one."""

    def __init__(self, *lines):
        self.function = parse_module(HEADER + "\n".join(lines) + "\nret;\n}\n").functions["k"]
        self.groups = Groups(self.function)

    def execute(self, pc):
        self.groups.executed(WARP, self.function.instructions[pc])

    def issue(self, number, register):
        operation = SimpleNamespace(
            agent_id=number, kind="wgmma", instruction=None, registers=(register,)
        )
        self.groups.issued(WARP, operation)


def two_groups(wait):
    """A product on register 1, a commit (pc 0), one on register 2, a commit (1), a wait (2)."""
    run = Run(COMMIT, COMMIT, WAIT.format(wait), WAIT.format(0))
    run.issue(1, register=1)
    run.execute(0)
    run.issue(2, register=2)
    run.execute(1)
    run.execute(2)
    return run


def test_a_commit_in_front_of_a_wait_for_all_is_not_needed_if_another_one_follows():
    run = two_groups(wait=0)
    run.groups.handed_on(WARP)
    assert run.groups.effective == {(1, "removed"), (2, "removed"), (2, "one group more")}


def test_a_commit_in_front_of_a_wait_for_some_is():
    run = two_groups(wait=1)
    run.groups.handed_on(WARP)
    assert (0, "removed") in run.groups.effective


def test_what_is_waited_for_again_before_anything_depends_on_it_is_not_needed():
    run = two_groups(wait=0)
    run.execute(3)
    run.groups.handed_on(WARP)
    assert not {change for change in run.groups.effective if change[0] == 2}


def test_registers_of_a_product_that_would_be_pending_depend_on_the_wait():
    run = two_groups(wait=1)
    run.groups.touched(WARP, [2])
    assert run.groups.effective == set()
    run.groups.touched(WARP, [1])
    assert {(0, "removed"), (2, "removed"), (2, "one group more")} <= run.groups.effective


def test_products_do_not_depend_on_global_memory():
    run = two_groups(wait=1)
    run.groups.accessed(WARP, Space.GLOBAL)
    assert run.groups.effective == set()
    run.groups.accessed(WARP, Space.SHARED)
    assert (2, "removed") in run.groups.effective


@pytest.mark.parametrize(
    ("line", "family"),
    [
        ("cp.async.commit_group;", "cp.async"),
        ("cp.async.wait_all;", "cp.async"),
        ("cp.async.bulk.wait_group.read 0;", "bulk"),
        (COMMIT, "wgmma"),
        ("bar.sync 0;", None),
    ],
)
def test_families(line, family):
    assert family_of(Run(line).function.instructions[0]) == family


# What a kernel's fingerprint depends on.


def hashed(text: str) -> str:
    return fingerprint(api.load(text).syntax.functions["k"])


def test_comments_blank_lines_and_names_do_not_count() -> None:
    assert hashed("// built elsewhere\n\n" + TEXT) == hashed(TEXT)
    renamed = TEXT.replace(".entry k(", ".entry other(")
    assert fingerprint(api.load(renamed).syntax.functions["other"]) == hashed(TEXT)


def test_the_function_s_number_in_its_module_does_not_count() -> None:
    first, fifth = (TEXT.replace("READY", f"$L__BB{number}_2") for number in (0, 4))
    assert hashed(first) == hashed(fifth)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sub.u32 %r8, 508", "sub.u32 %r8, 504"),  # an instruction
        ("@!%p1 bra", "@%p1 bra"),  # a guard
        ("READY:\n    bar.sync 0;", "bar.sync 0;\nREADY:"),  # where a branch goes
    ],
)
def test_code_counts(old: str, new: str) -> None:
    assert old in TEXT
    assert hashed(TEXT.replace(old, new, 1)) != hashed(TEXT)
