"""What drafters have in common that adapt their target by LoRA (2106.09685): the adapter is theirs, and the target uses it."""

import torch
from torch import nn

from specdec.drafter import Drafter
from specdec.target import Target


class AdaptsTarget(Drafter):
    """`adapter` holds the parameters that the target uses in place, named as in the target with "/" for ".".

    So what is decoded is the adapted target, and "lossless" is said of it.

    lora_rank, lora_alpha: the change of a layer is alpha / rank * B A; lora_modules: names of the layers it is put beside
    own: what the class that follows in the order of resolution is made with
    """

    adapts_target = True

    def __init__(self, target: Target, *, lora_rank: int, lora_alpha: int, lora_modules: tuple[str, ...], **own):
        super().__init__(target, **own)
        found = target.adapt(rank=lora_rank, alpha=lora_alpha, modules=list(lora_modules))
        self.adapter = nn.ParameterDict({name.replace(".", "/"): value for name, value in found.items()})

    def _apply(self, fn, recurse=True):
        """The adapter stays as exact as it was trained, whatever the rest is cast to."""
        exact = {name: value.data for name, value in self.adapter.items()}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            moved = self.adapter[name]
            moved.data = value.to(moved.device, torch.promote_types(value.dtype, moved.dtype))
        return self
