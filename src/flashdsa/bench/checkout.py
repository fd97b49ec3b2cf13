"""Origin of the running source: the git checkout, its commit, whether it was changed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path("workbench") / "results"
RECORDED = "git.json"
"""File beside src/ in a copy of the tree without .git: the `Checkout.as_dict` of the original."""


@dataclass(frozen=True)
class Checkout:
    """A git checkout of this project. `commit` is None before the first commit."""

    root: Path
    commit: str | None
    dirty: bool

    def as_dict(self) -> dict[str, str | bool | None]:
        return {"commit": self.commit, "dirty": self.dirty}


def find_checkout() -> Checkout | None:
    """The checkout, or recorded copy of one, of the imported flashdsa; else None."""
    root = Path(__file__).resolve().parents[3]
    if (root / RECORDED).is_file():
        recorded = json.loads((root / RECORDED).read_text(encoding="utf-8"))
        return Checkout(root, recorded["commit"], recorded["dirty"])
    if not (root / ".git").exists() or not (root / "workbench").is_dir():
        return None
    # Result files do not change what was measured, so they do not make a checkout dirty.
    status = _git(root, "status", "--porcelain", "--", ".", f":!{RESULTS}")
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    return Checkout(root, commit or None, dirty=bool(status) or commit is None)


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
