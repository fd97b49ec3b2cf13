"""The wheel's platform (with compiled kernels this machine's, else any) and its modules."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).parent / "src" / "flashdsa" / "_kernels"


class KernelDistribution(Distribution):
    """`make kernels` before the wheel is built puts the objects into it."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is bound to a platform."""
        return any(KERNELS.glob("*.so"))


class KernelWheel(bdist_wheel):
    """The objects depend on the platform, not on Python's version."""

    def get_tag(self) -> tuple[str, str, str]:
        """(Python, ABI, platform) of the wheel's name: the objects need an old glibc only, which
        tools/check_wheel.py holds them to."""
        _, _, platform = super().get_tag()
        return ("py3", "none", platform.replace("linux_", "manylinux_2_28_", 1))


class CurrentModules(build_py):
    """pip builds in the checkout and leaves build/lib, from which the next wheel is made."""

    def run(self) -> None:
        """Copy the package, and remove what an earlier build copied and the sources lack now."""
        super().run()
        if self.editable_mode:
            return
        made = {Path(file).absolute() for file in self.get_outputs()}
        for path in Path(self.build_lib, "flashdsa").absolute().rglob("*"):
            if path.is_file() and path not in made:
                path.unlink()


commands = {"bdist_wheel": KernelWheel, "build_py": CurrentModules}
setup(distclass=KernelDistribution, cmdclass=commands)
