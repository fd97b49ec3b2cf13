"""Files with something changed, each given to a command in a process with limits.

`judge` starts this module in a process of its own: memory of a test's packages counts there, too,
and forked processes need one without threads.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_BYTES = 2 << 30
"""Address space that a command may take beyond what its libraries have."""
CPU_SECONDS = 20
SECONDS = 60
CLEAR = 0, 1, 2, 124
"""Exit codes of commands: well, something was found, it cannot be carried out, its time is over."""
_RAISED = 70
"""Exit code of a process that ended with a traceback."""
_WORD = re.compile(rb"[\w.%$]+|[^\w\s]")
_NUMBER = re.compile(rb"\b\d+\b")
_NUMBERS = b"0", b"1", b"-1", b"3", b"65536", b"4294967295", b"100000000000", b"9" * 30, b"1e999"
_SIZES = 1, 2, 4, 8


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        originals: files of that kind, which are whole.
        mutated: a changed file, of one of them.
        commands: each reads the file of a path and returns an exit code.
        error: beginning of the line on stderr with which code 2 comes.
    """

    originals: Sequence[bytes]
    mutated: Callable[[random.Random, bytes], bytes]
    commands: Sequence[Callable[[Path], int]]
    error: str


def mutated_text(draw: random.Random, text: bytes) -> bytes:
    """Change one to four places of a text: words, numbers, lines, bytes."""
    for _ in range(draw.randint(1, 4)):
        kind = draw.randrange(6)
        lines = text.split(b"\n")
        if kind == 0:
            text = _replaced(draw, text, _NUMBER, draw.choice(_NUMBERS))
        elif kind == 1:
            words = _WORD.findall(text) or [b""]
            text = _replaced(draw, text, _WORD, draw.choice(words))
        elif kind == 2:
            text = _replaced(draw, text, _WORD, b"")
        elif kind == 3:
            lines.insert(draw.randrange(len(lines)), draw.choice(lines))
            text = b"\n".join(lines)
        elif kind == 4:
            del lines[draw.randrange(len(lines))]
            text = b"\n".join(lines)
        else:
            text = mutated_bytes(draw, text, most=1)
    return text


def _replaced(draw: random.Random, text: bytes, what: re.Pattern[bytes], by: bytes) -> bytes:
    places = list(what.finditer(text))
    if not places:
        return text
    place = draw.choice(places)
    return text[: place.start()] + by + text[place.end() :]


def mutated_bytes(draw: random.Random, data: bytes, most: int = 4) -> bytes:
    """Change up to `most` places: bits, numbers of 1 to 8 bytes, what is cut, added or repeated."""
    found = bytearray(data)
    for _ in range(draw.randint(1, most)):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(8)
        if kind <= 2 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind <= 5:
            size = draw.choice(_SIZES)
            at -= at % size
            value = draw.choice((0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1, draw.getrandbits(5)))
            found[at : at + size] = value.to_bytes(size, "little")
        elif kind == 6:
            end = min(len(found), at + draw.choice((1, 16, 4096)))
            found[at:at] = found[at:end]
        elif draw.random() < 0.5:
            del found[at:]
        else:
            del found[at : at + draw.choice((1, 16, 4096))]
    return bytes(found)


def judge(kind: str, seeds: range) -> list[str]:
    """Give changed files to the commands of a kind; return what did not end clearly.

    Args:
        kind: "module:NAME" of a Kind.
        seeds: of the changes.
    """
    command = [sys.executable, "-m", "tests.mutated_files", kind, str(seeds.start), str(seeds.stop)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bad: list[str] = json.loads(done.stdout.splitlines()[-1])
    return bad


def _judge_all(kind: Kind, seeds: range) -> list[str]:
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        for original in kind.originals:  # whatever is loaded late is loaded once, before the forks
            path.write_bytes(original)
            for command in kind.commands:
                if problem := _problem(command, path, kind.error):
                    bad.append(f"the original: {problem}")
        for seed in seeds:
            draw = random.Random(seed)
            path.write_bytes(kind.mutated(draw, draw.choice(kind.originals)))
            for number, command in enumerate(kind.commands):
                if problem := _problem(command, path, kind.error):
                    bad.append(f"seed {seed}, command {number}: {problem}")
    return bad


def _problem(command: Callable[[Path], int], path: Path, error: str) -> str:
    """Return what is wrong with the end of a command; nothing: it is clear."""
    output = path.with_name("output")
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        _run_limited(command, path, output)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    said = output.read_text(errors="replace")
    if code not in CLEAR:
        return f"code {code}: {said[-1500:]}"
    if code == 2 and (not said.startswith(error) or said.count("\n") != 1):
        return f"code 2: {said[-1500:]}"
    return ""


def _run_limited(command: Callable[[Path], int], path: Path, output: Path) -> None:
    """Run it in this process, which ends; stderr goes to `output`, stdout nowhere."""
    code = _RAISED
    try:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(SECONDS)
        code = command(path)
    except SystemExit as end:  # of command lines
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    kind = getattr(importlib.import_module(module), name)
    sys.stdout.write(json.dumps(_judge_all(kind, range(*map(int, sys.argv[2:])))) + "\n")


if __name__ == "__main__":
    _main()
