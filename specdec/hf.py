"""A drafter inside transformers: model.generate(**inputs, custom_generate=Speculative("checkpoints/shipped/mtp")).

`generate` prepares the prompts, its settings and its stopping criteria as usual. Then this project's decoder runs
instead of its own loop.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitNormalization,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import checkpoint
from specdec.core import precision
from specdec.core.cache import CACHE_ARGUMENTS
from specdec.core.compile import Runner
from specdec.core.constraint import Constraint, ConstraintSource
from specdec.core.generation import Generation, Round
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting, choose_proposer
from specdec.proposers.base import Proposer
from specdec.target import attention
from specdec.target.model import Target

# Processors of logits, in the order of Sampling; the last one normalises, which changes no distribution.
PROCESSORS: tuple[type, ...] = (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    LogitNormalization,
)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
MODEL_ARGUMENTS = ("attention_mask", "position_ids", *CACHE_ARGUMENTS, "use_cache", "logits_to_keep")


@dataclass(frozen=True)
class _LoadedDrafter:
    """A drafter beside the model that it was loaded for."""

    weights: list[tuple[int, int]]  # [(address, number of changes in place)] of the parameters
    model: PreTrainedModel
    target: Target
    drafting: Drafting
    proposer: Proposer
    runner: Runner


class Speculative:
    """The answers of `generate`, drafted by a checkpoint and verified by the model: `generate(custom_generate=...)`.

    checkpoint: a step's folder, a run's folder for its best step, or user/name[@revision] on the Hugging Face Hub
    decode: settings of drafting and verification; None: the number of drafts is chosen every round, nothing is compiled
    grammar: the language of all answers (specdec.tools.grammar.grammar.Grammar); tokenizer: the model's, for a grammar

    `generate` hands `streamer=` and `tokenizer=` to no custom_generate. So give it `token_streamer=` for a streamer,
    and stopping_criteria=[StopStringCriteria(tokenizer, strings)] for stop strings. What `assistant_model=` drafts is
    not used.

    The drafter is loaded at the first call and kept, with the model, until a call with another model. Raises ValueError
    for a model that is not the checkpoint's target, and for settings of `generate` that this decoder does not support.
    `last` holds the answers, counts and times of the last call. While a call runs, the model uses this project's
    attention, so one model must not generate in two threads at once.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        decode: Drafting | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        grammar: ConstraintSource | None = None,
    ):
        if grammar is not None and tokenizer is None:
            raise ValueError("A grammar needs the tokenizer: give Speculative(..., tokenizer=tokenizer).")
        self._folder, self._decode, self._tokenizer, self._grammar = checkpoint, decode, tokenizer, grammar
        self._begin_constraint = functools.lru_cache(maxsize=1)(self._compile)
        self.last: Generation | None = None
        self._loaded: _LoadedDrafter | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        token_streamer: BaseStreamer | None = None,
        **model_kwargs,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The texts [B, T + new] for input_ids [B, T], or an output object with them. `generate` calls it."""
        _check_settings(model, generation_config, model_kwargs)
        sampling = _read_sampling(logits_processor, bool(generation_config.do_sample))
        mask = _read_mask(input_ids, model_kwargs)
        pad = _find_pad_token(generation_config, stopping_criteria)
        num_new = (stopping_criteria.max_length or generation_config.max_length) - input_ids.shape[1]
        prompts = [tokens[real].tolist() for tokens, real in zip(input_ids, mask)]
        result = Generation([[] for _ in prompts], [[] for _ in prompts])
        with _borrow_model(model):
            loaded = self._load(model)
            decoder = loaded.drafting.decoder(
                loaded.target, loaded.proposer, sampling=sampling, stop=set(), runner=loaded.runner
            )
            vocab_size = loaded.target.vocab_size
            penalised = _mark_tokens(input_ids, vocab_size, logits_processor) if sampling.penalises else None
            constraints = self._make_constraints(generation_config, vocab_size, len(prompts))
            rounds = decoder.stream(
                prompts, max(1, num_new), penalised=penalised, result=result, constraints=constraints
            )
            sequences = _emit_answers(rounds, result, input_ids, stopping_criteria, pad, token_streamer)
        self.last = result
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]  # they are whole numbers
        return sequences

    def _make_constraints(self, config: GenerationConfig, vocab_size: int, num: int) -> list[Constraint | None] | None:
        """A constraint for each of `num` answers, at its beginning; None without a grammar."""
        if self._grammar is None or self._tokenizer is None:
            return None
        ends = config._eos_token_tensor
        stop = frozenset() if ends is None else frozenset(ends.flatten().tolist())
        begin_constraint = self._begin_constraint(vocab_size, stop)
        return [begin_constraint() for _ in range(num)]

    def _compile(self, vocab_size: int, stop: frozenset[int]) -> Callable[[], Constraint]:
        """The function that begins a constraint for a vocabulary size and token ids that end an answer."""
        assert self._grammar is not None and self._tokenizer is not None
        return self._grammar.compile(self._tokenizer, vocab_size, set(stop))

    def _load(self, model: PreTrainedModel) -> _LoadedDrafter:
        """The drafter for this model; it is loaded again only for another model, or if the weights have changed."""
        weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
        if self._loaded and self._loaded.model is model and self._loaded.weights == weights:
            return self._loaded
        self._loaded = None
        folder = checkpoint.resolve(self._folder)
        if checkpoint.read_head_class(folder).adapts_target:
            raise ValueError(
                f"{folder} adapts its target, which would change your model: decode with "
                "specdec.decoding.decoder.Decoder and a Target of its own, or take a checkpoint that does not change "
                "its target."
            )
        target = _make_target(model)
        with torch.random.fork_rng(devices=[]):  # new weights draw random numbers before those of the file replace them
            drafter = checkpoint.load(folder, target)
        drafting, proposer = choose_proposer(target, drafter, self._decode)
        self._loaded = _LoadedDrafter(weights, model, target, drafting, proposer, drafting.runner())
        return self._loaded


def _make_target(model: PreTrainedModel) -> Target:
    """The model as a target. Warns of a dtype that this device only imitates."""
    target = Target(model, name=model.name_or_path or type(model).__name__)
    choice = precision.choose_dtype(target.device)
    if target.dtype == torch.bfloat16 and choice.dtype == "float32":
        warnings.warn(f"The model is in bfloat16, but {choice.reason}: load it with dtype=torch.float32.", stacklevel=3)
    return target


def _emit_answers(
    rounds: Iterator[Round],
    result: Generation,
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    pad: int | None,
    streamer: BaseStreamer | None,
) -> Tensor:
    """The loop of `generate` with tokens from rounds: input_ids [B, T] -> [B, T + new].

    Some rows are ahead of others, but tokens are appended column by column. So every criterion sees the same texts as
    in `generate`, in the same order.
    result: collects tokens and counts; pad: the token after an answer's end; None: answers go on until all have ended
    """
    running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    if streamer is not None:
        streamer.put(input_ids.cpu())  # as `generate` does
    awaited = list(range(len(input_ids)))  # rows whose next token is not padding
    lengths = [0] * len(input_ids)
    for emitted in rounds:
        for answer, tokens in zip(result.tokens, emitted.tokens):
            answer += tokens
        while awaited and all(len(result.tokens[row]) > lengths[row] for row in awaited):
            input_ids = _append_column(input_ids, result.tokens, awaited, lengths, pad)
            running &= ~criteria(input_ids, None)  # type: ignore[arg-type]  # as in `generate` without output_scores
            if streamer is not None:
                streamer.put(input_ids[:, -1].cpu())
            if pad is not None or not running.any():
                awaited = running.nonzero()[:, 0].tolist()
        if not awaited:
            break
    if streamer is not None:
        streamer.end()
    _cut_result(result, lengths)
    return input_ids


def _cut_result(result: Generation, lengths: list[int]) -> None:
    """Removes tokens and counts behind the end of each answer."""
    for row, length in enumerate(lengths):
        result.tokens[row] = result.tokens[row][:length]
        result.accepted[row] = _cut_counts(result.accepted[row], length)


def _append_column(
    input_ids: Tensor, answers: list[list[int]], awaited: list[int], lengths: list[int], pad: int | None
) -> Tensor:
    """input_ids [B, T] with the next token of each awaited row, and padding elsewhere: [B, T + 1].

    Counts `lengths` up.
    """
    column = [pad] * len(input_ids)
    for row in awaited:
        column[row] = answers[row][lengths[row]]
        lengths[row] += 1
    return torch.cat([input_ids, torch.tensor(column, device=input_ids.device)[:, None]], dim=1)


def _cut_counts(accepted: list[int], length: int) -> list[int]:
    """The drafts emitted by each round that an answer of `length` tokens consists of."""
    counts, tokens_left = [], length - 1
    for count in accepted:
        if tokens_left > 0:
            counts.append(min(count, tokens_left - 1))
        tokens_left -= count + 1
    return counts


@contextlib.contextmanager
def _borrow_model(model: PreTrainedModel) -> Iterator[None]:
    """Makes the model fit for a Target. On exit its attention, training modes and requires_grad are as before."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    training = [module for module in model.modules() if module.training]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config._attn_implementation = attention.choose_implementation(type(model))
    try:
        model.eval()
        yield
    finally:
        config._attn_implementation = implementation
        for module in training:
            module.training = True
        for parameter in trainable:
            parameter.requires_grad_(True)


