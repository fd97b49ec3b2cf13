"""A script written for a GPU: reverses tiles of a tensor on "cuda" and checks the result.

compile_and_run.py [race]
"""

import sys

import torch
from cuda.bindings import driver
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import HardwareInfo
from tests.cutedsl.small_kernels import reverse

if not torch.cuda.is_available():
    sys.exit("a GPU is needed")
a = torch.arange(128, dtype=torch.int32, device="cuda")
b = torch.zeros_like(a)
assert a.is_cuda and b.device.type == "cuda"
stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
compiled = cute.compile(reverse, from_dlpack(a), from_dlpack(b), stream, "race" not in sys.argv)
compiled(from_dlpack(a), from_dlpack(b), stream)
torch.cuda.synchronize()
clusters = HardwareInfo().get_max_active_clusters(2)
sys.stdout.write(f"clusters {clusters} {torch.cuda.get_device_capability()}\n")
if "race" not in sys.argv:
    assert torch.equal(b.cpu(), a.cpu().view(2, 64).flip(1).reshape(-1))
sys.stdout.write(f"done {sys.argv[1:]}\n")
