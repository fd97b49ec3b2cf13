"""Parameters are read from wheels as they stand, whatever else has the same name."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tools.peer_signatures import functions_of

SOURCE = """
if has_kernels:
    def scores(q, kv: tuple[Tensor, int], *, width: int = 3, meta=None) -> Tensor: ...
class Wrapper:
    def scores(self, q, kv, width, meta, more, and_more, kept_private): ...
def best(x, tie=TopKTieBreak.NONE): ...
"""


def test_functions_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "peer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer/__init__.py", SOURCE)
        archive.writestr("peer/data.bin", b"\xff")
    known = {"scores": "q, kv, *, width=3, meta=None", "best": "x", "gone": ""}
    found = dict(functions_of(wheel, known))
    assert found == {"scores": known["scores"], "best": "x, tie=0"}
    found = dict(functions_of(wheel, {"scores": "q"}))
    assert found["scores"].startswith("self, q")
