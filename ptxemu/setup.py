"""The wheel's modules are those of the sources; its page's links work on a package index."""

import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from build_steps import CurrentModules, index_page  # noqa: E402

setup(
    cmdclass={"build_py": CurrentModules},
    long_description=index_page(HERE, "ptxemu"),
    long_description_content_type="text/markdown",
)
