"""Times decoding with drafts against transformers' generate, llama.cpp and vLLM, on the same prompts, greedy, in turn.

    python -m benchmarks.rivals checkpoint=checkpoints/shipped/eagle3,checkpoints/shipped/mtp limit=6
    python -m benchmarks.rivals proposers=ngram,suffix rivals=transformers,llamacpp,vllm prompts=data/prompts_copy.jsonl

Compared are: generate alone, and with custom_generate, which puts this decoder inside it; plain decoding here; every
checkpoint as a chain, as a tree and with auto; every proposer; and the rivals, each alone and with its own speculation.
llama.cpp and vLLM need `make engines`; they run on the CPU, in processes of their own that are stopped while others are
timed. A method that fails says why in its row. Read the ratios, which are medians over prompts of neighbouring
decodings: absolute times say little on a shared machine. Rates include the prompt's pass and leave out compiling.
"""

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import OmegaConf

from benchmarks import common, hardware
from benchmarks.engines import llamacpp, vllm
from specdec import checkpoint
from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.export.engines import ExportForm, make_form
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.hf import Speculative
from specdec.measuring.model_card import Provenance, write_export
from specdec.options import config_files
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer
from specdec.target.model import Target
from specdec.text import conversations as data

GENERATE, PLAIN = "transformers generate", "plain"
GGUF_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
NGRAMS = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
VLLM_LOOKUPS = {  # suffix without its cache of earlier answers: every prompt is decoded several times
    "ngram, n-grams of 2 to 4, 5 drafts": {"method": "ngram", "num_speculative_tokens": 5, **NGRAMS},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
MAX_LOOKUP_DRAFTS = 64  # drafts of a round by the methods above, at most; the context has room for them


@dataclass(frozen=True)
class RivalOptions:
    checkpoint: str = ""  # comma list of trained heads
    proposers: str = ""  # comma list of files in conf/proposer, with their defaults
    rivals: str = "transformers"  # comma list of transformers, llamacpp, vllm; empty: none
    prompts: str = common.HELDOUT
    template: str = "{}"  # JSON of the template arguments of prompts that do not say them
    limit: int = 8
    max_new_tokens: int = 64
    repeats: int = 3  # times that every method decodes every prompt
    depth: int = 2  # drafts of chains, and of engines
    tree: str = "3,2,4"  # depth, width and nodes
    compile: bool = True  # this project's passes, and vLLM's
    out: str | None = None  # JSON file for the figures
    target_name: str | None = None
    target_dtype: str = "auto"
    target_device: str | None = None


@dataclass(frozen=True)
class RivalEngine:
    """An engine that decodes one prompt at a time.

    generate(prompt): the new tokens; passes of the target after the prompt's own, None if unknown; seconds of compiling
    """

    generate: Callable[[list[int]], tuple[list[int], int | None, float]]
    reset_history: Callable[[], None] = lambda: None  # drops all that was learned from earlier prompts
    close: Callable[[], None] = lambda: None


@dataclass
class RivalMethod:
    """A row of the table.

    plain: name of the same engine's plain decoding
    restarts: whether the engine must start anew to forget earlier answers
    """

    start: Callable[[], RivalEngine]
    plain: str = PLAIN
    restarts: bool = False
    engine: RivalEngine | None = None
    failure: str | None = None  # why it has ended
    rates: list[float] = field(default_factory=list)  # [repeats * prompts] tokens/s
    answers: list[list[int]] = field(default_factory=list)  # [prompts][.], of the first repeat
    emitted: int = 0
    rounds: int | None = 0

    def begin(self, prompts: list[list[int]]) -> None:
        """Before every repeat: forgets the answers, as the same prompts come again. The longest and the shortest prompt
        make it compile for the largest and the smallest cache."""
        if self.engine is None or self.restarts:
            self.close()
            self.engine = self.start()
            for prompt in [[0]] if self.restarts else [min(prompts, key=len), max(prompts, key=len)]:
                self.engine.generate(prompt)
        self.engine.reset_history()

    def time(self, prompt: list[int], *, keep: bool) -> None:
        """keep: whether the answer is compared with others'"""
        assert self.engine is not None
        start = time.perf_counter()
        tokens, rounds, compiling = self.engine.generate(prompt)
        self.rates.append(len(tokens) / (time.perf_counter() - start - compiling))
        self.emitted += len(tokens) - 1
        self.rounds = None if self.rounds is None or rounds is None else self.rounds + rounds
        if keep:
            self.answers.append(tokens)

    def guard(self, function: Callable[[], None]) -> None:
        """Calls `function` unless this method has failed. What another project raises is noted, and the others go
        on.
        """
        if self.failure is not None:
            return
        try:
            function()
        except Exception as error:
            self.failure = " ".join(str(error).split()) or type(error).__name__
            self.close()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


def measure_methods(methods: dict[str, RivalMethod], prompts: list[list[int]], repeats: int) -> None:
    """Times every method for every prompt, `repeats` times; the order of the methods rotates."""
    for number in range(repeats * len(prompts)):
        prompt, keep = prompts[number % len(prompts)], number < len(prompts)
        first = number % len(methods)
        for method in [*methods.values()][first:] + [*methods.values()][:first]:
            if number % len(prompts) == 0:
                method.guard(functools.partial(method.begin, prompts))
            method.guard(functools.partial(method.time, prompt, keep=keep))


def summarise_methods(methods: dict[str, RivalMethod]) -> dict[str, dict]:
    """Medians over prompts, by method, and how many answers are those of plain decoding; a failed one has its
    failure.
    """
    figures: dict[str, dict] = {}
    for name, method in methods.items():
        if method.failure is not None:
            figures[name] = {"failure": method.failure}
            continue
        figures[name] = {"tokens_per_second": statistics.median(method.rates)}
        for key, reference_name in {"generate": GENERATE, "plain": PLAIN, "own_plain": method.plain}.items():
            if (reference := methods[reference_name]).failure is None:
                ratios = [
                    rate / reference_rate for rate, reference_rate in zip(method.rates, reference.rates, strict=True)
                ]
                figures[name][f"to_{key}"] = statistics.median(ratios)
                figures[name][f"same_as_{key}"] = sum(map(list.__eq__, method.answers, reference.answers))
        if method.rounds:
            figures[name]["tau"] = method.emitted / method.rounds
    return figures


@dataclass(frozen=True)
class Setting:
    """The subject of all methods. longest: tokens of the longest prompt with its answer; folder: folder of exports"""

    subject: common.Subject
    options: RivalOptions
    longest: int
    folder: Path

    def model(self, custom: Speculative | None = None, **arguments: Any) -> RivalEngine:
        """transformers' generate, with further arguments of it; custom: this project's decoder inside it."""
        model: Any = self.subject.target.model
        arguments |= {"eos_token_id": sorted(self.subject.stop), "max_new_tokens": self.options.max_new_tokens}
        arguments |= {"do_sample": False} | ({} if custom is None else {"custom_generate": custom})

        def generate(prompt: list[int]) -> tuple[list[int], int, float]:
            tokens, passes = torch.tensor([prompt], device=model.device), list[int]()
            hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
            try:
                text = model.generate(tokens, attention_mask=torch.ones_like(tokens), **arguments)
            finally:
                hook.remove()
            answer = text[0, len(prompt) :].tolist()
            if custom is not None and custom.last is not None:
                return answer, len(custom.last.accepted[0]), custom.last.compile_seconds
            return answer, len(passes) - 1, 0.0

        return RivalEngine(generate)

    def drafted(self) -> dict[str, int]:
        """The drafts of a round, by head, as engines can be told: a block is drafted whole."""
        depth, heads = self.options.depth, self.subject.heads
        max_depths = {name: head.depth or depth for name, head in heads.items()}
        return {
            name: max_depths[name] if isinstance(heads[name], BlockDrafter) else min(depth, max_depths[name])
            for name in heads
        }

    def export(self, name: str, form: ExportForm, num: int, engine: str) -> Path:
        """The folder of a head's export."""
        folder, target = self.folder / f"{name.replace('/', '-')}-{engine}", self.subject.target
        card_facts: Any = {"target": target, "license": "other", "training_data": None, "num_drafts": num}
        document = checkpoint.read_document(self.subject.folders[name])
        provenance = Provenance.read(self.subject.folders[name], document, name=name, **card_facts)
        write_export(form, folder, dtype=target.dtype, provenance=provenance)
        return folder


def make_own_methods(setting: Setting) -> dict[str, RivalMethod]:
    """This project's decoder: inside generate, plain, every head in each shape and with auto, every proposer."""
    subject, options = setting.subject, setting.options
    runner = Drafting(compile=options.compile).runner()

    def method(proposer: Proposer | None) -> RivalMethod:
        decoder = Decoder(subject.target, proposer, sampling=Sampling(), stop=subject.stop, runner=runner)

        def generate(prompt: list[int]) -> tuple[list[int], int, float]:
            generation = decoder.generate([prompt], options.max_new_tokens)
            return generation.tokens[0], len(generation.accepted[0]), generation.compile_seconds

        return RivalMethod(lambda: RivalEngine(generate, proposer.reset_history if proposer else lambda: None))

    methods = {PLAIN: method(None)}
    tree_depth, width, nodes = common.read_numbers("tree", options.tree)
    for name, head in subject.heads.items():
        max_depth = head.depth or max(options.depth, tree_depth)
        chain = Drafting(min(options.depth, max_depth), compile=options.compile)
        for drafting in (chain, Drafting(min(tree_depth, max_depth), width, nodes, compile=options.compile)):
            methods[f"{name}, {drafting.shape}"] = method(drafting.proposer(head))
        single_draft = Drafting(1, compile=options.compile).proposer(head)
        methods[f"{name}, auto"] = method(AutoProposer.make_default(subject.target, single_draft))
        custom = functools.partial(setting.model, Speculative(subject.folders[name], chain))
        methods[f"generate, custom_generate {name}, {chain.shape}"] = RivalMethod(custom)
    for name in common.split_list(options.proposers):
        methods[name] = method(make_proposer(name, subject.target, Drafting(options.depth, compile=options.compile)))
    return methods


def make_proposer(name: str, target: Target, drafting: Drafting) -> Proposer:
    """The proposer of conf/proposer/NAME.yaml, which must need neither a trained head nor another proposer."""
    decode = asdict(drafting) | {"nodes": drafting.shape.nodes}
    file = OmegaConf.load(config_files.list_files("proposer")[name])
    config = OmegaConf.create({"proposer": file, "decode": decode, "checkpoint": None})
    settings: Any = OmegaConf.to_container(config.proposer, resolve=True, throw_on_missing=True)
    return get_object(settings.pop("_target_"))(target, **settings)


def make_transformers(setting: Setting) -> dict[str, RivalMethod]:
    """Prompt lookup, and assisted generation with its defaults and a fixed length if a head is a draft model."""

    def assisted(draft: Draft, settings: dict[str, Any]) -> RivalEngine:
        assistant = draft.language_model(setting.subject.target.dtype)
        assistant.generation_config.update(**settings)
        return setting.model(assistant_model=assistant)

    lookup: Any = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}  # the defaults of generate
    methods = {"generate, prompt lookup": RivalMethod(functools.partial(setting.model, **lookup))}
    num = setting.options.depth
    fixed: Any = {"assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": "constant"}
    for name, head in setting.subject.heads.items():
        if isinstance(head, Draft):
            for title, settings in {"": {}, f", {num} drafts": fixed | {"num_assistant_tokens": num}}.items():
                methods[f"generate, assistant_model {name}{title}"] = RivalMethod(
                    functools.partial(assisted, head, settings)
                )
    return methods


