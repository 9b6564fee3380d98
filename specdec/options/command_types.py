"""Metadata of the fields of commands' options: what an option says of itself besides its type and bounds."""

from dataclasses import dataclass
from typing import Annotated

from specdec.core.option_types import Text

MEMORY = "memory"  # the option sizes the memory of a command
PROSE = "prose"  # the option is a text for the model, which stays as it is written
OUTPUT_FILE, OUTPUT_FOLDER = "output file", "output folder"  # the option names what a command writes


@dataclass(frozen=True)
class Prefix:
    """Marks a dict that takes PREFIX.KEY=VALUE for every KEY, as it is written."""

    name: str


OutputFile = Annotated[Text, OUTPUT_FILE]
OutputFolder = Annotated[Text, OUTPUT_FOLDER]
TemplateSettings = Annotated[dict[str, str], Prefix("template")]
ProposerSettings = Annotated[dict[str, str], Prefix("proposer")]
