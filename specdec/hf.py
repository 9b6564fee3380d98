"""A drafter inside transformers: model.generate(**inputs, custom_generate=Speculative("checkpoints/shipped/mtp")).

`generate` prepares the prompts, its settings and its stopping criteria as usual. Then this project's decoder runs instead
of its own loop.
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
from specdec.core.compile import Runner
from specdec.core.constraint import Constraint, ConstraintSource
from specdec.core.generation import Generation, Round
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer
from specdec.proposers.heads import HeadProposer
from specdec.target import attention
from specdec.target.model import Target

# What changes logits, in the order in which Sampling does it; the last normalises, which changes no distribution.
PROCESSORS: tuple[type, ...] = (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    LogitNormalization,
)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
MODEL_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")


@dataclass(frozen=True)
class _LoadedDrafter:
    """A drafter beside the model that it was loaded for."""

    weights: list[tuple[int, int]]  # of each parameter, its address and how often it was changed in place
    model: PreTrainedModel
    target: Target
    drafting: Drafting
    proposer: Proposer
    runner: Runner


class Speculative:
    """For `generate(custom_generate=...)`: the answers of `generate`, drafted by a checkpoint and verified by the model.

    checkpoint: a step's folder, a run's folder for its best step, or user/name[@revision] on the Hugging Face Hub
    decode: how to draft and verify; None: how much to draft is chosen every round (proposers/auto.py), not compiled
    grammar: that all answers follow (specdec.tools.grammar.grammar.Grammar); tokenizer: of the model, which a grammar needs

    `generate` hands `streamer=` and `tokenizer=` to no custom_generate. So give it `token_streamer=` for a streamer, and
    stopping_criteria=[StopStringCriteria(tokenizer, strings)] for stop strings. What `assistant_model=` drafts is not used.

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
        """input_ids [B, T] -> [B, T + new], or that in an output object; called by `generate`"""
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
            penalised = _mark_tokens(input_ids, loaded.target.vocab_size) if sampling.penalises else None
            constraints = self._make_constraints(generation_config, loaded.target.vocab_size, len(prompts))
            rounds = decoder.stream(
                prompts, max(1, num_new), penalised=penalised, result=result, constraints=constraints
            )
            sequences = _emit_answers(rounds, result, input_ids, stopping_criteria, pad, token_streamer)
        self.last = result
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]  # they are whole numbers
        return sequences

    def _make_constraints(self, config: GenerationConfig, vocab_size: int, num: int) -> list[Constraint | None] | None:
        """Of each answer, at its beginning."""
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
        document = checkpoint.read_document(folder)
        if checkpoint.load_head_class(str(document.get("_target_"))).adapts_target:
            raise ValueError(
                f"{folder} adapts its target, which would change your model: decode with specdec.decoding.decoder.Decoder and a Target "
                "of its own, or take a checkpoint that does not change its target."
            )
        target = Target(model, name=model.name_or_path or type(model).__name__)
        choice = precision.choose_dtype(target.device)
        if target.dtype == torch.bfloat16 and choice.dtype == "float32":
            warnings.warn(
                f"The model is in bfloat16, but {choice.reason}: load it with dtype=torch.float32.", stacklevel=2
            )
        with torch.random.fork_rng(devices=[]):  # new weights draw random numbers before those of the file replace them
            drafter = checkpoint.load(folder, target)
        drafting = self._decode or Drafting(min(2, drafter.depth or 2))
        proposer = drafting.proposer(drafter)
        if self._decode is None and isinstance(proposer, HeadProposer):
            proposer = AutoProposer.make_default(target, proposer)
        self._loaded = _LoadedDrafter(weights, model, target, drafting, proposer, drafting.runner())
        return self._loaded


def _emit_answers(
    rounds: Iterator[Round],
    result: Generation,
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    pad: int | None,
    streamer: BaseStreamer | None,
) -> Tensor:
    """The loop of `generate` with tokens from rounds. Some rows are ahead of others, but tokens are appended column by column.

    So every criterion sees the same texts as in `generate`, in the same order. input_ids [B, T] -> [B, T + new]
    result: collects tokens and counts; pad: the token after an answer's end; None: answers go on until all have ended
    """
    running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    if streamer is not None:
        streamer.put(input_ids.cpu())  # as `generate` does
    awaited = list(range(len(input_ids)))  # rows whose next token is not padding
    lengths, num_columns = [0] * len(input_ids), 0
    for emitted in rounds:
        for answer, tokens in zip(result.tokens, emitted.tokens):
            answer += tokens
        while awaited and all(len(result.tokens[row]) > num_columns for row in awaited):
            column = [pad] * len(input_ids)
            for row in awaited:
                column[row], lengths[row] = result.tokens[row][num_columns], num_columns + 1
            num_columns += 1
            new = torch.tensor(column, device=input_ids.device)
            input_ids = torch.cat([input_ids, new[:, None]], dim=1)
            running &= ~criteria(input_ids, None)  # type: ignore[arg-type]  # as in `generate` without output_scores
            if streamer is not None:
                streamer.put(new.cpu())
            if pad is not None or not running.any():
                awaited = running.nonzero()[:, 0].tolist()
        if not awaited:
            break
    if streamer is not None:
        streamer.end()
    for row, length in enumerate(lengths):
        result.tokens[row] = result.tokens[row][:length]
        result.accepted[row] = _cut_counts(result.accepted[row], length)
    return input_ids


