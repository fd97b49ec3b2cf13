"""The instructions: one file per section of the PTX manual, one small function an instruction."""

from __future__ import annotations

from functools import cache
from importlib import import_module

FILES = {
    "addressing": "applypriority createpolicy cvta discard getctarank isspacep mapa prefetch "
    "prefetchu",
    "async_copy": "cp",
    "atomics": "atom multimem red",
    "barriers": "bar barrier fence membar",
    "bits": "bfe bfi bfind bmsk brev clz fns popc szext",
    "bulk_copy": "cp multimem",
    "cluster": "clusterlaunchcontrol red st",
    "compare": "selp set setp slct",
    "control": "call",
    "convert": "cvt",
    "data_move": "ld ldu st",
    "floating": "abs add copysign div fma mad max min mul neg rcp sqrt sub testp",
    "half": "abs add fma max min mul neg sub",
    "integer": "abs add addc div dp2a dp4a mad mad24 madc max min mul mul24 neg rem sad sub subc",
    "logic": "and cnot lop3 not or shf shl shr xor",
    "matrix_move": "ldmatrix movmatrix stmatrix",
    "mbarrier": "mbarrier",
    "misc": "alloca brkpt griddepcontrol istypep nanosleep pmevent setmaxnreg stackrestore "
    "stacksave suld suq sured sust tex tld4 trap txq",
    "moves": "mov prmt",
    "tcgen05_data": "tcgen05",
    "tcgen05_mma": "tcgen05",
    "tcgen05_sync": "tcgen05",
    "tensormap": "tensormap",
    "transcendental": "cos ex2 lg2 rsqrt sin tanh",
    "video": "vabsdiff vabsdiff2 vabsdiff4 vadd vadd2 vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 "
    "vmin vmin2 vmin4 vset vset2 vset4 vshl vshr vsub vsub2 vsub4",
    "warp_mma": "mma",
    "warp_sync": "activemask bar elect match redux shfl vote",
    "wgmma": "wgmma",
    "wmma": "wmma",
}
"""Files of this package, and the first words of the opcodes that each defines."""


@cache
def load(word: str) -> None:
    """Import the files that define opcodes whose first word is `word`."""
    for name, words in FILES.items():
        if word in words.split():
            import_module(f"{__name__}.{name}")