def make_llamacpp(setting: Setting) -> dict[str, RivalMethod]:
    """llama.cpp alone, with the GGUF files of the checkpoints, and with its own look-ups."""
    llamacpp.find_python()
    subject, options = setting.subject, setting.options
    outtype = GGUF_TYPES.get(subject.target.dtype, "f32")

    @functools.cache
    def target_file() -> str:
        path = str(setting.folder / "target.gguf")
        llamacpp.convert_to_gguf(subject.target.name, path, outtype=outtype)
        return path

    def start(**arguments: Any) -> RivalEngine:
        engine = llamacpp.LlamaCpp(target_file(), context=setting.longest, **arguments)

        def generate(prompt: list[int]) -> tuple[list[int], int | None, float]:
            tokens = engine.generate(prompt, options.max_new_tokens, subject.stop)
            return tokens, engine.counts.rounds if engine.has_counts else len(tokens) - 1, 0.0

        return RivalEngine(generate, close=engine.close)

    def with_head(name: str, num: int) -> RivalEngine:
        form = make_form(subject.heads[name], "gguf")
        folder, kind = setting.export(name, form, num, "gguf"), form.settings["kind"]
        target = None if kind == "simple" else subject.target.name
        llamacpp.convert_to_gguf(str(folder), f"{folder}.gguf", target=target, outtype=outtype)
        return start(draft=f"{folder}.gguf", kind=kind, num=num)

    plain = "llama.cpp, plain"
    methods = {plain: RivalMethod(start, plain)}
    for name, num in setting.drafted().items():
        methods[f"llama.cpp, {name}, {num} drafts"] = RivalMethod(functools.partial(with_head, name, num), plain)
    for kind in llamacpp.LOOKUPS:
        methods[f"llama.cpp, {kind}"] = RivalMethod(functools.partial(start, kind=kind), plain, restarts=True)
    return methods


