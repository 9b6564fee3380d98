"""Targets whose layers two processes share: states are those of a whole target, whatever each process reads."""

import pytest
import torch
from accelerate import PartialState
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.target.adapter import add_adapter
from specdec.target.model import Target
from specdec.text.conversations import Row
from tests.support import families
from tests.support.quantised import quantise
from tests.support.saved_targets import edit
from tests.support.targets import save_word_model
from tests.support.together import together
from train.data.batches import TrainingBatch, collate
from train.features.outputs import ComputedFeatures
from train.processes import make_mesh

pytestmark = pytest.mark.full  # starts processes

MODULE = "tests.specdec.target.test_sharding"
FAMILIES = ["gemma4_text-shared", "phi3"]  # with values beside the layers, joined matrices
REFUSED = ["qwen3_5_text", "qwen3_moe"]
LENGTHS = ([[30], [29]], [[17, 2, 1], [9, 4, 2, 1]])  # of the documents of two packs, by process: 1 group and 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name in (*FAMILIES, *REFUSED):
        families.make(families.find_family(name)).save_pretrained(folder / name)
    edit(save_word_model(folder / "quantised"), quantization_config={"quant_method": "gptq", "bits": 4})
    save_word_model(folder / "plain", tied=True)
    quantise(folder / "plain", folder / "modelopt", "modelopt_nvfp4")
    return folder


@pytest.fixture(scope="module")
def results(folder) -> list[dict]:
    """The result of `compare` in each of two processes."""
    return together(2, f"{MODULE}:compare", str(folder))


def compare(folder: str) -> dict:
    """In each process, with its own texts: figures of a whole and of a shared target, and refusals."""
    PartialState(cpu=True)
    mesh = make_mesh("dp_shard", 2, "cpu", "shard=2")
    figures = {}
    for name in (*FAMILIES, "plain", "modelopt"):
        whole, sharded = pair = [
            Target.load(f"{folder}/{name}", dtype="float64"),
            Target.load_sharded(f"{folder}/{name}", mesh, dtype="float64"),
        ]
        outputs = [ComputedFeatures(loaded, (1, 2))(batch()) for loaded in pair]
        sizes = [count_bytes(loaded) for loaded in pair]
        figures[name] = difference(*outputs), sizes, whole.fingerprint() == sharded.fingerprint()
    missing_calls = sharded.share.count_missing_calls(3 + 2 * dist.get_rank()), whole.share.count_missing_calls(3)
    check_refusals(folder, sharded, mesh)
    return {"figures": figures, "missing_calls": missing_calls}


def batch() -> TrainingBatch:
    """Packs of other documents in each process."""
    torch.manual_seed(dist.get_rank())
    packs = []
    for counts in LENGTHS[dist.get_rank()]:
        packs.append([Row("0", "all", torch.randint(57, (count,)).tolist(), [True] * count) for count in counts])
    return collate(packs, length=32, pad_token=0)


def difference(first, second) -> float:
    """The largest difference in documents, relative to the largest state."""
    inside = batch().documents >= 0
    return max(
        float((one - two)[inside].abs().max() / one[inside].abs().max())
        for one, two in ((first.features, second.features), (first.final, second.final))
    )


def count_bytes(target: Target) -> list[int]:
    """Of the blocks and of everything else in this process."""
    layer_parameters = {id(value) for block in target.layers for value in block.parameters()}
    sizes = [0, 0]
    for value in target.model.parameters():
        local = value.to_local() if isinstance(value, DTensor) else value
        sizes[id(value) not in layer_parameters] += local.nbytes
    return sizes


def check_refusals(folder: str, sharded: Target, mesh) -> None:
    attempts = {
        r"recurrent or convolution layers.*Use shard=false\.$": lambda: Target.load_sharded(
            f"{folder}/qwen3_5_text", mesh
        ),
        r"experts.*Use shard=false; then device=auto": lambda: Target.load_sharded(f"{folder}/qwen3_moe", mesh),
        r"is quantised \(gptq-4bit\), and shard=true divides only plain": lambda: Target.load_sharded(
            f"{folder}/quantised", mesh
        ),
        r"set compile=false\.$": lambda: Decoder(
            sharded, None, sampling=Sampling(), stop=set(), runner=Runner(compile=True)
        ),
        r"or choose another head\.$": lambda: add_adapter(sharded, rank=2, alpha=4, modules=["q_proj"]),
    }
    for sentence, attempt in attempts.items():
        with pytest.raises(ValueError, match=f"(?s){sentence}"):
            attempt()


def test_states_and_fingerprints_are_those_of_a_whole_target(results):
    """Though one process calls its target once and the other five times. Each holds half of the layers and all else."""
    for name in (*FAMILIES, "plain", "modelopt"):
        figures = [result["figures"][name] for result in results]
        assert all(error < 1e-10 and same for error, _, same in figures), name
        (layers, ends), _ = figures[0][1]
        shares = [sizes[1] for _, sizes, _ in figures]
        assert sum(share[0] for share in shares) == layers
        assert all(0.4 < share[0] / layers < 0.6 and share[1] == ends for share in shares)
    assert [list(result["missing_calls"]) for result in results] == [[2, 0], [0, 0]]
