"""The table of adapters that `Linear` and `Linear4` read, in numbers."""

import numpy as np

ADAPTERS, TABLE = "adapters", "adapter_table"  # inputs of a graph
TABLE_NUMBERS = 6  # of a part: addresses of A and B, rank, first output, outputs, is_16
LANES = 16  # to whose multiples A's ranks are padded
_TWO = np.array([[1, 1], [1, -1]], dtype=np.float32)
HADAMARD = np.kron(_TWO, np.kron(_TWO, _TWO))  # of the eight parts of mixed inputs
