"""Plain text to token ids, for models that continue texts: with the special tokens in front that the model expects.

Most models expect none. Gemma and Llama expect a beginning-of-text token, without which they write nonsense.
"""

import contextlib
import hashlib
import json
import warnings

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config


def find_opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts in front of a text."""
    text, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(text) + 1)
    return next((whole[:place] for place in starts if whole[place : place + len(text)] == text), [])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens after which a model continues the text: no end-of-text token follows, whatever the tokenizer adds.

    Raises ValueError for a token that the target has no embedding for.
    """
    tokens, first = tokenizer(text, add_special_tokens=False)["input_ids"], find_opening_tokens(tokenizer)
    return check_ids(tokenizer, tokens if tokens[: len(first)] == first else first + tokens)


def encode_pair(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """-> the tokens of `encode(prompt)`, and those that the text goes on with: cut as the whole text is, if that is possible"""
    before, whole = encode_text(tokenizer, prompt), encode_text(tokenizer, prompt + completion)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    return before, tokenizer(completion, add_special_tokens=False)["input_ids"]


def expect_opening(
    tokenizer: PreTrainedTokenizerBase, name: str, *, revision: str | None, trust_remote_code: bool
) -> None:
    """Makes the tokenizer of a base model begin texts as the model's configuration says, if it lost that, and warns.

    A tokenizer from a GGUF file does not add the beginning-of-text token. One is expected if the configuration names it, and
    not also as the end of a text, as models do that expect none. `add_bos_token` in tokenizer_config.json has the last word.
    """
    begin = tokenizer.bos_token_id
    if (
        tokenizer.chat_template
        or begin is None
        or not hasattr(tokenizer, "add_bos_token")
        or find_opening_tokens(tokenizer)
    ):
        return
    stated = get_tokenizer_config(name, revision=revision).get("add_bos_token")
    if stated is None:
        origin = {"revision": revision, "trust_remote_code": trust_remote_code}
        configurations: list = []
        with contextlib.suppress(OSError, ValueError, KeyError):
            configurations.append(AutoConfig.from_pretrained(name, **origin).get_text_config(decoder=True))
        with contextlib.suppress(OSError, ValueError):
            configurations.append(GenerationConfig.from_pretrained(name, revision=revision or "main"))
        named = [getattr(each, "bos_token_id", None) for each in configurations]
        ends = [getattr(each, "eos_token_id", None) for each in configurations] + [tokenizer.eos_token_id]
        stated = begin in named and all(
            begin != end and begin not in (end if isinstance(end, list) else ()) for end in ends
        )
        if stated:
            warnings.warn(
                f"The tokenizer of {name} puts no {tokenizer.bos_token} in front of texts, and the model's configuration names "
                'it: it is put there. "add_bos_token": false in tokenizer_config.json leaves it out.',
                stacklevel=2,
            )
    if stated:
        tokenizer.add_bos_token = True


# Ids of a tokenizer that a target has no embedding for: texts with them are refused, before the target reads them.

NUM_EMBEDDINGS = "rows_of_embedding"  # attribute of a tokenizer: how many embeddings its target has


def limit_ids(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> None:
    """Remembers the number of the target's embeddings."""
    setattr(tokenizer, NUM_EMBEDDINGS, num_embeddings)


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id that texts may have, plus 1."""
    highest = max(tokenizer.get_vocab().values())
    return min(highest + 1, getattr(tokenizer, NUM_EMBEDDINGS, highest + 1))


def check_ids(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    """The tokens. Raises ValueError for an id that the target has no embedding for."""
    num_embeddings = getattr(tokenizer, NUM_EMBEDDINGS, None)
    if num_embeddings is not None and max(tokens, default=0) >= num_embeddings:
        wrong = max(tokens)
        raise ValueError(
            f"The text, or what is put around it, has the token {tokenizer.convert_ids_to_tokens(wrong)} ({wrong}), and the "
            f"embedding of {tokenizer.name_or_path} has {num_embeddings} rows. Remove it, or take the tokenizer that belongs to the model."
        )
    return tokens


def digest_vocabulary(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """16 hex digits that identify the vocabulary: the text of every id."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
