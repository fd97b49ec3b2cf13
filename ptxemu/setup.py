"""The wheel's modules are those of the sources, whatever was built before."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class CurrentModules(build_py):
    """pip builds in the checkout and leaves build/lib, from which the next wheel is made."""

    def run(self) -> None:
        """Copy the package, and remove what an earlier build copied and the sources lack now."""
        super().run()
        if self.editable_mode:
            return
        made = {Path(file).absolute() for file in self.get_outputs()}
        for path in Path(self.build_lib, "ptxemu").absolute().rglob("*"):
            if path.is_file() and path not in made:
                path.unlink()


setup(cmdclass={"build_py": CurrentModules})
