"""A tiny random target, and heads of any family that draft it without a mistake, or wrongly in half of the rounds.

They show whether an engine runs a head as it was trained. A faithful engine accepts every draft of the first kind. With
the second kind it drafts what this project drafts: those drafts depend on everything that the head reads.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.engines import launch
from specdec.engines.exported import ExportedHead
from specdec.engines.start_lines import LINES, EngineStart
from specdec.export.engines import make_form
from specdec.heads.base import Drafter
from specdec.heads.dependence.selector import Selector
from specdec.measuring.model_card import write_export
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedAnswer
from specdec.measuring.servers.server import Connection, Server, make_body
from specdec.measuring.servers.verdict import draft_as_engine
from specdec.target.model import Target
from specdec.text import conversations as data
from tests.support.exports import make_provenance
from tests.support.together import free_ports
from train.data import batches
from train.features.outputs import ComputedFeatures
from train.objective.objective import Objective

NUM_DRAFTS = 3  # drafts of a round
STEPS, EVERY = 1200, 50  # largest number of training steps, and steps between two tests of the drafts
NUM_TOKENS = 24  # tokens of an answer in an engine
FEWEST_ROUNDS = -(-(NUM_TOKENS - 1) // (NUM_DRAFTS + 1))  # rounds of an answer whose drafts are all right
HOST = "127.0.0.1"
# Not compiled, vLLM 0.32 turns queries of latent attention by an operator that takes them for one head on a CPU
LATENT_OPERATORS = json.dumps({"custom_ops": ["all", "-rotary_embedding"]})
VLLM_FLAGS = f"--enforce-eager --gpu-memory-utilization 0.2 --compilation-config '{LATENT_OPERATORS}'"
ShareRight = Callable[[Drafter], float]  # share of rounds that draft only what the target then says


@dataclass(frozen=True)
class Case:
    """A tiny head: its name in conf/head, arguments, draft vocabulary or not, and the formats that CPU engines take."""

    head: str
    arguments: dict
    reduced: bool
    formats: tuple[str, ...]

    def __str__(self) -> str:
        words = [self.head, *(f"{key}={value}" for key, value in self.arguments.items())]
        return " ".join([*words, "reduced"] if self.reduced else words)


MARKOV = {"kind": "markov", "rank": 16}
SELECTOR = {"kind": "selector", "rank": 16, "top": 8}
BLOCK = {"num_drafts": NUM_DRAFTS}
# vLLM's CPU build norms the features' keys of all layers with the first layer's weight, so it gets one layer
THIN_BLOCK = {**BLOCK, "num_layers": 1}
CASES = [
    Case("eagle", {}, False, ("vllm",)),
    Case("eagle3", {}, True, ("vllm", "speculators", "gguf")),
    Case("eagle3", {"target_layers": [1, 3, 6]}, False, ("vllm", "speculators", "gguf")),
    Case("eagle3", {"norm_features": True, "norm_output": True}, True, ("vllm", "speculators")),
    Case("eagle3", {"norm_before_fc": True, "norm_before_residual": True}, True, ("vllm", "speculators", "gguf")),
    Case("eagle3", {"own_output": False}, True, ("vllm", "speculators", "gguf")),
    Case("eagle3", {"num_layers": 2}, False, ("vllm", "speculators")),
    Case("eagle3", {"window": 8}, False, ("vllm", "speculators")),
    Case("peagle", {"num_layers": 2}, True, ("vllm", "speculators")),
    Case("medusa", {"num_heads": 3, "num_blocks": 2}, False, ("vllm",)),
    Case("medusa", {"num_heads": 3, "own_output": True}, False, ("vllm", "medusa")),
    Case("mtp", {"window": 500}, False, ("vllm",)),  # vLLM has none for it: this one is wider than the texts
    Case("dflash", THIN_BLOCK, True, ("vllm", "speculators")),
    Case("dflash", BLOCK, False, ("gguf",)),
    Case("dflash", {**THIN_BLOCK, "mask_token": 7}, False, ("vllm", "gguf")),
    # the edge of a window is another one in vLLM (docs/file-formats.md, section 10): this one is wider than the texts
    Case("dflash", {**THIN_BLOCK, "window": 500}, True, ("vllm", "speculators")),
    Case("dspark", {**BLOCK, "dependence": MARKOV}, True, ("gguf",)),
    Case("dflash2", {**BLOCK, "dependence": SELECTOR}, False, ("gguf",)),
    Case("draft", {}, False, ("vllm", "gguf")),
]
# In an environment of its own. OpenVINO GenAI's own choice of layers ends with a target of ten layers.
OPENVINO_CASES = [
    Case("eagle3", {}, True, ("openvino",)),
    Case("eagle3", {"target_layers": [1, 3, 7], "own_output": False}, False, ("openvino",)),
]


def make_target(folder: Path, *, tokenizer: str) -> Target:
    """Random weights, written to `folder` with the tokenizer of another folder, which llama.cpp's converter needs."""
    torch.manual_seed(0)
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=len(loaded), hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.15, eos_token_id=2,
        bos_token_id=1, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=False)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    loaded.save_pretrained(folder)
    return Target.load(str(folder), dtype="float32")


