"""The cases are those of the tests that need no GPU, from the helpers in tests/integration/cpu and beside the units."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

for folder in (str(ROOT / "tests/unit/layers/fused"), str(ROOT / "tests/integration/cpu"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests/integration/cpu"), str(ROOT), os.environ.get("PYTHONPATH", "")]
)
