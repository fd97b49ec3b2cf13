"""What orders accesses, operations and lifetimes, and what is found where something is missing."""

import json
from types import SimpleNamespace

import pytest
from tests.check.fake_run import FakeOperation, FakeRun
from tests.check.histories import History

from ptxemu.engines.mbarrier import mbarriers
from ptxemu.machine.state import Ordering

AFTER, BEFORE = "fence tcgen05.after_thread_sync", "fence tcgen05.before_thread_sync"
PEERS = "launch ctas=2 warps=1;"


def with_and_without(name: str, history: str, missing: str, then: str = "") -> dict[str, str]:
    """Nothing is found with the part in braces; without it `missing` is, and `then` holds."""
    before, part, behind = history.replace("{", "}").split("}")
    return {
        name: f"{before}{part}{behind}; => nothing",
        f"{name}, not": f"{before}{behind}; => {missing}; {then}",
    }


# Happens-before of generic accesses: barriers, flags; bytes, words and pages.
MANY = [f"a st g{0x1000 + 4 * n:x}; a st.release.gpu g2000; b ld.relaxed.gpu g2000;"
        for n in range(20)]  # fmt: skip
GENERIC = {
    "repetitions of a pair of instructions only count": "bar a b; a st 400,404; b ld 400,404;" * 5
    + "=> error race; counts 5",
    "two warps write the same value, which no data decide": "launch fixed; a st 400;"
    "b st 400 silent; => note same-value-race",
    "two warps write the same value": "a st 400; b st 400 silent; => error race",
    **with_and_without("a barrier orders a read", "a st 400; {bar a b;} b ld 400", "error race"),
    **with_and_without("a barrier orders a write", "a st 400; {bar a b;} b st 400", "error race"),
    "what follows the barrier is not ordered by it": "a st 400; bar a b; a st 400; b ld 400;"
    "=> error race",
    "overwriting what another warp may still read": "a st 400; bar a b; b ld 400; a st 400;"
    "=> error race; bar a b; a st 400; counts 1",
    "order is transitive through a third warp": "launch warps=3; a st 400; bar a b; bar b c;"
    "c ld 400; => nothing",
    "all readers must be waited for before a write": "launch warps=4; a st 400; bar a b c d;"
    "b ld 400; c ld 400; d ld 400; bar a b d; a st 400; => error race; says by cta (0,0,0) warp 2",
    "what a lane does in its order, and reads, never race": "a st 400*32; a st 400*32; bar a b;"
    "a ld 400; b ld 400; => nothing",
    "two warps write different halves and bytes of a word": "a st 400,404+2; b st 402,406+2;"
    "a st 40C+1; b st 40D+1; => nothing; b ld 404; => error race; says 0x404",
    "a word written before its page was refined": "a st 400; b st 500+1; b ld 402+2;"
    "=> error race; says 0x402",
    "accesses that span pages are seen whole": "a st 3FF8,7FF8+16; bar a b; a st 8004;"
    "b ld 3FF8,7FF8+16; => error race; says 0x8004",
    "a later phase of an mbarrier includes the earlier ones": "launch warps=3; a st 800;"
    "a arrive 0/0; b wait 0/0 relaxed; b arrive 0/1; c wait 0/1; c ld 800; => nothing",
    "global memory of the arguments is initialised and checked": "a ld g7F0000000000;"
    "b st g7F0000000000; => error race; says global memory 0x7f0000000000",
    "what follows the fence is not released by it": "a fence acq_rel.gpu; a st g1000;"
    "a st.relaxed.gpu g2000; b ld.acquire.gpu g2000; b ld g1000; => error race",
    "what an atomic has observed comes before what follows it": "launch warps=3; a st g3000;"
    "a red.relaxed.gpu g2000; b red.relaxed.gpu g2000; bar b c; c st g2000; => nothing;"
    "c ld g3000; => error race",
    "weak and atomic accesses of shared memory": "a st 400; b atom.relaxed.cta 400;"
    "=> error lost-update",
    **{
        f"a fence acquires all of {count} that relaxed reads saw before it":
        f"launch clusters=2 warps=1; {''.join(MANY[:count])} b fence acq_rel.cta; b ld g1000;"
        "=> error race; b fence acq_rel.gpu;"
        + "".join(f"b ld g{0x1004 + 4 * n:x};" for n in range(count - 1)) + "=> error race"
        for count in (3, 20)
    },
    "who reads equal writes needs to know one who writes all": "launch warps=3 fixed; a st 800;"
    "b st 800 silent; bar b c; c ld 800; => note same-value-race; c st 800;"
    "=> note same-value-race, error race",
    "local memory is of one lane": "a st l0; b ld l0; a st 400; => nothing",
}  # fmt: skip

