"""All orders of synchronisation of small launches: proofs, and faults that few schedules show."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.check.litmus import Published, Text, Verdict
from tests.check.published_litmus import PROGRAMS, RACE, SOME
from tests.kernel_run import aligned, setup, source

from ptxemu.cli.main import main
from ptxemu.exploration import Exploration, Order

MOST = 300


def explored(
    body: str, *, grid: int, block: int, memory: np.ndarray | None = None, most: int = MOST
) -> tuple[Exploration, list[Order]]:
    array = aligned(np.zeros(512, np.uint32) if memory is None else memory)
    text = source(body, {"a": array}, shared=64)
    exploration = Exploration(setup(text, [array], grid=grid, block=block))
    return exploration, list(exploration.run(most))


def levels(orders: list[Order]) -> set[str]:
    """Levels of findings in any order, but for notes; or "failure"."""
    found = {f.level for order in orders for f in order.findings} - {"note"}
    return found | {"failure" for order in orders if order.failure is not None}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_verdict_is_that_of_the_model_in_all_orders(program: Published) -> None:
    text = Text(program)
    exploration, orders = explored(
        text.body(), grid=text.grid, block=32 * text.width, memory=text.memory()
    )
    assert exploration.is_complete
    assert exploration.orders == len(orders)
    found = levels(orders)
    if program.verdict is Verdict.DEADLOCK:
        assert found == {"failure"}
    elif program.verdict in (RACE, SOME):
        assert "error" in found
    else:
        assert found == set()


def tickets(number: int) -> str:
    """Each CTA takes tickets from one counter."""
    return "".join(f"atom.global.add.u32 %r{n}, [%rd_a], 1;\n" for n in range(number))


@pytest.mark.parametrize(
    ("blocks", "each", "count"), [(2, 2, 6), (2, 3, 20), (2, 4, 70), (3, 1, 6), (3, 2, 90)]
)
def test_tickets_have_as_many_orders_as_there_are(blocks: int, each: int, count: int) -> None:
    exploration, orders = explored(tickets(each), grid=blocks, block=1)
    assert exploration.is_complete
    assert (exploration.orders, levels(orders)) == (count, set())


def test_additions_whose_result_nobody_sees_commute() -> None:
    body = "red.global.add.u32 [%rd_a], 1;\n" * 4
    exploration, _ = explored(body, grid=3, block=1)
    assert (exploration.is_complete, exploration.orders) == (True, 1)


def test_barriers_leave_one_order() -> None:
    body = "mov.u32 %r0, %tid.x;\nshr.u32 %r0, %r0, 5;\nsetp.eq.u32 %p0, %r0, 0;\n"
    body += "@%p0 atom.global.add.u32 %r1, [%rd_a], 1;\nbar.sync 0;\n"
    body += "@!%p0 atom.global.add.u32 %r1, [%rd_a], 1;\nbar.sync 0;\n"
    exploration, orders = explored(body, grid=1, block=64)
    assert (exploration.is_complete, exploration.orders, levels(orders)) == (True, 1, set())


RING = """
mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r1], 1; @%p0 mbarrier.init.shared.b64 [%r1+8], 1; bar.sync 0;
mov.u32 %r5, 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER; @!%p0 bra END;
PRODUCER: xor.b32 %r6, %r5, 1;
EMPTY: {wait}.parity.shared.b64 %p2, [%r1+8], %r6; @!%p2 bra EMPTY; st.shared.b32 [%r1+16], %r5;
{arrive}
xor.b32 %r5, %r5, 1; add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, 3; @%p3 bra PRODUCER; bra END;
CONSUMER: setp.ne.u32 %p0, %r0, 32; @%p0 bra END;
AGAIN:
FULL: {wait}.parity.shared.b64 %p2, [%r1], %r5; @!%p2 bra FULL; ld.shared.b32 %r8, [%r1+16];
mbarrier.arrive.shared.b64 %rd1, [%r1+8]; xor.b32 %r5, %r5, 1; add.u32 %r7, %r7, 1;
setp.lt.u32 %p3, %r7, 3; @%p3 bra AGAIN;
END:
"""
"""A ring of one stage, three rounds."""
ARRIVE = "mbarrier.arrive.shared.b64 %rd0, [%r1];"


def test_a_ring_of_mbarriers_has_one_order() -> None:
    body = RING.format(wait="mbarrier.try_wait", arrive=ARRIVE)
    exploration, orders = explored(body, grid=1, block=64)
    assert (exploration.is_complete, exploration.orders, levels(orders)) == (True, 1, set())


def test_looks_at_mbarriers_that_only_wait_are_no_orders() -> None:
    body = RING.format(wait="mbarrier.test_wait", arrive=ARRIVE)
    exploration, orders = explored(body, grid=1, block=64)
    assert (exploration.is_complete, levels(orders)) == (True, set())
    assert exploration.orders < 20


@pytest.mark.parametrize("wait", ["mbarrier.try_wait", "mbarrier.test_wait"])
def test_an_arrival_that_never_comes_is_a_deadlock(wait: str) -> None:
    exploration, orders = explored(RING.format(wait=wait, arrive=""), grid=1, block=64)
    assert exploration.is_complete
    assert levels(orders) == {"failure"}
    assert all("lock: nothing can go on" in str(order.failure) for order in orders)


def test_lanes_that_wait_let_others_of_their_warp_go_first() -> None:
    """Lane 0 waits for what lane 1 stores."""
    body = "mov.u32 %r0, %tid.x;\nsetp.ne.u32 %p0, %r0, 0;\n@%p0 bra OTHER;\n"
    body += "SPIN: ld.acquire.gpu.global.b32 %r1, [%rd_a];\nsetp.eq.u32 %p1, %r1, 0;\n"
    body += "@%p1 bra SPIN;\nbra END;\nOTHER:\nst.release.gpu.global.b32 [%rd_a], 1;\nEND:\n"
    exploration, orders = explored(body, grid=1, block=2)
    assert (exploration.is_complete, exploration.orders, levels(orders)) == (True, 1, set())


def test_a_bound_leaves_it_open() -> None:
    exploration, orders = explored(tickets(4), grid=2, block=1, most=10)
    assert not exploration.is_complete
    assert len(orders) == exploration.orders == 10


RARE = """
mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; atom.global.add.u32 %r2, [%rd_a], 1;
atom.global.add.u32 %r3, [%rd_a], 1; setp.ne.u32 %p2, %r2, 2; setp.ne.u32 %p3, %r3, 5;
@%p1 bra END; @%p2 bra END; @%p3 bra END; trap;
END:
"""
"""CTA 0 is to take the third ticket of six, and the last."""


def test_a_fault_in_few_orders_is_found_and_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exploration, orders = explored(RARE, grid=3, block=1)
    assert (exploration.is_complete, exploration.orders) == (True, 90)
    assert 0 < sum(order.failure is not None for order in orders) < 10
    path = tmp_path / "rare.ptx"
    path.write_text(source(RARE, ["a"]))
    launch = ["check", str(path), "--grid=3", "--block=1", "--arg=u32[64]=zeros", "--json"]
    assert main([*launch, "--explore"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["orders"] == {"tried": 90, "all": True, "left_out": []}
    repeat = report["failure"].partition("repeat with ")[2].partition("]")[0].split()
    assert main([*launch, *repeat]) == 1
    assert "trap" in json.loads(capsys.readouterr().out)["failure"]
    assert main([*launch, "--order=0,0,1,1,2,2"]) == 0


def test_the_report_says_whether_it_is_a_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tickets.ptx"
    path.write_text(source(tickets(3), ["a"]))
    launch = ["check", str(path), "--grid=2", "--block=1", "--arg=u32[64]=zeros"]
    assert main([*launch, "--explore"]) == 0
    assert "all 20 orders of synchronisation\n" in capsys.readouterr().out
    assert main([*launch, "--explore", "7"]) == 0
    assert "7 orders of synchronisation, and there are more" in capsys.readouterr().out
