"""Two heads take turns in a vLLM that answers requests, where `make engines` has set it up."""

import contextlib
import functools
import json
import math
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec.engines.client import EngineClient
from specdec.engines.draft_weights.base import DraftWeights
from specdec.engines.draft_weights.choice import open_draft_weights
from specdec.engines.draft_weights.vllm import make_vllm_words
from specdec.export.engines import make_form
from specdec.export.mtp import TARGET_OVERRIDES
from specdec.heads.base import Drafter
from specdec.measuring.model_card import write_export
from tests.engines import tiny_heads
from tests.engines.test_running_engines import running
from tests.engines.test_served_heads import PYTHON, engines
from tests.support.commands import ROOT
from tests.support.exports import make_provenance
from tests.support.targets import REAL_TARGET
from tests.support.together import free_ports
from train.settings.hydra_text import make_search_path

NUM_TOKENS, NUM_SWAPS = 24, 6
Answer = tuple[float, float, int, list[int], int]  # seconds of start and end, prompt, token ids, rounds


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target, prompts without near ties, and its answers as rows."""
    target = tiny_heads.make_target(tmp_path_factory.mktemp("swapped") / "target", tokenizer=str(REAL_TARGET))
    prompts = tiny_heads.make_prompts(target, 4, num_tokens=NUM_TOKENS)
    return target, prompts, tiny_heads.answer_prompts(target, prompts, NUM_TOKENS)


def train_two(name: str, reduced: bool, tiny) -> list[Drafter]:
    """A head of conf/head that drafts most rounds rightly, and the same with noise."""
    target, prompts, rows = tiny
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = hydra.compose("train", overrides=[f"head={name}", make_search_path()])
    config = OmegaConf.to_container(composed.head, resolve=True)
    settings = {name: value for name, value in config["drafter"].items() if value != "auto"}
    torch.manual_seed(1)
    vocab = tiny_heads.choose_vocab(rows) if reduced else None
    drafter = instantiate({**settings, "_convert_": "all"}, target, vocab=vocab)

    def exceeds(tau: float, trained: Drafter) -> float:
        return float(len(prompts) * (NUM_TOKENS - 1) / sum(count_rounds(trained, prompts)) > tau)

    good = tiny_heads.overfit(drafter, rows, config["objective"], share_right=functools.partial(exceeds, 3.0))
    return [good, tiny_heads.perturb(good, share_right=functools.partial(exceeds, 2.0))]


def count_rounds(drafter: Drafter, prompts: list[list[int]]) -> list[int]:
    """Rounds of the answer to each prompt, by this project's decoder."""
    return [*map(len, tiny_heads.decode_here(drafter, prompts, NUM_TOKENS).accepted)]


