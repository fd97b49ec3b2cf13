"""Mutants of the fused indexer, forward, decode and backwards, for workbench/sanitizers/run.py: racecheck
must report them.

    python workbench/sanitizers/controls.py build NAME FOLDER
    python workbench/sanitizers/controls.py run NAME FOLDER

A mutant is the kernel compiled while one of its barriers or waits is left out, or with a read in
front of a wait. None can hang: no decision that CTAs or threads take together depends on what is
read too early. Its ids may be wrong, and may lie a little outside the output: there is room around
it.
`build` needs CuTe DSL and no GPU; ptxemu's verdict on the mutant is in FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from workbench.sanitizers.backward import Backward
from workbench.sanitizers.cases import DONE, Fused, launch
from workbench.sanitizers.decode import Decode, FewHeads
from workbench.sanitizers.early import counts_read_early, weights_read_early
from workbench.sanitizers.forward import Forward, without_wait
from workbench.sanitizers.index_backward import IndexBackward
from workbench.sanitizers.order import Order, lanes_do_not_wait
from workbench.sanitizers.prefill import Prefill

SHARED = Fused((700,), (1, 2, 1), num_heads=16, topk=512)
"""A cluster of two ranks a row; its bins are so small that wrong keys cannot fill one."""
COMPACTED = Fused((8300,), (1, 1, 1), num_heads=16, topk=512)
"""One CTA compacts its list, and sorts the winners by their bits in a bitmap."""
GUARD = 1 << 22
"""Ids before and behind a mutant's output."""
RIGHT = "right"
RIGHT_FORWARD = "right forward"
RIGHT_DECODE = "right decode"
RIGHT_FEW_HEADS = "right few heads"
RIGHT_PREFILL = "right prefill"
RIGHT_ORDER = "right order"
"""The controls that are no mutants: nothing may be reported of them."""


@dataclass(frozen=True)
class Control:
    """A mutant and the call that shows it.

    Attributes:
        what: is wrong with it. case: launched once.
        barrier: that is left out: a function of the kernel, and which of its barriers.
        wait: that is left out: a function of the kernel, and for which mbarrier.
        early: makes a context manager, in which the kernel is compiled with an early read.
        unseen: why racecheck reports nothing of it, which ptxemu does.
        unheard: why ptxemu reports nothing of it, which racecheck does.
    """

    what: str
    case: Fused | Forward | Decode | Backward | IndexBackward | Prefill | Order
    barrier: tuple[str, int] | None = None
    wait: tuple[str, str] | None = None
    early: Callable[[], AbstractContextManager[None]] | None = None
    unseen: str = ""
    unheard: str = ""

    def mutate(self) -> AbstractContextManager[None]:
        """In it the mutant is compiled."""
        if self.barrier:
            return without_barrier(*self.barrier)
        if self.wait:
            return without_wait(*self.wait)
        return self.early() if self.early else nullcontext()

    @property
    def right(self) -> str:
        """The control of the kernel as it is; "" where that is the installed one."""
        rights = {
            Fused: RIGHT, Forward: RIGHT_FORWARD, Decode: RIGHT_DECODE,
            FewHeads: RIGHT_FEW_HEADS, Prefill: RIGHT_PREFILL, Order: RIGHT_ORDER,
        }  # fmt: skip
        return rights.get(type(self.case), "")

    @property
    def is_mutant(self) -> bool:
        """Whether anything is wrong with it."""
        return bool(self.barrier or self.wait or self.early)

    @property
    def plan(self) -> Any:
        """What a mutant of the fused indexer is compiled for."""
        from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

        return IndexerPlan(num_heads=self.case.num_heads, topk=self.case.topk)

    def compile(self) -> Any:
        """The mutant's function."""
        from flashdsa.kernels.indexer.sm90.build import compile_indexer

        with self.mutate():
            if isinstance(self.case, Fused):
                return compile_indexer(self.plan)
            return self.case.compile()


BLOCK = re.compile(r"(then|else|while|loop|if|for)_.*\d+$")
"""What CuTe DSL calls the body of a statement when it traces a function."""


def traced(frame: FrameType | None) -> tuple[str, int]:
    """The kernel's function that is being traced, and its line; `consumer_sync` is seen through.

    ("", 0) outside of the kernels.
    """
    line = 0
    while frame is not None:
        name = frame.f_code.co_name
        if "flashdsa/kernels" in frame.f_code.co_filename and name != "consumer_sync":
            line = line or frame.f_lineno
            if not BLOCK.match(name):
                return name, line
        frame = frame.f_back
    return "", 0


