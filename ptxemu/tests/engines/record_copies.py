"""Record what an H200 and its driver do: `python3 -m tests.engines.record_copies OUT`
in ptxemu/ (needs libcuda and NumPy).

Writes OUT/h200_tensor_maps.json.gz (cuTensorMapEncodeTiled's results) and OUT/h200_copies.npz (the
arrays that each case of `copy_cases` changed, or its error). The tests compare ptxemu with them.
"""

import contextlib
import ctypes
import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.engines.copy_cases import Case, TensorMap, all_cases
from tests.memory.tensor_map_cases import encode_cases
from tests.packed import save_packed


class Driver:
    """The few driver calls that are needed; every failure raises."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def status(self, name: str, *args: Any) -> int:
        return int(getattr(self._cuda, name)(*args))

    def call(self, name: str, *args: Any) -> None:
        code = self.status(name, *args)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def encode(self, case: dict[str, Any]) -> tuple[int, list[int]]:
        raw = (ctypes.c_uint64 * 32)()
        start = (-(ctypes.addressof(raw) // 8)) % 8
        array64 = lambda values: (ctypes.c_uint64 * 8)(*values)
        array32 = lambda values: (ctypes.c_uint32 * 8)(*values)
        code = self.status(
            "cuTensorMapEncodeTiled", ctypes.byref(raw, start * 8), ctypes.c_int(case["dtype"]),
            ctypes.c_uint32(case["rank"]), ctypes.c_void_p(case["address"]), array64(case["dims"]),
            array64(case["strides"]), array32(case["box"]), array32(case["element_strides"]),
            *(ctypes.c_int(case[k]) for k in ("interleave", "swizzle", "l2_promotion", "oob_fill")),
        )  # fmt: skip
        return code, list(raw[start : start + 16])

    def run(self, case: Case) -> None:
        """Launch a case; its arrays change in place."""
        addresses = []
        for array in case.arrays:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(len(array) + 256))
            self._copy("cuMemcpyHtoD_v2", pointer, _host(array), array)
            addresses.append(pointer.value)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), case.ptx.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, case.kernel.encode())
        values = [self._pack(arg, addresses) for arg in case.args]
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
        shape = map(ctypes.c_uint, (case.grid, 1, 1, 32, 1, 1, case.smem))
        self.call("cuLaunchKernel", function, *shape, None, pointers, None)
        self.call("cuCtxSynchronize")
        for array, address in zip(case.arrays, addresses, strict=True):
            self._copy("cuMemcpyDtoH_v2", _host(array), ctypes.c_uint64(address), array)
            self.call("cuMemFree_v2", ctypes.c_uint64(address))
        self.call("cuModuleUnload", module)

    def _copy(self, name: str, target: Any, source: Any, array: Any) -> None:
        self.call(name, target, source, ctypes.c_size_t(len(array)))

    def _pack(self, arg: int | str | TensorMap, addresses: list[int]) -> bytes:
        if isinstance(arg, str):
            return struct.pack("<Q", addresses[int(arg.split()[1])])
        if isinstance(arg, int):
            return struct.pack("<i", arg)
        fields = {
            "dtype": arg.dtype, "rank": len(arg.dims), "address": addresses[arg.array],
            "dims": arg.dims, "strides": arg.strides, "box": arg.box, "element_strides": arg.steps,
            "interleave": arg.interleave, "swizzle": arg.swizzle,
            "l2_promotion": arg.l2_promotion, "oob_fill": arg.oob_fill,
        }  # fmt: skip
        code, words = self.encode(fields)
        if code:
            raise RuntimeError(f"cuTensorMapEncodeTiled: {code}")
        return struct.pack("<16Q", *words)


def _host(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def worker(first: int, out: Path) -> int:
    """Run cases from `first` on until one fails; the failed one's index, or -1."""
    driver, cases = Driver(), all_cases()
    for index in range(first, len(cases)):
        case = cases[index]
        _say(case.name)
        try:
            driver.run(case)
        except RuntimeError as error:
            _say(f"{case.name}: {error}")
            (out / f"case_{index}.txt").write_text(str(error))
            return index
        np.savez(out / f"case_{index}.npz", *case.arrays)
    return -1


def main() -> None:
    """Record both files."""
    out = Path(sys.argv[1])
    if len(sys.argv) > 2:
        sys.exit(worker(int(sys.argv[2]), out / "cases") >= 0)
    (out / "cases").mkdir(parents=True, exist_ok=True)
    driver = Driver()
    results = [driver.encode(case) for case in encode_cases()]
    rows = [
        {"args": case, "result": code, "words": [f"{w:x}" for w in words] if code == 0 else []}
        for case, (code, words) in zip(encode_cases(), results, strict=True)
    ]
    lines = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
    (out / "h200_tensor_maps.json.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    cases = all_cases()
    names, parts = [], []
    first = 0
    while first < len(cases):
        command = [sys.executable, __file__, str(out), str(first)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, timeout=40)
        index = first
        while (out / "cases" / f"case_{index}.npz").exists():
            with np.load(out / "cases" / f"case_{index}.npz") as arrays:
                for k, before in enumerate(cases[index].arrays):
                    after = arrays[f"arr_{k}"]
                    if not np.array_equal(before, after):
                        names.append(f"{cases[index].name}/{k}")
                        parts.append(after)
            index += 1
        if index < len(cases):
            error = out / "cases" / f"case_{index}.txt"
            text = error.read_text() if error.exists() else "timeout"
            names.append(f"{cases[index].name}/error")
            parts.append(np.frombuffer(text.encode(), np.uint8))
        first = index + 1
    lengths = np.array([len(part) for part in parts])
    data = np.concatenate(parts)
    arrays = {"names": np.array(names), "lengths": lengths, "data": data}
    save_packed(out / "h200_copies.npz", arrays)


if __name__ == "__main__":
    main()
