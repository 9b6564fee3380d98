"""How a draft depends on the drafts before it in its block: the parts of a block drafter that can be exchanged.

Each file has one `Dependence`, and so has the file part.py of an experiment. `dependence: {kind: FILE, ...}` or the name of the
experiment chooses it, and the other entries are its arguments.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Mapping
from typing import Any

from specdec.core import extensions
from specdec.heads.dependence.base import Dependence, DrafterSizes
from specdec.heads.dependence.base import DraftedBlock as DraftedBlock
from specdec.heads.dependence.base import Lattice as Lattice


def make_dependence(sizes: DrafterSizes, settings: Mapping[str, Any]) -> Dependence:
    """The part that they name. Raises ValueError for a file or an argument that does not exist, and for one that is missing."""
    arguments = dict(settings) if isinstance(settings, Mapping) else {"kind": settings}
    kind = arguments.pop("kind", None)
    kinds = [name for _, name, _ in pkgutil.iter_modules(__path__) if name != "base"]
    experiments = list(extensions.find_modules("part"))
    if kind in kinds:
        module = importlib.import_module(f"{__name__}.{kind}")
    elif kind in experiments:
        module = extensions.import_module(kind, "part")
    else:
        raise ValueError(f"dependence.kind={kind}: choose one of {', '.join(sorted([*kinds, *experiments]))}.")
    classes = inspect.getmembers(
        module, lambda member: inspect.isclass(member) and member.__module__ == module.__name__
    )
    (part_class,) = (member for _, member in classes if issubclass(member, Dependence))
    for name, value in arguments.items():  # each part says which of them there are
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
            raise ValueError(f"dependence.{name}={value} must be above 0.")
    names = [name for name in inspect.signature(part_class).parameters if name != "sizes"]
    if unknown_names := arguments.keys() - set(names):
        raise ValueError(
            f"dependence.kind={kind} has no {', '.join(sorted(unknown_names))} but {', '.join(names)}: take head= of this kind, and change those."
        )
    try:
        return part_class(sizes, **arguments)
    except (TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"dependence.kind={kind} does not take these settings ({error}).") from error