def make_vllm(setting: Setting) -> dict[str, RivalMethod]:
    """vLLM alone, with the exports of the checkpoints, and with its own look-ups; each is a process of its own."""
    vllm.check_vllm(vllm.PYTHON)
    subject, options = setting.subject, setting.options

    def start(settings: dict | None) -> RivalEngine:
        dtype, longest = str(subject.target.dtype).removeprefix("torch."), setting.longest + MAX_LOOKUP_DRAFTS
        limits: Any = {"dtype": dtype, "max_model_len": longest, "eager": not options.compile}
        engine = vllm.Vllm(subject.target.name, speculative=settings, **limits)

        def generate(prompt: list[int]) -> tuple[list[int], int, float]:
            reply = engine.generate([prompt], options.max_new_tokens, subject.stop)
            return reply.answers[0], len(reply.rounds[0]), 0.0

        return RivalEngine(generate, close=engine.close)

    def with_head(name: str, num: int) -> RivalEngine:
        form = make_form(subject.heads[name], "vllm")
        return start(form.engine_settings(str(setting.export(name, form, num, "vllm")), num))

    plain = "vLLM, plain"
    methods = {plain: RivalMethod(functools.partial(start, None), plain)}
    for name, num in setting.drafted().items():
        methods[f"vLLM, {name}, {num} drafts"] = RivalMethod(functools.partial(with_head, name, num), plain)
    for title, settings in VLLM_LOOKUPS.items():
        methods[f"vLLM, {title}"] = RivalMethod(functools.partial(start, settings), plain)
    return methods


