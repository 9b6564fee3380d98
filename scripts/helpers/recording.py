"""Options of the commands that record conversations."""

from helpers.options import option, split

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.server import traffic
from train.data import rows as data


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    record: str | None = option(None, "folder that conversations are written to, as rows to train on; null: nowhere")
    record_rate: float = option(1.0, "share of the conversations that are recorded; all turns of one, or none")
    record_max_bytes: int = option(1 << 30, "bytes that the folder may have; the oldest files are deleted")
    record_redact: str | None = option(None, "module:function, called with each row -> the row to write, or None")
    record_tags: str = option("", "comma list of tags for every row; the first names its category")


def settings(chosen: RecordOptions) -> traffic.Recording | None:
    """None without record=. Raises ValueError for settings that cannot be used."""
    if chosen.record is None:
        return None
    return traffic.Recording(
        Path(chosen.record),
        rate=chosen.record_rate,
        max_bytes=chosen.record_max_bytes,
        redact=traffic.find_hook(chosen.record_redact),
        tags=tuple(split(chosen.record_tags)),
    )


def open_recorder(
    settings: traffic.Recording, origin: traffic.Origin, tokenizer: PreTrainedTokenizerBase
) -> traffic.Recorder:
    """Raises ValueError for a folder that cannot be used."""
    own = copy.deepcopy(tokenizer)  # the recorder has a thread of its own
    return traffic.Recorder(settings, origin=origin, tokenizer=own, encode_chat=partial(data.encode_prompt, own))


def describe(settings: traffic.Recording | None) -> str:
    """For the line that a command starts with; empty without record=."""
    if settings is None:
        return ""
    share = "all" if settings.rate == 1 else f"{100 * settings.rate:g} % of the"
    return f"; {share} conversations are recorded in {settings.folder}"
