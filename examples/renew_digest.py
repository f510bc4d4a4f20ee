"""Write the digest of answers in manifests of model directories again, after a new export of them.

python examples/renew_digest.py DIR…
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvasir.server.engine.digest import write_digest

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("give the model directories: python examples/renew_digest.py DIR…")
    for argument in sys.argv[1:]:
        if reason := write_digest(Path(argument)):
            sys.exit(f"{argument} has no digest: {reason}")
