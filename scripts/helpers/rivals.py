"""Other decoders for scripts/bench.py, greedy, each alone and with its own speculation: transformers, llama.cpp, vLLM.

One that cannot run loses its own row only: `Rival.failure` says why.
"""

from helpers import in_vllm, loading

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_clients import llamacpp_client, vllm_client
from engine_clients.llamacpp_client import LlamaCpp
from engine_clients.vllm_client import Vllm
from specdec.export.cards import Provenance
from specdec.export.engines import ExportForm, make_form
from specdec.export.folder import write_export
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.measuring.benchmark import Timed, TimedModel

NAMES = ("transformers", "llamacpp", "vllm")
GGUF_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
SHORT = {"size_n": 3, "size_m": 10}  # n-grams of 3 and 10 drafts; llama.cpp's defaults are 12 and 48
VLLM_LOOKUPS = {
    "ngram, n-grams of 2 to 4, 5 drafts": {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
    },
    # without its cache of earlier answers: every prompt is decoded several times
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}  # fmt: skip
MOST_DRAFTS = 64  # of the methods above, for the length of the context
Answer = Callable[
    [Any, list[int], int], tuple[list[int], int | None]
]  # engine, prompt, longest answer -> tokens, rounds


@dataclass(frozen=True)
class Setting:
    """What all rivals decode.

    lengths: of the chains of drafts; longest: tokens of the longest prompt and its answer; folder: for exports
    gguf: the target's GGUF file, if there is one; gguf_type: of the files that are made; eager: vLLM compiles nothing
    """

    opened: loading.Opened
    runs: list[loading.Run]
    lengths: list[int]
    longest: int
    max_new_tokens: int
    folder: Path
    gguf: str | None = None
    gguf_type: str | None = None
    eager: bool = False

    def model(self, **arguments) -> TimedModel:
        """transformers' generate, with further arguments of it."""
        model, stop = self.opened.target.model, self.opened.stop
        return TimedModel(model, stop=stop, max_new_tokens=self.max_new_tokens, **arguments)