STORED = "a st 800; a fence proxy.async; x = a store;"
FENCED = "a st 800*16; {0} bar a b; {1} x = b store; x ld 800+64;"
MAPPED = "a st g3000; {0} bar a b; {1} x = b load; x map g3000;"
RELEASE, ACQUIRE = "a fence tensormap.release;", "b fence tensormap.acquire;"
LOADING = "b st 800; b fence proxy.async; bar a b; x = a load; {0} x st 800+64; x arrive; {1}"
COPIED = "x = a copy; x st 800+16; y = a copied after x; y arrive; {0} b wait; z = b {1};"
PRACTICE = "warning missing-proxy-fence-after-cp-async"
HANDED_BACK = "a tile; b wait; x = b wgmma; x ld 800+64; {b join x;} b arrive 8; a wait 8;"
PROXIES = {
    **{
        f"{kind} {'behind' if behind else 'before'} the barrier lets a bulk store read":
        FENCED.format(*(("", f"b fence {kind};") if behind else (f"a fence {kind};", "")))
        + "=> nothing"
        for kind in ("proxy.async", "proxy.async.shared::cta") for behind in (False, True)
    },
    **{
        f"a bulk store reads behind {kind or 'no fence'}": FENCED.format(kind, "")
        + "=> error missing-proxy-fence; says needs fence.proxy.async, between PTX line 10;"
        "says issued by cta (0,0,0) warp 1"
        for kind in ("", *(f"a fence {kind};" for kind in
                           ("proxy.async.global", "acq_rel.cta", "mbarrier_init")))
    },
    "a write behind the fence needs another one": "a fence proxy.async; a st 800; bar a b;"
    "x = b store; x ld 800; => error missing-proxy-fence",
    "a fence without a barrier": "a st 800; a fence proxy.async; x = b store; x ld 800;"
    "=> error race",
    "a refill of what was written without fence, and of what was read": "a st 800;"
    "a fence proxy.async; a ld 800; b st 900; bar a b; x = b load; x st 800+16; x st 900+16;"
    "=> error missing-proxy-fence, warning missing-proxy-fence-after-read",
    "global memory needs the fence too": "a st g10000; a fence proxy.async.shared::cta; bar a b;"
    "x = b load; x ld g10000; => error missing-proxy-fence; b fence proxy.async.global;"
    "x = b load; x ld g10000; counts 1",
    **{
        f"a tensor map with{'' if a else 'out'} release, with{'' if b else 'out'} acquire":
        MAPPED.format(a, b) + ("=> nothing" if a and b else "=> error missing-tensormap-fence;"
                               f"says generic.{'acquire' if a else 'release'} by")
        for a in (RELEASE, "") for b in (ACQUIRE, "")
    },
    **{
        f"a read of a load without the wait, {'early' if early else 'late'}":
        LOADING.format(*(("b ld 800;", "") if early else ("", "b ld 800;")))
        + "=> error missing-wait; says needs a wait on the mbarrier;"
        "says async write (cp.async.bulk.shared::cluster"
        for early in (False, True)
    },
    "the source of a bulk store changes before it has read": STORED + "a st 800; x ld 800;"
    "=> error missing-wait; says needs cp.async.bulk.wait_group.read, between",
    **{
        f"the source of a bulk store changes behind wait_group{how}":
        STORED + f"x ld 800; a join x{how}; a st 800; => nothing" for how in ("", " reads")
    },
    "wait_group.read does not complete the write": "x = a store; x st g10000+64; a join x reads;"
    "a ld g10000; => error missing-wait",
    **with_and_without("wait_group counts for other warps behind a barrier",
                       STORED + "x ld 800; a join x reads; {bar a b;} b st 800",
                       "error race, error race"),
    "cp.async needs its wait and then the fence": "x = a copy; x st 800+16; a ld 800;"
    "=> error missing-wait; says cp.async.wait_group; a join x; a ld 800; y = a store;"
    "y ld 800+16; => error missing-wait, error missing-proxy-fence; counts 1 1;"
    "a fence proxy.async; y = a store; y ld 800+16; counts 1 1",
    **{
        f"{reader} reads what cp.async{' waited' if joined else ''} arrived for":
        COPIED.format(joined, reader) + f"z ld 800+16; => {expected}"
        for reader, joined, expected in (
            ("wgmma", "", PRACTICE), ("mma", "", PRACTICE), ("tcopy", "", PRACTICE),
            ("wgmma", "a join x;", "error missing-proxy-fence"),
            ("tensor", "", "error missing-proxy-fence"),
        )
    },
    **with_and_without("operations order each other through mbarriers without fence",
                       HANDED_BACK + "a tile 0/1", "error missing-wait",
                       "says needs wgmma.wait_group"),
    "one warp loads twice without waiting, and nothing changes": "x = a load; x st 800+64;"
    "y = a load; y st 800+64 silent; => error missing-wait",
    "a race of two instructions is not hidden by their harmless one": "x = a store; x st g0+64;"
    "y = b store; y st g0+64 silent; x = a store; x st g40+64; y = b store; y st g40+64;"
    "=> error missing-wait; counts 2",
}  # fmt: skip

