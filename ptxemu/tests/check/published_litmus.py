"""Litmus programs of the PTX memory model that are published, written anew, with their verdicts.

Names are those of Dat3M (github.com/hernanponcedeleon/Dat3M, `litmus/PTX`), whose folder `Nvidia`
follows NVIDIA's own tests (github.com/NVlabs/mixedproxy) and whose folder `Memalloy` follows
github.com/johnwickerson/memalloy. There a program has a condition on values; here it has what the
model says of its races.

A program with a bare name waits where the published one reads once and its condition asks for the
new value: so it is ordered on every schedule. As it is published (`, read once`) it races where the
old value is read.
"""

from tests.check.litmus import Published, Verdict

RACE, SOME, CLEAN, WEAK, DEADLOCK = Verdict


def _program(name: str, ctas: str, threads: str, verdict: Verdict) -> Published:
    return Published(name, ctas, tuple(part.strip() for part in threads.split("|")), verdict)


_TICKET = "A.{0}.gpu in 1; turn.{1}.gpu out; R x; W x {3}; A.{2}.gpu out 1"


def _tickets(first: tuple[str, str, str], second: tuple[str, str, str]) -> str:
    return " | ".join(_TICKET.format(*orders, n) for n, orders in enumerate((first, second), 1))


_ALL = ("acquire", "acquire", "release")
_SC_PAIR = "W x 1; {0}; R y | W y 1; {1}; R x"
_WAITS = [
    # Message passing and its like: the reader waits, or reads once.
    ("Manual/CoRR-acquire-weak", "01", "W.release.gpu x 1 | {acquire.gpu x 1}; R x"),
    ("Manual/CoRW-R", "01", "W.release.sys x 1 | {acquire.sys x 1}; W x 2; R x"),
    ("Manual/CoRW_", "01", "W.release.gpu x 1 | {acquire.gpu x 1}; W x 2"),
    ("Manual/MP-3-transitive", "001",
     "W x 1; W.release.cta y 1 | {acquire.cta y 1}; W.release.gpu z 1 | {acquire.gpu z 1}; R x"),
    ("Manual/MP-cta-gpu", "00", "W x 1; W.release.cta y 1 | {acquire.gpu y 1}; R x"),
    ("Manual/MP-gpu", "00", "W x 1; W.release.gpu y 1 | {acquire.gpu y 1}; R x"),
    ("Manual/MP-sys", "00", "W x 1; W.release.sys y 1 | {acquire.sys y 1}; R x"),
    ("Manual/MP-sys-fence", "00",
     "W x 1; F.acq_rel.sys; W.relaxed.sys y 1 | {relaxed.sys y 1}; F.acq_rel.sys; R x"),
    ("Manual/Cause-base-strong", "012",
     "W.release.gpu x 1; W.release.sys f 1 | {acquire.gpu x 1}; W x 2; W.release.sys g 1 | "
     "{acquire.sys g 1}; R.acquire.sys g; R x"),
    ("Nvidia/Co-Total-3-threads-scope-diff", "001",
     "W x 42; W.release.cta f 1 | {acquire.gpu f 1}; W.release.gpu g 1 | {acquire.gpu g 1}; R x"),
    ("Nvidia/Release-acquire-pattern", "01",
     "W y 1; W.release.sys x 1; W.relaxed.sys x 2 | {relaxed.sys x 2}; F.acq_rel.sys; R y"),
]  # fmt: skip


def _once(threads: str) -> str:
    """Reads in place of waits."""
    words = threads.replace("{", "R.").replace("}", "").split(";")
    kept = [" ".join(w.split()[:2]) if w.strip().startswith("R.") else w for w in words]
    return ";".join(kept)


def _reads_once(threads: str) -> str:
    parts = [_once(part.strip()) for part in threads.split("|")]
    return " | ".join(parts)


def _waiting(threads: str) -> str:
    return threads.replace("{", "until.").replace("}", "")