@contextmanager
def without_barrier(function: str, number: int) -> Iterator[None]:
    """Leave out the function's barrier of that number, of some threads or all of the CTA, in the
    order of tracing.

    Raises:
        LookupError: it has none of that number; the kernel has changed.
    """
    from cutlass import cute

    lines: list[int] = []

    def unless_left_out(real: Callable[..., Any]) -> Callable[..., Any]:
        def barrier(*args: Any, **kwargs: Any) -> Any:
            owner, line = traced(sys._getframe(1))
            if owner != function:
                return real(*args, **kwargs)
            if line not in lines:
                lines.append(line)
            return None if lines.index(line) == number else real(*args, **kwargs)

        return barrier

    kinds = {
        name: unless_left_out(getattr(cute.arch, name)) for name in ("barrier", "sync_threads")
    }
    with patch.multiple(cute.arch, **kinds):
        yield
    if number >= len(lines):
        raise LookupError(f"{function} has {len(lines)} barriers, none of number {number}")


CONTROLS = {
    RIGHT: Control("nothing", COMPACTED),
    "warp sums": Control(
        "ids: sums of the warps are read before all are stored", SHARED, barrier=("warp_sums", 0)
    ),
    "candidates": Control(
        "threshold: candidates are sent before all are stored", SHARED, barrier=("gather", 0)
    ),
    "threshold": Control(
        "threshold: it is read before it is stored", SHARED, barrier=("compare", 1)
    ),
    "compacted": Control(
        "list: overwritten before all of a block is read", COMPACTED, barrier=("compact", 0)
    ),
    "bitmap": Control(
        "ids: the bitmap is read before all bits are set",
        COMPACTED,
        barrier=("emit_by_position", 1),
        unseen="does not see reductions",
    ),
    "prefix": Control(
        "ids: parts of a prefix sum are read too early", COMPACTED, barrier=("warp_sums", 0)
    ),
    "counts": Control(
        "counts: read before their st.async messages are there",
        SHARED,
        early=counts_read_early,
        unseen="does not see st.async",
    ),
    "weights": Control(
        "weights: read before the bulk copy is complete", SHARED, early=weights_read_early
    ),
    RIGHT_PREFILL: Control("nothing", Prefill()),
    "scales": Control(
        "shared keys: scales are read before the copy is complete",
        Prefill(),
        wait=("score_segment", "key_full"),
    ),
    RIGHT_ORDER: Control("nothing", Order()),
    "order": Control(
        "by score: lanes read words before others have stored them",
        Order(),
        early=lanes_do_not_wait,
        unheard="takes a warp as one agent",
    ),
    RIGHT_FORWARD: Control("nothing", Forward()),
    "left P": Control(
        "forward: the right tile's maxima are read before all are stored",
        Forward(),
        wait=("consume_left", "p1_full"),
    ),
    "right P": Control(
        "forward: the left tile's maxima are read before all are stored",
        Forward(),
        wait=("consume_right", "p0_full"),
    ),
    "sums": Control(
        "forward: the left sums are read before all are stored",
        Forward(),
        wait=("merge_sums", "left_sums"),
    ),
    "lists": Control(
        "backward, lists: the warps' counts are read before all are stored",
        Backward(16, mutant="mla_bwd_fused"),
        barrier=("write_range", 0),
    ),
    "choice": Control(
        "backward, choice: the warps' sums are read before all are stored",
        Backward(queries=2, mutant="mla_bwd_fused"),
        barrier=("choice_kernel", 0),
    ),
    "places": Control(
        "backward, slots: the warps' sums are read before all are stored",
        Backward(16, ordered=True, mutant="mla_bwd_fused"),
        barrier=("sum_up_to", 1),
    ),
    "keys": Control(
        "backward, scores: keys are multiplied before they are there",
        Backward(128, 2, 30, alike=True, mutant="mla_bwd_scores"),
        wait=("issue_products", "k_full"),
        unseen="does not see wgmma",
    ),
    "stage": Control(
        "backward, dQ: keys are multiplied before they are there",
        Backward(128, 2, 30, alike=True, mutant="mla_bwd_dq"),
        wait=("multiply_all", "full"),
        unseen="does not see wgmma",
    ),
    "rows": Control(
        "backward, dKV: Q and dO are multiplied before they are there",
        Backward(128, 2, 30, alike=True, mutant="mla_bwd_dkv", ctas=3),
        wait=("multiply_tile", "rows_full"),
        unseen="does not see wgmma",
    ),
    "index lists": Control(
        "index backward, lists: gradients are read before all are in the table",
        IndexBackward(topk=60),
        barrier=("fill_table", 0),
        unseen="does not see atomics",
    ),
    "index images": Control(
        "index backward: A is multiplied before all of it is stored",
        IndexBackward(queries=2, topk=60),
        barrier=("publish", 0),
        unseen="does not see wgmma",
    ),
    RIGHT_DECODE: Control("nothing", Decode("ue8m0", 1)),
    "decode P": Control(
        "decode: the left tile's maxima are read before all are stored",
        Decode("ue8m0", 1),
        wait=("issue_others", "p0_full"),
    ),
    "decode O": Control(
        "decode: O is read too early", Decode("ue8m0", 1), wait=("write_share", "staged")
    ),
    RIGHT_FEW_HEADS: Control("nothing", FewHeads()),
    "few heads P": Control(
        "few heads: maxima are read before all are stored", FewHeads(), barrier=("meet", 0)
    ),
    "few heads O": Control(
        "few heads: a half is added too early", FewHeads(), wait=("exchange_halves", "halves")
    ),
}
"""By name."""