MAKERS = {"transformers": make_transformers, "llamacpp": make_llamacpp, "vllm": make_vllm}


def main(arguments: list[str]) -> None:
    options = common.read_options(RivalOptions, __doc__, arguments)
    listed = common.split_list(options.rivals)
    if not set(listed) <= MAKERS.keys():
        raise ValueError(f"rivals={options.rivals}: there are {', '.join(MAKERS)}.")
    if not any(map(common.split_list, (options.checkpoint, options.proposers, options.rivals))):
        raise ValueError("There is nothing to time: give checkpoint=DIR, or proposers=ngram, or rivals=transformers.")
    subject = common.load_subject(
        options.checkpoint, name=options.target_name, dtype=options.target_dtype, device=options.target_device
    )
    target = subject.target
    if set(listed) - {"transformers"} and target.device.type != "cpu":
        raise ValueError(f"rivals={options.rivals}: llama.cpp and vLLM run on the CPU: give target.device=cpu too.")
    questions = data.load_prompts(
        options.prompts, subject.tokenizer, limit=options.limit, arguments=json.loads(options.template)
    )
    prompts = [prompt.tokens for prompt in questions]
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(subject, options, max(map(len, prompts)) + options.max_new_tokens, Path(folder))
        methods = {GENERATE: RivalMethod(setting.model)} | make_own_methods(setting)
        for name in listed:
            try:
                methods |= MAKERS[name](setting)
            except ValueError as error:  # the engine is not installed
                methods[name] = RivalMethod(setting.model, failure=str(error))
        try:
            measure_methods(methods, prompts, options.repeats)
        finally:
            for method in methods.values():
                method.close()
    figures, num_bytes = summarise_methods(methods), hardware.count_bytes_per_token(target)
    limit = hardware.measure_bandwidth(num_bytes, target.device) / num_bytes
    title = (
        f"{target.name}, {str(target.dtype).removeprefix('torch.')}, {target.device}, {torch.get_num_threads()} "
        "threads; "
        f"{len(prompts)} prompts x {options.repeats}. Reading the weights once allows {limit:.0f} tokens/s of plain "
        "decoding."
    )
    print(title, common.format_rows([{"method": name} | row for name, row in figures.items()]), sep="\n\n")
    if options.out:
        document = {"title": title, "limit_tokens_per_second": limit, "options": asdict(options), "methods": figures}
        files.write_text(Path(options.out), json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    common.run_main(main)
