"""What the commands in scripts/ share. A command imports this package first, which makes the clone's `train` importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
