"""Programs of CUTLASS and cuda-samples, compiled by nvcc and run unchanged: `make test-peers`.

Checkouts are named by PTXEMU_CUTLASS and PTXEMU_CUDA_SAMPLES; nothing is fetched here.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES, CUTLASS = "PTXEMU_CUDA_SAMPLES", "PTXEMU_CUTLASS"
INTRODUCTION = "Samples/0_Introduction/"
# (checkout, source, arch, arguments, what it prints, codes of errors)
CASES = [
    (SAMPLES, f"{INTRODUCTION}vectorAdd/vectorAdd.cu", "sm_90a", "", "Test PASSED", set()),
    (SAMPLES, f"{INTRODUCTION}simpleTemplates/simpleTemplates.cu", "sm_90a", "", "OK", set()),
    (SAMPLES, f"{INTRODUCTION}simplePrintf/simplePrintf.cu", "sm_90a", "", "[3, 7]", set()),
    (
        SAMPLES,
        f"{INTRODUCTION}simpleVoteIntrinsics/simpleVoteIntrinsics.cu",
        "sm_90a",
        "",
        "OK",
        set(),
    ),
    (CUTLASS, "examples/00_basic_gemm/basic_gemm.cu", "sm_90a", "128 64 32", "Passed.", set()),
    (
        CUTLASS,
        "examples/cute/tutorial/blackwell/01_mma_sm100.cu",
        "sm_100a",
        "128 256 64",
        "Execution is successful.",
        # Generic stores and __syncthreads before the MMA; no wait::ld before the barrier.
        {"missing-proxy-fence", "tmem-load-not-waited", "tmem-read-by-register"},
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: Path(case[1]).stem)
def test_a_public_program_runs(
    case: tuple[str, str, str, str, str, set[str]], tmp_path: Path
) -> None:
    checkout, source, arch, arguments, said, codes = case
    folder = os.environ.get(checkout)
    if folder is None:
        pytest.skip(f"{checkout} does not name a checkout")
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not there")
    path, virtual = Path(folder) / source, arch.replace("sm_", "compute_")
    includes = ["Common", "include", "tools/util/include", "examples/common"]
    options = [f"-I{Path(folder) / name}" for name in includes]
    options += ["-lineinfo", "-std=c++17", "--expt-relaxed-constexpr", "-w"]
    program, report = tmp_path / path.stem, tmp_path / "report.json"
    gencode = f"-gencode=arch={virtual},code={virtual}"
    subprocess.run(["nvcc", *options, gencode, str(path), "-o", str(program)], check=True)
    ptxemu = [sys.executable, "-m", "ptxemu", "exec", "--quiet", "--json", str(report)]
    run = subprocess.run(
        [*ptxemu, str(program), *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    facts = json.loads(report.read_text())
    assert facts["exit_code"] == 0 and not facts["failures"], run.stdout + run.stderr
    assert said in run.stdout
    assert {one["code"] for one in facts["findings"] if one["level"] == "error"} == codes
