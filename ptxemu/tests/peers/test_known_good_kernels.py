"""Kernels that nobody here wrote, compiled by their own code: right results, and nothing that would
be wrong on hardware but what is named here. Against the ISA's letter some of them use registers of
tcgen05.ld early.

They come from the registry (`make test-peers` installs them) and are not copied. Each script runs
through `ptxemu exec` as a user would run it, and asserts its own result.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
CASES = [
    ("cudnn", "sm_90a", "dsa_backward.py", "64"),
    ("cudnn", "sm_100a", "dsa_backward.py", "16"),
    ("cudnn", "sm_100a", "dsa_backward.py", "64"),
    ("cudnn", "sm_100a", "dsa_backward.py", "128"),
    ("cudnn", "sm_100a", "dsa_forward.py", "64", "576"),
    ("cudnn", "sm_100a", "dsa_forward.py", "128", "512"),
    ("cudnn", "sm_90a", "dsa_topk.py"),
    ("cudnn", "sm_100a", "dsa_topk.py"),
    ("cudnn", "sm_100a", "nsa_compression.py"),
    ("cudnn", "sm_100a", "fused_gemm.py", "swiglu"),
    ("cudnn", "sm_100a", "fused_gemm.py", "amax"),
    *(
        ("quack", arch, "quack_kernel.py", kernel)
        for arch in ("sm_90a", "sm_100a")
        for kernel in ("softmax", "cross_entropy", "topk", "gemm")
    ),
    *(
        ("flash_attn", arch, "flash_attention.py", *kernel)
        for arch in ("sm_90a", "sm_100a")
        for kernel in (("forward",), ("backward", "64"), ("backward", "128"), ("paged",))
    ),
    ("flash_attn", "sm_100a", "flash_attention.py", "split"),
    ("triton", "sm_90a", "triton_kernels.py"),
    ("triton", "sm_100a", "triton_kernels.py"),
    ("cupy", "sm_90a", "cupy_kernels.py"),
]
KNOWN = {
    # Its last commits arrive at barriers of the other CTA of the pair, where nobody waits for them
    # before it exits. The source has the waits commented out: "currently it hangs if we have this".
    ("flash_attn", "sm_100a", "flash_attention.py", "backward", "128"): ["signal-after-exit"] * 3
}
"""By case, the codes of findings that are faults of the kernel."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_result_is_right_and_only_known_is_found(case: tuple[str, ...], tmp_path: Path) -> None:
    package, arch, script, *arguments = case
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-peers installs it")
    report = tmp_path / "report.json"
    ptxemu = [sys.executable, "-m", "ptxemu", "exec", "--quiet", "--fail-on", "hardware"]
    run = subprocess.run(
        [*ptxemu, "--json", str(report), "--arch", arch, str(SCRIPTS / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "QUACK_CACHE_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    known = KNOWN.get(case, [])
    assert run.returncode == bool(known), run.stdout[-2000:] + run.stderr[-4000:]
    document = json.loads(report.read_text())
    assert document["launches"], "no kernel was launched"
    found = [f for f in document["findings"] if f["kind"] == "hardware"]
    assert [f["code"] for f in found] == known, [f["message"] for f in found]
