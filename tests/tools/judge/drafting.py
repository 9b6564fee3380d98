"""A stand-in for an engine that drafts, and this project's own server with a chain of a head."""

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from specdec import checkpoint
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from tests.support.decoding import chain_of
from tests.support.small_server import SmallServer
from tests.support.targets import small_tokenizer
from tests.tools.server.test_app import serving

NUM, NEW, K = 6, 12, 3


FACTS = {  # what each engine tells of itself, by path
    "vllm": {"version": {"version": "0.32.0"}},
    "sglang": {"server_info": {"version": "0.5.23", "quantization": "fp8", "kv_cache_dtype": "auto"}},
    "llamacpp": {"props": {"build_info": "b11434-abc"}},
}
RENDERING = {"vllm": ["tokenize"], "sglang": ["tokenize"], "llamacpp": ["apply-template", "tokenize"]}


class Drafting(SmallServer):
    """A stand-in for an engine of a kind: random rounds for each prompt, told as that engine tells them.

    drafts: whether the engine drafts; per_answer, metrics: whether it has counts of drafts in answers, and in /metrics
    spoil: called with path, body and how often this prompt was asked before; its reply takes the place of the usual one
    entry: further fields of the model in /v1/models; template: suffix of each message, which renders other prompts
    first_id: called with the prompt and how often it was asked before; the answer's ids count from there
    """

    def __init__(self, kind: str, *, drafts: bool = True, per_answer: bool = True, metrics: bool = True):
        super().__init__(self._reply)
        self.kind, self.drafts, self.per_answer, self.metrics = kind, drafts, per_answer, metrics
        self.spoil: Callable = no_fault
        self.entry: dict = {}
        self.template = ""
        self.first_id: Callable = lambda prompt, times: 1
        self.counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "tokens"), 0)
        self.positions = [0] * K
        self.times_asked: dict[str, int] = {}

    def list_rounds(self, body: dict) -> list[int]:
        """Accepted drafts of each round, which end with the answer; some answers end early."""
        source = random.Random(name_prompt(body))
        limit = min(body["max_tokens"], source.choice((NEW, 7)))
        accepted: list[int] = []
        while (tokens_left := limit - 1 - sum(accepted) - len(accepted)) > 0:
            num = source.randrange(K + 1) if self.drafts and body.get("speculate", True) else 0
            accepted.append(min(num, tokens_left - 1))
        return accepted

    def _reply(self, path: str, body: dict | None):
        if path == "v1/models":
            return 200, {"data": [{"id": "small", "owned_by": self.kind, "max_model_len": 64} | self.entry]}
        if path == "metrics":
            return (200, self.write_metrics()) if self.metrics else (404, {})
        if path in FACTS.get(self.kind, ()):
            return 200, FACTS[self.kind][path]
        if body and path in RENDERING.get(self.kind, ()):
            return self.render(path, body)
        if body is None or path not in ("v1/completions", "v1/chat/completions"):
            return 404, {}
        prompt = name_prompt(body)
        with self.guard:
            times = self.times_asked[prompt] = self.times_asked.get(prompt, -1) + 1
        return self.spoil(path, body, times) or (200, self.stream(body, self.first_id(prompt, times)))

    def render(self, path: str, body: dict):
        """The prompt of messages as text or as ids; 404 for a text."""
        tokenizer = small_tokenizer()
        if "messages" not in body:
            is_text = self.kind == "llamacpp" and "parse_special" in body
            return (200, {"tokens": tokenizer(body["content"])["input_ids"]}) if is_text else (404, {})
        messages = [message | {"content": message["content"] + self.template} for message in body["messages"]]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return 200, ({"prompt": text} if path == "apply-template" else {"tokens": ids})

    def stream(self, body: dict, first_id: int = 1) -> list[bytes]:
        time.sleep(0.01)
        accepted, num = self.list_rounds(body), 1
        drafts = self.drafts and body.get("speculate", True)
        events = []
        for step in [None, *accepted]:
            size = 1 if step is None else step + 1
            start = first_id + num - 1
            events.append(self.write_event(body, step, list(range(start, start + size)), K if drafts else 0))
            num += 0 if step is None else size
        events[-1]["choices"][0]["finish_reason"] = "length" if num == body["max_tokens"] else "stop"
        counts, positions = self.count(accepted, len(accepted) if drafts else 0, num)
        last: dict = {"choices": [], "usage": {"completion_tokens": num}}
        if self.per_answer:
            last |= self.write_counts(accepted, drafts, counts, positions)
        return [b"", *(f"data: {json.dumps(event)}\n\n".encode() for event in [*events, last]), b"data: [DONE]\n\n"]

    def write_event(self, body: dict, step: int | None, ids: list[int], drafted: int) -> dict:
        """A document with the tokens of a round; step: its accepted drafts, None for the first token"""
        event: dict = {"choices": [{"text": "a" * len(ids), "finish_reason": None}]}
        if body.get("return_token_ids"):
            event["choices"][0]["token_ids"] = ids
        if body.get("verbose"):
            event["__verbose"] = {"tokens": ids}
        if self.kind == "specdec" and step is not None:
            event["round"] = {"accepted": step, "drafted": drafted}
        if "messages" in body:
            event["choices"][0]["delta"] = {"content": event["choices"][0].pop("text")}
        return event

    def count(self, accepted: list[int], drafting: int, num: int) -> tuple[dict, list[int]]:
        counts = {"drafts": drafting, "draft_tokens": K * drafting, "accepted_tokens": sum(accepted), "tokens": num}
        positions = count_positions(accepted)
        with self.guard:
            self.counts = {name: value + counts[name] for name, value in self.counts.items()}
            self.positions = [before + added for before, added in zip(self.positions, positions)]
        return counts, positions

    def write_counts(self, steps: list[int], drafts: bool, counts: dict, positions: list[int]) -> dict:
        """The fields of the last document with the counts of an answer."""
        drafted, accepted, tokens = counts["draft_tokens"], counts["accepted_tokens"], counts["tokens"]
        histogram = [steps.count(number) for number in range(K + 1)]
        if self.kind == "specdec":
            own = {"rounds": len(steps), "drafted": drafted, "accepted": accepted, "accepted_by_position": positions}
            return {"usage": {"completion_tokens": tokens, "speculation": own}}
        if self.kind == "llamacpp":
            own = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
            return {"timings": {"predicted_n": tokens, **own}}
        vllm = {"mean_acceptance_length": 9.0, "acceptance_histogram": histogram, "num_spec_steps": len(steps)}
        vllm |= {"num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted, "num_spec_tokens": K}
        sglang = {"spec_accept_length": 9.0, "spec_verify_ct": len(steps), "spec_num_correct_drafts": accepted}
        sglang |= {"spec_num_proposed_drafts": drafted, "spec_correct_drafts_histogram": histogram}
        fields = {
            "vllm": {"metrics": {"speculative_decoding": vllm | {"per_step_accepted": steps}}},
            "sglang": {"sglext": {"spec_tokens_details": sglang}},
        }
        return fields.get(self.kind, {}) if drafts else {}

    def write_metrics(self) -> str:
        prefix, labels, tokens = "vllm", 'engine="0",', "generation_tokens"
        if self.kind == "llamacpp":
            prefix, labels, tokens = "llamacpp", "", "tokens_predicted"
        label = labels and f'{{{labels}model_name="small"}}'
        lines = ["# HELP x", f"{prefix}:{tokens}_total{label} {self.counts['tokens']}", "vllm:num_requests_running 0.0"]
        if self.drafts:
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                lines.append(f"{prefix}:spec_decode_num_{name}_total{label} {float(self.counts[name])}")
            counter = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{counter}{{{labels}position="{index}"}} {value}' for index, value in enumerate(self.positions)]
        return "\n".join(lines)


def no_fault(path: str, body: dict, times: int) -> None:
    """The usual replies."""


def name_prompt(body: dict) -> str:
    return json.dumps(body.get("prompt", body.get("messages")))


def count_positions(accepted: list[int]) -> list[int]:
    return [sum(map(position.__lt__, accepted)) for position in range(K)]


def list_bodies(server: Drafting, start: int = 0) -> list[dict]:
    """The bodies of whole answers that were asked for, without the short tries."""
    return [body for _, body in server.requests[start:] if body and body.get("max_tokens") == NEW]


def find_truth(server: Drafting) -> tuple[float, list[float]]:
    """tau and survival of one answer to each prompt with all of its tokens."""
    bodies = {name_prompt(body): body for body in list_bodies(server)}
    rounds = [server.list_rounds({"prompt": body["prompt"], "max_tokens": NEW}) for body in bodies.values()]
    accepted = list(itertools.chain(*rounds))
    return sum(accepted) / len(accepted) + 1, [num / len(accepted) for num in count_positions(accepted)]


@contextlib.contextmanager
def own_server(folder: Path) -> Iterator[SmallServer]:
    """This project's server with a chain of the head -> something with its URL"""
    target = Target.load(str(folder / "target"), dtype="float64")
    head = HeadProposer(checkpoint.load(folder / "head", target), chain_of(K))
    small = SmallServer(no_fault)
    with serving(target, proposer=head) as (url, _):
        small.port = int(url.rpartition(":")[2])
        yield small
