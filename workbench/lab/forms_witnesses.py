"""Kernels of strangers that use the same operand forms: seen on the emulator, with right results.

`workbench/probes/record_operand_forms.py` wrote the table down from runs of their own scripts under
`ptxemu exec`; every script checked its own result. What is not here, only the emulator confirms.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.dsl.umma import SharedOperand, UmmaProduct
from workbench.lab.forms_catalog import OperandForm

IN_TMEM = "TMEM"
EMULATOR_ONLY = "emulator only"


@dataclass(frozen=True)
class Witness:
    """A form in a kernel that nobody here wrote; .kind::f16.

    Attributes:
        a, b: major-ness and swizzle, as "MN 64B", or "TMEM".
        distinct: A in TMEM: the lane halves held different rows of the same M (an implicit pair).
    """

    kernel: str
    cta_group: int
    ws: bool
    m: int
    n: int
    a: str
    b: str
    distinct: bool = False


FORWARD_H64 = "cuDNN DSA fwd h64"
FORWARD_H128 = "cuDNN DSA fwd h128"
BACKWARD = "cuDNN DSA bwd"
QUACK = "quack GEMM"
DENSE = "CUTLASS dense_gemm"
ATTENTION = "FlashAttn-4 fwd"
ATTENTION_BACKWARD = "FlashAttn-4 bwd"
PROVENANCE = {
    FORWARD_H64: "nvidia-cudnn-frontend 1.32.0; ptxemu/tests/peers/scripts/dsa_forward.py 64 576",
    FORWARD_H128: "nvidia-cudnn-frontend 1.32.0; dsa_forward.py 128 512",
    BACKWARD: "nvidia-cudnn-frontend 1.32.0; dsa_backward.py 64 and 128",
    QUACK: "quack-kernels; ptxemu/tests/peers/scripts/quack_kernel.py gemm",
    DENSE: "NVIDIA/cutlass examples/python/CuTeDSL/cute/blackwell/kernel/dense_gemm/dense_gemm.py "
    "--mnkl 256,256,128,1 --ab_dtype BFloat16 with --mma_tiler_mn, --use_2cta_instrs, --a_major m "
    "--b_major n",
    ATTENTION: "flash-attn-4 4.0.0b36, head dim 128, 256 queries, causal",
    ATTENTION_BACKWARD: "flash-attn-4 4.0.0b36, head dims 64, 192/128 and 256",
}
"""What ran, on 2026-11-20."""
WITNESSES = (
    Witness(FORWARD_H64, 1, True, 64, 256, "K 128B", "MN 128B"),
    Witness(FORWARD_H64, 1, True, 64, 128, IN_TMEM, "K 128B", distinct=True),
    Witness(FORWARD_H64, 1, True, 64, 128, IN_TMEM, "K 64B", distinct=True),
    Witness(FORWARD_H128, 2, False, 128, 256, "K 128B", "MN 128B"),
    Witness(FORWARD_H128, 2, False, 128, 128, IN_TMEM, "K 128B", distinct=True),
    Witness(BACKWARD, 1, False, 128, 64, "MN 128B", "K 128B"),
    Witness(BACKWARD, 1, False, 128, 64, "MN 128B", "MN 128B"),
    Witness(BACKWARD, 1, False, 64, 64, "K 128B", "K 128B"),
    Witness(BACKWARD, 1, False, 64, 64, "MN 128B", "K 128B"),
    Witness(BACKWARD, 1, False, 64, 64, "MN 128B", "MN 128B"),
    Witness(QUACK, 2, False, 256, 256, "K 128B", "K 128B"),
    Witness(DENSE, 1, False, 128, 32, "K 128B", "K 128B"),
    Witness(DENSE, 1, False, 128, 32, "MN 128B", "MN 64B"),
    Witness(DENSE, 1, False, 64, 32, "K 128B", "K 128B"),
    Witness(DENSE, 1, False, 64, 32, "MN 128B", "MN 64B"),
    Witness(DENSE, 1, False, 128, 256, "K 128B", "MN 128B"),
    Witness(DENSE, 2, False, 128, 32, "K 128B", "K 128B"),
    Witness(DENSE, 2, False, 128, 64, "MN 128B", "MN 64B"),
    Witness(ATTENTION, 1, False, 128, 128, "K 128B", "K 128B"),
    Witness(ATTENTION, 1, False, 128, 128, IN_TMEM, "MN 128B"),
    Witness(ATTENTION_BACKWARD, 1, False, 128, 64, "MN 128B", "MN 128B"),
    Witness(ATTENTION_BACKWARD, 1, False, 128, 64, IN_TMEM, "MN 128B"),
    Witness(ATTENTION_BACKWARD, 2, False, 256, 128, "K 128B", "K 128B"),
    Witness(ATTENTION_BACKWARD, 2, False, 256, 128, IN_TMEM, "MN 128B"),
    Witness(ATTENTION_BACKWARD, 2, False, 256, 192, IN_TMEM, "MN 64B"),
    Witness(ATTENTION_BACKWARD, 2, False, 256, 256, IN_TMEM, "MN 128B"),
    Witness(ATTENTION_BACKWARD, 2, False, 128, 128, "K 128B", "K 128B"),
    Witness(ATTENTION_BACKWARD, 2, False, 128, 256, "K 128B", "MN 128B"),
    Witness(ATTENTION_BACKWARD, 2, False, 128, 192, "MN 128B", "MN 64B"),
)


@dataclass(frozen=True)
class Confirmation:
    """Who else uses a form.

    Attributes:
        kernel: whose, or `EMULATOR_ONLY`.
        exact: the same instruction; else the same but for N.
        n: the witness's.
    """

    kernel: str
    exact: bool
    n: int

    @property
    def text(self) -> str:
        """For the table."""
        if self.kernel == EMULATOR_ONLY or self.exact:
            return self.kernel
        return f"{self.kernel}, N={self.n}"


def layouts(product: UmmaProduct) -> set[tuple[str, str]]:
    """Major-ness and swizzle of A and B in every K step."""
    found = set()
    for k in range(0, product.k, 16):
        a = IN_TMEM
        if isinstance(product.a, SharedOperand):
            a = f"{product.a.major} {product.a.place(0, k)[0].swizzle}B"
        found.add((a, f"{product.b.major} {product.b.place(0, k)[0].swizzle}B"))
    return found


def confirmation(form: OperandForm) -> Confirmation:
    """The best witness for a form: all its instructions, or all but for N, or nobody."""
    product = form.plan.product
    nobody = Confirmation(EMULATOR_ONLY, False, 0)
    if form.plan.source is not None:
        return nobody
    wanted = layouts(product)
    same = [w for w in WITNESSES if _is_same(w, product) and (w.a, w.b) in wanted]
    for n in sorted({w.n for w in same}, key=lambda n: (n != product.n, -n)):
        of_n = [w for w in same if w.n == n]
        if {(w.a, w.b) for w in of_n} == wanted:
            return Confirmation(of_n[0].kernel, n == product.n, n)
    return nobody


def _is_same(witness: Witness, product: UmmaProduct) -> bool:
    is_distinct = bool(getattr(product.a, "distinct", False))
    return (
        (witness.cta_group, witness.ws, witness.m) == (product.cta_group, product.ws, product.m)
        and (witness.a == IN_TMEM) == product.a_in_tmem
        and (not product.a_in_tmem or product.parts == 1 or witness.distinct == is_distinct)
    )
