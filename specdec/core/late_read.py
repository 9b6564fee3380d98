"""Values of a device that the host reads later, without a wait for what the device does after them."""

import torch
from torch import Tensor


class LateValues:
    """A copy of a tensor as it is now in the device's work, which the host reads later."""

    def __init__(self, tensor: Tensor):
        self._event = torch.cuda.Event() if tensor.device.type == "cuda" else None
        if self._event is None:
            self._values = tensor.clone()
        else:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list:
        """The values as lists, once the device has made them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
