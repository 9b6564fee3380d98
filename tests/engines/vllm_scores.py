"""In the engines' environment: vLLM's own candidate scores of an exported folder, on a CPU.

The argument is a folder with config.json, the weights, and inputs.pt: {hidden [B, K, H], ids and unary [B, K, top],
log_probs, anchor [B], context [B, H], embeddings [B, K, top, H], x [B * size, H]}.
Writes outputs.pt: {scores [B, K, top, top], mixed and finished [B * size, H]}
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.lilicorr import LiLiCorrHead
from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector, DFlashGroupedConv


def fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    module.load_state_dict(found, strict=True)
    for part in module.modules():
        if isinstance(part, LinearBase):
            part.cpu_linear = torch.nn.functional.linear  # without packed weights


@torch.no_grad()
def main(folder: Path) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    inputs, facts, width = torch.load(folder / "inputs.pt"), config["dflash_config"], config["hidden_size"]
    scores = {}
    if "selector_rank" in facts:
        sizes = {"rank": facts["selector_rank"], "top_k": facts["selector_top_k"], "params_dtype": torch.float32}
        selector = CandidateSelector(hidden_size=width, vocab_size=config["vocab_size"], prefix="selector", **sizes)
        fill(selector, tensors, "candidate_selector.")
        scores["scores"] = selector(inputs["ids"], inputs["unary"], inputs["hidden"], inputs["anchor"])
    else:
        sizes = {"model_hidden_size": width, "block_size": config["block_size"], "rms_norm_eps": config["rms_norm_eps"]}
        head = LiLiCorrHead(**sizes, config=facts)
        fill(head, tensors, "lilicorr.")
        head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
        valid = torch.ones(len(inputs["context"]), dtype=torch.bool)
        scores["scores"] = head(inputs["embeddings"], inputs["log_probs"], inputs["hidden"], inputs["context"], valid)
    if "conv_kernel_size" in facts:
        sizes = facts["conv_kernel_size"], facts["conv_group_size"], config["block_size"], torch.float32
        convolution = DFlashGroupedConv(width, *sizes, prefix="convolution")
        fill(convolution, tensors, "layers.1.mlp_conv.")
        scores["mixed"], coefficients = convolution.prepare(inputs["x"])
        scores["finished"] = convolution.finish(inputs["x"] + 1, coefficients)
    torch.save(scores, folder / "outputs.pt")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig(compilation_config={"mode": 0})):
        parallel_state.init_distributed_environment(1, 0, f"file://{scratch}/store", 0, backend="gloo")
        parallel_state.initialize_model_parallel()
        main(Path(sys.argv[1]))