TILE_READ = "a tile; b wait; x = b store; x ld 800+64;"
MOST = "t0-1+128"
KNOWN = {
    "later operations of the warp know of the load too": TILE_READ + "y = b store; y ld 800+64;"
    "=> nothing",
    "an operation issued before the wait does not know of it": "y = b store;" + TILE_READ
    + "y ld 800+64; => error missing-wait",
    "another warp does not know of it": TILE_READ + "y = a store; y ld 800+64;"
    "=> error missing-wait",
    "the next load of the same bytes is another one": TILE_READ + "b join x; bar a b; a tile 0/1;"
    "y = b store; y ld 800+64; => error missing-wait",
    "what only the order of operations tells is no news for their warp": "x = a load;"
    "x st 800+64; y = b mma after x; y ld 800+64; z = b store; z ld 800+64; => error missing-wait",
    "in tensor memory the order is asked each time": f"x = a mma; x st {MOST}; y = a mma after x;"
    f"y ld {MOST}; y st {MOST}; => nothing; z = a mma; z ld {MOST}; => error unordered-mma",
}  # fmt: skip

LIVES = {
    **with_and_without("distributed shared memory is accessed before its CTA exits",
                       PEERS + "a st 800; cluster; b ld 800@0; {cluster;} exit 0; exit 1",
                       "error dsmem-exit", "says needs a cluster barrier"),
    **with_and_without("distributed shared memory is accessed after its CTA has started",
                       PEERS + "{cluster;} b st 800@0; cluster", "error dsmem-entry",
                       "says may not have started"),
    "an access behind the exit is the same error": PEERS + "a st 800; cluster; exit 0;"
    "a complain error exited-cta; b ld 800@0; => error dsmem-exit",
    **with_and_without("a bulk store has read before its CTA exits",
                       STORED + "x ld 800; {a join x reads;} exit 0", "warning read-after-exit"),
    "a store that reads behind the exit is no uninitialised read": STORED
    + "exit 0; x ld 800; finish; => warning read-after-exit",
    "a store reads behind the exit, and another CTA has the room": STORED + "x ld 800; exit 0;"
    "=> warning read-after-exit; start; => error read-after-exit;"
    "says needs cp.async.bulk.wait_group.read before the exit",
    "a store that reads behind the exit still needs its proxy fence": "a st 800; x = a store;"
    "exit 0; x ld 800; x done; => error missing-proxy-fence, warning read-after-exit",
    "a product that reads behind the exit": STORED.replace("store", "wgmma") + "x ld 800; exit 0;"
    "=> error async-after-exit; says needs wgmma.wait_group before the exit",
    "a load must have written before its CTA exits": "a tile; exit 0;"
    "=> error async-after-exit, warning signal-after-exit",
    **with_and_without("own cp.async behind the exit",
                       "x = a copy; x st 800+16; {a join x;} exit 0", "warning async-after-exit"),
    "complaints of the machine are findings once an instruction": "a complain error tmem-leak;" * 3
    + "=> error tmem-leak; counts 3; says 64 columns; says PTX line 10",
    **with_and_without("a relaxed arrival that was seen came before the exit",
                       PEERS + "b arrive 0 relaxed; {a wait 0 relaxed;} exit 0",
                       "error signal-after-exit"),
    # PTX ISA, "barrier.cluster": .relaxed says nothing of accesses before it.
    "a cluster barrier orders arrivals before the exit": PEERS + "b arrive; cluster; exit 0;"
    "=> nothing",
    "a relaxed cluster barrier does not": PEERS + "b arrive; cluster relaxed; exit 0;"
    "=> error signal-after-exit",
    "a relaxed cluster barrier orders nothing but an initialisation": PEERS + "a st 800;"
    "a fence mbarrier_init; cluster relaxed; b ld 800@0; a wait; => error relaxed-barrier-race",
}  # fmt: skip

