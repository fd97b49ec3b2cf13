"""What a test or a recording asks cuTensorMapEncodeTiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorMap:
    """cuTensorMapEncodeTiled's arguments; the map is over argument number `array`."""

    array: int
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    oob_fill: int = 0

    @property
    def steps(self) -> tuple[int, ...]:
        """Element strides, 1 where none are given."""
        return self.element_strides or (1,) * len(self.dims)
