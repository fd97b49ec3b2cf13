"""Plans of the operand-form kernels: one product, and where its A comes from."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.dsl.umma import OperandFormError, SharedOperand, SharedTile, TmemOperand, UmmaProduct
from flashdsa.hw import SM100, TMEM_LANES
from flashdsa.plan import Role


@dataclass(frozen=True)
class FormPlan:
    """One kernel: a product, and where its A comes from if that is TMEM.

    Attributes:
        route: "shared": A is in shared memory. "rows": each thread stores the row of its lane.
            The others begin with D of `source`, rounded to bf16, as A:
            "exchange": the two halves of the lanes exchange their halves of a row;
            "transpose": through shared memory, then each thread stores the row of its lane;
            "copy": through shared memory, then tcgen05.cp.
        source: the product whose D becomes A.
        scratch: byte offset in the arena of what the exchange or transpose needs.
    """

    product: UmmaProduct
    route: str = "shared"
    source: UmmaProduct | None = None
    scratch: int = 0

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        if self.product.a_in_tmem == (self.route == "shared"):
            raise OperandFormError(f"route {self.route!r} does not fit the place of A")
        if (self.source is None) != (self.route in ("shared", "rows")):
            raise OperandFormError(f"route {self.route!r} does not fit the source of A")
        if self.smem_bytes > SM100.smem_bytes - 2048:
            raise OperandFormError(
                f"{self.smem_bytes} bytes of shared memory: a CTA has {SM100.smem_bytes}"
            )

    @property
    def name(self) -> str:
        """Of the compiled function."""
        return "operand_form"

    @property
    def roles(self) -> tuple[Role, ...]:
        """None: all warps do the same."""
        return ()

    @property
    def cta_group(self) -> int:
        """CTAs that work together."""
        return self.product.cta_group

    @property
    def products(self) -> tuple[UmmaProduct, ...]:
        """The source, if any, and the product."""
        return (self.product,) if self.source is None else (self.source, self.product)

    @property
    def tiles(self) -> tuple[SharedTile, ...]:
        """All tiles, in the order of their offsets."""
        found = {
            piece.tile
            for product in self.products
            for operand in (product.a, product.b)
            if isinstance(operand, SharedOperand)
            for piece in operand.pieces
        }
        return tuple(sorted(found, key=lambda tile: tile.at))

    @property
    def image_bytes(self) -> int:
        """What is copied into the arena: all tiles."""
        return max(tile.at + tile.bytes for tile in self.tiles)

    @property
    def smem_bytes(self) -> int:
        """With the scratch of the exchange or transpose."""
        if self.source is None:
            return self.image_bytes
        return max(self.image_bytes, self.scratch + TMEM_LANES * (self.a_words + 1) * 4)

    @property
    def a_words(self) -> int:
        """32-bit words of a row of A in TMEM."""
        return len(self.product.a_columns)

    @property
    def a_rows(self) -> int:
        """Rows of A in global memory that the threads of one CTA store to TMEM (route "rows")."""
        a = self.product.a
        if not isinstance(a, TmemOperand):
            return 0
        return self.product.rows * (self.product.parts if a.distinct else 1)

    @property
    def used_columns(self) -> int:
        """TMEM columns behind the last one that is used."""
        ends = [product.column + product.columns for product in self.products]
        return max(*ends, *(product.a_columns.stop for product in self.products))

    @property
    def allocated_columns(self) -> int:
        """A power of two from 32 on."""
        return max(32, 1 << (self.used_columns - 1).bit_length())
