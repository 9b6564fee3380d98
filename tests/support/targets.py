"""Tiny targets and tokenizers, in memory and as folders."""

import collections
import functools
import itertools
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from specdec.target import attention
from specdec.target.model import Target
from tests.support.commands import ROOT

REAL_TARGET = ROOT / "targets" / "smollm2-135m"

TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
OLD_TRANSFORMERS = TRANSFORMERS < (5, 18)
NEW_TRANSFORMERS = TRANSFORMERS > (5, 19)  # newer than that of docs/targets.md: more may work, for other reasons not

# Real targets, for counts on tensors without values
COMMON_SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
QWEN3_8B = Qwen3Config(
    **COMMON_SIZES,
    num_hidden_layers=36,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
)
LLAMA_8B = LlamaConfig(
    **COMMON_SIZES, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072
)


def make_target(vocab_size: int, *, num_layers: int = 8, width: int = 32, device: torch.device | str = "cpu") -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        initializer_range=0.4,  # logits that are not flat
        attn_implementation=attention.IMPLEMENTATION,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config).double().to(device), name="tiny")


def scale_forward(target: Target, monkeypatch) -> None:
    """Makes the target scale the output of its layers, as a target does that is more than a sequence of layers."""
    forward = target.decoder.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.last_hidden_state = 1.5 * output.last_hidden_state
        return output

    monkeypatch.setattr(target.decoder, "forward", scaled)


TEMPLATE = (  # the chat template of SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


WORDS = (  # frequent in tests and in the template; as single tokens they keep texts short
    "system user assistant You are a helpful AI named SmolLM trained by Hugging Face Count to from on is followed "
    "then number Say hello Hello world"
)


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    """The word with every occurrence of the pair as one symbol."""
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


@functools.cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's special tokens and chat template, all bytes, and some words: about 400 entries."""
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    vocab = special | {symbol: 3 + n for n, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = [list(part) for word in WORDS.split() for part in (word, "\u0120" + word)]  # \u0120 stands for a space
    merges: list[tuple[str, str]] = []
    while pairs := collections.Counter(pair for word in words for pair in itertools.pairwise(word)):
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))  # byte-pair encoding: the pair that occurs most often
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
        words = [merge(word, pair) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
    )


def byte_fallback_tokenizer(*, opening: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece's way: words with their space in front, and a token for each byte of what is no word or ASCII
    letter.

    opening: whether a text's first word has a space in front that its text lacks, as with Llama 2; Gemma has none
    """
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "\ufffd", *map(chr, range(33, 127))]
    vocab = {piece: n for n, piece in enumerate(special + pieces)}
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        for num in range(1, 1 + len(word)):
            merges.append((("\u2581" + word)[:num], word[num - 1]))
            vocab.setdefault("".join(merges[-1]), len(vocab))
    merges = list(dict.fromkeys(merges))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if opening else space
    strip = [decoders.Strip(" ", 1, 0)] * opening
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="</s>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    assert len(fast_tokenizer) == len(vocab)
    return fast_tokenizer


def save_target(folder: Path, *, num_layers: int = 3, seed: int = 0, tokenizer=None) -> Target:
    """A tiny target, saved with a tokenizer as a folder that scripts and train.py load. -> that target, in float32"""
    tokenizer = tokenizer or small_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), dtype="float32")


def word_tokenizer(num_words: int, prefix: str = "w") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"{prefix}{n}": n for n in range(num_words)}, unk_token=f"{prefix}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=f"{prefix}0", eos_token=f"{prefix}1")


def save_word_model(
    path: Path, *, rows: int = 61, width: int = 32, tied: bool = False, prefix: str = "w", seed: int = 0
) -> Path:
    """A saved model whose tokenizer has 57 words and whose embedding has `rows` rows. -> path"""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=4,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    word_tokenizer(57, prefix).save_pretrained(path)
    return path
