"""Exchangeable parts of a block drafter, which make a draft depend on the drafts before it in its block.

Each file here has one `Dependence`, and so has the file part.py of an experiment. The setting `dependence: {kind: ...}`
names the file or the experiment. Its other entries are arguments of the part.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from specdec.core import extensions
from specdec.heads.dependence.base import Dependence, DrafterSizes
from specdec.heads.dependence.base import DraftedBlock as DraftedBlock
from specdec.heads.dependence.base import Lattice as Lattice


def make_dependence(sizes: DrafterSizes, settings: Mapping[str, Any]) -> Dependence:
    """Makes the part that `settings` names by `kind`, with the other settings as its arguments.

    Raises ValueError for an unknown kind, for an unknown or missing argument, and for a number that is not above 0.
    """
    arguments = dict(settings) if isinstance(settings, Mapping) else {"kind": settings}
    kind = arguments.pop("kind", None)
    part_class = _find_part(kind)
    for name, value in arguments.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
            raise ValueError(f"dependence.{name}={value} must be above 0.")
    names = [name for name in inspect.signature(part_class).parameters if name != "sizes"]
    if unknown_names := arguments.keys() - set(names):
        raise ValueError(
            f"dependence.kind={kind} has no {', '.join(sorted(unknown_names))} but {', '.join(names)}: take head= of "
            "this kind, and change those."
        )
    try:
        return part_class(sizes, **arguments)
    except (TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"dependence.kind={kind} does not take these settings ({error}).") from error


def _find_part(kind: Any) -> Callable[..., Dependence]:
    """The class of a part. Raises ValueError for an unknown kind."""
    kinds = [name for _, name, _ in pkgutil.iter_modules(__path__) if name != "base"]
    experiments = list(extensions.find_modules("part"))
    if kind in kinds:
        module = importlib.import_module(f"{__name__}.{kind}")
    elif kind in experiments:
        module = extensions.import_module(kind, "part")
    else:
        raise ValueError(f"dependence.kind={kind}: choose one of {', '.join(sorted([*kinds, *experiments]))}.")
    classes = [member for member in vars(module).values() if inspect.isclass(member)]
    (part_class,) = (x for x in classes if issubclass(x, Dependence) and x.__module__ == module.__name__)
    return part_class
