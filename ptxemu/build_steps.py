"""What the builds of flashdsa and of ptxemu share; their setup.py import it."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path

from setuptools.command.build_py import build_py

LINK = re.compile(r"(?<=\]\()[^)\s#]+")
PICTURES = (".png", ".svg")


class CurrentModules(build_py):
    """pip builds in the checkout and leaves build/lib, from which the next wheel is made."""

    def run(self) -> None:
        """Copy the package, and remove what an earlier build copied and the sources lack now."""
        super().run()
        if self.editable_mode:
            return
        made = {Path(file).absolute() for file in self.get_outputs()}
        package = self.distribution.get_name()
        for path in Path(self.build_lib, package).absolute().rglob("*"):
            if path.is_file() and path not in made:
                path.unlink()


def index_page(house: Path, folder: str = "") -> str:
    """Return README.md with links that work on a package index's page.

    Relative links lead to the tag of this version at `Repository` of `[project.urls]`. Without
    that entry the text is returned as it is.

    Args:
        house: the project's folder, which has README.md and pyproject.toml.
        folder: the house's path in the repository.
    """
    text = (house / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((house / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if address is None:
        return text

    def absolute(found: re.Match[str]) -> str:
        if not (house / found[0]).exists():  # another site's, or Python such as `kernel[grid](x)`
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, found[0]))
        view = "raw" if path.endswith(PICTURES) else "blob"
        return f"{address.rstrip('/')}/{view}/v{project['version']}/{path}"

    return LINK.sub(absolute, text)
