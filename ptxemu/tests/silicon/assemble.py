"""Assemble every program with ptxas, where there is one: `python3 -m tests.silicon.assemble`."""

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tests.silicon.programs import all_programs
from tests.silicon.programs.case import Program


def complaint(program: Program) -> str:
    """What ptxas says, empty if nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(program.ptx)
        source.flush()
        command = ["ptxas", "-arch=sm_90a", "-O1", "-o", "/dev/null", source.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def main() -> None:
    """Print the complaints; exit 1 if there are any."""
    prefix = sys.argv[1] if len(sys.argv) > 1 else ""
    programs = [p for p in all_programs() if p.name.startswith(prefix)]
    with ThreadPoolExecutor(2) as pool:
        complaints = list(pool.map(complaint, programs))
    bad = [(p.name, c) for p, c in zip(programs, complaints, strict=True) if c]
    for name, text in bad:
        lines = [part.split(";", 1)[-1].strip() for part in text.splitlines()[:3]]
        sys.stdout.write(f"{name}: {' / '.join(lines)}\n")
    sys.stdout.write(f"{len(programs) - len(bad)} of {len(programs)} assemble\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
