"""Stretches of dealt tiles in shared memory, as the gather stores them for the consumers."""

from typing import Any

from cutlass import Int32, cute

from flashdsa.dsl.smem import store_words
from flashdsa.kernels.attention.sm90.decode.shared.context import Context, DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.dealing import (
    Batch,
    Parts,
    is_part,
    parts_of_item,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import STRETCH_BYTES
from flashdsa.kernels.attention.sm90.decode.shared.words import load_words_again


@cute.jit
def store_stretch(ctx: Context, batch: Batch, number: Int32) -> None:
    """One thread: store a stretch for the consumers, who have read the one before the last."""
    parts = Parts(Int32(0), Int32(1))
    if is_part(ctx, batch):
        parts = parts_of_item(ctx, batch, number)
    store_words(place_of(ctx.memory, number), [ctx.query, ctx.head, parts.first, parts.count])


def place_of(memory: DecodeMemory, number: Any) -> Any:
    """Address of a stretch."""
    return memory.stretches.address() + (number & 1) * STRETCH_BYTES


def load_stretch(memory: DecodeMemory, number: Any, thread: Any) -> Context:
    """The CTA's stretch of that number, as a thread of a consumer's warpgroup takes it; its slots
    are the gather's."""
    query, head, _, _ = load_words_again(place_of(memory, number))
    return any_stretch(memory, thread)._replace(query=query, head=head)


def any_stretch(memory: DecodeMemory, thread: Any) -> Context:
    """A stretch as a thread of a consumer's warpgroup knows each: without its item and slots."""
    none = Int32(0)
    return Context(memory, none, none, none, none, none, none, none, thread, None)


def load_parts(memory: DecodeMemory, number: Any) -> Parts:
    """Parts of the item of a stretch."""
    return Parts(*load_words_again(place_of(memory, number))[2:])
