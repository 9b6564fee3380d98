"""What the options of commands say of themselves beside type and bounds: metadata of their fields."""

from dataclasses import dataclass
from typing import Annotated

from specdec.core.option_types import Text

MEMORY = "memory"  # sizes what a command holds at once
PROSE = "prose"  # a text for the model, which stays as it is written
OUTPUT_FILE, OUTPUT_FOLDER = "output file", "output folder"  # names what a command writes


@dataclass(frozen=True)
class Prefix:
    """Of a dict that takes NAME.KEY=VALUE for every KEY, as it is written."""

    name: str


OutputFile = Annotated[Text, OUTPUT_FILE]
OutputFolder = Annotated[Text, OUTPUT_FOLDER]
TemplateSettings = Annotated[dict[str, str], Prefix("template")]
ProposerSettings = Annotated[dict[str, str], Prefix("proposer")]