class Rival(Timed):
    """A method that may fail when it starts or later: then `failure` says why, and it generates nothing.

    plain: the name of the same engine's plain decoding, whose answers this one must give
    """

    def __init__(self, start: Callable[[], Timed], *, plain: str | None = None):
        self.start, self.plain = start, plain
        self.method: Timed | None = None
        self.failure: str | None = None

    def open(self) -> None:
        def start() -> None:
            self.method = self.start()

        self._guarded(start)

    def __call__(self, prompt: list[int]) -> tuple[list[int], float]:
        reply = self._guarded(lambda: self.method(prompt)) if self.method else None
        return reply or ([], math.inf)

    def restart(self) -> None:
        if self.method:
            self._guarded(self.method.restart)

    def clear(self) -> None:
        if self.method:
            self.method.clear()

    def figures(self) -> dict:
        return self.method.figures() if self.method else {}

    def close(self) -> None:
        if isinstance(self.method, TimedEngine):
            self.method.close()
        self.method = None

    def _guarded(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # whatever another project raises
            self.failure = " ".join(str(error).split()) or type(error).__name__
            self.close()
            return None


class TimedEngine(Timed):
    """Generates with an engine in a process of its own. Its time is that of the whole request.

    remembers: it drafts from earlier answers, so that it is started again where these are to be forgotten
    """

    def __init__(self, start: Callable[[], Any], answer: Answer, max_new_tokens: int, *, remembers: bool = False):
        self.start, self.answer, self.max_new_tokens, self.remembers = start, answer, max_new_tokens, remembers
        self.engine = start()
        self.clear()

    def __call__(self, prompt: list[int]) -> tuple[list[int], float]:
        start = time.perf_counter()
        tokens, rounds = self.answer(self.engine, prompt, self.max_new_tokens)
        seconds = time.perf_counter() - start
        if rounds is not None:
            self.num_emitted += len(tokens) - 1
            self.num_rounds += rounds
        return tokens, seconds

    def restart(self) -> None:
        if self.remembers:
            self.close()
            self.engine = self.start()
            self.answer(self.engine, [0], 4)  # the first request after loading is slow

    def clear(self) -> None:
        self.num_emitted = self.num_rounds = 0

    def figures(self) -> dict:
        return {"tau": self.num_emitted / self.num_rounds} if self.num_rounds else {}

    def close(self) -> None:
        self.engine.close()


def make(listed: list[str], setting: Setting) -> dict[str, Rival]:
    """The rivals that are listed (of NAMES), by the names of their rows; not opened yet. Raises ValueError for others."""
    unknown = [name for name in listed if name not in NAMES]
    if unknown:
        raise ValueError(f"rivals={','.join(unknown)}: there are {', '.join(NAMES)}.")
    engines = [name for name in listed if name != "transformers"]
    if engines and setting.opened.target.device.type != "cpu":
        raise ValueError(f"rivals={','.join(engines)} run on the CPU: give target.device=cpu too.")
    if engines and any(run.drafter.adapts_target for run in setting.runs):
        raise ValueError(
            f"rivals={','.join(engines)}: this checkpoint adapts its target, and they would serve the frozen one. "
            "Leave them out."
        )
    makers = {"transformers": in_transformers, "llamacpp": in_llamacpp, "vllm": in_vllms}
    rivals: dict[str, Rival] = {}
    for name in dict.fromkeys(listed):
        rivals |= makers[name](setting)
    return rivals


def in_transformers(setting: Setting) -> dict[str, Rival]:
    """Assisted generation where a checkpoint is a draft model, with each of its schedules, and prompt lookup."""

    def assisted(run: loading.Run, given: dict[str, Any]) -> TimedModel:
        assert isinstance(run.drafter, Draft)
        assistant = run.drafter.language_model(setting.opened.target.dtype)
        assistant.generation_config.update(**given)
        return setting.model(assistant_model=assistant)

    rivals = {}
    for run in setting.runs:
        if not isinstance(run.drafter, Draft):
            continue
        schedules: dict[str, dict[str, Any]] = {
            "its defaults": {},
            "dynamic schedule (heuristic)": {"num_assistant_tokens_schedule": "heuristic"},
        }
        for num in setting.lengths:
            schedules[f"{num} drafts"] = {
                "num_assistant_tokens": num,
                "assistant_confidence_threshold": 0.0,
                "num_assistant_tokens_schedule": "constant",
            }
        for name, given in schedules.items():
            rivals[f"generate, assistant_model {run.name}, {name}"] = Rival(functools.partial(assisted, run, given))
    return rivals | prompt_lookup(setting, 10, 2)  # the defaults of generate


def prompt_lookup(setting: Setting, num: int, longest: int) -> dict[str, Rival]:
    name = f"generate, prompt_lookup_num_tokens={num}, n-grams of up to {longest}"
    given = {"prompt_lookup_num_tokens": num, "max_matching_ngram_size": longest}
    return {name: Rival(lambda: setting.model(**given))}


def numbers(run: loading.Run, lengths: list[int]) -> list[int]:
    """Drafts in a round, as engines can be told: a block is drafted whole."""
    depth = run.drafter.depth
    if isinstance(run.drafter, BlockDrafter):
        return [depth]
    return list(dict.fromkeys(min(length, depth or length) for length in lengths))


def written(setting: Setting, run: loading.Run, form: ExportForm, num: int, engine: str) -> Path:
    """The folder of a checkpoint's export."""
    folder = setting.folder / f"{run.name.replace('/', '-')}-{engine}-{num}"
    target = setting.opened.target
    provenance = Provenance.read(run.folder, target=target, license="other", data=None, num_drafts=num)
    write_export(form, folder, dtype=target.dtype, provenance=provenance)
    return folder


def missing(name: str, reason: str) -> dict[str, Rival]:
    def refuse() -> Timed:
        raise ValueError(reason)

    return {name: Rival(refuse)}


def in_llamacpp(setting: Setting) -> dict[str, Rival]:
    """llama.cpp alone, with the GGUF files of the checkpoints, and with its own look-ups."""
    try:
        llamacpp_client.find_python()
    except ValueError as error:
        return missing("llama.cpp", str(error))
    target = setting.opened.target.name
    outtype = setting.gguf_type or GGUF_TYPES.get(setting.opened.target.dtype, "f32")

    @functools.cache
    def target_file() -> str:
        path = setting.gguf or str(setting.folder / "target.gguf")
        if not setting.gguf:
            llamacpp_client.convert(target, path, outtype=outtype)
        return path

    def start(**given) -> LlamaCpp:
        return LlamaCpp(target_file(), threads=torch.get_num_threads(), context=setting.longest, **given)

    def answer(engine: LlamaCpp, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int | None]:
        tokens = engine.generate(prompt, max_new_tokens, setting.opened.stop)[0]
        return tokens, engine.counts.rounds if engine.counted else len(tokens) - 1

    def timed(remembers: bool = False, **given) -> TimedEngine:
        return TimedEngine(lambda: start(**given), answer, setting.max_new_tokens, remembers=remembers)

    def with_head(run: loading.Run, num: int) -> TimedEngine:
        form = make_form(run.drafter, "gguf")
        folder, kind = written(setting, run, form, num, "gguf"), form.settings["kind"]
        draft = f"{folder}.gguf"
        llamacpp_client.convert(str(folder), draft, target=None if kind == "simple" else target, outtype=outtype)
        return timed(draft=draft, kind=kind, num=num)

    title = f"llama.cpp ({Path(setting.gguf).name if setting.gguf else f'{outtype} GGUF'})"
    plain = f"{title}, plain"
    rivals = {plain: Rival(timed)}
    for run in setting.runs:
        for num in numbers(run, setting.lengths):
            name = f"{title}, {run.name}, {num} drafts"
            rivals[name] = Rival(functools.partial(with_head, run, num), plain=plain)
    for kind in llamacpp_client.LOOKUPS:
        rivals[f"{title}, {kind}"] = Rival(functools.partial(timed, remembers=True, kind=kind), plain=plain)
    short = functools.partial(timed, remembers=True, kind="ngram-simple", settings=SHORT)
    rivals[f"{title}, ngram-simple, n-grams of {SHORT['size_n']}, {SHORT['size_m']} drafts"] = Rival(short, plain=plain)
    return rivals


def in_vllms(setting: Setting) -> dict[str, Rival]:
    """vLLM alone, with the exports of the checkpoints, and with its own look-ups; each is a process of its own."""
    try:
        vllm_client.check(vllm_client.PYTHON)
    except ValueError as error:
        return missing("vLLM", str(error))
    target = setting.opened.target
    common = {"dtype": str(target.dtype).removeprefix("torch."), "eager": setting.eager}

    def answer(engine: Vllm, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
        served = engine.generate([prompt], max_new_tokens, setting.opened.stop)
        return served.answers[0], len(served.rounds[0])

    def timed(start: Callable[[], Vllm]) -> TimedEngine:
        return TimedEngine(start, answer, setting.max_new_tokens)

    def own(settings: dict | None) -> TimedEngine:
        longest = setting.longest + MOST_DRAFTS
        return timed(lambda: in_vllm.start(target.name, settings, longest=longest, **common))

    def with_head(run: loading.Run, num: int) -> TimedEngine:
        form = make_form(run.drafter, "vllm")
        settings = form.settings_for(str(written(setting, run, form, num, "vllm")), num)
        return timed(lambda: in_vllm.start(target.name, settings, longest=setting.longest + num + 9, **common))

    plain = "vLLM, plain"
    rivals = {plain: Rival(functools.partial(own, None))}
    for run in setting.runs:
        for num in numbers(run, setting.lengths):
            rivals[f"vLLM, {run.name}, {num} drafts"] = Rival(functools.partial(with_head, run, num), plain=plain)
    for name, settings in VLLM_LOOKUPS.items():
        rivals[f"vLLM, {name}"] = Rival(functools.partial(own, settings), plain=plain)
    return rivals
