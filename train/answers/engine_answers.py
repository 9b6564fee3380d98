"""Answers of servers, many at once, in the order of the jobs. vLLM (v1/completions) and llama.cpp (completion) take and give token ids."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import PurePosixPath

from transformers import PreTrainedTokenizerBase

from train.answers.answering import AnswerJob, AnswerSettings, WrittenAnswer, make_answer
from train.features.engine_client import BadAnswer, EngineClient, Refused
from train.features.engine_features import LLAMA_CPP, discard_states, find_fingerprint

AHEAD = 4  # requests that wait for an earlier answer, for each one in flight


class AnswerServer:
    """The target in one server, or in several that are used in turn, which answer jobs in their order.

    name: the target's, which the server's model is compared with
    example: a job, with whose prompt the servers' tokenizer is compared

    `fingerprint`: of the weights that answer; None: not known
    Raises ValueError, with what to do, if a server does not answer or has another tokenizer.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        settings: AnswerSettings,
        *,
        name: str,
        example: AnswerJob,
    ):
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        about = self._choose_model(name)
        self.model, self.of_llama_cpp = str(about["id"]), about.get("owned_by") == LLAMA_CPP
        self.fingerprint = find_fingerprint(about)
        check_tokenizer(client, self.model, tokenizer, example.tokens)

    def write(self, jobs: Iterable[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """What was written for the jobs, some of them at a time."""
        return in_order(self._submit, iter(jobs), ahead=AHEAD * self.client.in_flight)

    def _submit(self, job: AnswerJob) -> "Future[WrittenAnswer]":
        def read(answer: dict) -> WrittenAnswer:
            found = self.read_answer(answer, job)
            discard_states(answer, job.tokens + found.tokens)
            return found

        settings = self.settings
        if self.of_llama_cpp:
            body = {
                "prompt": job.tokens,
                "n_predict": settings.max_new_tokens,
                "samplers": ["temperature", "top_p"],  # no others, in the order of vLLM
                "temperature": job.temperature,
                "top_p": settings.top_p,
                "seed": settings.seed_of(job.id, bits=31),
                "return_tokens": True,
                "cache_prompt": False,  # answers do not depend on those before
            }
            return self.client.submit("completion", body, lambda answer: self.read_answer(self._as_vllm(answer), job))
        body = {  # what this interface leaves open is set here, so that the model's defaults do not count
            "model": self.model,
            "prompt": job.tokens,
            "max_tokens": settings.max_new_tokens,
            "temperature": job.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed_of(job.id, bits=31),
            "stop_token_ids": sorted(settings.stop),
            "ignore_eos": True,  # only `stop` ends an answer
            "return_token_ids": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return self.client.submit("v1/completions", body, read)

    def _as_vllm(self, answer: dict) -> dict:
        """An answer of llama.cpp, which knows no stop tokens but those of its file."""
        tokens = answer.get("tokens") or []
        end = next((n + 1 for n, token in enumerate(tokens) if token in self.settings.stop), None)
        finish = "length" if end is None and answer.get("stop_type") == "limit" else "stop"
        return {"choices": [{"token_ids": tokens[:end], "finish_reason": finish}]}

    def read_answer(self, answer: dict, job: AnswerJob) -> WrittenAnswer:
        """What came back for a job. Raises BadAnswer for what may be right the next time."""
        settings = self.settings
        try:
            choice = answer["choices"][0]
            tokens, finish = choice.get("token_ids"), choice["finish_reason"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadAnswer(f"it has no answer of the interface's form ({type(error).__name__}: {error})") from error
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise BadAnswer(f"the answer to {job.id} has no token ids, which vLLM and llama.cpp give")
        ended = tokens[-1] in settings.stop
        if finish not in ("stop", "length") or (finish == "stop" and not ended):
            raise BadAnswer(
                f"the answer to {job.id} ended because of {finish!r} with token {tokens[-1]}, which is none of the "
                f"target's stop tokens {sorted(settings.stop)}"
            )
        if not ended and len(tokens) != settings.max_new_tokens:
            raise BadAnswer(f"the answer to {job.id} was cut after {len(tokens)} tokens, not {settings.max_new_tokens}")
        return make_answer(self.tokenizer, tokens, settings.stop, job.before)

    # What the servers are

    def _choose_model(self, name: str) -> dict:
        """What the first server says about its model of the target, whose name all servers have."""
        found = [{str(model["id"]): model for model in models} for models in self.client.describe_models()]
        common = [each for each in found[0] if all(each in models for models in found)]
        if not common:
            names = "; ".join(", ".join(models) for models in found)
            raise ValueError(f"The servers have no model in common ({names}). Give those of one target.")
        last = PurePosixPath(name).name.lower()
        model = next((each for each in common if PurePosixPath(each).name.lower() == last), None)
        if model is None:
            model = common[0]
            warnings.warn(
                f"The server's model is called {model}, and target.name={name}: make sure that they are the same.",
                stacklevel=2,
            )
        return found[0][model]


def check_tokenizer(client: EngineClient, model: str, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> None:
    """Compares ids where servers have /tokenize, as vLLM and llama.cpp have. tokens: of a prompt, as an example

    Raises ValueError for a server with another tokenizer.
    """
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
    try:
        for _ in client.urls:  # they are asked in turn
            found = client.post("tokenize", body, lambda answer: answer.get("tokens"))
            if isinstance(found, list) and found and found != wanted:
                raise ValueError(
                    f"The server's tokenizer is not the target's: it gives {len(found)} ids for a prompt that has "
                    f"{len(wanted)}, or other ids. Serve the model that target.name= names."
                )
    except Refused:
        return


def in_order(
    submit: Callable[[AnswerJob], "Future[WrittenAnswer]"], jobs: Iterator[AnswerJob], *, ahead: int
) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
    """Yields the results of the first jobs as soon as they are there. ahead: jobs that may be under way behind the first one"""
    waiting: deque[tuple[AnswerJob, Future[WrittenAnswer]]] = deque()
    try:
        while True:
            while len(waiting) < ahead and (job := next(jobs, None)) is not None:
                waiting.append((job, submit(job)))
            if not waiting:
                return
            done = [(waiting[0][0], waiting[0][1].result())]
            waiting.popleft()
            while waiting and waiting[0][1].done() and waiting[0][1].exception() is None:  # else it raises next time
                job, future = waiting.popleft()
                done.append((job, future.result()))
            yield done
    finally:
        for _, future in waiting:
            future.cancel()