INIT = "a mbarrier.init 400+8;"
MBARRIERS = {
    "use of an mbarrier without barrier behind its init": INIT + "b wait 400; => error race",
    **with_and_without("data become an mbarrier once its readers are done",
                       "a st 400; a ld 400; {bar a b;} b mbarrier.init 400+8",
                       "error race, error race"),
    "plain accesses to an mbarrier are errors until it is invalidated": INIT + "a ld 404;"
    "=> error mbarrier-access; a mbarrier.inval 400+8; a st 404; counts 1",
    "an initialisation behind a use that it does not know": INIT + "bar a b; a arrive 400;"
    "b mbarrier.init 400+8; => error race; says arrival; says mbarrier.init",
    "an initialisation behind a barrier behind all uses": INIT + "bar a b; a arrive 400;"
    "b wait 400; bar a b; b mbarrier.init 400+8; => nothing",
    "a user of an mbarrier must know all initialisations": "launch fixed;" + INIT
    + "b mbarrier.init 400+8 silent; => note same-value-race; b executes mbarrier.arrive;"
    "b arrive 400; => note same-value-race, error race",
    **with_and_without("the next phase comes behind the wait",
                       "b arrive; a see; {a arrive 8; b see 8;} b arrive 0/1; a see 0/1",
                       "error mbarrier-overrun"),
    # One warp of a warpgroup arrives for all: it has waited for their common products.
    "a product issued behind the wait tells of it": "b arrive; a see; x = a wgmma; b join x;"
    "b arrive 0/1; a see 0/1; => nothing",
    **with_and_without("an arrival comes behind those of the phase before",
                       "a arrive; b arrive; a see; {b see;} a arrive 0/1; b arrive 0/1",
                       "error mbarrier-early-arrival"),
    **{  # Else another phase of the same parity may answer it.
        f"a wait that passes over phases comes behind {what}": "b arrive 0/0; b arrive 0/1;"
        f"b arrive 0/2; {early} b arrive 0/3; {late} a missed 3; => {expected}"
        for what, early, late, expected in (
            ("all phases before", "bar a b;", "", "nothing"),
            ("the phase's arrival", "", "bar a b;", "nothing"),
            ("nothing", "", "", "warning mbarrier-phase-aliasing"),
        )
    },
}  # fmt: skip

ALL, FEW = "t0-127+256", "t0-31+4"
PRODUCT, TLOAD = f"x = a mma; x st {ALL};", f"l = b tload; l ld {FEW};"
LOADED = f"{PRODUCT} a commit 0 x; b wait; b {AFTER}; {TLOAD}"
OPERANDS = (
    f"a st 800+64; a fence proxy.async; bar a b; {PRODUCT} x ld 800+64; x done; a commit 0 x;"
)
THREE = (f"launch warps=3; a tcgen05.st {FEW}; l = a tload; l ld {FEW}; a join l; {{0}} bar a b;"
         f"{{1}} bar b c; c {AFTER}; y = c tstore; y st {FEW};")  # fmt: skip
HANDOVER = (f"a tcgen05.st {FEW}; l = a tload; l ld {FEW}; a join l; {{0}} a arrive 0 relaxed;"
            f"b wait 0 relaxed; {{1}} x = b mma; x st {FEW};")  # fmt: skip
