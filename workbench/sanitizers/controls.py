"""Kernels with one synchronisation left out: racecheck must report them, or its silence says
nothing.

A mutant is compiled where CuTe DSL is, while one barrier or wait is left out, or with a read in
front of a wait, and asked ptxemu; it is launched where the GPU is. None can hang: no decision that
CTAs or threads take together depends on what is read too early.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import Tensor

from tests.kernels.indexer.inputs import Inputs
from workbench.small_calls.call import Small, emulator_of, gpu_of, replace_function
from workbench.small_calls.table import TABLE

NO_WORD = -12345678
"""Neither a count nor a weight."""
GUARD = 1 << 22
"""Elements before and after a mutant's ids."""
BLOCK = re.compile(r"(then|else|while|loop|if|for)_.*\d+$")
"""Names that CuTe DSL gives the body of a statement when it traces a function."""
Mutate = Callable[[], AbstractContextManager[None]]


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

    def unless_left_out(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner, line = traced(sys._getframe(1))
        if owner != function:
            return real(*args, **kwargs)
        if line not in lines:
            lines.append(line)
        return None if lines.index(line) == number else real(*args, **kwargs)

    with ExitStack() as stack:
        for name in ("barrier", "sync_threads"):
            kind = partial(unless_left_out, getattr(cute.arch, name))
            stack.enter_context(patch.object(cute.arch, name, kind))
        yield
    if number >= len(lines):
        raise LookupError(f"{function} has {len(lines)} barriers, none of number {number}")


@contextmanager
def without_wait(function: str, barrier: str) -> Iterator[None]:
    """Leave out a function's waits for an mbarrier.

    Raises:
        LookupError: it has none; the kernel has changed.
    """
    from flashdsa.dsl.pipeline import Barriers

    real = Barriers.wait
    left_out: list[str] = []

    def wait(self: Any, *args: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        callers = []
        while frame is not None:
            callers.append(frame.f_code.co_name)
            frame = frame.f_back
        if self.planned.name == barrier and function in callers:
            left_out.append(barrier)
        else:
            real(self, *args)

    with patch.object(Barriers, "wait", wait):
        yield
    if not left_out:
        raise LookupError(f"{function} does not wait for {barrier}")


@contextmanager
def read_before(waiting: str, caller: str, words_of: Callable[..., Any]) -> Iterator[None]:
    """Read an array's first words before a function of the fused indexer waits for them.

    They are never what they are compared with, but who compiles it cannot know.

    Args:
        waiting, caller: "module:function" and the module that calls it, in kernels.indexer.
        words_of: the array, of the function's arguments.
    """
    from importlib import import_module

    from cutlass import cute

    module, _, name = waiting.partition(":")
    owner = import_module(f"flashdsa.kernels.indexer.{module}")

    @cute.jit  # type: ignore[untyped-decorator]
    def read(words: Any) -> None:
        lane = cute.arch.lane_idx()
        if words[lane] == words.element_type(NO_WORD):
            words[lane] = words.element_type(0)

    def early(*args: Any) -> Any:
        read(words_of(*args))
        return getattr(owner, name)(*args)

    with patch.object(import_module(f"flashdsa.kernels.indexer.{caller}"), name, early):
        yield


@contextmanager
def lanes_do_not_wait() -> Iterator[None]:
    """Compile without the barriers of a warp's lanes."""
    from cutlass import cute

    with patch.object(cute.arch, "sync_warp", lambda *_, **__: None):
        yield


@dataclass(frozen=True)
class Control:
    """A mutant and the call that shows it.

    Attributes:
        what: is wrong with it. row: the kernel's in the table of small calls. call: its name there.
        mutate: makes a context in which the mutant is compiled.
        unseen: why racecheck reports nothing of it, which ptxemu does.
    """

    what: str
    row: str
    call: str
    mutate: Mutate
    unseen: str = ""

    @property
    def small_call(self) -> Small:
        return next(call for call in TABLE[self.row].calls if call.name == self.call)


def _barrier(function: str, number: int) -> Mutate:
    return partial(without_barrier, function, number)


def _wait(function: str, barrier: str) -> Mutate:
    return partial(without_wait, function, barrier)


_SHARED = "indexer-sm_90a", "shared row"
_COMPACTED = "indexer-sm_90a", "compacted, 16 heads"
_FWD = "mla-fwd-sm_90a", "two CTAs"
_LARGE = "two tiles and one"
_WGMMA = "does not see wgmma"
# fmt: off
CONTROLS = {
    "warp sums": Control("ids: sums of the warps are read before all are stored",
                         *_SHARED, _barrier("warp_sums", 0)),
    "candidates": Control("threshold: candidates are sent before all are stored",
                          *_SHARED, _barrier("gather", 0)),
    "threshold": Control("threshold: it is read before it is stored",
                         *_SHARED, _barrier("compare", 1)),
    "compacted": Control("list: overwritten before all of a block is read",
                         *_COMPACTED, _barrier("compact", 0)),
    "bitmap": Control("ids: the bitmap is read before all bits are set",
                      *_COMPACTED, _barrier("emit_by_position", 1), "does not see reductions"),
    "prefix": Control("ids: parts of a prefix sum are read too early",
                      *_COMPACTED, _barrier("warp_sums", 0)),
    "counts": Control("counts: read before their st.async messages are there", *_SHARED, partial(
        read_before, "select.exchange:find_kth", "select.threshold",
        lambda s, *_: s.cluster.coarse), "does not see st.async"),
    "weights": Control("weights: read before the bulk copy is complete", *_SHARED, partial(
        read_before, "schedule.work_tile:wait_for_tile", "select.tiles",
        lambda inputs, *_: inputs.weights)),
    "scales": Control("shared keys: scales are read before the copy is complete",
                      "prefill-sm_90a", "700 keys", _wait("score_segment", "key_full")),
    "counts of tiles": Control(
        "shared keys: counts are read before their st.async messages are there",
        "prefill-shared-sm_90a", "a cluster of three",
        partial(read_before, "select.exchange:find_kth", "sm90.prefill.together",
                lambda s, *_: s.cluster.coarse),
        "does not see st.async"),
    "order": Control("by score: lanes read words before others have stored them",
                     "indexer-order-sm_90a", "300, random", lanes_do_not_wait),
    "P of tile 1": Control("forward: tile 1's maxima are read before all are stored",
                      *_FWD, _wait("consume0", "p1_full")),
    "P of tile 0": Control("forward: tile 0's maxima are read before all are stored",
                       *_FWD, _wait("take_step", "p0_full")),
    "sums": Control("forward: consumer0's sums are read before all are stored",
                    *_FWD, _wait("merge_sums", "sums0_full")),
    "lists": Control("backward, lists: the warps' counts are read before all are stored",
                     "mla-bwd-fused-sm_90a", "16 heads", _barrier("write_range", 0)),
    "choice": Control("backward, choice: the warps' sums are read before all are stored",
                      "mla-bwd-lists-sm_90a", _LARGE, _barrier("choice_kernel", 0)),
    "places": Control("backward, slots: the warps' sums are read before all are stored",
                      "mla-bwd-slots-sm_90a", "16 heads", _barrier("sum_up_to", 1)),
    "keys": Control("backward, scores: keys are multiplied before they are there",
                    "mla-bwd-scores-sm_90a", _LARGE, _wait("issue_products", "k_full"), _WGMMA),
    "stage": Control("backward, dQ: keys are multiplied before they are there",
                     "mla-bwd-dq-sm_90a", _LARGE, _wait("multiply_all", "full"), _WGMMA),
    "rows": Control("backward, dKV: Q and dO are multiplied before they are there",
                    "mla-bwd-dkv-sm_90a", _LARGE, _wait("multiply_tile", "rows_full"), _WGMMA),
    "index lists": Control("index backward, lists: gradients are read before all are in the table",
                           "indexer-bwd-sm_90a", "seven queries", _barrier("fill_table", 0),
                           "does not see atomics"),
    "index images": Control("index backward: A is multiplied before all of it is stored",
                            "indexer-bwd-sm_90a", "seven queries", _barrier("publish", 0), _WGMMA),
    "decode P": Control("decode: tile 0's maxima are read before all are stored",
                        "mla-decode-packed-single-cta-sm_90a", "a CTA",
                        _wait("issue_tile0", "p0_full")),
    "decode O": Control("decode: O is read too early",
                        "mla-decode-packed-sm_90a", "any scale", _wait("write_share", "staged")),
    "stream-K ticket": Control("stream-K decode: the ticket is read before it is drawn",
                            "mla-decode-stream-k-packed-sm_90a", "three CTAs",
                            _wait("draw_ticket", "ticket_full")),
    "stream-K halves": Control("stream-K few heads: Q is written before halves in it are read",
                            "mla-decode-stream-k-heads16-sm_90a", "four CTAs",
                            _wait("take_stretches", "stretch_read")),
    "few heads P": Control("few heads: maxima are read before all are stored",
                           "mla-decode-heads16-sm_90a", "a CTA", _barrier("meet", 0)),
    "few heads O": Control("few heads: a half is added too early",
                           "mla-decode-heads16-sm_90a", "a CTA",
                           _wait("exchange_halves", "halves")),
}
# fmt: on
"""Controls by name."""


def build(name: str, folder: Path) -> dict[str, int]:
    """Compile the mutant, run it on the emulator, and link it into FOLDER/NAME.so; what ptxemu
    found of it: code -> number."""
    from flashdsa.jit.loader import compile_plan, installed_hash
    from flashdsa.jit.shared_object import build_shared_object

    control = CONTROLS[name]
    made: dict[Any, Any] = {}

    def mutant(spec: Any, plan: Any) -> Any:
        """Return the mutant of the first plan of the kernel that the call takes."""
        if spec is TABLE[control.row].spec and not made:
            with control.mutate():
                made[plan] = compile_plan(spec, plan)
        return made.get(plan)

    import ptxemu.cutedsl  # noqa: F401 - keeps the PTX of what is compiled from here on

    emulator = emulator_of(control.small_call)
    with replace_function(emulator, mutant):
        control.small_call.launch(emulator)
    codes = [one.code for one in emulator.findings if one.level == "error"]
    found = {code: codes.count(code) for code in sorted(set(codes))}
    ((plan, function),) = made.items()
    build_shared_object(object_of(folder, name), {"control": function}, installed_hash("sm90"))
    document = {"what": control.what, "plan": plan.name, "emulator": found}
    verdict_of(folder, name).write_text(json.dumps(document) + "\n")
    return found


def run(name: str, folder: Path) -> None:
    """Launch it on the GPU, after the right kernel, whose leavings in shared memory it may read
    for what it does not wait for."""
    from flashdsa.jit.loader import installed_hash, load
    from flashdsa.jit.shared_object import is_from, load_shared_object

    control, path = CONTROLS[name], object_of(folder, name)
    if not is_from(path, installed_hash("sm90")):
        sys.exit(f"{path}: built from other sources")
    plan_name = json.loads(verdict_of(folder, name).read_text())["plan"]
    mutant = load_shared_object(path)("control")
    is_mutant = False

    def either(spec: Any, plan: Any) -> Any:
        """Operations keep what they launch, so that it is chosen at each launch."""
        if plan.name != plan_name:
            return None
        right = load(spec, plan)
        return lambda *arguments: (mutant if is_mutant else right)(*arguments)

    runner = gpu_of(control.small_call)
    with replace_function(runner, either), patch.object(Inputs, "output", guarded(Inputs.output)):
        for is_mutant in (False, True):
            wrong = [v.message for v in control.small_call.judge(runner) if not v.passed]
            print(
                f"{'mutant' if is_mutant else 'kernel'}: {'; '.join(wrong) or 'no result is wrong'}"
            )
    print(f"ended {name}")


def guarded(output: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ids' buffer with room before and behind, where a mutant may write."""

    def buffer(*args: Any, **kwargs: Any) -> Tensor:
        like = output(*args, **kwargs)
        room = like.new_zeros(2 * GUARD + like.numel())
        return room[GUARD : GUARD + like.numel()].view(like.shape).copy_(like)

    return buffer


def object_of(folder: Path, name: str) -> Path:
    """The mutant's shared object."""
    return folder / f"{name.replace(' ', '_')}.so"


def verdict_of(folder: Path, name: str) -> Path:
    """Return the path of what ptxemu said of it."""
    return object_of(folder, name).with_suffix(".json")


if __name__ == "__main__":
    {"build": build, "run": run}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
