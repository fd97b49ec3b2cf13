"""The file of recordings: an .npz of one byte string a family and an index in JSON."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PATH = HERE / "recordings" / "h200.npz"


@dataclass
class Recording:
    """What the hardware did with one program."""

    digest: str
    status: str
    """"ok", or the driver's error."""
    results: list[bytes] = field(default_factory=list)


@dataclass
class Archive:
    """All recordings: `meta` says when and on what."""

    meta: dict[str, Any] = field(default_factory=dict)
    programs: dict[str, Recording] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file."""
        blobs: dict[str, bytearray] = {}
        index: dict[str, Any] = {}
        for name, recording in sorted(self.programs.items()):
            blob = blobs.setdefault(name.partition("/")[0], bytearray())
            index[name] = [recording.digest, recording.status, *map(len, recording.results)]
            blob.extend(b"".join(recording.results))
        text = {"meta": self.meta, "programs": index}
        arrays = {f: np.frombuffer(bytes(b), np.uint8) for f, b in blobs.items()}
        arrays["index"] = np.frombuffer(json.dumps(text, separators=(",", ":")).encode(), np.uint8)
        with zipfile.ZipFile(
            path, "w", zipfile.ZIP_LZMA
        ) as archive:  # half of np.savez_compressed's
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array)

    @classmethod
    def load(cls, path: Path = PATH) -> Archive:
        """Read the file; an empty archive where there is none."""
        if not path.exists():
            return cls()
        with np.load(path) as arrays:
            text = json.loads(arrays["index"].tobytes())
            blobs = {f: arrays[f].tobytes() for f in arrays.files if f != "index"}
        archive = cls(text["meta"])
        offsets = dict.fromkeys(blobs, 0)
        for name, (digest, status, *sizes) in text["programs"].items():
            family, results = name.partition("/")[0], []
            for size in sizes:
                start = offsets[family]
                results.append(blobs[family][start : start + size])
                offsets[family] = start + size
            archive.programs[name] = Recording(digest, status, results)
        return archive
