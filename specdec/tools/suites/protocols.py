"""The ways in which publications ask and count.

conf/protocol/NAME.yaml  what a publication sends to the target, with which settings, and how it counts acceptance
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdec.core.option_types import describe_unknown_choice
from specdec.measuring.counting import SPECDEC, Counting
from specdec.text import reading

CONF = Path(__file__).with_name("conf")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The way in which a publication asks and counts: a file of conf/protocol.

    `templates`, `num`, `few_shot`, `max_new_tokens` and `stop` are by the name of a suite. `system` is one text for all
    suites, or a text for each.
    """

    name: str
    title: str
    source: str
    options: dict[str, Any]  # options of the verbs that measure
    counting: Counting
    unsaid: str = ""  # a sentence on what the publication leaves open, or the verbs cannot do
    chat: str = "target"  # form of a chat: target (its chat template), vicuna, or none
    turns: str = "all"  # all or first
    strip: bool = False  # whether blanks around earlier answers are removed
    system: str | dict[str, str] = ""
    templates: dict[str, str] = field(default_factory=dict)
    num: dict[str, int] = field(default_factory=dict)  # questions that the publication uses
    order: str | dict[str, int] = "first"  # or {shuffle: seed of Python's random}, if it uses fewer than there are
    few_shot: dict[str, dict[str, Any]] = field(default_factory=dict)  # rows in front of a question, and their template
    max_new_tokens: dict[str, int] = field(default_factory=dict)  # exceptions from that of `options`
    stop: dict[str, list[str]] = field(default_factory=dict)  # texts that end an answer

    digest = property(lambda self: reading.digest_prompts([asdict(self)]))  # 16 hex digits of all fields

    def add_system(self, row: dict, name: str) -> dict:
        """The row with the system message in front, if there is one. name: name of a subset or suite"""
        system = self.system.get(name, "") if isinstance(self.system, dict) else self.system
        if not system:
            return row
        return row | {"prompt": None, "messages": [{"role": "system", "content": system}, *row["messages"]]}


NO_PROTOCOL = Protocol(name="", title="", source="", options={}, counting=SPECDEC)  # this project's own way


def list_names(kind: str) -> list[str]:
    """The names in conf/KIND, in order. kind: suite or protocol"""
    return sorted(path.stem for path in (CONF / kind).glob("*.yaml"))


def read_conf(kind: str, name: str) -> dict[str, Any]:
    """Reads conf/KIND/NAME.yaml. Raises ValueError for a name that does not exist."""
    names = list_names(kind)
    if name not in names:
        raise ValueError(describe_unknown_choice(kind, name, names))
    return yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())


def read_protocol(name: str) -> Protocol:
    """Reads a protocol. Raises ValueError for a name that conf/protocol does not have."""
    document = read_conf("protocol", name)
    return Protocol(name=name, **document | {"counting": Counting(**document["counting"])})