PROGRAMS = [
    *(_program(name, ctas, _waiting(threads), CLEAN) for name, ctas, threads in _WAITS),
    *(
        _program(f"{name}, read once", ctas, _reads_once(threads), SOME)
        for name, ctas, threads in _WAITS
    ),
    # Atomics.
    _program("Manual/Atom-minus-location_", "01", "A.acq_rel.sys x -1 | A.acq_rel.sys x -1", CLEAN),
    _program("Manual/Atom-plus-location-weak_", "01",
             "A.acq_rel.cta x 1 | A.acq_rel.cta x 1", RACE),
    _program("Manual/Atom-plus-location_", "01", "A.acq_rel.sys x 1 | A.acq_rel.sys x 1", CLEAN),
    _program("Manual/Atom-plus-register", "01",
             "red.release.cta x 1 | red.release.cta x 1; R.acquire.cta x", RACE),
    _program("Manual/Red-minus-location_", "01",
             "red.release.sys x -1 | red.release.sys x -1", CLEAN),
    _program("Manual/Red-plus-location_", "01", "red.release.sys x 1 | red.release.sys x 1", CLEAN),
    _program("Nvidia/Atom-SB", "01",
             "A.acq_rel.gpu x 1; A.acq_rel.gpu y 1 | A.acq_rel.gpu y 1; A.acq_rel.gpu x 1", CLEAN),
    _program("Nvidia/Atom-SB-ld", "01",
             "A.acq_rel.gpu x 1; A.acq_rel.gpu y 1 | W.relaxed.gpu y 1; R.relaxed.gpu x", WEAK),
    _program("Manual/LB+RMW-a", "000",
             "R.acquire.gpu y; W x 1 | A.relaxed.gpu x 1 | R.relaxed.gpu x; W.release.gpu y 1",
             SOME),
    _program("Manual/LB+RMW-b", "000",
             "R.acquire.gpu y; W x 1 | F.acq_rel.cta | R.relaxed.gpu x; W.release.gpu y 1", SOME),
    _program("Manual/LB+RMW-c", "000",
             "R.acquire.gpu y; W.relaxed.gpu x 1 | A.relaxed.gpu x 1 | "
             "R.relaxed.gpu x; W.release.gpu y 1", CLEAN),
    _program("Manual/MP+RMW", "000",
             "W.relaxed.gpu x 1; W.release.gpu y 1 | A.relaxed.gpu y 1 | "
             "R.acquire.gpu y; R.relaxed.gpu x", CLEAN),
    # Coherence.
    _program("Manual/Cause-base-weak", "012",
             "W x 1; W.release.sys f 1 | W.release.gpu x 2; R x; W.release.sys g 1 | "
             "R.acquire.sys f; R.acquire.sys g; R x", RACE),
    _program("Manual/Co-Total-3-threads-scope-same", "000",
             "W x 1; W.release.sys f 1 | W x 2; W.release.sys g 1 | "
             "R.acquire.sys f; R.acquire.sys g; R x; R x", RACE),
    _program("Manual/Co-Total-4-threads", "0000",
             "W x 1; W.release.sys f 1 | W x 2; W.release.sys g 1 | "
             "R.acquire.sys f; R.acquire.sys g; R x | R.acquire.sys f; R.acquire.sys g; R x", RACE),
    _program("Manual/CoRR-relaxed-acquire-weak", "01",
             "W.release.gpu x 1; W.relaxed.gpu x 2 | R.relaxed.gpu x; R.acquire.gpu x; R x", SOME),
    _program("Manual/CoRR-weak-acquire-weak", "01",
             "W.release.gpu x 1; W x 2 | R x; R.acquire.gpu x; R x", RACE),
    _program("Manual/CoRR-weak-acquire", "01", "W.release.gpu x 1 | R x; R.acquire.gpu x", RACE),
    _program("Manual/CoRR-weak-weak", "01", "W.release.gpu x 1 | R x; R x", RACE),
    _program("Manual/CoRW-WW", "01",
             "R.acquire.sys x; W.release.sys y 3 | W.release.sys y 4; W.relaxed.sys x 5", WEAK),
    _program("Manual/CoWR-R", "01", "W.release.gpu x 1 | W.release.sys x 2; R x; R x", RACE),
    _program("Manual/CoWR_", "01", "W.release.gpu x 1 | W.release.gpu x 2; R x", RACE),
    _program("Manual/CoWW-R", "0", "W x 1; W x 2; R.acquire.sys x", CLEAN),
    _program("Manual/CoWW-RR", "00", "W x 1; W x 2 | R x; R x", RACE),
    _program("Manual/CoWW_", "0", "W x 1; W x 2", CLEAN),
    _program("Manual/Coherence-weak", "0000",
             "W x 1 | W x 2 | R.acquire.sys x; R.acquire.sys x | R.acquire.sys x; R.acquire.sys x",
             RACE),
    _program("Manual/Coherence", "0000",
             "W.relaxed.sys x 1 | W.relaxed.sys x 2 | R.acquire.sys x; R.acquire.sys x | "
             "R.acquire.sys x; R.acquire.sys x", CLEAN),
    # Load and store buffering, message passing without order.
    _program("Manual/LB+NoThinAir-location_", "01", "R x; W y 0 | R y; W x 0", RACE),
    _program("Manual/LB+NoThinAir-register", "01", "R y; W x 0 | R x; W y 0", RACE),
    _program("Manual/LB-dlb-no-fence-1", "01",
             "X.relaxed.gpu h 1; W t 1 | R t; F.sc.gpu; X.relaxed.gpu h 1", RACE),
    _program("Manual/LB-dlb-no-fence-2", "01",
             "X.relaxed.gpu h 1; F.sc.gpu; W t 1 | R t; X.relaxed.gpu h 1", RACE),
    _program("Manual/LB-dlb", "01",
             "X.relaxed.gpu h 1; F.sc.gpu; W t 1 | R t; F.sc.gpu; X.relaxed.gpu h 1", SOME),
    _program("Manual/MICRO24-Fig4a-correct", "01",
             "W.relaxed.sys sum 1; F.sc.gpu; W.relaxed.sys flag 1 | until.relaxed.sys flag 1; "
             "F.sc.gpu; R.relaxed.sys sum", CLEAN),
    _program("Manual/MICRO24-Fig4a", "01",
             "W.relaxed.sys sum 1; F.sc.gpu; W.relaxed.sys flag 1 | until.relaxed.sys flag 1; "
             "F.sc.cta; R.relaxed.sys sum", WEAK),
    _program("Manual/MICRO24-Fig4b-correct", "01",
             "A.relaxed.gpu sum 1; F.sc.gpu; X.relaxed.gpu flag 0 | take.relaxed.gpu flag; "
             "F.sc.gpu; A.relaxed.gpu sum 0", CLEAN),
    _program("Manual/MICRO24-Fig4b", "01",
             "A.relaxed.gpu sum 1; F.sc.cta; X.relaxed.gpu flag 0 | take.relaxed.gpu flag; "
             "F.sc.cta; A.relaxed.gpu sum 0", WEAK),
    _program("Manual/MP-cta", "01", "W x 1; W.release.cta y 1 | R.acquire.cta y; R x", RACE),
    _program("Manual/MP-dlb-no-fence-1", "01", "W d 1; R t; W t 1 | R t; F.sc.gpu; R d", RACE),
    _program("Manual/MP-dlb-no-fence-2", "01", "W d 1; F.sc.gpu; R t; W t 1 | R t; R d", RACE),
    _program("Manual/MP-dlb", "01",
             "W.relaxed.gpu d 1; F.sc.gpu; R t; W t 1 | R t; F.sc.gpu; R.relaxed.gpu d", SOME),
    _program("Manual/MP-relaxed", "00",
             "W.release.sys x 1; W.release.sys y 1 | R.relaxed.sys y; R.acquire.gpu x", WEAK),
    _program("Manual/SB+acq_rel-cta", "00",
             "W.release.cta x 1; F.acq_rel.cta; R.acquire.cta y | "
             "W.release.cta y 1; F.acq_rel.cta; R.acquire.cta x", WEAK),
    _program("Manual/SB-weak", "01", "W x 1; R y | W y 1; R x", RACE),
    *(
        _program(f"Manual/SB+{name}", ctas, _SC_PAIR.format(one, other), RACE)
        for name, ctas, one, other in (
            ("sc-cta-outScope", "01", "F.sc.cta", "F.sc.cta"),
            ("sc-cta", "00", "F.sc.cta", "F.sc.cta"),
            ("sc-gpu", "01", "F.sc.gpu", "F.sc.gpu"),
            ("sc-sys-gpu", "01", "F.sc.sys", "F.sc.gpu"),
            ("sc-gpu-multiFence", "01", "F.sc.gpu; W x 2; F.sc.gpu", "F.sc.gpu; W y 2; F.sc.gpu"),
        )
    ),
    _program("Nvidia/SB-cta", "00", "W x 1; F.sc.cta; R y | W y 2; F.sc.cta; R x", RACE),
    # Barriers of a CTA. Without a count a barrier is of all its threads.
    _program("Barrier/barrier-inscope", "00", "W x 1; B 1 | B 1; R x", CLEAN),
    _program("Barrier/barrier-not-inscope", "01", "W x 1; B 1 1 | B 1 1; R x", RACE),
    _program("Barrier/quorum1-fail", "000", "W x 1; B 1 3 | B 1 3; R x | B 1 3", CLEAN),
    _program("Barrier/quorum1-pass", "000", "W x 1; V 1 2 | R x; B 1 2 | F.acq_rel.cta", RACE),
    _program("Barrier/quorum1-hang", "000", "W x 1; B 1 4 | B 1 4; R x | B 1 4", DEADLOCK),
    _program("Barrier/quorum2-fail", "000", "R x; B 1 3 | B 1 3; W x 1 | B 1 3", CLEAN),
    _program("Barrier/quorum2-hang", "000", "R x; B 1 4 | B 1 4; W x 1 | B 1 4", DEADLOCK),
    _program("Manual/PC-bar-sync-arrive", "00", "R x; B 0; V 1 2 | V 1 2; W x 1; B 0", RACE),
    _program("Manual/PC-bar-sync-sync-1", "00", "R x; B 0; B 1 | B 0; W x 1; B 1", CLEAN),
    _program("Manual/PC-bar-sync-sync-3", "00", "R x; B 0; B 1 | B 1; W x 1; B 0", DEADLOCK),
    _program("Manual/SB+bar-const-diff", "00", "W x 1; B 0 1; R y | W y 1; B 1 1; R x", RACE),
    _program("Manual/SB+bar-const-equal", "00", "W x 1; B 1; R y | W y 1; B 1; R x", CLEAN),
    _program("Manual/SB+bar-diff-cta", "01", "W x 1; B 1 1; R y | W y 1; B 1 1; R x", RACE),
    _program("Manual/SB+named-bar-reg-const-diff", "00",
             "W x 1; from 2 1; R y | W y 1; B 1 1; R x", RACE),
    _program("Manual/SB+named-bar-reg-const-equal", "00",
             "W x 1; from 1 2; R y | W y 1; B 1 2; R x", CLEAN),
    _program("Manual/SB+named-bar-reg-diff", "00",
             "W x 1; from 1 1; R y | W y 1; from 2 1; R x", RACE),
    _program("Manual/SB+named-bar-reg-equal", "00",
             "W x 1; from 1 2; R y | W y 1; from 1 2; R x", CLEAN),
    _program("Manual/SB+twice-bars", "00",
             "W x 1; B 1; R y; W u 1; B 2; R v | W y 1; B 1; R x; W v 1; B 2; R u", CLEAN),
    _program("Manual/SB+twice-bars-diff", "00",
             "W x 1; B 1; R y; W u 1; B 2 1; R v | W y 1; B 1; R x; W v 1; B 3 1; R u", RACE),
    _program("Manual/barrier-instance-id", "0000",
             "W x 1; B 1 2; R y; R v | W y 1; B 1 2; R x; R u | W u 1; B 2 2; R y; R v | "
             "W v 1; B 2 2; R x; R u", RACE),
    _program("Manual/counter-atomic-store-rmw", "00",
             "W.relaxed.gpu x 1; B 0; A.acq_rel.gpu x 1 | B 0; A.acq_rel.gpu x 1", CLEAN),
    _program("Manual/counter-plain-store-atomic-load", "00",
             "W x 1; B 0; R.relaxed.gpu x | B 0; R.relaxed.gpu x", CLEAN),
    _program("Manual/counter-plain-store-plain-load", "00", "W x 1; B 0; R x | B 0; R x", CLEAN),
    _program("Manual/counter-plain-store-rmw", "00",
             "W x 1; B 0; A.acq_rel.gpu x 1 | B 0; A.acq_rel.gpu x 1", CLEAN),
    # A barrier between CTAs: the master's thread waits for the other CTA's, and lets it go on.
    *(
        _program(f"Manual/XF-Barrier-{name}", "011",
                 f"W x 1; until.{get} f 1; W.{put} f 2 | B 1; W.relaxed.gpu f 1; until.{get} f 2; "
                 "B 2; R x | B 1; B 2", verdict)
        for name, put, get, verdict in (
            ("relacq", "release.gpu", "acquire.gpu", CLEAN),
            ("rlx", "relaxed.gpu", "relaxed.gpu", RACE),
        )
    ),
    _program("Manual/XF-Barrier-weak", "011",
             "W x 1; until.acquire.gpu f 1; W f 2 | B 1; W.relaxed.gpu f 1; until.acquire.gpu f 2; "
             "B 2; R x | B 1; B 2", RACE),
    # Locks; m is free where it is 0, and taken at first where it begins as 1.
    _program("Manual/SL-cas-minus", "01",
             "W x 1; X.relaxed.gpu m 0 | take.relaxed.gpu m; R x", RACE),
    _program("Manual/SL-cas-plus", "01",
             "W x 1; F.sc.gpu; X.relaxed.gpu m 0 | take.relaxed.gpu m; F.sc.gpu; R x", CLEAN),
    _program("Manual/SL-future-minus", "01",
             "R x; W m 0; F.sc.gpu | take.relaxed.gpu m; W x 1", RACE),
    _program("Manual/SL-future-plus", "01",
             "R x; F.sc.gpu; X.relaxed.gpu m 0 | take.relaxed.gpu m; F.sc.gpu; W x 1", CLEAN),
    _program("Manual/Ticketlock-same-gpu", "00", _tickets(_ALL, _ALL), CLEAN),
    _program("Manual/Ticketlock-acq2rlx-1", "00",
             _tickets(("relaxed", "acquire", "release"), _ALL), CLEAN),
    _program("Manual/Ticketlock-acq2rlx-2", "00",
             _tickets(("acquire", "relaxed", "release"), _ALL), SOME),
    _program("Manual/Ticketlock-rel2rlx", "00",
             _tickets(("acquire", "acquire", "relaxed"), _ALL), SOME),
    # Memalloy: weak accesses and fences alone.
    *(
        _program(f"Memalloy/{name}", ctas, threads, RACE)
        for name, ctas, threads in (
            ("IRIW1", "0111", "W x 1 | R x; F.sc.cta; R y | W x 1 | R x; F.sc.gpu; R y"),
            ("IRIW2", "0001", "W x 1 | R x; F.sc.cta; R y | W x 1 | R x; F.sc.gpu; R y"),
            ("IRIW_gl_cta", "0111", "W x 1 | R x; F.sc.gpu; R x | W x 1 | R x; F.sc.cta; R x"),
            ("IRIW_uniproc", "0111", "W x 1 | R x; F.sc.cta; R x | W x 2 | R x; F.sc.gpu; R x"),
            ("IRRWIW1", "0111", "W x 2 | R x; F.sc.cta; R y | W x 1 | R x; F.sc.gpu; W y 1"),
            ("IRRWIW2", "0111", "W x 2 | R x; F.sc.gpu; R y | W x 1 | R x; F.sc.cta; W y 1"),
            ("IRRWIW3", "0001", "W x 2 | R x; F.sc.gpu; R y | W x 1 | R x; F.sc.cta; W y 1"),
            ("IRRWIW4", "0001", "W x 2 | R x; F.sc.cta; R y | W x 1 | R x; F.sc.gpu; W y 1"),
            ("IRRWIW_uniproc", "0111", "W x 1 | R x; F.sc.cta; R x | W x 2 | R x; F.sc.gpu; W x 3"),
            ("IRWIW1", "0001", "W x 2 | R x; F.sc.cta; W y 1 | W x 2 | R x; F.sc.gpu; W y 1"),
            ("IRWIW2", "0111", "W x 2 | R x; F.sc.cta; W y 1 | W x 2 | R x; F.sc.gpu; W y 1"),
            ("IRWIW_gl_cta", "0111", "W x 2 | R x; F.sc.gpu; W y 1 | W y 2 | R y; F.sc.cta; W x 2"),
            ("RWC1", "011", "W x 1 | R x; F.sc.cta; R y | W x 1; F.sc.gpu; R y"),
            ("RWC2", "011", "W x 1 | R x; F.sc.gpu; R y | W x 1; F.sc.cta; R y"),
            ("RWC_uniproc", "011", "W x 1 | R x; F.sc.cta; R x | W x 2; F.sc.gpu; R x"),
            ("WRC1", "011", "W x 1 | R x; F.sc.cta; W y 1 | R x; F.sc.gpu; R y"),
            ("WRC2", "011", "W x 1 | R x; F.sc.gpu; W y 1 | R x; F.sc.cta; R y"),
            ("WRR+2W", "011", "W x 1 | R x; F.sc.cta; R y | W x 2; F.sc.gpu; W y 3"),
            ("WRR+2W1", "011", "W x 2 | R x; F.sc.cta; R y | W x 1; F.sc.gpu; W y 1"),
            ("WRR+2W2", "011", "W x 2 | R x; F.sc.gpu; R y | W x 1; F.sc.cta; W y 1"),
            ("WRW+2W1", "011", "W x 2 | R x; F.sc.cta; W y 1 | W x 2; F.sc.gpu; W y 1"),
            ("WRW+2W2", "011", "W x 2 | R x; F.sc.gpu; W y 1 | W x 2; F.sc.cta; W y 1"),
            ("WRW+WR1", "011", "W x 1 | R x; F.sc.cta; W y 1 | W x 2; F.sc.gpu; R y"),
            ("WRW+WR2", "011", "W x 1 | R x; F.sc.gpu; W y 1 | W x 2; F.sc.cta; R y"),
            ("WWC1", "011", "W x 2 | R x; F.sc.cta; W y 1 | R x; F.sc.gpu; W y 1"),
            ("WWC2", "011", "W x 2 | R x; F.sc.gpu; W y 1 | R x; F.sc.cta; W y 1"),
        )
    ),
]  # fmt: skip
LEFT_OUT = {
    "threads on two GPUs": "CoRR of two GPUs, SB+sc-sys, Ticketlock-diff-gpu",
    "other proxies and aliases": "Nvidia/proxy, Manual/proxy: surface, texture, constant",
    "barriers with a count that is no multiple of a warp": "quorum2-pass, quorum3, quorum4, "
    "barrier-logical-id, SB+named-bar-dyn-reg-const, SB+named-bar-sta-reg-const",
    "programs that never end": "CADP",
}
"""Programs that are not expressed here, by the reason."""
