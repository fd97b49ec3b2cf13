"""Choices of the kernels that pool tokens into entries, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashdsa.hw import WARP_SIZE
from flashdsa.plan import SmemRegion, UniformPlan

ROW_ALIGNMENT = 8
"""bf16 of which rows of kv begin at multiples."""
AT_ONCE = 4
"""Most slots of a thread whose loads are in flight together."""
MOST_SLOTS = 32
"""Most slots of a thread; more are shared out among groups of an entry's threads."""
ROTATED = 64
"""Last columns that are rotated."""
WORD = 4
SLICE = 64
"""Columns of a CTA that has the same slots of many entries."""
NUMBERS = 5
"""Numbers of a column that such a CTA is given."""
POOLED = 3
"""Numbers of a column that groups merge: largest logit, sum of weights, sum of weighted kv."""


@dataclass(frozen=True)
class CompressPlan(UniformPlan):
    """One compiled kernel; kv and gates are bf16, all else is fp32.

    Attributes:
        ratio, overlap: of `compress_kv`. d: columns of an entry.
        ape: there is a position bias.
        finished: there are a norm and a rotation of 64 columns.
        state: tokens of earlier calls are in a ring of each sequence.
        gradient: the gradients are written, not the entries; of entries of more slots than a thread
            has, what each column needs for them.
        sliced: the gradients of such entries are written.
    """

    ratio: int = 4
    overlap: bool = True
    d: int = 512
    ape: bool = True
    finished: bool = True
    state: bool = False
    gradient: bool = False
    sliced: bool = False

    def __post_init__(self) -> None:
        if self.d not in (128, 512):
            raise ValueError(f"d: expected 128 or 512; got {self.d}")
        if self.sliced and not (self.gradient and self.groups > 1 and self.ape and self.finished):
            raise ValueError("sliced: expected a gradient of more slots than a thread has")

    @property
    def slots(self) -> int:
        return self.ratio * (1 + self.overlap)

    @property
    def whole(self) -> bool:
        """Whether a thread has the gradients of all slots of an entry."""
        return self.gradient and self.groups == 1

    @property
    def unit(self) -> int:
        """Columns of a thread; the backward has numbers of all slots of each in registers."""
        return 4 if self.whole else 8

    @property
    def lanes(self) -> int:
        """Threads of a group: each has a unit of an entry's columns."""
        return self.d // self.unit

    @property
    def groups(self) -> int:
        """Groups of threads that share an entry's slots."""
        return -(-self.slots // MOST_SLOTS)

    @property
    def threads(self) -> int:
        return 128 if self.whole else 256

    @property
    def entries(self) -> int:
        """Entries that a CTA has at a time."""
        return self.threads // (self.lanes * self.groups)

    @property
    def resident(self) -> int:
        """CTAs of the backward that an SM's registers hold."""
        return 1 if self.sliced else 4 if self.slots > AT_ONCE else 8

    @property
    def regions(self) -> list[SmemRegion]:
        merged = self.threads * self.unit * POOLED * WORD if self.groups > 1 else 0
        sums = self.threads * self.unit * self.slots * WORD if self.whole and self.ape else 0
        regions = [
            SmemRegion("sums", 2 * self.threads // WARP_SIZE * WORD, 16, "of a warp's columns"),
            SmemRegion("merged", merged, 16, "what each group has pooled"),
            SmemRegion("d_ape", sums, 16, "each thread's sums of its slots and columns"),
        ]
        return [] if self.sliced else [region for region in regions if region.bytes]

    @property
    def name(self) -> str:
        windows = "_overlap" if self.overlap else ""
        parts = ("_ape" if self.ape else "") + ("_finished" if self.finished else "")
        way = "_bwd_slots" if self.sliced else "_bwd" if self.gradient else ""
        way += "_state" if self.state else ""
        return f"compress_kv{way}_{self.ratio}{windows}_{self.d}{parts}"


MODELS = (
    CompressPlan(),  # DeepSeek-V4, CSA
    CompressPlan(d=128),  # its index keys
    CompressPlan(ratio=128, overlap=False),  # HCA
    CompressPlan(ratio=2, overlap=False, ape=False),  # DeepSeek-V4.1
    CompressPlan(overlap=False, d=128, finished=False),  # GLM-5.3's index keys
)
"""Forward kernels of the models that have entries."""
STATES = tuple(replace(plan, state=True) for plan in MODELS)
"""Their kernels of calls with a state."""
GRADIENTS = (
    *(replace(plan, gradient=True) for plan in MODELS),
    *(replace(plan, gradient=True, sliced=True) for plan in MODELS if plan.groups > 1),
)
"""Their backward kernels."""
