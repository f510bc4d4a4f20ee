"""What the process of each trial inherits: modules of an export, and PyTorch's list of operators.

Only a process that forks trials imports it, because it changes PyTorch for good.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import tests.families.trial  # noqa: F401  its modules, too
from tests.kit.random_models import export_random
from tests.kit.traces import list_operators_once

torch.set_num_threads(1)  # threads of this process are none of a fork
list_operators_once(pytest.MonkeyPatch())
with TemporaryDirectory() as folder:
    export_random(Path(folder))
