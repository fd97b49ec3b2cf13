"""One operand form of tcgen05.mma: operands in, one product, D's raw TMEM cells out.

all threads      | thread 0 of each CTA | the issuing thread (CTA 0 of a pair)
mark D, store A  | copy the tiles       |
barrier          |                      |
                 |                      | source product, commit   (if A is another product's D)
its D becomes A  |                      |
barrier          |                      | (tcgen05.cp,) product, commit
D to global      |                      |
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, Vector, cute
from cutlass.experimental import primitives as prims
from cutlass.memory import SmemAllocator

from flashdsa.dsl.umma import STEP_COLUMNS, UmmaProduct, shared_descriptor
from flashdsa.dsl.umma_issue import issue
from flashdsa.hw import TMEM_LANES
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

MARK = 0x7FC0DEAD
"""What the cells of D hold before: a NaN that no product gives."""
CHUNK = 32
"""TMEM columns that a thread moves at a time."""


class Context(NamedTuple):
    """What all parts of the kernel use."""

    plan: FormPlan
    tmem: Int32  # TMEM address of the allocation
    arena: cute.Pointer  # shared memory, at a multiple of 1024
    thread: Int32  # which is also the TMEM lane that it stores and loads


def _group(plan: FormPlan) -> str:
    return f"cta_{plan.cta_group}"


@cute.jit
def _issue(c: Context, product: cutlass.Constexpr[UmmaProduct], done: cute.Pointer) -> None:
    """All instructions of a product by one thread; a commit that arrives on `done` of each CTA."""
    issue(product, c.arena, c.tmem, True, 0, 0)
    _commit(c, done)


@cute.jit
def _commit(c: Context, done: cute.Pointer) -> None:
    if cutlass.const_expr(c.plan.cta_group == 2):
        prims.tcgen05_commit(done.to_llvm_ptr(), multicast_mask=3, group="cta_2")
    else:
        prims.tcgen05_commit(done.to_llvm_ptr(), group="cta_1")


@cute.jit
def _sync(c: Context) -> None:
    """Barrier of all threads of the CTA or pair, with what they stored to TMEM."""
    prims.tcgen05_wait("store")
    prims.tcgen05_fence("before_thread_sync")
    if cutlass.const_expr(c.plan.cta_group == 2):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    prims.tcgen05_fence("after_thread_sync")


@cute.jit
def _lanes(c: Context, column: cutlass.Constexpr[int], dtype: cutlass.Constexpr) -> Any:
    """Pointer to a column in the lanes of this warp."""
    return prims.make_tmem_ptr(c.tmem + column + ((c.thread // 32) << 21), dtype)


@cute.jit
def _mark(c: Context) -> None:
    """Every cell of the columns of D becomes MARK."""
    for product in c.plan.products:
        for first in cutlass.range_constexpr(0, product.columns, CHUNK):
            width = min(CHUNK, product.columns - first)
            marks = Vector.from_elements([Int32(MARK)] * width, Int32)
            prims.tcgen05_st("32x32b", _lanes(c, product.column + first, Int32), marks)


@cute.jit
def _store_rows(c: Context, rows: cute.Tensor) -> None:
    """A out of global memory (rows, words): each thread stores the row that its lane needs."""
    row = c.thread % c.plan.a_rows
    if cutlass.const_expr(c.plan.product.data_path == "F"):
        row = c.thread // 32 * 16 + c.thread % 16
    column = c.plan.product.a_columns.start
    for first in cutlass.range_constexpr(0, c.plan.a_words, CHUNK):
        width = min(CHUNK, c.plan.a_words - first)
        words = [rows[row, first + i] for i in range(width)]
        prims.tcgen05_st(
            "32x32b", _lanes(c, column + first, Int32), Vector.from_elements(words, Int32)
        )


@cute.jit
def _load_source(c: Context) -> Any:
    """The source's D in this thread's lane, rounded to bf16, two a word."""
    source = c.plan.products[0]
    values = prims.tcgen05_ld("32x32b", _lanes(c, source.column, Float32), num=source.columns)
    prims.tcgen05_wait("load")
    return values.to(BFloat16)


@cute.jit
def _exchange(c: Context, scratch: cute.Pointer) -> None:
    """Lanes l and l + 64 hold the two halves of a row: both get both, and store the row as A."""
    own = _load_source(c).bitcast(Int32)
    half = c.plan.a_words // 2
    stride = c.plan.a_words + 1  # odd: no bank conflicts
    words = cute.make_tensor(
        cute.recast_ptr(scratch, dtype=Int32),
        cute.make_layout((TMEM_LANES, half), stride=(stride, 1)),
    )
    for i in cutlass.range_constexpr(half):
        words[c.thread, i] = own[i]
    cute.arch.sync_threads()
    row = c.thread % 64
    halves = [words[row + 64 * side, i] for side in range(2) for i in range(half)]
    prims.tcgen05_st(
        "32x32b",
        _lanes(c, c.plan.product.a_columns.start, Int32),
        Vector.from_elements(halves, Int32),
    )


@cute.jit
def _transpose(c: Context, scratch: cute.Pointer) -> None:
    """Each thread writes its head's row of keys as a column of S^T in shared memory."""
    values = _load_source(c).bitcast(Uint16)
    head = c.thread // 32 * 16 + c.thread % 32
    heads, keys = c.plan.product.k, c.plan.products[0].n
    if cutlass.const_expr(c.plan.route == "transpose"):
        layout = cute.make_layout((keys, heads), stride=(heads + 2, 1))  # an odd number of words
    else:  # 8 x 16 bytes core matrices: K-major without swizzle
        layout = cute.make_layout((keys, (8, heads // 8)), stride=(8, (1, 8 * keys)))
    transposed = cute.make_tensor(cute.recast_ptr(scratch, dtype=Uint16), layout)
    if c.thread % 32 < 16:  # data path F: 16 of 32 lanes hold rows
        for key in cutlass.range_constexpr(keys):
            transposed[key, head] = values[key]


@cute.jit
def _store_transposed(c: Context, scratch: cute.Pointer) -> None:
    """Every group of 32 lanes gets the rows (key) of S^T (keys, heads)."""
    count = c.plan.a_words
    words = cute.make_tensor(
        cute.recast_ptr(scratch, dtype=Int32),
        cute.make_layout((c.plan.product.rows, count), stride=(count + 1, 1)),
    )
    row = c.thread % c.plan.product.rows
    prims.tcgen05_st(
        "32x32b",
        _lanes(c, c.plan.product.a_columns.start, Int32),
        Vector.from_elements([words[row, i] for i in range(count)], Int32),
    )


@cute.jit
def _copy_transposed(c: Context, scratch: cute.Pointer) -> None:
    """The same by one thread: 8 heads of 32 keys a tcgen05.cp, to all four groups of lanes."""
    base = Int64(scratch.toint()) >> 4
    rows = c.plan.product.rows
    first = c.plan.product.a_columns.start
    for step in cutlass.range_constexpr(c.plan.product.k // 8):
        prims.tcgen05_cp(
            "shape_32x128b",
            prims.make_tmem_ptr(c.tmem + first + step * STEP_COLUMNS // 2, Int32),
            base + shared_descriptor(step * rows * 16, 16, 128, 0),
            group=_group(c.plan),
            multicast="warpx4",
        )


@cute.jit
def _dump(c: Context, out: cute.Tensor) -> None:
    """D's columns of all lanes to `out` (lanes, columns)."""
    product = c.plan.product
    for first in cutlass.range_constexpr(0, product.columns, CHUNK):
        width = min(CHUNK, product.columns - first)
        cells = prims.tcgen05_ld("32x32b", _lanes(c, product.column + first, Int32), num=width)
        prims.tcgen05_wait("load")
        for i in cutlass.range_constexpr(width):
            out[c.thread, first + i] = cells[i]


@cute.kernel
def form_kernel(
    image: cute.Tensor, rows: cute.Tensor, out: cute.Tensor, plan: cutlass.Constexpr[FormPlan]
) -> None:
    """image (CTAs, words): the tiles; rows (CTAs, rows, words): A; out (CTAs, 128, columns): D."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    allocator = SmemAllocator()
    arena = allocator.allocate(plan.smem_bytes, 1024)
    barriers = allocator.allocate_array(Int64, 3)
    hold = allocator.allocate_array(Int32, 1)
    loaded, source_done, done = barriers, barriers + 1, barriers + 2
    if thread == 0:
        for i in cutlass.range_constexpr(3):
            cute.arch.mbarrier_init(barriers + i, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        prims.tcgen05_alloc(hold.to_llvm_ptr(), plan.allocated_columns, group=_group(plan))
        prims.tcgen05_relinquish_alloc_permit(group=_group(plan))
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.sync_threads()
    prims.tcgen05_fence("after_thread_sync")
    c = Context(plan, hold.load(), arena, thread)
    scratch = arena + plan.scratch

    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(loaded, plan.image_bytes)
        prims.cp_async_bulk_shared_cluster_global(
            arena.to_llvm_ptr(),
            (image.iterator + block * image.shape[1]).to_llvm_ptr(),
            loaded.to_llvm_ptr(),
            plan.image_bytes,
        )
    _mark(c)
    if cutlass.const_expr(plan.route == "rows"):
        _store_rows(c, rows[block, None, None])
    # loaded: the tiles are in this CTA's shared memory; the barrier says so to the issuing thread.
    cute.arch.mbarrier_wait(loaded, 0)
    _sync(c)

    if cutlass.const_expr(plan.source is not None):
        if warp == 0 and rank == 0:
            if prims.elect_sync():
                _issue(c, plan.products[0], source_done)
        cute.arch.mbarrier_wait(source_done, 0)
        prims.tcgen05_fence("after_thread_sync")
        if cutlass.const_expr(plan.route == "exchange"):
            _exchange(c, scratch)
        else:
            _transpose(c, scratch)
            if cutlass.const_expr(plan.route == "copy"):
                # generic writes above -> tcgen05.cp below reads through the async proxy
                cute.arch.fence_proxy("async.shared", space="cta")
            else:
                cute.arch.sync_threads()
                _store_transposed(c, scratch)
        _sync(c)

    if warp == 0 and rank == 0:
        if prims.elect_sync():
            if cutlass.const_expr(plan.route == "copy"):
                _copy_transposed(c, scratch)  # tcgen05.cp -> tcgen05.mma run in order
            _issue(c, plan.product, done)
    cute.arch.mbarrier_wait(done, 0)
    prims.tcgen05_fence("after_thread_sync")
    _dump(c, out[block, None, None])
    _sync(c)
    if warp == 0:
        prims.tcgen05_dealloc(
            prims.make_tmem_ptr(c.tmem, Int32), plan.allocated_columns, group=_group(plan)
        )


@cute.jit
def run_form(
    image: cute.Tensor, rows: cute.Tensor, out: cute.Tensor, plan: cutlass.Constexpr[FormPlan]
) -> None:
    """One launch of as many CTAs or pairs as `image` has rows."""
    form_kernel(image, rows, out, plan).launch(
        grid=(image.shape[0], 1, 1), block=(TMEM_LANES, 1, 1), cluster=(plan.cta_group, 1, 1)
    )
