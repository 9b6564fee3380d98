"""`generate` with a drafter gives the answers of plain `generate`, or refuses what it cannot honour."""

import copy
import json
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import (
    BaseStreamer,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import checkpoint
from specdec.core import precision
from specdec.core.hub import push_files
from specdec.decoding.drafting import Drafting
from specdec.hf import Speculative
from tests.specdec.generate_laws import distance, law_of
from tests.support.decoding import random_tokens
from tests.support.drafters import load_head, make_drafter
from tests.support.targets import make_target

pytestmark = pytest.mark.full

V, PAD = 12, 0  # so few tokens that a random drafter is sometimes right
LENGTHS, LETTERS = (5, 12, 2, 9), "abcdefghijkl"
TREE = Drafting(depth=3, width=3, nodes=8)
SAMPLED_TREE = Drafting(depth=2, width=2, nodes=4, children="distinct")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    make_target(V).model.save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def load_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)


@pytest.fixture(scope="module")
def head(folder):
    """A function head(name, reduced) that saves a random drafter and returns its checkpoint."""
    target = make_target(V)

    def save(name: str, reduced: bool = False):
        path = folder / f"{name}-{reduced}"
        if not path.exists():
            checkpoint.save(path, make_drafter(target, name, reduced), dict(load_head(name)["drafter"]))
        return path

    return save


@pytest.fixture(scope="module")
def eagle(head):
    """A fixed shape: what auto drafts depends on clocks."""
    return Speculative(head("eagle"), Drafting())


