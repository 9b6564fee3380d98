"""Plain text to token ids, for models that continue texts, with the special tokens that the model expects in front.

Most models expect none. Gemma and Llama expect a beginning-of-text token, and write nonsense without it.
"""

import contextlib
import hashlib
import json
import warnings

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config


def find_opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts in front of a text"""
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(text) + 1)
    return next((whole[:place] for place in starts if whole[place : place + len(text)] == text), [])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens after which a model continues the text, without an end-of-text token of the tokenizer.

    Raises ValueError for a token without an embedding in the target.
    """
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = find_opening_tokens(tokenizer)
    return check_ids(tokenizer, tokens if tokens[: len(first)] == first else first + tokens)


def encode_pair(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """-> the tokens of `encode_text(prompt)`, and those of the completion: cut as in the whole text, if possible"""
    before = encode_text(tokenizer, prompt)
    whole = encode_text(tokenizer, prompt + completion)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    return before, tokenizer(completion, add_special_tokens=False)["input_ids"]


def expect_opening(
    tokenizer: PreTrainedTokenizerBase, name: str, *, revision: str | None, trust_remote_code: bool
) -> None:
    """Makes a base model's tokenizer begin texts as the model's configuration says, and warns.

    Tokenizers from GGUF files do not add the beginning-of-text token. It is expected if the configuration names it, and
    not also as the end of a text. `add_bos_token` in tokenizer_config.json has the last word.
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
        stated = _names_opening(tokenizer, name, revision=revision, trust_remote_code=trust_remote_code)
        if stated:
            warnings.warn(
                f"The tokenizer of {name} puts no {tokenizer.bos_token} in front of texts, and the model's "
                'configuration names it: it is put there. "add_bos_token": false in tokenizer_config.json leaves '
                "it out.",
                stacklevel=2,
            )
    if stated:
        tokenizer.add_bos_token = True


def _names_opening(
    tokenizer: PreTrainedTokenizerBase, name: str, *, revision: str | None, trust_remote_code: bool
) -> bool:
    """True if a configuration of the model names the beginning-of-text token, and none names it as an end of text"""
    configurations: list = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        configurations.append(config.get_text_config(decoder=True))
    with contextlib.suppress(OSError, ValueError):
        configurations.append(GenerationConfig.from_pretrained(name, revision=revision or "main"))
    begins = [getattr(config, "bos_token_id", None) for config in configurations]
    ends = {tokenizer.eos_token_id}
    for config in configurations:
        end = getattr(config, "eos_token_id", None)
        ends.update(end if isinstance(end, list) else [end])
    return tokenizer.bos_token_id in begins and tokenizer.bos_token_id not in ends


# Ids of a tokenizer without an embedding in the target: texts with them are refused

NUM_EMBEDDINGS = "rows_of_embedding"  # attribute of a tokenizer: number of its target's embeddings


def limit_ids(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> None:
    """Remembers the number of the target's embeddings."""
    setattr(tokenizer, NUM_EMBEDDINGS, num_embeddings)


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id that texts may have, plus 1"""
    highest = max(tokenizer.get_vocab().values())
    return min(highest + 1, getattr(tokenizer, NUM_EMBEDDINGS, highest + 1))


def check_ids(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    """The tokens. Raises ValueError for an id without an embedding in the target."""
    num_embeddings = getattr(tokenizer, NUM_EMBEDDINGS, None)
    if num_embeddings is not None and max(tokens, default=0) >= num_embeddings:
        wrong = max(tokens)
        raise ValueError(
            f"The text, or what is put around it, has the token {tokenizer.convert_ids_to_tokens(wrong)} ({wrong}), "
            f"and the embedding of {tokenizer.name_or_path} has {num_embeddings} rows. Remove it, or take the "
            "tokenizer that belongs to the model."
        )
    return tokens


def digest_vocabulary(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """16 hex digits that identify the vocabulary: the text of every id"""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
