"""experiment=blockwise is Medusa with one residual layer a head, equal weights of all heads, and the text as goal."""

import hydra
from omegaconf import OmegaConf

from specdec.heads.medusa import Medusa
from tests.support.commands import ROOT
from train.settings.hydra_text import make_search_path
from train.settings.options import read_run


def test_the_experiment_is_the_method_of_the_paper():
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = hydra.compose("train", ["experiment=blockwise", "run=some", make_search_path()])
    options = read_run(OmegaConf.to_container(composed, resolve=True))
    drafter, objective = options.head.drafter, options.head.objective
    assert options.head.drafter_class is Medusa and drafter["num_blocks"] == 1
    assert objective["decay"] == 1 and {name for name, weight in objective["losses"].items() if weight} == {"ce"}
    assert objective["supervise"] == "answers" and options.decode.nodes == options.decode.depth == drafter["num_heads"]