def inputs_of(rows: int = len(LENGTHS)) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, as input_ids and attention_mask [B, T]."""
    prompts = [random_tokens(seed, num, V) for seed, num in enumerate(LENGTHS[:rows])]
    longest = max(map(len, prompts))
    padded = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


class Until(StoppingCriteria):
    """Ends the rows that `rule` selects from the texts [B, T], and records these texts."""

    def __init__(self, rule):
        self.rule, self.seen = rule, []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        self.seen.append(input_ids.tolist())
        return self.rule(input_ids)


def agree(model, speculative, inputs, **settings) -> torch.Tensor:
    """The answers of `generate`, checked to be equal with and without the drafter.

    The streamed values and the texts that stopping criteria receive must be equal too.
    """
    results = []
    criteria = settings.pop("rule", None)
    for drafted in (False, True):
        streamer = Recorder()
        extra = {"custom_generate": speculative, "token_streamer": streamer} if drafted else {"streamer": streamer}
        if criteria is not None:
            extra["stopping_criteria"] = [until := Until(criteria)]
        settings = {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": 24} | settings
        answer = model.generate(**inputs, **settings, **extra)
        results.append((answer, streamer.seen, until.seen if criteria is not None else None))
    (reference, *reference_records), (answers, *records) = results
    assert answers.dtype == torch.long and answers.tolist() == reference.tolist()
    assert records == reference_records and records[0][-1] == "end"
    for tokens, accepted in zip(speculative.last.tokens, speculative.last.accepted, strict=True):
        assert len(tokens) == 1 + sum(count + 1 for count in accepted)
    return answers


# Greedy


def test_a_head_on_the_hub_drafts_by_its_name(hub, model, head):
    card = b"---\nlicense: mit\ntags: []\n---\n"
    push_files(
        "user/head", {**{path.name: path for path in head("eagle").iterdir()}, "README.md": card}, message="Add a head"
    )
    drafted = Speculative("user/head", Drafting(depth=3))
    given = {**inputs_of(), "max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(model.generate(**given, custom_generate=drafted), model.generate(**given))
    assert sum(map(sum, drafted.last.accepted)) > 0


@pytest.mark.parametrize("decode", [None, TREE], ids=["auto", "tree"])
@pytest.mark.parametrize("name, reduced", [("eagle", False), ("eagle3", True), ("mtp", False), ("medusa", False),
                                           ("hydra", True), ("dflash", False), ("draft", False)])  # fmt: skip
def test_greedy_answers_equal_those_of_generate(model, head, name, reduced, decode):
    speculative = Speculative(head(name, reduced), decode)
    inputs = inputs_of()
    answers = agree(model, speculative, inputs)
    assert answers.shape == (4, 12 + 24)
    assert decode is None or any(map(any, speculative.last.accepted))  # how much auto drafts depends on the machine
    assert speculative.last.tokens == answers[:, 12:].tolist()
    single_row = {key: value[1:2] for key, value in inputs.items()}  # the longest prompt, which has no padding
    assert agree(model, speculative, single_row).tolist() == answers[1:2].tolist()


def twice(ids):
    return ids[:, -1] == ids[:, -2]


SETTINGS = {
    "penalty": {"repetition_penalty": 1.7},
    "eos": {"eos_token_id": 3},
    "eos list": {"eos_token_id": [3, 5], "pad_token_id": 5},
    "eos and penalty": {"eos_token_id": 3, "repetition_penalty": 1.3, "pad_token_id": 3},
    "max_length": {"max_new_tokens": None, "max_length": 20},
    "one token": {"max_new_tokens": 1},
    "max_time": {"max_time": 1e-9, "eos_token_id": 3},
    "rows end, and go on without an eos token": {"rule": twice},
    "rows end, and are padded": {"rule": twice, "eos_token_id": 4},
    "rows look at each other": {"rule": lambda ids: (ids[:, -1] == ids[0, -1]) & (ids[:, -1] == 2), "eos_token_id": 5},
    "one bool for all": {"rule": lambda ids: torch.full((len(ids),), ids.shape[1] == 17)},
    "warpers that greedy decoding ignores": {"temperature": 0.3, "top_k": 2, "top_p": 0.5},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "no cache": {"use_cache": False},
}


@pytest.fixture(scope="module")
def plain(model) -> list[list[int]]:
    return model.generate(**inputs_of(), do_sample=False, max_new_tokens=24, pad_token_id=PAD).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_honoured(model, head, plain, name):
    speculative = Speculative(head("mtp"), TREE)
    answers = agree(model, speculative, inputs_of(), **SETTINGS[name])
    without_effect = ("no cache", "warpers that greedy decoding ignores")
    assert (answers.tolist() == plain) == (name in without_effect)
    agree(model, speculative, inputs_of(1), **SETTINGS[name])


def test_stop_strings_are_honoured(model, eagle):
    letters = {letter: token for token, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    whole = agree(model, eagle, inputs_of())
    string = "".join(LETTERS[token] for token in whole[0, 15:18])
    settings = {"eos_token_id": 5, "do_sample": False, "pad_token_id": PAD, "max_new_tokens": 24}
    plain = model.generate(**inputs_of(), stop_strings=[string], tokenizer=tokenizer, **settings)
    answers = agree(model, eagle, inputs_of(), **settings, stopping_criteria=[StopStringCriteria(tokenizer, [string])])
    assert answers.tolist() == plain.tolist() != agree(model, eagle, inputs_of(), eos_token_id=5).tolist()


def test_a_generation_config_and_an_output_object_are_honoured(model, eagle):
    config = GenerationConfig(max_new_tokens=9, return_dict_in_generate=True, pad_token_id=PAD)
    output = model.generate(**inputs_of(), generation_config=config, custom_generate=eagle)
    assert type(output) is type(model.generate(**inputs_of(), generation_config=config))
    assert output.sequences.tolist() == agree(model, eagle, inputs_of(), max_new_tokens=9).tolist()


# Sampling


WARPED = {"temperature": 0.8, "top_k": 4, "top_p": 0.85, "repetition_penalty": 1.4}


LAWS = [{}, WARPED, WARPED | {"temperature": 1.2}, WARPED | {"top_p": 1.0}, WARPED | {"repetition_penalty": 1.0}]


@pytest.fixture(scope="module")
def distributions(model):
    """The distributions after each of two prompts, under each of the settings in LAWS."""
    laws = []
    for row in (1, 2):
        ids, mask = (value[row : row + 1] for value in inputs_of().values())
        laws.append([law_of(model, ids, mask, 3, settings) for settings in LAWS])
    return laws


@pytest.mark.parametrize("name, decode", [("eagle", None), ("draft", None), ("eagle", SAMPLED_TREE)], ids=str)
def test_sampled_answers_have_the_law_of_generate(model, head, distributions, name, decode):
    """Answers to two prompts, one of them padded, follow their own distribution and differ from the others."""
    inputs, num = {key: value[1:3] for key, value in inputs_of().items()}, 300
    speculative = Speculative(head(name), decode)
    for number, settings in enumerate(LAWS[:2]):
        torch.manual_seed(0)
        sampled = {"top_k": 0, **settings, "do_sample": True, "max_new_tokens": 3, "num_return_sequences": num}
        answers = model.generate(**inputs, **sampled, pad_token_id=PAD, custom_generate=speculative)
        assert answers.shape == (2 * num, 15)
        assert torch.equal(answers[:, :12], inputs["input_ids"].repeat_interleave(num, 0))
        for tokens, prompt_laws in zip(answers[:, 12:].split(num), distributions):
            assert distance(tokens, prompt_laws[number]) < 4
            assert all(
                distance(tokens, distribution) > 5
                for distribution in prompt_laws
                if distribution is not prompt_laws[number]
            )


def test_sampling_draws_from_the_generator_of_torch(model, head, plain):
    """The first call, which loads the drafter, draws the same numbers as later calls."""
    eagle, answers = Speculative(head("eagle"), Drafting()), []
    settings = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": PAD, "custom_generate": eagle}
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(model.generate(**inputs_of(), **settings).tolist())
    assert answers[0] == answers[1] != answers[2]
    assert model.generate(**inputs_of(), **settings, top_k=1).tolist() == plain


# Refusals


def filled_cache(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(inputs_of(1)["input_ids"][:, :3], past_key_values=cache)
    return cache


REFUSED = [
    ({"num_beams": 3}, r"num_beams=3: set num_beams=1"),
    *(({name: True, "return_dict_in_generate": True}, name) for name in ("output_scores", "output_logits",
        "output_hidden_states")),
    ({"min_new_tokens": 4, "eos_token_id": 3}, "the logits processors MinLengthLogitsProcessor"),
    ({"min_p": 0.1, "do_sample": True}, ".*MinPLogitsWarper"),
    ({"guidance_scale": 1.5}, ".*UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    *(({"logits_processor": LogitsProcessorList(given)},
        "the logits processors .*in this order and with their usual settings")
      for given in ([TopKLogitsWarper(3), TemperatureLogitsWarper(0.5)], [TopKLogitsWarper(3, filter_value=-9.0)],
                    [TopPLogitsWarper(0.5, min_tokens_to_keep=2)], [RepetitionPenaltyLogitsProcessor(1.9, 13)])),
    ({"prompt_lookup_num_tokens": 2}, "assisted_generation: .*prompt_lookup_num_tokens"),
    ({"cache_implementation": "static"}, "cache_implementation=static"),
    ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
    ({"position_ids": torch.arange(12).expand(4, -1)}, "these position_ids"),
]  # fmt: skip


@pytest.mark.parametrize("settings, words", REFUSED, ids=[str(list(settings)) for settings, _ in REFUSED])
def test_settings_that_cannot_be_honoured_are_refused(model, eagle, settings, words):
    with pytest.raises(ValueError, match=f"Speculative cannot honour {words}.*or call generate without"):
        model.generate(**inputs_of(), max_new_tokens=4, pad_token_id=PAD, **settings, custom_generate=eagle)


def test_caches_embeddings_right_padding_and_a_missing_pad_token_are_refused(model, eagle):
    inputs = inputs_of(1)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    until = Until(twice)
    until.eos_token_id = torch.tensor([3])
    for extra, words in (
        ({"past_key_values": filled_cache(model), **inputs}, "cannot honour (cache|past_key_values): "),
        ({"past_key_values": DynamicCache(config=model.config), **inputs}, "cannot honour (cache|past_key_values): "),
        ({"inputs_embeds": embeds}, "cannot honour inputs_embeds: "),
        ({"inputs_embeds": embeds, **inputs}, "cannot honour inputs_embeds: "),
        ({key: value.flip(1) for key, value in inputs_of().items()}, r'on the left \(tokenizer\.padding_side="left"\)'),
        ({"stopping_criteria": [until], **inputs_of()}, "set pad_token_id"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(**extra, custom_generate=eagle)


# The caller's model


def state(model) -> list:
    return [
        model.config._attn_implementation,
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        {name: value.tolist() for name, value in model.state_dict().items()},
        model.generation_config.to_dict(),
    ]


def test_the_model_is_unchanged_after_generate(folder, head):
    model = load_model(folder)
    model.model.layers[1].train()
    model.lm_head.weight.requires_grad_(False)
    before = state(model)
    assert before[0] == "sdpa" and any(before[1]) and not all(before[2])
    speculative = Speculative(head("eagle3"))
    model.generate(**inputs_of(), custom_generate=speculative, pad_token_id=PAD)
    assert state(model) == before

    def fail(ids):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs_of(), custom_generate=speculative, stopping_criteria=[Until(fail)])
    assert state(model) == before


def test_a_drafter_is_loaded_once_for_each_model(folder, head, model, monkeypatch):
    loads, load = [], checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda *arguments: loads.append(arguments) or load(*arguments))
    speculative, second = Speculative(head("eagle")), load_model(folder)
    for caller_model in (model, model, second, model, second):
        agree(caller_model, speculative, inputs_of(1))
    assert len(loads) == 4
    with torch.no_grad():
        second.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"was trained for tiny .*, not for"):
        second.generate(**inputs_of(1), custom_generate=speculative)
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.up_proj.weight.data += 1
    with pytest.raises(ValueError, match=r"was trained for tiny .*, not for"):
        other.generate(**inputs_of(1), custom_generate=speculative)
    agree(model, speculative, inputs_of(1))


def test_a_drafter_that_adapts_its_target_is_refused(model, head, tmp_path):
    document = json.loads((head("medusa") / "drafter.json").read_text())
    (tmp_path / "drafter.json").write_text(json.dumps(document | {"_target_": "specdec.heads.medusa.Medusa2"}))
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="adapts its target, which would change your model"):
        model.generate(**inputs_of(1), custom_generate=Speculative(tmp_path))
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_a_dtype_that_this_device_only_imitates_is_told(monkeypatch, folder, head, dtype):
    monkeypatch.setattr(precision, "choose_dtype", lambda device: precision.DtypeChoice(dtype, "this CPU was asked"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_model(folder).bfloat16().generate(
            **inputs_of(1), max_new_tokens=2, custom_generate=Speculative(head("eagle"))
        )
    said = [str(each.message) for each in told if "bfloat16" in str(each.message)]
    wanted = "The model is in bfloat16, but this CPU was asked: load it with dtype=torch.float32."
    assert said == [wanted] * (dtype == "float32")