NO_FENCE = "=> note missing-tcgen05-fence; says needs tcgen05.fence::before_thread_sync"
TMEM = {
    "the accumulator is read before the commit was waited for": f"{PRODUCT} a commit 0 x; {TLOAD}"
    "=> error missing-wait; says needs tcgen05.commit and a wait on its mbarrier;"
    "says TMEM of cta (0,0,0) lane 0 column 0",
    "no fence behind the wait": f"{PRODUCT} a commit 0 x; b wait; {TLOAD}"
    "=> note missing-tcgen05-fence",
    # A tcgen05.ld is waited for and handed on, by a third warp, to who overwrites the columns.
    "a fence before the arrival": THREE.format(f"a {BEFORE};", "") + "=> nothing",
    "a fence of the third warp": THREE.format("", f"b {BEFORE};") + "=> nothing",
    "no fence before the arrival": THREE.format("", "") + NO_FENCE,
    "a fence behind the arrival": THREE.format("", f"a {BEFORE};") + NO_FENCE,
    "a commit includes what earlier commits of its thread tracked": f"{PRODUCT}"
    f"c = a commit after x; c arrive; c done; a commit 0/1 c; b wait 0/1; b {AFTER}; {TLOAD}"
    "=> nothing",
    **with_and_without("products of two threads are in order if the threads synchronise",
                       f"{PRODUCT} {{bar a b; b {AFTER};}} y = b mma synced x; y st {ALL}",
                       "error unordered-mma"),
    **with_and_without("a product overwrites what was loaded behind wait::ld",
                       f"{LOADED} {{b join l;}} b {BEFORE}; bar a b; a {AFTER}; y = a mma after x;"
                       f"y st {ALL}", "error missing-tcgen05-wait"),
    **{  # PTX ISA, "Register dependencies, same thread": a use of the registers orders no access.
        f"a product overwrites what was loaded and then {verb}": f"{LOADED} b {verb} l;"
        f"b {BEFORE}; bar a b; a {AFTER}; y = a mma; y st {ALL}; => {expected}"
        for verb, expected in (
            ("touch", "error late-tmem-read"),
            ("use", "error tmem-load-not-waited, error tmem-read-by-register"),
            ("join", "nothing"),
        )
    },
    **with_and_without("a computation with registers orders a load before the exit",
                       f"{LOADED} {{b touch l;}} exit 0", "warning read-after-exit"),
    "a sum with cells that nobody wrote": f"x = a mma; x ld {ALL}; x st {ALL}; finish;"
    "=> error uninitialised-tmem-read",
    "a load of cells that nobody wrote": TLOAD + "finish; => warning uninitialised-tmem-read",
    "shared memory that nobody writes, once its cluster is gone": "a ld 400,500; x = a store;"
    "x ld 500; b st 400; => error race; exit 0; x done;"
    "=> error race, warning read-after-exit, warning uninitialised-read,"
    " warning uninitialised-async-read; says of shared memory of cta (0,0,0) 0x500",
    "dealloc while another warp still loads": f"a tcgen05.st t0-127+128; bar a b; {TLOAD} b join l;"
    "a tcgen05.dealloc t0-127+128; => error tmem-dealloc-race, note missing-tcgen05-fence",
    "lanes of tmem are told apart": "x = a tstore; x st t0-31+64; y = b tstore; y st t32-63+64;"
    "=> nothing; z = b tstore; z st t31:60+4; => error race; says lane 31 column 15",
    "a commit that nobody waits for": "a commit; exit 0; => warning signal-after-exit",
    **with_and_without("a product over part of a result that was read",
                       f"{PRODUCT} x done; a commit 0 x; a wait; {{y = a tload; y ld {ALL};"
                       f"a join y;}} z = a mma; z st t0-127:128+256", "warning tmem-overlap"),
    # The canonical patterns: relaxed arrivals and waits with tcgen05 fences around them.
    **with_and_without("a relaxed wait for a commit and a fence order a load",
                       f"{OPERANDS} b wait 0 relaxed; {{b {AFTER};}} {TLOAD}",
                       "error missing-wait"),
    "a relaxed wait knows that operands were read": f"{OPERANDS} b wait 0 relaxed; y = b load;"
    "y st 800+64; => nothing",
    "a relaxed wait for a copy does not make its data visible": "x = a load; x st 800+64; x arrive;"
    "b wait 0 relaxed; b ld 800+64; => error missing-wait",
}  # fmt: skip

