"""The base of heads that adapt their target by LoRA (2106.09685)."""

import torch
from torch import nn

from specdec.core.option_types import Names, Positive, Width
from specdec.heads.base import Head
from specdec.target.adapter import add_adapter
from specdec.target.model import Target


class AdaptsTarget(Head):
    """Puts a LoRA adapter into the target. Outputs, and losslessness, are then those of the adapted target.

    `adapter` holds the parameters that the target uses in place. Their names are those of the target, with "/" for ".".

    lora_rank, lora_alpha: rank and alpha of a layer's change, alpha / rank * B A
    lora_modules: names of the layers to adapt
    head_arguments: arguments of the next class in the method resolution order
    """

    adapts_target = True

    def __init__(
        self, target: Target, *, lora_rank: Width, lora_alpha: Positive, lora_modules: Names, **head_arguments
    ):
        super().__init__(target, **head_arguments)
        parameters = add_adapter(target, rank=lora_rank, alpha=lora_alpha, modules=list(lora_modules))
        self.adapter = nn.ParameterDict({name.replace(".", "/"): value for name, value in parameters.items()})

    def _apply(self, fn, recurse=True):
        """Casts the adapter to a higher precision, never to a lower one than that of its training."""
        adapter_values = {name: value.data for name, value in self.adapter.items()}
        super()._apply(fn, recurse)
        for name, value in adapter_values.items():
            parameter = self.adapter[name]
            parameter.data = value.to(parameter.device, torch.promote_types(value.dtype, parameter.dtype))
        return self
