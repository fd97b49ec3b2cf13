"""Mutation runs: what is caught and how, what survives, what counts as neither; the command."""

import json

import numpy as np
import pytest
from tests.kernel_run import TID, setup, source

from ptxemu.cli.main import main
from ptxemu.errors import PtxEmuError
from ptxemu.mutate import Replay, Report, measure, mutate
from ptxemu.mutate.runner import POLICIES, Equivalents
from tests import producer_consumer

# Mutation runs: what is caught and how, what survives, what counts as neither.

AT_THE_END = Equivalents.parse(
    f"""
    # the kernel ends behind it, and a grid's end waits for its stores
    {producer_consumer.line_of("wait_group")} .read: nothing follows
    """
)


def replay(text, arrays, *, block):
    return Replay(setup(text, arrays, block=block))


def original():
    return replay(producer_consumer.TEXT, producer_consumer.arrays(), block=128)


@pytest.fixture(scope="module")
def report():
    subject = original()
    return Report("k", *mutate(subject, equivalents=AT_THE_END))


def by_name(report):
    return {(r.mutation.site.category, r.mutation.name): r for r in report.results}


def test_every_mutant_that_is_not_equivalent_is_caught(report):
    assert not report.survivors
    assert report.share() == 1.0
    assert len(report.results) == 13


def test_the_original_has_no_finding(report):
    assert not {f for f in report.baseline.faults if f.level != "note"}


@pytest.mark.parametrize(
    ("category", "name", "how"),
    [
        ("proxy-fence", "removed", {"finding"}),
        ("init-fence", "removed", {"finding", "warning"}),
        ("arrive", "removed", {"deadlock", "finding", "warning"}),
        ("expect-tx", "+16 bytes", {"deadlock", "finding"}),
        ("mbarrier-wait", "true at once", {"finding"}),
        ("barrier", "removed", {"finding", "error"}),
    ],
)
def test_how_a_mutant_is_caught(report, category, name, how):
    result = by_name(report)[category, name]
    assert (result.verdict, result.how in how) == ("caught", True)
    assert result.message
    assert result.policy is not None


def test_equivalent_mutants_are_reported_apart_with_their_reason(report):
    result = by_name(report)["group-wait", ".read"]
    assert (result.verdict, result.how) == ("equivalent", "nothing follows")
    text = "\n".join(report.lines())
    assert "equivalent, as explained" in text
    assert "nothing follows" in text


def test_the_table_and_the_json_agree(report):
    facts = report.to_json_dict()
    assert facts["share"] == 1.0
    assert len(facts["mutants"]) == 13
    assert facts["categories"]["barrier"] == {"mutants": 3, "caught": 3, "share": 1.0}
    rows = [line.split() for line in "\n".join(report.lines()).splitlines()]
    assert ["barrier", "3", "3", "3", ".", ".", ".", ".", ".", "100%", "100%"] in rows
    assert ["all", "10", "13", "12", ".", ".", ".", "1", ".", "92%", "100%"] in rows


def test_processes_give_the_same_results_as_one(report):
    subject = original()
    _, results = mutate(subject, jobs=2, equivalents=AT_THE_END)
    verdicts = [(r.verdict, r.how, r.message) for r in results]
    assert verdicts == [(r.verdict, r.how, r.message) for r in report.results]


def test_what_is_argued_is_tried_last():
    """So that a run which is stopped lacks only what runs longest."""
    subject = original()
    first = Equivalents.parse(f"{producer_consumer.line_of('fence.mbarrier_init')} removed: first")
    tried = []
    mutate(subject, equivalents=first, on_result=lambda *told: tried.append(told[2].mutation))
    assert first.reason(tried[-1]) == "first"
    assert not any(map(first.reason, tried[:-1]))


def test_only_and_limit_choose_mutants():
    subject = original()
    _, results = mutate(subject, only=["barrier", "commit"])
    assert [r.mutation.site.category for r in results] == ["barrier"] * 3 + ["commit"]
    _, results = mutate(subject, limit=3)
    assert len(results) == 3


def test_a_replay_starts_from_the_inputs_of_its_making():
    arrays = producer_consumer.arrays()
    subject = replay(producer_consumer.TEXT, arrays, block=producer_consumer.THREADS)
    arrays[0][:] = 0
    outcomes = [subject.run(subject.module, policy) for policy in (None, None)]
    assert (outcomes[0].outputs[0] == outcomes[1].outputs[0]).all()
    assert arrays[1][0] == producer_consumer.THREADS