HISTORIES = GENERIC | PROXIES | KNOWN | LIVES | MBARRIERS | TMEM


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    History(HISTORIES[name])


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (f"a {BEFORE};", f"b {AFTER};", []),
        ("", f"b {AFTER};", ["error"]),
        (f"a {BEFORE};", "", ["error"]),
    ],
)
def test_fences_around_a_relaxed_handover_order_a_load_before_a_product(
    before: str, after: str, found: list[str]
) -> None:
    findings = History(HANDOVER.format(before, after)).run.findings
    assert [f.level for f in findings if "tcgen05.ld" in f.message] == found


def test_a_race_is_told_in_words_and_in_json() -> None:
    run = FakeRun()
    a, b = run.warps
    run.write(a, [0x400, 0x404])
    run.read(b, [0x404, 0x408])
    run.finish()
    (race, uninitialised) = run.findings
    assert (race.code, race.level, race.count) == ("race", "error", 1)
    assert race.first is not None and race.second is not None
    assert (race.first.warp, race.first.ptx_line, race.first.source_line) == (0, 10, 1)
    assert (race.second.warp, race.second.ptx_line, race.second.action) == (1, 20, "generic read")
    assert "\n" not in race.message
    for part in ("kernel fake", "cta (0,0,0) warp 1", "PTX line 10", "kernel.py:2", "0x404"):
        assert part in race.message
    assert "needs a barrier" in race.message
    assert uninitialised.code == "uninitialised-read" and "0x408" in uninitialised.message
    data = json.loads(json.dumps(race.to_json_dict()))
    assert data["first"]["cta"] == [0, 0, 0] and data["level"] == "error"


def test_findings_stay_the_same_when_unused_states_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ptxemu.check.shadow_memory.STATES_BEFORE_COMPACTION", 8)
    run = FakeRun()
    run.checker._memory._compact_at = 8
    a, b = run.warps
    run.write(a, 0x400)
    for use in range(50):
        run.write(a, [0x800, 0x900])
        run.barrier(a, b, use=use)
        run.read(b, 0x800)
        run.barrier(a, b, use=use, number=1)
    assert run.codes == []
    run.read(b, 0x400)
    run.read(b, 0x900)
    run.write(a, 0x900)
    assert run.codes == ["race"]
    assert len(run.checker._memory._states) < 40


def test_a_finding_of_the_letter_of_the_isa_says_so() -> None:
    name = "a relaxed cluster barrier orders nothing but an initialisation"
    (finding,) = History(LIVES[name]).run.findings
    assert finding.kind == "isa"


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize(
    "tx, pending, code",
    [(0, 2, None), (64, 2, "mbarrier-tx-left"), (0, 1, "mbarrier-arrivals-left")],
)
def test_mbarriers_are_looked_at_when_all_is_over(tx: int, pending: int, code: str | None) -> None:
    run = FakeRun()
    barrier = SimpleNamespace(tx_count=tx, pending=pending, expected=2, phase=3)
    run.ctas[0].engines[mbarriers] = SimpleNamespace(by_offset={0x400: barrier})
    run.exit(run.ctas[0])
    run.finish()
    levels = [(finding.code, finding.level) for finding in run.findings]
    assert levels == ([] if code is None else [(code, "warning")])


@pytest.mark.parametrize("waited", [True, False])
def test_a_peer_waits_for_each_commit_that_arrives_in_its_shared_memory(waited: bool) -> None:
    """That a later commit has arrived says that the products are done, not that the earlier
    commit's signal has reached the peer."""
    history = History(f"{PEERS} {PRODUCT} x done")
    run = history.run
    issuer, peer = run.warps
    before = list(history.operations.values())
    for phase in range(2):
        operation = FakeOperation(50 + phase, "tcgen05.commit", issuer, run.instruction("commit"))
        operation.mbarriers = tuple((cta.index, 8 * phase) for cta in run.ctas)
        operation.ordering = Ordering(before)  # type: ignore[arg-type]
        run.checker.async_issued(operation, issuer)
        for cta in run.ctas:
            run.arrive(operation, cta=cta.index, offset=8 * phase)
        run.checker.async_completed(operation)
        before = [operation]
    for warp in (issuer, peer):
        if waited or warp is issuer:
            run.wait(warp, cta=warp.cta.index, offset=0)
        run.wait(warp, cta=warp.cta.index, offset=8)
    for cta in run.ctas:
        run.exit(cta)
    assert run.codes == ([] if waited else ["signal-after-exit"])