def build(name: str, folder: Path) -> None:
    """Compile the mutant, run it on the emulator, and link it into FOLDER/NAME.so."""
    import ptxemu.cutedsl  # noqa: F401 - keeps the PTX of what is compiled from here on
    from flashdsa.jit.loader import installed_hash
    from flashdsa.jit.shared_object import build_shared_object

    control = CONTROLS[name]
    function = control.compile()
    codes = [one.code for one in emulated(function, control) if one.level == "error"]
    verdict = {code: codes.count(code) for code in sorted(set(codes))}
    build_shared_object(object_of(folder, name), {"control": function}, installed_hash("sm90"))
    text = json.dumps({"what": control.what, "emulator": verdict})
    verdict_of(folder, name).write_text(text + "\n")


def emulated(function: Any, control: Control) -> list[Any]:
    """What ptxemu's check finds."""
    from ptxemu.cutedsl import emulate

    case = control.case
    if not isinstance(case, Fused):
        return case.emulated(function)
    inputs = case.inputs()
    ids = guarded(inputs.output(case.topk))
    with emulate(arch="sm_90a", on_finding="collect") as run:
        launch(function, control.plan, inputs, ids, case.clusters)
    return run.findings


def run(name: str, folder: Path) -> None:
    """Launch it once on the GPU, behind the right kernel, whose leavings in shared memory it may
    read for what it does not wait for."""
    from flashdsa.jit.loader import installed_hash
    from flashdsa.jit.shared_object import is_from, load_shared_object

    control = CONTROLS[name]
    if isinstance(control.case, Backward | IndexBackward):
        print(control.case.wrong(None) or "right")
    for one in dict.fromkeys(filter(None, (control.right, name))):
        path = object_of(folder, one)
        if not is_from(path, installed_hash("sm90")):
            sys.exit(f"{path}: built from other sources")
        print(f"{one}: {launched(load_shared_object(path)('control'), control)}")


def launched(function: Any, control: Control) -> str:
    """What became of a launch on the GPU."""
    case = control.case
    if not isinstance(case, Fused):
        return case.wrong(function) or "right"
    inputs = case.inputs()
    expected = case.expected(inputs)
    ids = guarded(expected.cuda())
    launch(function, control.plan, inputs.to("cuda"), ids, case.clusters)
    return f"{int((ids.cpu() != expected).sum())} of {expected.numel()} ids are wrong"


def guarded(like: Any) -> Any:
    """Zeros of the shape of `like`, with room before and behind."""
    room = like.new_zeros(2 * GUARD + like.numel())
    return room[GUARD : GUARD + like.numel()].view(like.shape)


def object_of(folder: Path, name: str) -> Path:
    """The mutant's shared object."""
    return folder / f"{name.replace(' ', '_')}.so"


def verdict_of(folder: Path, name: str) -> Path:
    """What ptxemu said of it."""
    return object_of(folder, name).with_suffix(".json")


if __name__ == "__main__":
    {"build": build, "run": run}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    print(DONE)
