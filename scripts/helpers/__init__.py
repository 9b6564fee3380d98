"""What the commands in scripts/ share. A command imports this package first: it makes the clone's `train` importable, and importing specdec
says how threads wait, which must be before torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import specdec  # noqa: E402, F401
