"""Names of prompt blocks: the hash of the parent's name and the block's own tokens, so a name stands for a prefix."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def name_blocks(prompt_ids: list[int], block_size: int, most: int) -> list[bytes]:
    """Of the prompt's whole blocks, `most` at most; 128 bits, so that a collision is no concern."""
    n_blocks = min(len(prompt_ids) // block_size, most)
    names: list[bytes] = []
    for block in np.array(prompt_ids[: n_blocks * block_size], dtype=np.int64).reshape(
        n_blocks, block_size
    ):
        parent = names[-1] if names else b""
        names.append(blake2b(parent + block.tobytes(), digest_size=16).digest())
    return names
