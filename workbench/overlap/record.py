"""The lists that a model of transformers selects, kept while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def recorded_lists(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A dictionary that fills while `model` runs inside the block: by an indexer's name the ids of
    its last call, (batch, S, topk). `torch.save` makes of it what ``overlap --layers`` reads.

    An indexer is a module whose class has "Indexer" in its name and that returns integers. Lists
    are as the model gives them: ids of keys that a query does not see are among them if the model
    leaves it to the mask.
    """
    lists: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(_: nn.Module, __: object, output: object, name: str = name) -> None:
            if isinstance(output, Tensor) and output.dtype in (torch.int32, torch.int64):
                lists[name] = output.detach().cpu()

        if "Indexer" in type(module).__name__:
            handles.append(module.register_forward_hook(keep))
    try:
        yield lists
    finally:
        for handle in handles:
            handle.remove()
