"""The build of `kernels/`: a shared library that any Python can hand to ONNX Runtime.

All else is in pyproject.toml. Without a compiler the package installs without the library.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
# gcc 12 warns of its own header of AVX-512.
FLAGS += ["-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]


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
            depends=sorted(map(str, Path("kernels").glob("*.h"))),
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ],
)
