"""All kinds of heads in public layouts, by kind: those of the core, and those of the experiments that are there."""

from specdec.core import extensions
from specdec.export import block_drafter, draft, eagle, medusa, mtp, stitched
from specdec.export.family import ExportFamily
from specdec.heads.base import Drafter


def load_families() -> dict[str, ExportFamily]:
    """All families by kind. Plain DFlash is the last block drafter, because it recognises each of them."""
    experiments = [extensions.import_module(name, "export") for name in extensions.find_modules("export")]
    modules = (eagle, medusa, mtp, stitched, draft, *experiments, block_drafter)
    return {family.kind: family for module in modules for family in module.FAMILIES}


FAMILIES = load_families()
CONTAINERS = [kind for kind, family in FAMILIES.items() if "speculators" in family.writers]


def find_family(drafter: Drafter) -> ExportFamily | None:
    """The family of a head; None for heads that no public layout has."""
    return next((family for family in FAMILIES.values() if family.accepts(drafter)), None)


def kind_of(drafter: Drafter) -> str:
    """The name of the head's kind; the class's name for heads that no public layout has."""
    family = find_family(drafter)
    return type(drafter).__name__ if family is None else family.kind
