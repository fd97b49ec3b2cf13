"""The formats of packed kv rows, as data; docs/concepts/dsa.md shows them. No torch.

A format of your own is a record in the table, before the first call that names it:

    ROW_FORMATS["mine"] = RowFormat("mine", 448, 32, "e8m0", rope=64, unused=2)

CPU and torch read and write every record that `RowFormat` accepts. A GPU backend refuses a record
by the field that its kernels cannot read, before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flashdsa.errors import ArgumentTypeError, ArgumentValueError

_BYTES_OF_SCALE = {"fp32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class RowFormat:
    """A packed kv row: coded columns whose groups share a scale, then bf16 columns.

    Attributes:
        name: as `kv_format` has it.
        columns: coded columns.
        group: neighbouring coded columns that share a scale.
        scale: code of a scale: "fp32", "e8m0" or "e4m3".
        rope: bf16 columns, the last.
        fp4: codes are e2m1, two in a byte, the even column in the low half; else e4m3.
        unused: bytes after a row's scales that mean nothing.
        split: a page has the data of all its rows and then their scales. Else rows are whole, with
            the scales between the codes and the bf16 columns.

    Raises:
        ArgumentValueError: a field that no row can have.
    """

    name: str
    columns: int
    group: int
    scale: str
    rope: int = 0
    fp4: bool = False
    unused: int = 0
    split: bool = False

    def __post_init__(self) -> None:
        """Check the fields; kernels are exported under names that have the format's."""
        step = 2 if self.fp4 else 1
        for field, expected, holds in (
            ("name", "letters, digits and underscores", self.name.isidentifier()),
            ("columns", f"a multiple of {step} from {step} on",
             self.columns > 0 and self.columns % step == 0),
            ("group", f"a divisor of columns, {self.columns}",
             self.group > 0 and self.columns % self.group == 0),
            ("scale", f"one of {', '.join(_BYTES_OF_SCALE)}", self.scale in _BYTES_OF_SCALE),
            ("rope", "0 or more", self.rope >= 0),
            ("unused", "0 or more", self.unused >= 0),
        ):  # fmt: skip
            if not holds:
                got = getattr(self, field)
                raise ArgumentValueError(f"{field}: expected {expected}; got {got!r}")

    @property
    def d_qk(self) -> int:
        """Columns of the row."""
        return self.columns + self.rope

    @property
    def num_scales(self) -> int:
        """Scales of a row."""
        return self.columns // self.group

    @property
    def code(self) -> str:
        """Name of the codes."""
        return "e2m1" if self.fp4 else "e4m3"

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, which a row begins with."""
        return self.columns // 2 if self.fp4 else self.columns

    @property
    def data_bytes(self) -> int:
        """Bytes of codes and bf16 columns."""
        return self.code_bytes + 2 * self.rope

    @property
    def stored_scales(self) -> int:
        """Bytes of a row's scales."""
        return self.num_scales * _BYTES_OF_SCALE[self.scale]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales and of what follows them without use."""
        return self.stored_scales + self.unused

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a page."""
        return self.data_bytes + self.scale_bytes

    @property
    def scales_at(self) -> int:
        """Byte at which the scales of a row without a page begin."""
        return self.data_bytes if self.split else self.code_bytes

    @property
    def rope_at(self) -> int:
        """Byte at which the bf16 columns of a row without a page begin."""
        return self.code_bytes if self.split else self.code_bytes + self.scale_bytes

    def page_bytes(self, rows: int) -> int:
        """Bytes of a page of servers; a split one ends at a multiple of a row's data."""
        used = rows * self.row_bytes
        return -(-used // self.data_bytes) * self.data_bytes if self.split else used


Objections = Callable[[RowFormat], Iterator[str]]
"""Says of a format what a kernel cannot read: "field: takes ...; got ..."; nothing if it reads its
rows."""


def takes(field: str, got: object, *taken: object) -> Iterator[str]:
    """Object to a field whose value is not among those that are taken."""
    if got not in taken:
        yield f"{field}: takes {', '.join(map(str, taken))}; got {got}"


def takes_multiples(form: RowFormat, data: int, rope: int, scales: int) -> Iterator[str]:
    """Object to rows, in pages of any number of them, whose parts begin elsewhere than the kernel
    loads them from.

    Args:
        data, rope, scales: bytes, powers of two, at whose multiples the kernel loads codes, bf16
            columns and scales. Pages begin at multiples of all.
    """
    rope = rope if form.rope else 1
    pitch = "data_bytes" if form.split else "row_bytes"
    places = {pitch: max(data, rope, scales), "rope_at": rope}
    places["scale_bytes" if form.split else "scales_at"] = scales
    for field, multiple in places.items():
        value = getattr(form, field)
        if value % multiple:
            yield f"{field}: takes multiples of {multiple}; got {value}"


class _Table(dict[str, RowFormat]):
    """Formats by name. A name is given once: what is chosen and compiled is kept by it."""

    def __setitem__(self, name: str, form: RowFormat) -> None:
        """Add a format.

        Raises:
            ArgumentValueError: the name is another one than the format's, or another format's.
        """
        if name != form.name or self.get(name, form) != form:
            raise ArgumentValueError(
                f"ROW_FORMATS[{name!r}]: expected a format of this name, of which there is no "
                f"other one; got {form}"
            )
        super().__setitem__(name, form)


V32 = RowFormat("v32", 512, 128, "fp32", rope=64)
SHIPPED = (
    V32,
    RowFormat("v32_no_rope", 512, 128, "fp32"),
    RowFormat("v4", 448, 64, "e8m0", rope=64, unused=1, split=True),
    RowFormat("v41", 512, 32, "e8m0", split=True),
    RowFormat("v41_fp4", 512, 16, "e4m3", fp4=True, split=True),
)
"""Formats that kernels are compiled for in advance."""
INTERLEAVED = (
    RowFormat("v41_interleaved", 512, 32, "e8m0"),
    RowFormat("v41_fp4_interleaved", 512, 16, "e4m3", fp4=True),
)
"""DeepSeek-V4.1's rows since FlashMLA of 2026-09-30: each with its own scales behind its codes."""
ROW_FORMATS = _Table((form.name, form) for form in (*SHIPPED, *INTERLEAVED))
"""Every format of packed rows by its name."""
INDEX_MXFP4 = RowFormat("mxfp4", 128, 32, "e8m0", fp4=True, split=True)
"""The indexer's keys of 68 bytes."""


def row_format(kv_format: object) -> RowFormat:
    """Return the format of this name."""
    found = ROW_FORMATS.get(kv_format) if isinstance(kv_format, str) else None
    if found is None:
        error = ArgumentValueError if isinstance(kv_format, str) else ArgumentTypeError
        raise error(f"kv_format: expected one of {', '.join(ROW_FORMATS)}; got {kv_format!r}")
    return found


def has_split_rows(row_bytes: int) -> bool:
    """Whether a format in the table has rows of these bytes that are split."""
    return any(form.split and form.row_bytes == row_bytes for form in ROW_FORMATS.values())


def find_row_format(
    name: str, shape: Sequence[int], kv_format: str | None, *, alone: bool = True
) -> RowFormat:
    """Return the format of packed rows of this shape.

    Args:
        name: of the argument, for messages.
        kv_format: the name of a format, or None.
        alone: the named format must be that of these rows; else only if they have its bytes.
            Other rows' pages are then split if those of the named format are.

    Raises:
        ArgumentTypeError, ArgumentValueError: no format has these bytes, or two.
    """
    wanted = None if kv_format is None else row_format(kv_format)
    if wanted is not None and (alone or wanted.row_bytes == shape[-1]):
        if wanted.row_bytes != shape[-1]:
            raise ArgumentValueError(
                f"{name}: expected rows of {wanted.row_bytes} bytes ({wanted.name}); "
                f"got shape {list(shape)}"
            )
        return wanted
    found = [form for form in ROW_FORMATS.values() if form.row_bytes == shape[-1]]
    if len(found) > 1 and wanted is not None:
        found = [form for form in found if form.split == wanted.split]
    if not found:
        known = ", ".join(f"{form.row_bytes} ({form.name})" for form in ROW_FORMATS.values())
        raise ArgumentValueError(
            f"{name}: expected packed rows of {known} bytes; got shape {list(shape)}"
        )
    if len(found) > 1:
        names = " or ".join(form.name for form in found)
        raise ArgumentValueError(
            f"{name}: rows of {shape[-1]} bytes are {names}; expected kv_format to say which"
        )
    return found[0]
