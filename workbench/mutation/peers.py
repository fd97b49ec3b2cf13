"""Kernels of other packages that `python -m workbench mutate` tries if they are named.

The packages are those that `make test-peers` installs; $CUTLASS is a checkout of that project.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CUTE = "$CUTLASS/examples/python/CuTeDSL/cute"
_OURS = "ptxemu/tests/peers/scripts"
_BLACKWELL_GEMM = f"{_CUTE}/blackwell/kernel/dense_gemm/dense_gemm_persistent.py"
_OF_GEMM = "--use_tma_store --ab_dtype Float16 --acc_dtype Float32 --skip_ref_check"


@dataclass(frozen=True)
class Peer:
    """A script that launches a kernel on what calls itself a GPU; otherwise as `Row`.

    Attributes:
        entry: a pattern of the saved files' names. path: the script's.
        calls: its arguments, of a launch each. sms: streaming multiprocessors.
    """

    arch: str
    entry: str
    path: str
    calls: tuple[str, ...]
    sms: int = 2
    scratch: tuple[str, ...] = ()
    lanes_apart: bool = False

    def record(self, number: int, path: Path) -> None:
        """Write the launch of a call to a file."""
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "ptxemu", "exec", "--arch", self.arch, "--quiet", "--no-check"]
            command += ["--sms", str(self.sms), "--save", folder, os.path.expandvars(self.path)]
            run = [sys.executable, *command, *self.calls[number].split()]
            subprocess.run(run, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            first = min(Path(folder).glob(f"{self.entry}*.launch"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(first.read_bytes())


# fmt: off
PEERS = {
    "cutlass-gemm-sm_90a": Peer(
        "sm_90a", "Hopper", f"{_CUTE}/hopper/kernel/dense_gemm/dense_gemm_persistent.py",
        tuple(f"--mnkl 512,256,{k},1 --cluster_shape_mn 2,1 --tile_shape_mn 128,128"
              for k in (512, 448, 128))),
    "cutlass-fmha-sm_90a": Peer(
        "sm_90a", "Hopper", f"{_CUTE}/hopper/kernel/attention/fmha.py",
        ("--q_shape 1,256,1,128 --k_shape 1,768,1,128",)),
    "cutlass-gemm-1cta-sm_100a": Peer(
        "sm_100a", "Persistent", _BLACKWELL_GEMM,
        (f"--mnkl 512,256,704,1 --mma_tiler_mn 128,128 {_OF_GEMM}",)),
    "cutlass-gemm-2cta-sm_100a": Peer(
        "sm_100a", "Persistent", _BLACKWELL_GEMM,
        ("--mnkl 1024,512,704,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 "
         f"--use_2cta_instrs {_OF_GEMM}",), sms=4),
    "quack-gemm-sm_90a": Peer(
        "sm_90a", "quackgemm", f"{_OURS}/quack_kernel.py",
        # The last: fewer steps than stages, so that the loads of two tiles are in flight.
        ("gemm 256 512 512", "gemm 384 768 448", "gemm 256 512 128", "gemm 256 512 256")),
    "quack-gemm-sm_100a": Peer(
        "sm_100a", "quackgemm", f"{_OURS}/quack_kernel.py",
        ("gemm 512 1536 128", "gemm 512 512 704")),
    # Three blocks of keys; the kernel of another number has other PTX.
    "cudnn-dsa-backward-sm_90a": Peer(
        "sm_90a", "cudnn*.1", f"{_OURS}/dsa_backward.py", ("64 2 256 192",)),
    "cudnn-dsa-backward-h64-sm_100a": Peer(
        "sm_100a", "bwd_cudnn", f"{_OURS}/dsa_backward.py", ("64 3 384 320",)),
}
# fmt: on
