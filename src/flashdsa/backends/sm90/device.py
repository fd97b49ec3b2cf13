"""What the launches of every operation ask about the device and the process."""

from __future__ import annotations

from functools import lru_cache

import torch

from flashdsa.settings import Settings


@lru_cache
def num_ctas(device: torch.device) -> int:
    """One CTA an SM."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def values_are_checked() -> bool:
    """Whether the values of device tensors are to be read: asked for, and no graph is captured."""
    captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return Settings.from_environment().check and not captures
