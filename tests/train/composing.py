"""Options of train.py as Hydra composes them, without a run."""

import hydra
from omegaconf import OmegaConf

from tests.support.commands import ROOT
from train.settings.hydra_text import make_search_path
from train.settings.options import RunOptions, read_run


def compose(*overrides: str) -> dict:
    """The document of conf/train.yaml with overrides."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = hydra.compose("train", ["run=some", *overrides, make_search_path()])
    return OmegaConf.to_container(config, resolve=True)


def compose_options(*overrides: str) -> RunOptions:
    return read_run(compose(*overrides))
