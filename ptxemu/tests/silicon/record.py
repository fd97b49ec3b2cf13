"""Record on the GPU what the programs of this suite do: `python3 -m tests.silicon.record --out DIR`
in ptxemu/.

Needs the CUDA driver and NumPy. Writes DIR/h200.npz, which belongs in recordings/. A program that
fails or hangs ends its worker process; the next one goes on behind it. With --maps it writes
DIR/h200_tensor_maps.json.gz: what the driver makes of the arguments in tests/memory's file of that
name, to which cases are added.
"""

import argparse
import contextlib
import datetime
import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.silicon.programs import all_programs
from tests.silicon.programs.case import Program, TensorMap, condense
from tests.silicon.silicon_archive import PATH, Archive, Recording
from tests.silicon.silicon_driver import Driver, DriverError, StickyError

MAPS = Path(__file__).parents[1] / "memory" / "h200_tensor_maps.json.gz"
STALL_SECONDS = 30.0
"""A worker that reports nothing for so long is killed."""


def wanted(arguments: argparse.Namespace) -> list[Program]:
    """The programs to record, in order."""
    programs = all_programs()
    if arguments.only:
        prefixes = tuple(arguments.only.split(","))
        programs = [p for p in programs if p.name.startswith(prefixes)]
    if arguments.missing:
        known = Archive.load().programs
        programs = [
            p for p in programs
            if p.name not in known or known[p.name].digest != p.digest()
        ]  # fmt: skip
    return programs


def work(programs: list[Program], start: int, spool: Path) -> int:
    """Run programs from `start`; append what they did to `spool`; 1 after a sticky failure."""
    driver = Driver()
    with spool.open("ab") as sink:
        pickle.dump(("meta", driver.describe()), sink)
        for index in range(start, len(programs)):
            program = programs[index]
            began, sticky = time.monotonic(), False
            recording = Recording(program.digest(), "ok")
            try:
                results = driver.run(program)
                recording.results = [condense(r, program.check) for r in results]
            except DriverError as error:
                recording.status = str(error)[:400]
            except StickyError as error:
                recording.status, sticky = str(error)[:400], True
            pickle.dump(("program", index, recording, time.monotonic() - began), sink)
            sink.flush()
            if sticky:
                return 1
    return 0


def read_spool(path: Path) -> list[tuple[Any, ...]]:
    """The complete entries."""
    entries = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as source:
        while True:
            try:
                entries.append(pickle.load(source))
            except (EOFError, pickle.UnpicklingError):
                break
    return entries


def supervise(command: list[str], spool: Path, end: float) -> None:
    """Run a worker until it exits, stalls, or the time is up."""
    process = subprocess.Popen(command)
    size, moved = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        current = spool.stat().st_size if spool.exists() else 0
        if current != size:
            size, moved = current, now
        if now - moved > STALL_SECONDS or now > end:
            process.kill()
            process.wait()


def record(arguments: argparse.Namespace) -> None:
    """Everything, into one archive."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    spool = Path(tempfile.mkdtemp(prefix="silicon-spool-"), "spool")
    programs = wanted(arguments)
    end = time.monotonic() + arguments.seconds
    command = [sys.executable, "-m", "tests.silicon.record", "--out", str(out)]
    command += ["--spool", str(spool), "--only", arguments.only or ""]
    command += ["--missing"] * arguments.missing
    start, archive, times = 0, Archive.load(), []
    while start < len(programs) and time.monotonic() < end:
        supervise([*command, "--worker", str(start)], spool, end)
        done = {e[1] for e in read_spool(spool) if e[0] == "program"}
        reached = max(done, default=-1) + 1
        if reached == start:  # the worker died without a word: charge it to the program
            with spool.open("ab") as sink:
                lost = Recording(programs[start].digest(), "worker died or stalled")
                pickle.dump(("program", start, lost, 0.0), sink)
            reached += 1
        start = reached
    for entry in read_spool(spool):
        if entry[0] == "program":
            archive.programs[programs[entry[1]].name] = entry[2]
            times.append((entry[3], programs[entry[1]].name))
        else:
            archive.meta |= entry[1]
    archive.meta["driver"] = _driver_version()
    archive.meta["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    current = {p.name for p in all_programs()}
    archive.programs = {n: r for n, r in archive.programs.items() if n in current}
    archive.save(out / PATH.name)
    report(programs, archive, times, out / PATH.name)


def report(
    programs: list[Program], archive: Archive, times: list[tuple[float, str]], path: Path
) -> None:
    """The summary table, then every failure."""
    families: dict[str, list[int]] = {}
    failures = []
    for program in programs:
        row = families.setdefault(program.name.partition("/")[0], [0, 0, 0])
        recording = archive.programs.get(program.name)
        fresh = recording is not None and recording.digest == program.digest()
        row[0 if fresh and recording.status == "ok" else 1 if fresh else 2] += 1
        if fresh and recording.status != "ok":
            failures.append(f"{program.name}: {recording.status}")
    lines = [f"{'family':20} {'ok':>6} {'failed':>6} {'not run':>7}"]
    lines += [f"{f:20} {a:6} {b:6} {c:7}" for f, (a, b, c) in families.items()]
    lines.append(f"meta: {archive.meta}")
    lines.append(f"{path}: {path.stat().st_size} bytes; {sum(t for t, _ in times):.1f} s")
    lines.append(f"slowest: {sorted(times)[-5:]}")
    sys.stdout.write("\n".join(lines + failures) + "\n")


def record_maps(out: Path) -> None:
    """Encode each row's arguments again."""
    rows, driver = json.loads(gzip.decompress(MAPS.read_bytes())), Driver()
    for row in rows:
        args = dict(row["args"])
        address, rank = args.pop("address"), args.pop("rank")
        args["dims"] = args["dims"][:rank]
        code, words = driver.encode(TensorMap(0, **args), address)
        row["result"] = code
        row["words"] = [] if code else [f"{w:x}" for w in struct.unpack("<16Q", words)]
    lines = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
    (out / MAPS.name).write_bytes(gzip.compress(lines.encode(), mtime=0))


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    return ""


def main() -> None:
    """The recorder's command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for h200.npz")
    parser.add_argument("--only", default="", help="comma-separated prefixes of program names")
    parser.add_argument("--missing", action="store_true", help="what has no valid recording yet")
    parser.add_argument("--maps", action="store_true", help="tensor maps alone")
    parser.add_argument("--seconds", type=float, default=170.0, help="stop after so long")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--spool", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    if arguments.maps:
        record_maps(Path(arguments.out))
    elif arguments.worker:
        code = work(wanted(arguments), int(arguments.worker), Path(arguments.spool))
        sys.stdout.flush()
        os._exit(code)
    else:
        record(arguments)


if __name__ == "__main__":
    main()
