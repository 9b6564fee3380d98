"""How long OpenMP's threads spin while they wait for each other.

With GNU's runtime they do for milliseconds by default. Beside another busy process, a thread that waits then takes the core of the one
that it waits for, and a pass takes ten times as long (RESULTS.md). The runtime reads the setting when torch loads it, so this
module does not import torch, and `import specdec` comes before it in every command.
"""

import os
import sys

SPIN = {"GOMP_SPINCOUNT": "2000"}  # for each runtime its variable; a user's own settings stay
OWN = ("OMP_WAIT_POLICY",)  # with this, the user has said how threads wait


def limit_spinning() -> bool:
    """Sets the variables for this process and those that it starts. -> whether they are still in time for this one"""
    if not any(name in os.environ for name in (*SPIN, *OWN)):
        os.environ.update(SPIN)
    return "torch" not in sys.modules
