"""The options of `specdec judge`."""

from typing import Annotated, Self

from pydantic import model_validator

from specdec.core.option_types import SmallCount, Text, Whole, Window
from specdec.engines.client import find_address
from specdec.measuring.servers.server import ServerOptions
from specdec.options.command_types import MEMORY, OutputFolder
from specdec.options.decoding import SamplingOptions


class JudgeDecodeOptions(SamplingOptions):
    depth: SmallCount
    window: Window | None


class JudgeOptions(ServerOptions):
    engine: Text
    control: Text | None
    checkpoint: str
    drafter: Text | None
    flags: Text | None
    machine: Text | None
    batch: Annotated[Text, MEMORY]
    repeat: Whole
    predicted: Text | None
    out: OutputFolder
    decode: JudgeDecodeOptions

    @model_validator(mode="after")
    def check_control(self) -> Self:
        for name, url in {"engine": self.engine, "baseline": self.baseline}.items():
            if self.control and url and find_address(self.control) == find_address(url):
                raise ValueError(
                    f"control={self.control} is the server of {name}=: give the URL of a second one without drafts."
                )
        return self
