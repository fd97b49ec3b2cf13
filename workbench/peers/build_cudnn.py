"""cuDNN Frontend's kernels of Hopper that the benches have as peers, compiled ahead of time.

Its own wrappers compile them with CuTe DSL when they are called. This compiles, on a machine
without a GPU, what draws and cases ask for: the top-k, the bf16 logits (of a sequence, and packed),
the backward of sparse MLA, the target, the scores and the backward of the indexer. The shared
objects stand beside a module, cudnn_kernels, that calls them as the wrappers do. Put the folder on
PYTHONPATH. All of it takes half an hour on two cores; a part that is there is not made again.

    python -m workbench.peers.build_cudnn UNPACKED_WHEEL FOLDER [PART ...]
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.hw import SM90
from flashdsa.jit.shared_object import build_shared_object
from flashdsa.problem import D_QK, D_V, INDEX_HEAD_DIM

DSA = "cudnn.deepseek_sparse_attention"
PACKAGES = ("", ".deepseek_sparse_attention", ".frost", *(
    f".deepseek_sparse_attention.{name}"
    for name in (
        "indexer_forward", "indexer_top_k", "utils", "utils.sm90", "sparse_attention_backward",
        "score_recompute", "indexer_backward",
    )
))  # fmt: skip
HOST = {"api_base": ("WorkspaceCarver", "ws_align"), "frost.buffers": ("memset_zero_async",)}
"""Names of host code that is imported and not called here."""
BF16, F32, I32 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32
ALIGNMENT = 16
WIDTHS = tuple(2**n for n in range(9, 20))
INDEX_TOPKS = (512, 1024, 2048)
ROWS = {"few": 1, "many": 1000}
"""Above 148 rows its top-k takes less shared memory of an SM."""
HEADS = (8, 16, 32, 64, 128)
CLASSES = (128, 256, 512, 1024, 2048)
"""topk of the training kernels, a constant in them; other ones are filled up with -1."""
MODULE = Path(__file__).with_name("cudnn_module.py")
Compiled = Iterator[tuple[str, Any]]


def import_kernel(unpacked: Path, module: str) -> Any:
    """A kernel's module, without its packages' own imports, which ask for a GPU's libraries."""
    for name in PACKAGES:
        package = types.ModuleType(f"cudnn{name}")
        package.__path__ = [str(unpacked / f"cudnn{name}".replace(".", "/"))]
        sys.modules[package.__name__] = package
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True
    for name, functions in HOST.items():
        host = types.ModuleType(f"cudnn.{name}")
        vars(host).update(dict.fromkeys(functions))
        sys.modules[host.__name__] = host
    return import_module(module)


def compact(dtype: Any, *shape: Any, align: int = ALIGNMENT) -> Any:
    """A tensor without gaps to compile for."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def sizes(count: int, divisibility: int = 1) -> list[Any]:
    """Free sizes."""
    return [cute.sym_int(divisibility=divisibility) for _ in range(count)]


def compiled(kernel: Any, *operands: Any) -> Any:
    """The TVM-FFI function of a kernel; it runs on torch's stream."""
    return cute.compile(kernel, *operands, options=options_for(SM90))


