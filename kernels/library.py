"""The library of operators: found, tried in a process of its own, and registered with sessions."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvasir.model.onnx.runtime import onnxruntime

Choice = Literal["auto", "off", "scalar", "avx2", "avx512", "amx", "neon"]

FILE = Path(__file__).with_name("libkvasir.so")
_TIMEOUT = 60.0  # seconds of the trial, which takes less than one
_SLOWER = ("avx512", "avx2")  # in the place of a fastest path whose trial fails


@dataclass(frozen=True)
class Library:
    """The built library and the path that its operators take: the fastest one for `auto`.

    fault: why it is a slower one, if a trial failed.
    """

    file: Path
    path: str = "auto"
    fault: str | None = field(default=None, compare=False)

    @cached_property
    def version(self) -> str:
        """A name of the library's content, on which answers depend."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()[:12]

    def resolved(self) -> Library:
        """Return the same library with the name of its path. Raises OSError if it cannot load."""
        if self.path != "auto":
            return self
        name = ctypes.CDLL(str(self.file)).KvasirFastestPath
        name.restype = ctypes.c_char_p
        return Library(self.file, name().decode())

    def register(self, options: onnxruntime.SessionOptions) -> None:
        """Make the operators known to a session that opens with these options."""
        options.add_session_config_entry("kvasir.path", self.path)
        options.register_custom_ops_library(str(self.file))


def load(choice: Choice, cache: Path | None, file: Path = FILE) -> Library | str:
    """Return the library, or a sentence that says why stock operators are used instead.

    cache: a folder that remembers which paths of which libraries passed their trial, if any.
    """
    if (reason := _unusable(choice, file)) is not None:
        return f"stock operators are used: {reason}"
    library = Library(file, choice)
    what = f"{library.version} {onnxruntime.__version__} {choice}"
    name = f"kernels-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    passed = None if cache is None else cache / name
    with suppress(OSError):
        # Machines may share a cache, and their fastest paths differ.
        if passed is not None and passed.read_text() == library.resolved().path:
            return library.resolved()
    faults = []
    for path in (choice, *(_SLOWER if choice == "auto" else ())):
        if (fault := _try(file, path)) is None:
            break
        faults.append(f"the trial of {file.name} {fault}")
    else:
        return f"stock operators are used: {faults[0]}"
    library = replace(Library(file, path).resolved(), fault=faults[0] if faults else None)
    if passed is not None and not faults:
        with suppress(OSError):  # the next start tries again, which takes half a second
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.write_text(library.path)
    return library


def _try(file: Path, path: str) -> str | None:
    """Run the operators in a process of its own; return what is wrong, if anything is."""
    command = (sys.executable, "-m", "kvasir.kernels.self_test", str(file), path)
    try:
        trial = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {_TIMEOUT:g} s"
    if trial.returncode:
        said = trial.stderr.strip() or f"it ended with {trial.returncode}"
        return f"failed: {said.splitlines()[-1]}"
    return None


def _unusable(choice: Choice, file: Path) -> str | None:
    if choice == "off":
        return "the setting asks for them"
    if find_spec("onnx") is None:
        return "the package onnx, which graphs are rewritten with, is not installed"
    if not file.exists():
        return f"{file.name} was not built when Kvasir was installed"
    return None
