"""Compiles this folder's kernels to PTX, into `recordings`.

    python -m tests.compilers.record --nvcc NVCC [--include DIRECTORY]

NVCC is the compiler of the wheel nvidia-cuda-nvcc (with nvidia-cuda-crt, nvidia-cuda-runtime and
nvidia-nvvm beside it); Triton is the installed one.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RECORDINGS = FOLDER / "recordings"
CAPABILITIES = {"sm_90a": 90, "sm_100a": 100}
POINTERS = ("x", "a", "b", "out")
TRITON: dict[str, tuple[dict[str, str], dict[str, int], tuple[str, ...]]] = {
    "softmax": ({"x": "fp32", "out": "fp32", "n": "i32"}, {"N": 128}, ("sm_90a",)),
    "product": (
        {"a": "fp32", "b": "fp32", "out": "fp32"},
        {"M": 64, "N": 32, "K": 32},
        ("sm_100a",),
    ),
    "descriptors": (
        {"a": "bf16", "b": "bf16", "out": "bf16", "m": "i32", "n": "i32", "k": "i32"},
        {"M": 64, "N": 32, "K": 32},
        ("sm_90a", "sm_100a"),
    ),
    "conversions": ({"x": "fp16", "out": "bf16"}, {"N": 128}, ("sm_90a",)),
}
"""Kernels with their arguments, constants and architectures."""


def record_cuda(nvcc: str, include: list[str]) -> None:
    """Compile the CUDA C++ kernels."""
    command = [nvcc, "-ptx", "-std=c++17", "-arch=sm_90a", *(f"-I{path}" for path in include)]
    target = RECORDINGS / "cuda_kernels.sm_90a.ptx"
    subprocess.run([*command, str(FOLDER / "cuda_kernels.cu"), "-o", str(target)], check=True)
    target.write_text(without_comments(target.read_text()))


def without_comments(text: str) -> str:
    """PTX without empty lines and comments, but for those that name the compiler."""
    said = re.compile(r"^[ \t]*(//(?! Generated| Cuda)[^\n]*)?\n", re.MULTILINE)
    return said.sub("", text)


def record_triton() -> None:
    """Compile the Triton kernels; what a launch needs to know goes into triton.json."""
    import triton
    from tests.compilers import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launches: dict[str, Any] = {}
    for name, (arguments, constants, architectures) in TRITON.items():
        types = {key: f"*{t}" if key in POINTERS else t for key, t in arguments.items()}
        source = ASTSource(
            fn=getattr(triton_kernels, name),
            signature={**types, **dict.fromkeys(constants, "constexpr")},
            constexprs=constants,
            attrs={
                (place,): [["tt.divisibility", 16]]
                for place, key in enumerate(types)
                if key in POINTERS or len(arguments) > len(POINTERS)
            },
        )
        for arch in architectures:
            target = GPUTarget("cuda", CAPABILITIES[arch], 32)
            compiled = triton.compile(source, target=target, options={"num_stages": 2})
            text = re.sub(r"\n\s*\.(loc|file)\s[^\n]*", "", compiled.asm["ptx"])
            text = text[: text.find("\t.section")] if "\t.section" in text else text
            (RECORDINGS / f"{name}.{arch}.ptx").write_text(without_comments(text))
            launches[f"{name}.{arch}"] = {
                "threads": 32 * compiled.metadata.num_warps,
                "shared_bytes": compiled.metadata.shared,
                "scratch_bytes": compiled.metadata.global_scratch_size,
            }
    (RECORDINGS / "triton.json").write_text(json.dumps(launches, indent=1) + "\n")


def main() -> None:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvcc")
    parser.add_argument("--include", action="append", default=[])
    options = parser.parse_args()
    RECORDINGS.mkdir(exist_ok=True)
    if options.nvcc:
        record_cuda(options.nvcc, options.include)
    record_triton()


if __name__ == "__main__":
    main()
