"""The wheel's platform: one that carries compiled kernels is for this machine's, else for any."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

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


setup(distclass=KernelDistribution, cmdclass={"bdist_wheel": KernelWheel})