def _cut_counts(accepted: list[int], length: int) -> list[int]:
    """The drafts emitted by each round, of those rounds that an answer of `length` tokens consists of."""
    counts, tokens_left = [], length - 1
    for count in accepted:
        if tokens_left > 0:
            counts.append(min(count, tokens_left - 1))
        tokens_left -= count + 1
    return counts


@contextlib.contextmanager
def _borrow_model(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model can be a Target. Afterwards its attention, training modes and requires_grad are as before."""
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
    mode, cache = config.get_generation_mode(), arguments.get("past_key_values")
    unsupported = [name for name, value in arguments.items() if value is not None and value is not False]
    own_cache = cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length())
    refused = [
        (model.config.is_encoder_decoder, "an encoder and decoder", "take a decoder-only model"),
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams}", "set num_beams=1"),
        (mode not in MODES, mode.value, "set what asks for it, such as prompt_lookup_num_tokens, to None"),
        *((getattr(config, name), name, "only token ids are returned, so set it to False") for name in OUTPUTS),
        (config.cache_implementation not in (None, "dynamic"), f"cache_implementation={config.cache_implementation}",
         "it keeps a cache of its own, so set None"),
        (config.prefill_chunk_size is not None, "prefill_chunk_size", "prompts are read at once, so set it to None"),
        (own_cache, "past_key_values", "it keeps a cache of its own, so pass the whole prompt and no cache"),
        *((name not in MODEL_ARGUMENTS, name, "it takes token ids and their attention_mask, so leave it out")
          for name in unsupported),
    ]  # fmt: skip
    for wrong, setting, advice in refused:
        if wrong:
            raise _make_refusal(setting, advice)


def _read_sampling(processors: LogitsProcessorList, do_sample: bool) -> Sampling:
    """The sampling that the processors amount to. Raises ValueError for processors that do something else."""
    kinds: list[type] = [type(processor) for processor in processors]
    by_kind: dict[type, Any] = dict(zip(kinds, processors))
    penalty, temperature, top_k, top_p = (by_kind.get(kind) for kind in PROCESSORS[:4])
    has_usual_settings = not (penalty and penalty.prompt_ignore_length) and not (
        top_p and top_p.min_tokens_to_keep != 1
    )
    has_usual_settings &= all(warper.filter_value == -torch.inf for warper in (top_k, top_p) if warper)
    if [kind for kind in PROCESSORS if kind in kinds] != kinds or not has_usual_settings:
        processor_names = ", ".join(kind.__name__ for kind in PROCESSORS)
        raise _make_refusal(
            f"the logits processors {', '.join(kind.__name__ for kind in kinds)}",
            f"it has {processor_names}, each once, in this order and with their usual settings; leave out others",
        )
    penalty_factor = penalty.penalty if penalty else 1.0
    if not do_sample:  # the best token stays the best at any temperature
        return Sampling(repetition_penalty=penalty_factor)
    return Sampling(
        temperature.temperature if temperature else 1.0,
        top_k.top_k if top_k else None,
        top_p.top_p if top_p else None,
        penalty_factor,
    )


def _read_mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """[B, T] bool, the prompts' tokens. Raises ValueError for right padding and positions that do not count them."""
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
    """What `generate` puts behind an answer that ended; None where it lets such an answer go on, without an eos token."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return None
    if config._pad_token_tensor is None:
        raise ValueError(
            "Answers end at an eos token of stopping_criteria, but there is no pad token: set pad_token_id."
        )
    return int(config._pad_token_tensor)


def _mark_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    """tokens [B, T] -> [B, V] bool, where they are; like `generate`, the padding too, and none past the vocabulary"""
    marks = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(1, tokens.clamp(max=vocab_size), True)[:, :-1]
