"""Graphs by operators of our own, as they are served."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnx

from kvasir.export.verification.paged_session import PagedSession
from kvasir.export.verification.segments import FOLDER_OPTION, SegmentedGraph
from kvasir.kernels.fuse import fuse
from kvasir.kernels.library import Library
from kvasir.model.config import TransformerConfig
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.packed import own_library
from kvasir.server.engine.session import open_session


def own_graph(path: Path, config: TransformerConfig) -> PagedSession | SegmentedGraph | None:
    """Return a decoder's graph; None where our operators cannot be used."""
    if (packed := PagedSession.find(path, config)) is not None:
        return packed
    library = own_library()
    return None if library is None else SegmentedGraph(path, config, partial(open_own, library))


def own_session(path: Path) -> onnxruntime.InferenceSession | None:
    """Return a session of a graph over whole texts; None where our operators cannot be used."""
    library = own_library()
    return None if library is None else open_session(path, usable_cpus(), library=library)


def open_own(
    library: Library, model: onnx.ModelProto, folder: Path
) -> onnxruntime.InferenceSession:
    """Open a part of a graph; folder: of its weights."""
    fused, _ = fuse(model)
    entries = {FOLDER_OPTION: folder}
    return open_cpu_session(fused.SerializeToString(), entries=entries, library=library.register)
