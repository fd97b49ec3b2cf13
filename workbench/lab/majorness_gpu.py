"""The majorness study on a GPU without CuTe DSL: kernels compiled here, run and judged there.

    python -m workbench.lab.majorness_gpu build DIR             here: DIR/kernels.so and DIR/git.json
    python -m workbench.lab.majorness_gpu run DIR --out X.json  there: needs torch and apache-tvm-ffi

Exit code 1 if a case fails. Where CuTe DSL is installed, `python -m workbench lab majorness --on gpu` does
the same for one case at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from flashdsa.bench.checkout import find_checkout
from workbench.lab.kernels.majorness.plan import MajornessPlan
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan
from workbench.lab.majorness import Study, run_study
from workbench.lab.runners import RunResult, empty_arguments, launch_of

SCHEMA = "flashdsa-majorness/1"
ARCH = "sm_90a"
BOTH = ("k", "mn")
REPEATS = 20
# What a TVM-FFI export takes from libcute_dsl_runtime.so (43 MB) otherwise.
SHIM = """
#include <stdint.h>
#include <stdio.h>
typedef void (*report)(const char *, const char **, int32_t);
static void fail(report f, const char *what, int32_t code) {
  static __thread char text[96];
  snprintf(text, sizeof text, "%s: %d", what, (int)code);
  const char *parts[1] = {text};
  f("CUDADialectError", parts, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(report f, int32_t code) { fail(f, "CUDA error", code); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(report f, int32_t x, int32_t y, int32_t z) {
  fail(f, "launch refused, grid x", x);
}
"""


def studies() -> list[Study]:
    """SS and RS, both cuts, with and without the boundary, every type, swizzle and A's majors."""
    plan = Sm90Plan()
    registers = replace(plan, a_source="registers")
    found = [
        Study(ARCH, base, BOTH, data)
        for base in (plan, registers)
        for data in ("random", "integer")
    ]
    variants: list[dict[str, Any]] = [
        {"boundary": False},
        {"cut": "shape"},
        {"a_major": "mn"},
        {"swizzle": 64},
        {"swizzle": 32},
        {"swizzle": 0},
        {"dtype": "f16"},
        {"n": 64, "k": 64},
    ]
    found += [Study(ARCH, replace(plan, **variant), BOTH) for variant in variants]
    found.append(Study(ARCH, replace(registers, boundary=False), BOTH))
    for dtype in ("e4m3", "e5m2", "tf32"):
        narrow = replace(plan, dtype=dtype, n=128)
        found += [Study(ARCH, narrow, ("k",), data) for data in ("random", "integer")]
    return found


def symbol(plan: MajornessPlan) -> str:
    """The exported name of a plan's kernel."""
    return "_".join(str(value) for value in asdict(plan).values())


def build(folder: Path) -> None:
    """Compile every plan and link them into one library."""
    import nvidia_cutlass_dsl
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from workbench.lab.kernels.majorness.operands import CARRIERS

    folder.mkdir(parents=True, exist_ok=True)
    types = {
        torch.uint8: CARRIERS[1],
        torch.uint16: CARRIERS[2],
        torch.uint32: CARRIERS[4],
        torch.int32: cute.Int32,
        torch.int64: cute.Int64,
        torch.float32: cute.Float32,
    }
    plans = {symbol(p): p for s in studies() for p in _plans(s)}
    with tempfile.TemporaryDirectory() as work:
        objects = []
        for name, plan in plans.items():
            fakes = [
                make_fake_compact_tensor(
                    types[t.dtype],
                    tuple(t.shape),
                    stride_order=tuple(range(t.dim()))[::-1],
                    assumed_align=16,
                )
                for t in empty_arguments(plan)
            ]
            options = f"--enable-tvm-ffi --gpu-arch {ARCH}"
            function = cute.compile(launch_of(ARCH), *fakes, plan, options=options)
            objects.append(f"{work}/{name}.o")
            function.export_to_c(objects[-1], function_name=f"k_{name}")
            print(name, flush=True)
        shim = Path(work, "shim.c")
        shim.write_text(SHIM)
        base = Path(next(iter(nvidia_cutlass_dsl.__path__)))
        static = next(base.glob("cu13/lib/libcuda_dialect_runtime_static.a"))
        library = folder / "kernels.so"
        inputs = [*objects, str(shim), str(static)]
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), *inputs]
        subprocess.run(command, check=True)
    checkout = find_checkout()
    git = None if checkout is None else checkout.as_dict()
    (folder / "git.json").write_text(json.dumps(git))
    print(f"{len(plans)} kernels, {library.stat().st_size} bytes in {library}")


def _plans(study: Study) -> list[MajornessPlan]:
    return [replace(study.plan, b_major=major) for major in study.majors]


def run(folder: Path, out: Path) -> int:
    """Run every study on the GPU; returns how many failed."""
    import tvm_ffi

    ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
    kernels = tvm_ffi.load_module(str(folder / "kernels.so"))
    device = torch.cuda.get_device_name()

    def runner(_arch: str, plan: MajornessPlan, tensors: list[torch.Tensor]) -> RunResult:
        on_gpu = [tensor.cuda() for tensor in tensors]
        for _repeat in range(REPEATS):  # the last run's outputs are judged, all must be the same
            before = on_gpu[-1].clone()
            on_gpu[-1].fill_(float("nan"))
            kernels[f"k_{symbol(plan)}"](*on_gpu)
            torch.cuda.synchronize()
            first = bool(before[1].isnan().all())
            if not first and not before[1].equal(on_gpu[-1][1]):
                raise SystemExit(f"{plan}: two runs differ")
        for tensor, result in zip(tensors, on_gpu, strict=True):
            tensor.copy_(result)
        return RunResult(device)

    rows, failed = [], 0
    for study in studies():
        start = time.perf_counter()
        report, _ = run_study(study, runner)
        failed += bool(report.failures)
        rows.append(_row(report.to_json_dict()) | {"seconds": time.perf_counter() - start})
        row = rows[-1]
        print(row["plan"], row["max_abs"], row["k_vs_mn"], report.failures, flush=True)
    document = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": json.loads((folder / "git.json").read_text()),
        "machine": {"gpu": device, "torch": torch.__version__, "driver": _driver()},
        "protocol": f"every kernel {REPEATS} times, all results equal; the last one judged",
        "rows": rows,
    }
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{failed} of {len(rows)} studies failed")
    return failed


def _row(report: dict[str, Any]) -> dict[str, Any]:
    results = report["results"].items()
    kept = ("arch", "plan", "data", "distribution", "seed", "max_reference", "limit", "k_vs_mn")
    return {name: report[name] for name in kept} | {
        "max_abs": {major: result["max_abs"] for major, result in results},
        "part0_max_abs": {major: result["part0_max_abs"] for major, result in results},
        "cuts_identical": {major: result["cuts_identical"] for major, result in results},
        "operands_equal": {
            major: all(step["difference"] is None for step in result["steps"])
            for major, result in results
        },
        "descriptors": {
            major: [[step["operand"], step["bits"]] for step in result["steps"]]
            for major, result in results
        },
        "failures": report["failures"],
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("majorness.json"))
    options = parser.parse_args()
    if options.what == "build":
        build(options.folder)
    else:
        sys.exit(bool(run(options.folder, options.out)))


if __name__ == "__main__":
    main()
