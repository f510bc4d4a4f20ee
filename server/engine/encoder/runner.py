"""An encoder on ONNX Runtime on the CPU: texts become one packed run.

Layers compute the tokens of all texts as one matrix, without padding. Attention of ONNX Runtime's
and pooling see a row for each text, padded on the right. So the texts of a run should be of similar
length.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np

from kvasir.kernels.library import Library
from kvasir.model.adapters.layout import Layout
from kvasir.model.config import TransformerConfig
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.model.packing import HIDDEN_OUTPUT, VECTORS_OUTPUT, pack
from kvasir.model.platform.machine import return_freed_memory, usable_cpus
from kvasir.server.engine.adapters.stock import graph_adapters
from kvasir.server.engine.encoder.sequence import EncoderSequence
from kvasir.server.engine.model_runner import check_max_model_len
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.session import open_session


class EncoderRunner:
    """Two sessions: with all threads for one run, and with one thread for each of several runs.

    The second one is opened when runs first overlap, and closed when the engine is idle. If the
    files have changed since, the first session runs these too. max_runs: at a time, each with one
    thread. fits_16_bits: as the manifest has it. library, layout: see OnnxRunner. Raises ValueError
    for a limit that the model cannot meet.
    """

    def __init__(
        self,
        graph: Path,
        config: TransformerConfig,
        *,
        max_model_len: int | None = None,
        threads: int | None = None,
        fits_16_bits: bool = False,
        library: Library | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.adapters = graph_adapters(layout, library)
        self.max_model_len = check_max_model_len(max_model_len, config)
        self.max_runs = threads or usable_cpus()
        # Hardly two runs have the same shapes.
        self._open = partial(
            open_session,
            graph,
            library=library,
            adapters=self.adapters,
            plans_memory=False,
            fits_16_bits=fits_16_bits,
        )
        self._files = [graph, graph.with_name(f"{graph.name}.data")]
        self._file_ids = self._read_file_ids()
        self._all = self._open(self.max_runs)
        self._single: onnxruntime.InferenceSession | None = None
        self._opening = Lock()
        self._n_types = config.n_token_types or 0

    def run(self, texts: list[EncoderSequence], *, alone: bool = True) -> list[Floats]:
        """Return each text's vector [d_out] or, if it wants them, its tokens' [tokens, d_model].

        alone: use all threads, since no other run happens at the same time.
        """
        types = None
        if self._n_types:  # of a lone type, a tokenizer may still number others
            types = [text.type_ids if self._n_types > 1 else None for text in texts]
        inputs, ends = pack([text.prompt_ids for text in texts], types)
        if self.adapters is not None:
            of_texts = [text.adapter for text in texts]
            inputs |= self.adapters.inputs(of_texts, np.diff(ends, prepend=0))
        names = [VECTORS_OUTPUT]
        if any(text.wants_tokens for text in texts):
            names.append(HIDDEN_OUTPUT)
        session = self._all if alone or self.max_runs == 1 else self._session_of_one()
        vectors, *of_tokens = session.run(names, inputs)
        return [
            of_tokens[0][end - len(text.prompt_ids) : end] if text.wants_tokens else vector
            for text, vector, end in zip(texts, vectors, ends, strict=True)
        ]

    def release_idle_memory(self) -> None:
        """Close the session for several runs, and return what the other one keeps for its runs."""
        self._single = None
        inputs, _ = pack([[0]], [None] if self._n_types else None)
        if self.adapters is not None:
            inputs |= self.adapters.inputs([None], np.ones(1, dtype=np.int64))
        shrinking = onnxruntime.RunOptions()
        shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._all.run([VECTORS_OUTPUT], inputs, shrinking)
        return_freed_memory()

    def _session_of_one(self) -> onnxruntime.InferenceSession:
        with self._opening:
            if self._single is None:
                is_same = self._file_ids == self._read_file_ids()
                self._single = self._open(1, 0) if is_same else self._all
            return self._single

    def _read_file_ids(self) -> list[tuple[int, int] | None]:
        """Return an identity of each file's contents; None for one that does not exist."""
        stats = [file.stat() if file.is_file() else None for file in self._files]
        return [stat and (stat.st_ino, stat.st_mtime_ns) for stat in stats]