def run(body, *, block=64, size=64, **how):
    text = source(TID + body, {"out": None}, shared=1024)
    subject = replay(text, [np.zeros(size, np.uint32)], block=block)
    return Report("k", *mutate(subject, **how))


def test_a_survivor_is_listed_and_lowers_the_share():
    store = "mov.u32 %r1, smem; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.b32 [%r1], %r0;"
    report = run(f"{store} bar.sync 0;")
    (result,) = report.results
    assert result.verdict == "survived"
    assert report.share() == 0.0
    assert "survivors:" in report.lines()


@pytest.mark.parametrize(
    ("notes", "verdict", "how"), [(False, "noted", ""), (True, "caught", "note")]
)
def test_a_note_is_enough_where_there_is_to_be_none(notes, verdict, how):
    write_seven = "mov.u32 %r1, smem; mov.u32 %r2, 7; st.shared.u32 [%r1], %r2;"
    in_warp = "shr.u32 %r3, %r0, 5; setp.eq.u32 %p0, %r3, {}; @!%p0 bra END{};"
    body = f"""
        {in_warp.format(0, 0)} {write_seven}
        END0: bar.sync 0;
        {in_warp.format(1, 1)} {write_seven}
        END1:
    """
    (result,) = run(body, notes=notes).results
    assert (result.verdict, result.how) == (verdict, how)
    assert "same-value-race" in result.message


def test_a_note_that_the_original_has_in_another_launch_is_no_news():
    write_seven = "mov.u32 %r1, smem; mov.u32 %r2, 7; st.shared.u32 [%r1], %r2;"
    body = f"""
        ld.global.u32 %r4, [%rd_out];
        setp.ne.u32 %p1, %r4, 0;
        setp.lt.u32 %p0, %r0, 32; @!%p0 bra MEET; {write_seven}
        MEET: @%p1 bra MET; bar.sync 0;
        MET: @%p0 bra END; {write_seven}
        END:
    """
    text = source(TID + body, {"out": None}, shared=16)
    ordered, unordered = (replay(text, [np.full(4, x, np.uint32)], block=64) for x in (0, 1))
    (result,) = mutate(ordered, notes=True)[1]
    assert (result.verdict, result.how) == ("caught", "note")
    (result,) = mutate(ordered, also=[unordered], notes=True)[1]
    assert result.verdict == "survived"


def test_of_a_weaker_order_the_note_is_news_wherever_the_launch_had_none():
    """The mutant's run goes the same way as the original's."""
    body = """
        setp.ne.u32 %p0, %r0, 0; @%p0 bra OTHER;
        red.relaxed.gpu.global.add.u32 [%rd_out+8], 5;
        red.release.gpu.global.add.u32 [%rd_out+4], 1;
        bra END;
        OTHER: setp.ne.u32 %p0, %r0, 32; @%p0 bra END;
        ld.global.u32 %r4, [%rd_out]; setp.ne.u32 %p1, %r4, 0; @%p1 bra READ;
        SPIN: ld.acquire.gpu.global.u32 %r5, [%rd_out+4];
        setp.eq.u32 %p2, %r5, 0; @%p2 bra SPIN;
        READ: ld.relaxed.gpu.global.u32 %r6, [%rd_out+8];
        st.global.u32 [%rd_out+12], %r6;
        END:
    """
    text = source(TID + body, {"out": None})
    waits, reads_at_once = (
        replay(text, [np.array([x, 0, 0, 0], np.uint32)], block=64) for x in (0, 1)
    )
    baseline, results = mutate(waits, also=[reads_at_once], notes=True)
    assert {fault.code for fault in baseline.faults} == {"stale-read"}
    assert [(r.verdict, r.how, r.launch) for r in results] == [("caught", "note", 0)] * 2


def test_a_line_that_the_launch_does_not_execute_is_not_reached():
    report = run("setp.lt.u32 %p0, %r0, 999;\n@%p0 bra END;\nbar.sync 0;\nEND:")
    (result,) = report.results
    assert result.verdict == "not reached"
    assert report.share() is None


def test_a_mutant_that_runs_for_ever_is_stopped():
    body = """
        mov.u32 %r1, smem;
        mov.u32 %r3, 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        mbarrier.init.shared.b64 [%r1], 1;
        mbarrier.arrive.shared.b64 _, [%r1];
        AGAIN:
        st.shared.u32 [%r1+64], %r3;
        add.u32 %r3, %r3, 1;
        mbarrier.test_wait.parity.shared.b64 %p0, [%r1], 0;
        @!%p0 bra AGAIN;
        END:
    """
    results = {r.mutation.name: r for r in run(body, block=32).results}
    assert results["removed"].verdict == "caught"
    assert results["removed"].how == "error"
    assert "does not end" in results["removed"].message


