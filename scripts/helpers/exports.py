"""The formats of specdec/export, and which of them a head has."""

import importlib
import pkgutil

from specdec import export
from specdec.drafter import Drafter, Head
from specdec.serving import Form

FORMATS = [module.name for module in pkgutil.iter_modules(export.__path__)]


def form_of(drafter: Drafter, name: str) -> Form:
    """The form of a head in a format of FORMATS. Raises ValueError, with the closest form that works, if it has none."""
    return importlib.import_module(f"specdec.export.{name}").form(drafter)


def forms_of(drafter: Head) -> dict[str, Form]:
    """All forms that a head has, by format. Heads that are nothing but an adapter of their target have none."""
    found = {}
    for name in FORMATS if isinstance(drafter, Drafter) else ():
        try:
            found[name] = form_of(drafter, name)
        except ValueError:
            continue
    return found
