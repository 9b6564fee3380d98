"""The golden record. Commands find the package `helpers` beside them."""

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)
