"""The multi-GPU tests run the same cases as the gloo ones, from the helpers in tests/integration/cpu."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

for folder in (str(ROOT / "tests/integration/cpu"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests/integration/cpu"), str(ROOT), os.environ.get("PYTHONPATH", "")]
)
