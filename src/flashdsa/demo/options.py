"""What a demo run is asked to do: the sizes and places a user may choose, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashdsa.output_paths import require_creatable

LARGEST_SEED = 2**63 - 1
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
DEVICES = ("cpu", "cuda")
SIZES = MappingProxyType(
    {
        "cpu": MappingProxyType({"window": 1280, "num_queries": 256, "topk": 256, "num_heads": 4}),
        "cuda": MappingProxyType(
            {"window": 4096, "num_queries": 2048, "topk": 512, "num_heads": 16}
        ),
    }
)
"""By device: two minutes on two CPU cores; on a Hopper GPU seconds, and sizes of its kernels."""


@dataclass(frozen=True)
class DemoOptions:
    """Choices of one run; the defaults take some two minutes on two CPU cores.

    Each training window has `window` bytes; its last `num_queries` positions are the queries, so
    every query's context is at least `window - num_queries + 1` bytes, out of which it selects
    `topk`. `batch` windows share one pool of pages. `indices`, where given, is the file that what
    the trained indexer chose on the held-out windows is saved to, [windows, num_queries, topk].
    `on` has the sizes that suit a device.
    """

    steps: int = 200
    window: int = SIZES["cpu"]["window"]
    num_queries: int = SIZES["cpu"]["num_queries"]
    topk: int = SIZES["cpu"]["topk"]
    num_heads: int = SIZES["cpu"]["num_heads"]
    batch: int = 1
    seed: int = 0
    learning_rate: float = 3e-3
    eval_every: int = 25
    eval_windows: int = 4
    picture: Path = Path("out/demo.png")
    backend: str = "auto"
    indices: Path | None = None
    device: str = "cpu"

    @classmethod
    def on(cls, device: str, **choices: Any) -> DemoOptions:
        """The options of a run on `device`, one of `DEVICES`; sizes that are None suit it."""
        given = {name: value for name, value in choices.items() if value is not None}
        return cls(**{**SIZES[device], **given, "device": device})

    @property
    def warm_up_steps(self) -> int:
        """In which dense attention teaches the indexer; in the others sparse attention does."""
        return -(-self.steps // 2)

    @property
    def smallest_context(self) -> int:
        """Bytes that the first query of a window can see, itself included."""
        return self.window - self.num_queries + 1

    def __post_init__(self) -> None:
        """Raise ValueError naming the option, what was expected, and what came."""
        object.__setattr__(self, "picture", Path(self.picture))
        counts = ("steps", "window", "num_queries", "topk", "num_heads", "batch")
        for name in (*counts, "eval_every", "eval_windows"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if self.num_queries > self.window:
            raise ValueError(
                f"num_queries: expected at most window = {self.window}, got {self.num_queries}"
            )
        if self.topk >= self.smallest_context:
            raise ValueError(
                f"topk: expected less than the smallest context, window - num_queries + 1 = "
                f"{self.smallest_context}, so that queries really select; got {self.topk}"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"seed: expected an integer in [0, 2^63), got {self.seed!r}")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate: expected a number > 0, got {self.learning_rate}")
        if self.picture.suffix not in PICTURE_SUFFIXES:
            raise ValueError(
                f"picture: expected a name ending in {', '.join(PICTURE_SUFFIXES)}, "
                f"got {str(self.picture)!r}"
            )
        if self.picture.is_dir():
            raise ValueError(f"picture: expected a file name, got the folder {str(self.picture)!r}")

    def require_writable_files(self) -> None:
        """Make the folders of picture and indices; raise ValueError if one cannot be written."""
        for name, path in (("picture", self.picture), ("indices", self.indices)):
            if path is not None:
                require_creatable(name, path)
                path.parent.mkdir(parents=True, exist_ok=True)
