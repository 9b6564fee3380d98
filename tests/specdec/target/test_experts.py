"""The number of experts that tokens use: by hand, and in the configurations of families."""

import pytest
from transformers import AutoConfig

from specdec.target.structure import Experts, find_experts


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, None),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, Experts(8, 2)),
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}, Experts(128, 8)),
        ("deepseek_v3", {"n_routed_experts": 256, "num_experts_per_tok": 8}, Experts(256, 8)),
        ("ernie4_5_moe", {"moe_num_experts": 64, "moe_k": 6}, Experts(64, 6)),
        ("longcat_flash", {"n_routed_experts": 16, "moe_topk": 4}, Experts(16, 4)),
        ("doge", {"is_moe": False}, None),
    ],
)
def test_experts_are_found_in_the_configurations_of_families(model_type, fields, expected):
    assert find_experts(AutoConfig.for_model(model_type, **fields).to_dict()) == expected