def make_command(target: str, folder: Path, method: str, port: str) -> list[str]:
    speculative = {"method": method, "model": str(folder), "num_speculative_tokens": tiny_heads.NUM_DRAFTS}
    flags = {"--model": target, "--port": port, "--dtype": "float32", "--max-model-len": "256",
             "--gpu-memory-utilization": "0.2", "--speculative-config": json.dumps(speculative),
             "--per-request-spec-decode-metrics": "detailed"}  # fmt: skip
    flags |= {"--hf-overrides": json.dumps(TARGET_OVERRIDES)} if method == "mtp" else {}
    words = [word for flag in flags.items() for word in flag]
    return [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager", *make_vllm_words()[1]]


class Users:
    """Three users who ask a server for the answers to the prompts, again and again."""

    def __init__(self, client: EngineClient, model: str, prompts: list[list[int]]):
        self.client, self.model, self.prompts = client, model, prompts
        self.stopped = threading.Event()
        self.answers: list[Answer] = []

    def ask(self, number: int) -> Answer:
        body = {"model": self.model, "prompt": self.prompts[number], "max_tokens": NUM_TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        start = time.monotonic()
        document = self.client.post_once(self.client.urls[0], "v1/completions", body)
        counts, (choice,) = document["metrics"]["speculative_decoding"], document["choices"]
        return start, time.monotonic(), number, choice["token_ids"], counts["num_spec_steps"]

    def ask_all(self) -> list[int]:
        """Rounds by prompt."""
        return [self.ask(number)[-1] for number in range(len(self.prompts))]

    def work(self, first: int) -> None:
        while not self.stopped.is_set():
            first += 1
            self.answers.append(self.ask(first % len(self.prompts)))

    @contextlib.contextmanager
    def at_work(self):
        """Raises what any request raised."""
        with ThreadPoolExecutor(3) as pool:
            futures: list[Future[None]] = [pool.submit(self.work, first) for first in range(3)]
            try:
                yield
            finally:
                self.stopped.set()
            for future in futures:
                future.result()


@engines
@pytest.mark.parametrize(("name", "reduced"), [("eagle3", True), ("mtp", False)])
def test_two_heads_take_turns_while_users_ask(tiny, tmp_path, monkeypatch, name, reduced):
    """Each answer is the target's, and has as many rounds as our decoder's with the head of that moment."""
    monkeypatch.chdir(ROOT)
    target, prompts, rows = tiny
    drafters, folders = train_two(name, reduced, tiny), [tmp_path / "good", tmp_path / "noisy"]
    for drafter, folder in zip(drafters, folders):
        provenance = make_provenance(drafter, target=target.name, fingerprint=target.fingerprint())
        write_export(make_form(drafter, "vllm"), folder, dtype=target.dtype, provenance=provenance)
    expected = [count_rounds(drafter, prompts) for drafter in drafters]
    assert 1.5 * sum(expected[0]) < sum(expected[1])
    port, environment = free_ports(1)[0], make_vllm_words()[0]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = make_command(target.name, folders[0], name, port)
    answers = [row.tokens[len(prompt) :] for row, prompt in zip(rows, prompts)]
    with (
        running(command, port, tmp_path / "log", **environment) as url,
        contextlib.closing(EngineClient(url, say=lambda _: None)) as client,
    ):
        weights = open_draft_weights(client, client.describe_models()[0][0])
        users = Users(client, target.name, prompts)
        assert users.ask_all() == expected[0]
        swaps = swap_at_work(weights, users, folders)
        check_answers(users.answers, swaps, answers, expected)
        check_faults(weights, users, tmp_path, expected[0])
        kill_in_the_middle(weights, folders[0], tmp_path / "log")


def swap_at_work(weights: DraftWeights, users: Users, folders: list[Path]) -> list[tuple[float, float, int]]:
    """-> start and end in seconds, and the head, of swaps among requests; the first head is served at the end"""
    swaps = [(0.0, 0.0, 0)]
    with users.at_work():
        for number in range(1, NUM_SWAPS + 1):
            time.sleep(1.5)
            start = time.monotonic()
            weights.load(folders[number % 2], f"swap-{number}")
            swaps.append((start, time.monotonic(), number % 2))
        time.sleep(1.5)
    version = weights.client.client.get(f"{weights.client.urls[0]}/weight_info").json()["weight_version"]
    assert version == f"swap-{NUM_SWAPS}"
    return swaps


def check_answers(
    answers: list[Answer], swaps: list[tuple[float, float, int]], expected: list[list[int]], rounds: list[list[int]]
) -> None:
    """Each head has answered; an answer between two swaps is that of the head of that time."""
    seen = [0, 0]
    for start, end, number, ids, count in answers:
        assert ids == expected[number] and count in (rounds[0][number], rounds[1][number])
        for (_, since, head), (until, _, _) in zip(swaps, [*swaps[1:], (math.inf, 0.0, 0)]):
            if since < start and end < until:
                assert count == rounds[head][number]
                seen[head] += 1
    assert min(seen) >= 4, seen


def check_faults(weights: DraftWeights, users: Users, folder: Path, expected: list[int]) -> None:
    """The served head stays, and a session that a lost client left open is closed."""
    client, (url,) = weights.client, weights.client.urls
    with pytest.raises(ValueError, match=f"{folder}/missing is no folder that this machine sees"):
        weights.load(folder / "missing", "missing")
    (folder / "other").mkdir()
    fields = json.loads((folder / "good/config.json").read_text()) | {"rope_theta": 5.0}
    (folder / "other/config.json").write_text(json.dumps(fields))
    (folder / "other/model.safetensors").write_bytes((folder / "good/model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"its rope_theta \(config\.json\) is 5\.0, and that of the served head"):
        weights.load(folder / "other", "other")
    assert users.ask_all() == expected
    client.post_once(url, "pause?mode=wait", {})
    client.post_once(url, "start_draft_weight_update", {})
    weights.load(folder / "good", "again")
    assert users.ask_all() == expected


def kill_in_the_middle(weights: DraftWeights, folder: Path, log: Path) -> None:
    """vLLM is stopped, gets a head, and is killed."""
    server = int(log.read_text().split("APIServer pid=")[1].split(")")[0])
    os.kill(server, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(weights.load, folder, "lost")
        time.sleep(1)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(
            ValueError, match=r"does not answer at /pause.*Started again, it serves the head of its start"
        ):
            loaded.result(timeout=60)
