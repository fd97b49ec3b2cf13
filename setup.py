"""The wheel's platform (with compiled kernels this machine's, else any), modules and page."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "ptxemu"))
from build_steps import CurrentModules, index_page  # noqa: E402

KERNELS = HERE / "src" / "flashdsa" / "_kernels"


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


commands = {"bdist_wheel": KernelWheel, "build_py": CurrentModules}
setup(
    distclass=KernelDistribution,
    cmdclass=commands,
    long_description=index_page(HERE),
    long_description_content_type="text/markdown",
)
