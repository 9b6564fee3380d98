"""Options that name a target, and where and how it is loaded."""

from typing import Literal

import torch
from pydantic import model_validator

from specdec.core import precision
from specdec.core.option_types import Options, Text, prefix_option_names
from specdec.target.loading import find_devices


class TokenizerOptions(Options):
    """Options of commands that read the target's tokenizer and not its weights."""

    name: Text
    trust_remote_code: bool


class TargetOptions(Options):
    """Options of commands that load the target."""

    name: Text | None
    dtype: Literal["auto", "bfloat16", "float32", "float16", "float64"]
    device: Text | None
    trust_remote_code: bool

    @model_validator(mode="after")
    def check_trust(self) -> "TargetOptions":
        if self.trust_remote_code and self.name is None:
            raise ValueError(
                "target.trust_remote_code=true runs code of a model that you name yourself: give target.name= too."
            )
        return self

    @property
    def device_here(self) -> str:
        """The device; by default CUDA's, if there is one."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype_here(self) -> str:
        """The dtype, with auto decided for the device. Raises ValueError for a device that is not there."""
        with prefix_option_names("target"):
            return precision.resolve_dtype(self.dtype, find_devices(self.device_here)[0])
