"""Write attention.onnx of model directories again, with its hash, where an older Kvasir made it.

python examples/renew_attention.py DIR…

Both graphs of a directory read one file of weights, which stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvasir.export.graphs.attention import write_attention_graph
from kvasir.model.directory import ATTENTION_GRAPH_FILE, MANIFEST_FILE, load_model_dir, sha256


def renew(directory: Path) -> None:
    """Replace the graph, and its hash in the manifest."""
    before = load_model_dir(directory).manifest.files[ATTENTION_GRAPH_FILE]
    write_attention_graph(directory)
    manifest, after = directory / MANIFEST_FILE, sha256(directory / ATTENTION_GRAPH_FILE)
    manifest.write_text(manifest.read_text("utf-8").replace(before, after), "utf-8")
    load_model_dir(directory)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("give the model directories: python examples/renew_attention.py DIR…")
    for argument in sys.argv[1:]:
        renew(Path(argument))
