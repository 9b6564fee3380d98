"""A folder of `specdec export`, as the engine that it is for is told to use it: by the lines of its model card."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CARDS = ("README.md", "MTP.md")  # the second one in a folder of format=stitched
LINE = re.compile(r"^([^\n`]+):\n\n```\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
FORMATS = {"vLLM": "vllm", "llama.cpp": "gguf", "transformers": "transformers", "OpenVINO GenAI": "openvino"}


@dataclass(frozen=True)
class ExportedHead:
    """target: name of the target; lines: launch lines by engine; drafts: drafts of a round in these lines"""

    folder: Path
    target: str
    lines: dict[str, str]
    drafts: int

    @classmethod
    def read(cls, folder: Path) -> "ExportedHead":
        """Reads the model card. Raises ValueError for a folder without a card of `specdec export`."""
        cards = [folder / name for name in reversed(CARDS) if (folder / name).is_file()]
        text = cards[0].read_text() if cards else ""
        title, drafts = re.search(r"^# .+? for (\S+)$", text, re.MULTILINE), re.search(r"^With (\d+) draft", text, re.M)
        if title is None or drafts is None:
            raise ValueError(f"{folder} has no model card of specdec export with a launch line: export the head again.")
        return cls(folder, title.group(1), dict(LINE.findall(text)), int(drafts.group(1)))

    @property
    def whole(self) -> bool:
        """Whether the folder has the target, too."""
        return (self.folder / CARDS[1]).is_file()

    def find_words(self, engine: str, program: str) -> list[str]:
        """The words of the engine's launch line that begins with `program`.

        Raises ValueError for an export that the engine does not read.
        """
        if engine not in self.lines:
            advice = f"specdec export format={FORMATS[engine]} writes one for it, where the head has one"
            names = ", ".join(name for name in self.lines if name in FORMATS) or "no engine that is started here"
            raise ValueError(f"{self.folder} is an export for {names}, and {engine} does not read it: {advice}.")
        commands = [line for line in self.lines[engine].splitlines() if line.startswith(program)]
        return shlex.split(commands[0])

    def read_vllm_settings(self) -> tuple[dict[str, Any], list[str]]:
        """vLLM's configuration of speculation, and its further flags."""
        words = self.find_words("vLLM", "vllm serve")
        place = words.index("--speculative-config") + 1
        settings = json.loads(words[place])
        if "model" in settings:
            settings["model"] = str(self.folder)  # it may have been moved
        return settings, words[place + 1 :]

    def read_llamacpp_kind(self) -> str:
        """Its --spec-type, such as draft-eagle3."""
        words = self.find_words("llama.cpp", "llama-server")
        return words[words.index("--spec-type") + 1]