def test_bytes_that_depend_on_the_schedule_do_not_catch_mutants():
    """Which warp's number is stored last is up to the schedule, with and without the barrier."""
    body = """
        bar.sync 0;
        shr.u32 %r1, %r0, 5;
        atom.global.exch.b32 %r2, [%rd_out], %r1;
    """
    (result,) = run(body, block=128).results
    assert result.verdict == "redundant"


def test_an_original_that_fails_is_refused():
    with pytest.raises(PtxEmuError, match="the original fails"):
        run("trap;\nbar.sync 0;")


@pytest.mark.parametrize("text", ["removed: why", "12 removed", "12:"])
def test_equivalents_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match="place mutation: reason"):
        Equivalents.parse(text)


# What a mutant computes is not held against sums whose order the schedule decides.

BODY = """
mul.wide.u32 %rd3, %r0, 4;
add.u64 %rd3, %rd_sums, %rd3;
red.global.add.f32 [%rd3], 0f3F800000;
red.global.add.f32 [%rd_sums+256], 0f3F800000;
red.global.add.u32 [%rd_sums+260], 1;
st.global.u32 [%rd_other], 7;
"""


def test_sums_of_any_order_and_scratch_are_no_results_and_ignored_codes_no_faults() -> None:
    arrays = np.zeros(66, np.float32), np.zeros(1, np.uint32)
    text = source(TID + BODY, ("sums", "other"))

    def replay(*scratch: str, ignored: tuple[str, ...] = ()) -> Replay:
        return Replay(setup(text, arrays), scratch, ignored)

    baseline = measure(replay(), POLICIES[:1])
    same = "same-value-race"
    assert same in {fault.code for fault in baseline.faults}
    others = measure(replay(ignored=(same,)), POLICIES[:1]).faults
    assert others == {fault for fault in baseline.faults if fault.code != same}
    by_address = [stable.view(np.uint32) != 0 for stable in baseline.is_stable]
    stored, sums = sorted(by_address, key=len)
    assert sums.tolist() == [True] * 64 + [False, True]
    assert stored.tolist() == [True]
    (only,) = measure(replay("argument 1"), POLICIES[:1]).is_stable
    assert len(only) == arrays[0].nbytes


# `ptxemu mutate` on the command line.

LAUNCH = ["--block", "128", "--arg", "u32[128]=arange", "--arg", "u32[128]=zeros", "--quiet"]


def write(folder):
    path = folder / "kernel.ptx"
    path.write_text(producer_consumer.TEXT)
    return str(path)


def test_survivors_are_listed_with_their_line_and_set_the_exit_code(tmp_path, capsys):
    code = main(["mutate", write(tmp_path), *LAUNCH, "--only", "group-wait", "--jobs", "1"])
    out = capsys.readouterr().out
    line = producer_consumer.line_of("wait_group")
    assert code == 1
    assert f"group-wait#1 .read: PTX line {line}: cp.async.bulk.wait_group 0" in out


def test_explained_survivors_do_not(tmp_path, capsys):
    known = tmp_path / "known.txt"
    known.write_text(f"{producer_consumer.line_of('wait_group')} .read: the kernel ends\n")
    report = ["--json", "-", "--equivalent", str(known)]
    code = main(["mutate", write(tmp_path), *LAUNCH, "--jobs", "2", *report])
    (kernel,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert kernel["share"] == 1.0
    assert {m["verdict"] for m in kernel["mutants"]} == {"caught", "equivalent"}


def test_an_explanation_of_what_the_kernel_does_not_have_is_named(tmp_path, capsys):
    known = tmp_path / "known.txt"
    known.write_text("group-wait#1 .read: it ends\n# a comment\nbarrier#9 *: gone # since then\n")
    code = main(
        ["mutate", write(tmp_path), *LAUNCH, "--only", "group-wait", "--equivalent", str(known)]
    )
    told = capsys.readouterr()
    assert code == 0
    assert told.err == f"{known}: k has no mutant 'barrier#9 *'\n"
    assert "-- it ends" in told.out


def test_progress_goes_to_stderr(tmp_path, capsys):
    loud = [option for option in LAUNCH if option != "--quiet"]
    main(["mutate", write(tmp_path), *loud, "--only", "barrier", "--jobs", "1"])
    assert "3 of 3 mutants, 3 caught" in capsys.readouterr().err


def test_a_target_is_needed(capsys):
    assert main(["mutate", "--quiet"]) == 2
    assert "--exec" in capsys.readouterr().err