def _make_refusal(setting: str, advice: str) -> ValueError:
    return ValueError(f"Speculative cannot honour {setting}: {advice}, or call generate without custom_generate.")


def _check_settings(model: PreTrainedModel, config: GenerationConfig, arguments: dict[str, Any]) -> None:
    """Raises ValueError for what the decoder does not support."""
    mode = config.get_generation_mode()
    unsupported = [name for name, value in arguments.items() if value is not None and value is not False]
    refused = [
        (model.config.is_encoder_decoder, "an encoder and decoder", "take a decoder-only model"),
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams}", "set num_beams=1"),
        (mode not in MODES, mode.value, "set what asks for it, such as prompt_lookup_num_tokens, to None"),
        *((getattr(config, name), name, "only token ids are returned, so set it to False") for name in OUTPUTS),
        (config.cache_implementation not in (None, "dynamic"), f"cache_implementation={config.cache_implementation}",
         "it keeps a cache of its own, so set None"),
        (config.prefill_chunk_size is not None, "prefill_chunk_size", "prompts are read at once, so set it to None"),
        *((_is_users(arguments.get(name)), name, "it keeps a cache of its own, so pass the whole prompt and no cache")
          for name in CACHE_ARGUMENTS),
        *((name not in MODEL_ARGUMENTS, name, "it takes token ids and their attention_mask, so leave it out")
          for name in unsupported),
    ]  # fmt: skip
    for wrong, setting, advice in refused:
        if wrong:
            raise _make_refusal(setting, advice)


