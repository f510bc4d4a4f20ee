"""The build of `kernels/`: a shared library that any Python can hand to ONNX Runtime.

All else is in pyproject.toml. Without a compiler the package installs without the library.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = Path("kernels/compile_flags.txt")  # where clangd looks for them, too


class BuildLibrary(build_ext):
    """A build whose result is named as a library, not as a module of this Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path in the package."""
        return str(Path(*fullname.split("."))) + ".so"


class AnyPython(bdist_wheel):
    """A wheel for any Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "kvasir.kernels.libkvasir",
            sources=sorted(map(str, Path("kernels").glob("*.cc"))),
            depends=[str(FLAGS), *sorted(map(str, Path("kernels").glob("*.h")))],
            extra_compile_args=[*FLAGS.read_text().split(), "-g0"],
            language="c++",
            optional=True,
        )
    ],
)
