"""Which hidden states heads read."""

from helpers import loading
from helpers.options import split

from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec.target.model import Target


def layers_of(target: Target, *, heads: str, layers: str | None = None) -> list[int]:
    """The hidden states that the heads of conf/head read, or the given ones, and the last one, in order.

    heads: comma list; layers: list such as [2,15,28], which takes the place of heads
    Raises ValueError, naming the option.
    """
    if layers is not None:
        try:
            wanted = sorted(int(layer) for layer in layers.strip(" []").split(",") if layer.strip())
            return sorted({*target.layer_ids(wanted), target.num_layers})
        except ValueError as error:
            raise ValueError(f"layers={layers} must be a list of numbers, such as [2,15,28]. {error}") from None
    found = {target.num_layers}
    for name in split(heads):
        path = loading.CONF / "head" / f"{name}.yaml"
        if not path.exists():
            known = ", ".join(sorted(path.stem for path in path.parent.glob("*.yaml")))
            raise ValueError(f"heads={name}: there is no head of that name. There are {known}.")
        found |= set(instantiate(OmegaConf.load(path).drafter, target, vocab=None, _convert_="all").target_layers)
    return sorted(found)
