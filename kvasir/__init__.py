"""Kvasir trains Transformers, exports them to ONNX, and serves them.

In Python it loads an exported model, in this process and without PyTorch:

    import kvasir

    with kvasir.load("examples/stdlib") as model:
        print(model.generate("def read_json(", max_tokens=20))
        for text in model.stream("import os", temperature=0):
            print(text, end="")

`load` and `Model` keep their form from version to version; all else is private. The rooms are the
folders beside this package: `kvasir/model` is a link to `model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvasir.server.process.library import Model

__all__ = ["Model", "load"]


def load(directory: str | Path, **settings: Any) -> Model:
    """Load a model directory; see `Model`."""
    from kvasir.server.process.library import Model  # noqa: PLC0415  takes a second

    return Model(directory, **settings)


def __getattr__(name: str) -> Any:
    if name == "Model":
        from kvasir.server.process.library import Model  # noqa: PLC0415

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
