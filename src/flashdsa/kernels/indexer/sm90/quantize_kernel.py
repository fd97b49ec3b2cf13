"""Quantisation of vectors of 128 to e4m3 with an fp32 scale each, into the packed cache or arrays.

A vector has 8 lanes, a lane 16 elements: largest magnitude by shuffles, scale, 16 bytes stored at
once.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute

from flashdsa import problem
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.grids import launch_ctas
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan

THREADS = 256
LANES_EACH = 8
ELEMENTS_EACH = problem.INDEX_HEAD_DIM // LANES_EACH
SIGN_CLEARED = 0x7FFFFFFF
LOW_WORD = 0xFFFFFFFF


@cute.jit
def load_elements(vectors: cute.Tensor, vector: Int32, part: Int32) -> cute.Tensor:
    """This lane's elements of the vector, exactly, as fp32."""
    start = vectors.iterator + (Int64(vector) * problem.INDEX_HEAD_DIM + part * ELEMENTS_EACH)
    mine = cute.make_tensor(start.align(16), cute.make_layout(ELEMENTS_EACH))
    loaded = cute.make_rmem_tensor(ELEMENTS_EACH, vectors.element_type)
    cute.autovec_copy(mine, loaded)
    elements = cute.make_rmem_tensor(ELEMENTS_EACH, Float32)
    elements.store(loaded.load().to(Float32))
    return elements


@cute.jit
def divide(numerator: Float32, denominator: Float32) -> Float32:
    """The IEEE quotient, rounded to nearest, whatever the compiler's flags."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[numerator, denominator],
    )


@cute.jit
def scale_of(elements: cute.Tensor) -> Float32:
    """max(amax, MIN_AMAX) / 448 of the vector; NaN if the vector has one. Magnitudes compare as
    their bits do; NaN's bits are above those of infinity."""
    largest = Uint32(0)
    for i in cutlass.range_constexpr(ELEMENTS_EACH):
        largest = cutlass.max(largest, elements[i].bitcast(Uint32) & Uint32(SIGN_CLEARED))
    for step in cutlass.range_constexpr(3):
        other = cute.arch.shuffle_sync_bfly(largest, 1 << step)
        largest = cutlass.max(largest, other)
    amax = largest.bitcast(Float32)
    if amax < Float32(problem.MIN_AMAX):
        amax = Float32(problem.MIN_AMAX)
    return divide(amax, Float32(problem.E4M3_MAX))


@cute.jit
def quantize(elements: cute.Tensor, scale: Float32) -> cute.Tensor:
    """This lane's elements over the scale, as the 16 bytes of e4m3 in 4 words."""
    words = cute.make_rmem_tensor(ELEMENTS_EACH // 4, Uint32)
    for i in cutlass.range_constexpr(ELEMENTS_EACH // 4):
        words[i] = cute.arch.inline_ptx(
            "{.reg .b16 low, high;\n"
            "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\n"
            "mov.b32 {$w0}, {low, high};}",
            write_only_types=[Uint32],
            read_only_args=[divide(elements[4 * i + k], scale) for k in range(4)],
        )
    return words


@cute.jit
def store_words(words: cute.Tensor, address: Any) -> None:
    """Store 16 bytes to device memory."""
    target = cute.recast_ptr(address.align(16), dtype=Uint32)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(ELEMENTS_EACH // 4)))


@cute.jit
def slot_of(slots: cute.Tensor, vector: Int32, count: Int32) -> Int64:
    """The vector's slot; arguments as in `launch_write`."""
    slot = Int64(0)
    if slots.shape[0] > count:
        low, high = slots[2 * vector], slots[2 * vector + 1]
        slot = (Int64(high) << 32) | (Int64(low) & LOW_WORD)
    else:
        slot = Int64(slots[vector])
    return slot


@cute.kernel
def quantize_kernel(
    vectors: cute.Tensor, slots: Any, out: cute.Tensor, scales: Any, plan: cutlass.Constexpr
):
    """One CTA of the grid; arguments as in `launch_write` and `launch_quantize`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    vector = (cta * THREADS + thread) // LANES_EACH
    part = thread % LANES_EACH
    count = vectors.shape[0]
    # Lanes past the last vector take part in the shuffles, and store nothing.
    elements = load_elements(vectors, cutlass.min(vector, count - 1), part)
    scale = scale_of(elements)
    words = quantize(elements, scale)
    if vector < count:
        if const_expr(not plan.to_cache):
            store_words(
                words, out.iterator + Int64(vector) * problem.INDEX_HEAD_DIM + part * ELEMENTS_EACH
            )
            if part == 0:
                scales[vector] = scale
        else:
            slot = slot_of(slots, vector, count)
            if slot >= 0 and slot < Int64(out.shape[0]) * problem.PAGE_SIZE:
                page = out.iterator + (slot // problem.PAGE_SIZE) * out.stride[0]
                offset = Int32(slot % problem.PAGE_SIZE)
                store_words(words, page + (offset * problem.INDEX_HEAD_DIM + part * ELEMENTS_EACH))
                if part == 0:
                    address = (
                        page + (problem.PAGE_KEY_BYTES + offset * problem.SCALE_BYTES)
                    ).align(problem.SCALE_BYTES)
                    cute.recast_ptr(address, dtype=Float32).store(scale)


@cute.jit
def launch_write(
    plan: cutlass.Constexpr, stream: Any, keys: cute.Tensor, slots: cute.Tensor, cache: cute.Tensor
):
    """Quantise `keys` (T, 128) and write key t into its slot, page * 64 + offset, of `cache`
    (num_pages, 8448) bytes, any distance between pages, on `stream`. Slots outside the cache are
    skipped. `slots`: a slot for each key in one word or two, low word first: (T,) or (2 T,) int32.
    """
    launch_ctas(quantize_kernel(keys, slots, cache, None, plan), ctas_of(keys), THREADS, stream)


@cute.jit
def launch_quantize(
    plan: cutlass.Constexpr,
    stream: Any,
    vectors: cute.Tensor,
    fp8: cute.Tensor,
    scales: cute.Tensor,
):
    """Quantise `vectors` (T, 128) into `fp8` (T, 128) bytes and `scales` (T,), on `stream`."""
    made = quantize_kernel(vectors, None, fp8, scales, plan)
    launch_ctas(made, ctas_of(vectors), THREADS, stream)


def ctas_of(vectors: cute.Tensor) -> Any:
    """CTAs of a launch."""
    return (vectors.shape[0] * LANES_EACH + THREADS - 1) // THREADS


def compile_quantize(plan: QuantizePlan) -> Any:
    """Compile `launch_write`, or `launch_quantize` for a plan without slots."""
    count = cute.sym_int32()
    element = BFloat16 if plan.dtype == "bfloat16" else Float32
    vectors = fake.fake_tensor(element, (count, problem.INDEX_HEAD_DIM))
    if plan.to_cache:
        others = fake.words(*fake.symbols(1)), fake.fake_pages(Uint8, (problem.PAGE_BYTES,))
        return compile_launch(SM90, launch_write, plan, vectors, *others)
    others = fake.fake_tensor(Uint8, (count, problem.INDEX_HEAD_DIM)), fake.numbers(count)
    return compile_launch(SM90, launch_quantize, plan, vectors, *others)
