"""Where the target's outputs come from, as conf/train.yaml says in `features`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from specdec.heads.base import Head
from train.data.packing import Packs
from train.features.engine_client import EngineClient
from train.features.engine_features import EngineTarget
from train.features.feature_files import FeatureFolder
from train.features.outputs import Features, Kept, Online

SAMPLE = 2000  # documents that are looked for in a folder before training


@dataclass(frozen=True)
class FeatureSettings:
    """conf/train.yaml, `features`. Raises ValueError for what does not fit together."""

    mode: str
    engine: str | list[str] | None
    in_flight: int
    patience: float
    folder: str
    layers: list[int]
    bits: int | None

    def __post_init__(self):
        if self.mode == "engine" and not self.urls:
            raise ValueError(
                "mode=engine needs the URL of a server: engine=http://localhost:8000 (python scripts/launch_engine.py starts "
                "one)."
            )
        if self.mode == "online" and self.urls:
            raise ValueError("mode=online runs the target in this process: use mode=engine, or engine=null.")

    def check(self, *, adapts: bool, best_by: str, on_policy: float, tp: int, shard: bool) -> None:
        """Raises ValueError for what only a target in this process can do, if a server is to read the texts.

        adapts: whether the head changes the target; best_by: of `train`; on_policy: of `data`; tp, shard: of `target`
        """
        needed = [
            (adapts, "the head changes the target"),
            (on_policy, "data.on_policy lets the target judge texts that the draft writes"),
            (best_by != "tau", f"train.best_by={best_by} is measured by decoding"),
            (tp > 1, f"target.tp={tp} cuts a target in these processes"),
            (shard, "target.shard=true keeps the target's layers in these processes"),
        ]
        for applies, reason in needed:
            if self.urls and applies:
                raise ValueError(
                    f"features.engine={self.urls}: {reason}, for which the target must be in this process: use "
                    "features.mode=online."
                )

    @property
    def urls(self) -> str:
        """A comma list of the servers; empty if the target is in this process."""
        return ",".join(self.engine) if isinstance(self.engine, list) else self.engine or ""

    def connect(self, drafter: Head, *, say: Callable[[str], None]) -> EngineTarget | None:
        """The servers that read texts, tried; None: the target in this process does."""
        if not self.urls:
            return None
        layers = (*drafter.target_layers, *drafter.target.layer_ids(self.layers))
        client = EngineClient(
            self.urls, in_flight=self.in_flight, patience=self.patience, longest=self.patience / 2, say=say
        )
        return EngineTarget(client, drafter.target, layers)

    def open(
        self,
        drafter: Head,
        packs: Packs,
        *,
        engine: EngineTarget | None,
        streamed: bool,
        reads: Sequence[int],
        main: bool,
        say: Callable[[str], None],
    ) -> Features:
        """The source of features. It says how large a folder will be, which the main process makes.

        streamed: whether texts are read as they come; reads: the packs that the run will read
        Raises ValueError for a folder of another target or a disk too small.
        """
        target, layers = drafter.target, drafter.target_layers
        if self.mode == "online":
            return Online(target, layers)
        if self.mode == "engine":
            return Kept(target, layers, folder=None, reader=engine)
        if streamed:
            raise ValueError(
                "mode=cached keeps the target's outputs for every text, and data.stream=true reads texts once: use mode=online "
                "or engine."
            )
        folder = FeatureFolder(target, (*layers, *target.layer_ids(self.layers)), Path(self.folder), bits=self.bits)
        size = folder.num_bytes(num_missing(folder, packs, reads))
        if size:
            folder.check_space(size)
            say(f"features up to {size / 1e9:.2f} GB will be written to {self.folder} as they are needed")
        if main:
            folder.open()
        return Kept(target, layers, folder=folder, reader=engine)


def num_missing(folder: FeatureFolder, packs: Packs, reads: Sequence[int]) -> int:
    """Tokens that a folder lacks of the documents of some packs; of many documents it looks for an even sample."""
    numbers = numpy.unique(numpy.concatenate([packs.members[packs.ends[at] : packs.ends[at + 1]] for at in reads]))
    sample = numbers[:: math.ceil(len(numbers) / SAMPLE)]
    texts = [torch.tensor(packs.rows.arrays(number, packs.length)[0]) for number in sample.tolist()]
    missing = sum(len(text) for text in texts if not folder.has(text))
    return round(missing * len(numbers) / len(sample))