def stream() -> Any:
    """The stream of the call."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def top_k(unpacked: Path) -> Compiled:
    """A kernel for each width, number of rows and k, as its own cache has them."""
    kernel = import_kernel(unpacked, f"{DSA}.indexer_top_k.indexer_top_k_decode_varlen")
    for k in INDEX_TOPKS:
        for width in WIDTHS:
            for name, rows in ROWS.items():
                yield (
                    f"topk_{width}_{name}_{k}",
                    kernel.compile_topk_kernel(torch.float32, rows, width, k, 1, return_val=False),
                )


def logits(unpacked: Path) -> Compiled:
    """Causal logits of (1, S) queries over (1, T) keys, and of packed sequences ("thd")."""
    kernel = import_kernel(unpacked, f"{DSA}.indexer_forward.indexer_fwd_sm90")
    for heads in (16, 32, 64):
        for packed in (False, True):
            (queries, batch), (keys,) = sizes(2), sizes(1, 8)
            one = () if packed else (1,)
            forward = kernel.IndexerForwardSm90(
                BF16, F32, head_dim=INDEX_HEAD_DIM, qhead_per_kvhead=heads, ratio=1,
                is_varlen=packed, use_unchecked_qh64=False, use_unchecked_qh64_masked=False,
                compute_lse=False,
            )  # fmt: skip
            ends = [compact(I32, batch, align=4) if packed else None for _ in range(2)]
            offsets = None if packed else compact(I32, 1, align=4)
            width = cute.sym_int(divisibility=8)
            yield (
                f"logits_h{heads}_{'thd' if packed else 'bf16'}",
                compiled(
                    forward,
                    compact(BF16, *one, queries, heads, INDEX_HEAD_DIM),
                    compact(BF16, *one, keys, 1, INDEX_HEAD_DIM),
                    compact(F32, *one, queries, heads),
                    None,
                    None,
                    compact(F32, *one, queries, width),
                    None,
                    I32(1), I32(1), I32(1), F32(1.0),
                    *ends,
                    offsets,
                    stream(),
                ),
            )  # fmt: skip


def backward(unpacked: Path) -> Compiled:
    """The backward of sparse MLA: of any topk with lengths, and of topk 2,048 without."""
    kernel = import_kernel(unpacked, f"{DSA}.sparse_attention_backward.dsa_bwd_sm90")
    for heads in HEADS:
        s, keys, rounded, size = sizes(4)
        of_heads = compact(F32, 1, rounded, heads)
        before = kernel._FlashAttentionDSABackwardPreprocessSm90(BF16, D_V, 90, 64, num_threads=256)
        values, sink = compact(BF16, 1, s, heads, D_V), compact(F32, heads)
        lse = compact(F32, 1, s, heads, align=4)
        operands = values, values, of_heads, lse, of_heads, sink, sink, None, None, None
        yield f"before_h{heads}", compiled(before, *operands, stream())
        for name, lengths in (("lengths", True), ("2048", False)):
            main = kernel.FlashAttentionDSABackwardSm90(
                BF16, D_QK, D_V, heads, tile_m=64, tile_n=64, KV_stage=1, PdS_stage=1,
                SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, num_threads=256,
                have_topk_length=lengths, max_topk=2048,
            )  # fmt: skip
            q = compact(BF16, 1, s, heads, D_QK)
            operands = (
                q,
                compact(BF16, 1, keys, 1, D_QK),
                values,
                of_heads,
                of_heads,
                q,
                compact(F32, 1, 1, size),
                compact(I32, 1, s, cute.sym_int(divisibility=4)),
                compact(I32, 1, s) if lengths else None,
                F32(1.0),
            )
            yield f"backward_h{heads}_{name}", compiled(main, *operands, stream())
    after = kernel._FlashAttentionDSABackwardPostprocessSm90(
        BF16, hdim_chunk=64, tile_n=64, head_dim=D_QK, num_threads=64, N_hdim_chunks=9
    )
    operands = compact(F32, 1, 1, size), compact(BF16, 1, keys, 1, D_QK), I32(1)
    yield "after", compiled(after, *operands, stream())


def recompute(unpacked: Path) -> Compiled:
    """The target of each number of heads, and the softmax of scores."""
    kernel = import_kernel(unpacked, f"{DSA}.score_recompute.sparse_score_recompute_sm90")
    kinds = [("target", heads, D_QK) for heads in HEADS]
    kinds += [("scores", heads, INDEX_HEAD_DIM) for heads in (32, 64)]
    for topk in CLASSES:
        for name, heads, columns in kinds:
            s, keys = sizes(2)
            scores = kernel.SparseScoreRecomputeSm90(
                BF16, head_dim=columns, qhead_per_kvhead=heads, tile_m=min(heads, 64), tile_n=64,
                num_threads=256, swap_AB=True, topk_max=topk, is_index_scores=name == "scores",
                softmax_scale=D_QK**-0.5 if name == "target" else 1.0, has_topk_length=True,
                num_head_tiles=max(1, heads // 64), is_sparse=True, output_log_probs=False,
                topk_indices_global=True,
            )  # fmt: skip
            of_heads = BF16 if name == "scores" else F32
            yield (
                f"{name}_h{heads}_{topk}",
                compiled(
                    scores,
                    compact(BF16, 1, s, heads, columns),
                    compact(BF16, 1, keys, 1, columns),
                    compact(I32, 1, s, topk),
                    stream(),
                    compact(F32, 1, s, topk),
                    compact(of_heads, 1, heads, cute.sym_int(divisibility=8)),
                    compact(I32, 1, s),
                    None,
                ),
            )


def index_backward(unpacked: Path) -> Compiled:
    """The backward of the indexer, of 64 heads."""
    kernel = import_kernel(unpacked, f"{DSA}.indexer_backward.indexer_backward_sm90")
    for topk in CLASSES:
        s, keys = sizes(2)
        main = kernel.IndexerBackwardSm90(
            head_dim=INDEX_HEAD_DIM, heads=64, block_I=128, topk=topk, topk_indices_global=True
        )
        q, weights = compact(BF16, 1, s, 64, INDEX_HEAD_DIM), compact(BF16, 1, s, 64)
        k = [compact(one, 1, keys, INDEX_HEAD_DIM) for one in (BF16, F32)]
        slots = [compact(one, 1, s, topk) for one in (F32, I32)]
        operands = q, weights, k[0], q, weights, k[1], *slots, F32(1.0), stream(), None, None
        yield f"index_backward_{topk}", compiled(main, *operands, I32(1), I32(1))


PARTS: dict[str, Callable[[Path], Compiled]] = {
    one.__name__: one for one in (logits, index_backward, recompute, backward, top_k)
}


def main() -> None:
    """Compile the parts, and write the module beside their objects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("unpacked", type=Path, help="the folder of the unpacked wheel")
    parser.add_argument("target", type=Path, help="a folder")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; by default all")
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    (arguments.target / "cudnn_kernels.py").write_text(MODULE.read_text())
    for part in arguments.parts or PARTS:
        library = arguments.target / f"libcudnn_{part}.so"
        functions = {}
        for name, function in () if library.exists() else PARTS[part](arguments.unpacked):
            functions[name] = function
            print(name, flush=True)
        if functions:
            build_shared_object(library, functions, "cudnn")


if __name__ == "__main__":
    main()