def decode_plainly(target: Target, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    return Decoder(target, None, sampling=Sampling(), stop=set()).generate(prompts, num_tokens).tokens


def make_prompts(target: Target, num: int, *, num_tokens: int) -> list[list[int]]:
    """Random prompts whose answers have no near ties, which engines round differently."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(100, 40_000, (8,), generator=generator).tolist() for _ in range(4 * num)]
    answers = decode_plainly(target, prompts, num_tokens)

    def find_margin(n: int) -> float:
        tokens = torch.tensor([prompts[n] + answers[n]])
        best = target.logits(target.read(tokens, ()).final[0, len(prompts[n]) - 1 : -1]).topk(2).values
        return float((best[:, 0] - best[:, 1]).min())

    return [prompts[n] for n in sorted(range(len(prompts)), key=find_margin)[-num:]]


def answer_prompts(target: Target, prompts: list[list[int]], num_tokens: int) -> list[data.Row]:
    """The prompts with the target's answers of `num_tokens` tokens, as rows to train on."""
    answers = decode_plainly(target, prompts, num_tokens)
    return [
        data.Row(str(n), "all", prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for n, (prompt, answer) in enumerate(zip(prompts, answers))
    ]


def choose_vocab(rows: list[data.Row]) -> torch.Tensor:
    """[W] the first hundred ids and every id in the rows, increasing"""
    return torch.tensor(sorted({*range(100), *(token for row in rows for token in row.tokens)}))


def train_heads(drafter: Drafter, rows: list[data.Row], objective: dict, prompts: list[list[int]]) -> dict:
    """{"right": a head without mistakes, "noisy": the same with noise}"""

    def share_right(trained: Drafter) -> float:
        generation = decode_here(trained, prompts)
        return sum(count_right(accepted) for accepted in generation.accepted) / sum(map(len, generation.accepted))

    right = overfit(drafter, rows, objective, share_right=share_right)
    return {"right": right, "noisy": perturb(right, share_right=share_right)}


def decode_here(drafter: Drafter, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> Generation:
    """Greedy answers with chains of NUM_DRAFTS, by this project's decoder."""
    drafting = Drafting(depth=NUM_DRAFTS)
    decoder = drafting.decoder(drafter.target, drafting.proposer(drafter), sampling=Sampling(), stop=set())
    return decoder.generate(prompts, num_tokens)


def count_right(accepted: list[int]) -> int:
    """Rounds that accept all drafts for which an answer of NUM_TOKENS has room. accepted: drafts of each round"""
    written, right = 1, 0
    for count in accepted:
        right += count == min(NUM_DRAFTS, NUM_TOKENS - written - 1)
        written += count + 1
    return right


# In engines


@contextlib.contextmanager
def open_engine(engine: str, drafter: Drafter, format_name: str, folder: Path) -> Iterator[Connection]:
    """An engine with a head, exported to `folder`, as `specdec launch_engine` starts it."""
    target, (port,) = drafter.target, free_ports(1)
    form = make_form(drafter, format_name)
    if not folder.exists():
        provenance = make_provenance(drafter, target=target.name, fingerprint=target.fingerprint())
        write_export(form, folder, dtype=target.dtype, provenance=provenance)
    head = ExportedHead.read(folder)
    if engine == "vllm" and "vLLM" not in head.lines:  # the card of format=medusa is for the reference code
        settings = json.dumps(form.engine_settings(str(folder), NUM_DRAFTS))
        head = replace(head, lines={"vLLM": f"vllm serve {target.name} --speculative-config '{settings}'"})
    start = EngineStart(str(folder) if head.whole else target.name, int(port), "float32", head, max_length=128,
                        folder=folder.parent / "converted", flags=VLLM_FLAGS)  # fmt: skip
    body = make_body(engine, Sampling(), max_new_tokens=NUM_TOKENS, seed=0, ignore_stop=True)
    url = launch.make_url(HOST, int(port))
    with (
        launch.open_server(LINES[engine](start), HOST, int(port), log=folder.with_suffix(".log"), patience=900),
        Server(url, start.target, engine, "", body, 120.0, print).open(4) as connection,
    ):
        yield connection


def ask(connection: Connection, prompts: list[list[int]]) -> list[ServedAnswer]:
    """An answer to each prompt. llama.cpp gets one request at a time, as its counters are those of all."""
    requests = [(str(n), {"prompt": prompt}) for n, prompt in enumerate(prompts)]
    batches = [[request] for request in requests] if connection.server.kind == "llamacpp" else [requests]
    answered = [connection.send_requests(batch) for batch in batches]
    assert not any(batch.failed for batch in answered), answered
    return sorted(referee.list_answers(answered), key=lambda answer: int(answer.prompt))


def check_served(drafter: Drafter, prompts: list[list[int]], engine: str, format_name: str, folder: Path) -> list[int]:
    """Rounds of each answer of an engine: those of this project's decoder, where this can be told, round by round."""
    with open_engine(engine, drafter, format_name, folder) as connection:
        answers = ask(connection, prompts)
    expected = decode_here(draft_as_engine(drafter, engine), prompts)
    return compare_answers(answers, expected)


def compare_answers(answers: list[ServedAnswer], expected: Generation) -> list[int]:
    """Rounds of each answer. Asserts that answers and rounds are those expected."""
    for answer, tokens, accepted in zip(answers, expected.tokens, expected.accepted, strict=True):
        assert answer.ids == tokens and answer.server_counts is not None and answer.counts is not None
        assert answer.counts.num_rounds == len(accepted)
        steps = answer.server_counts.steps
        assert steps is None or referee.find_first_difference(steps, accepted, len(tokens)) is None
    return [len(accepted) for accepted in expected.accepted]


def overfit(drafter: Drafter, rows: list[data.Row], objective: dict, *, share_right: ShareRight) -> Drafter:
    """A copy of the drafter that drafts these rows without a mistake. Raises ValueError if it does not learn them.

    objective: arguments of `Objective` as conf/head has them; only cross-entropy and confidence count
    """
    counting_losses = {"ce", "confidence"} if drafter.has_confidence else {"ce"}
    changes = {
        "losses": {name: float(name in counting_losses) for name in objective["losses"]},
        "depth": 1 if drafter.context_kind == "text" else NUM_DRAFTS,
        "anchors": None,
        "keep": 1.0,
    }
    arguments = objective | changes
    arguments.pop("_target_", None)
    loss_of = Objective(drafter, **arguments)
    batch = batches.collate([[row] for row in rows], length=max(len(row.tokens) for row in rows), pad_token=0)
    output = ComputedFeatures(drafter.target, drafter.target_layers)(batch)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(STEPS // EVERY):
        for _ in range(EVERY):
            loss = loss_of(batch, output)
            (loss.total / loss.num_goals).backward()
            optimizer.step()
            optimizer.zero_grad()
        frozen = drafter.frozen_copy()
        if share_right(frozen) == 1:
            return frozen
    raise ValueError(f"The tiny {type(drafter).__name__} has not learned its answers in {STEPS} steps.")


def perturb(drafter: Drafter, *, share_right: ShareRight) -> Drafter:
    """A copy with noise on every weight, enough that more than half of the rounds draft something wrong."""
    for scale in (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2):
        torch.manual_seed(2)
        noisy = drafter.frozen_copy()
        dependence = getattr(noisy, "dependence", None)
        if isinstance(dependence, Selector):  # training leaves its scores too small to matter
            weight = dependence.successor.weight
            weight.add_(1000 * scale * torch.randn_like(weight))
        for parameter in noisy.parameters():
            parameter.add_(scale * parameter.abs().mean() * torch.randn_like(parameter))
        if share_right(noisy) < 0.5:
            break
    return noisy