def _is_users(cache: Any) -> bool:
    """Whether `generate` was called with this cache, in place of the empty one that it makes."""
    return cache is not None and bool(getattr(cache, "_is_user_defined", False) or cache.get_seq_length())


def _read_sampling(processors: LogitsProcessorList, do_sample: bool) -> Sampling:
    """The sampling that the processors amount to. Raises ValueError for processors that do something else."""
    kinds: list[type] = [type(processor) for processor in processors]
    by_kind: dict[type, Any] = dict(zip(kinds, processors))
    penalty, temperature, top_k, top_p = (by_kind.get(kind) for kind in PROCESSORS[:4])
    if [kind for kind in PROCESSORS if kind in kinds] != kinds or not _has_usual_settings(penalty, top_k, top_p):
        processor_names = ", ".join(kind.__name__ for kind in PROCESSORS)
        raise _make_refusal(
            f"the logits processors {', '.join(kind.__name__ for kind in kinds)}",
            f"it has {processor_names}, each once, in this order and with their usual settings; leave out others",
        )
    penalty_factor = getattr(penalty, "penalty", 1.0)
    if not do_sample:  # the best token stays the best at any temperature
        return Sampling(repetition_penalty=penalty_factor)
    return Sampling(
        getattr(temperature, "temperature", 1.0),
        getattr(top_k, "top_k", None),
        getattr(top_p, "top_p", None),
        penalty_factor,
    )


def _has_usual_settings(penalty: Any, top_k: Any, top_p: Any) -> bool:
    """Whether processors, None where there is none, have the settings that Sampling amounts to."""
    values = {getattr(processor, "filter_value", -torch.inf) for processor in (top_k, top_p)}
    one_token = getattr(top_p, "min_tokens_to_keep", 1) == 1
    ignored = getattr(penalty, "prompt_ignore_length", None)
    return values == {-torch.inf} and one_token and (isinstance(ignored, Tensor) or not ignored)


def _read_mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """The mask [B, T] bool of the prompts' tokens. Raises ValueError for right padding, and for other positions."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape or not mask[:, -1].all():
        raise _make_refusal("this attention_mask", 'pad prompts on the left (tokenizer.padding_side="left")')
    mask = mask.bool()
    positions = model_kwargs.get("position_ids")
    if positions is not None and bool((positions != mask.cumsum(-1) - 1)[mask].any()):
        raise _make_refusal("these position_ids", "leave them out, and positions count the tokens of each prompt")
    return mask


def _find_pad_token(config: GenerationConfig, criteria: StoppingCriteriaList) -> int | None:
    """The token that `generate` puts behind an answer that ended; None without an eos token: answers then go on."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return None
    if config._pad_token_tensor is None:
        raise ValueError(
            "Answers end at an eos token of stopping_criteria, but there is no pad token: set pad_token_id."
        )
    return int(config._pad_token_tensor)


def _mark_tokens(tokens: Tensor, vocab_size: int, processors: LogitsProcessorList) -> Tensor:
    """A mask [B, V] bool of the tokens [B, T] that a penalty finds, none past V.

    It finds padding, too, unless `generate` tells it the padding of each row, as since transformers 5.23.
    """
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):  # [B]
            places = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = tokens.masked_fill(places < ignored.to(tokens.device)[:, None], vocab_size)
    marks = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(1, tokens.clamp(max=vocab_size), True)[:, :-1]
