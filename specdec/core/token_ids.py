"""Ids of a tokenizer that a target has no embedding for: texts with them are refused, before the target reads them."""

import warnings

from transformers import PreTrainedTokenizerBase

ROWS = "rows_of_embedding"  # attribute of a tokenizer that has more ids than the target has embeddings


def limit(tokenizer: PreTrainedTokenizerBase, rows: int, name: str) -> None:
    """Remembers the number of the target's embeddings if the tokenizer has higher ids, and warns. name: of the target"""
    names = {token: word for word, token in tokenizer.get_vocab().items() if token >= rows}
    if names:
        setattr(tokenizer, ROWS, rows)
        shown = ", ".join(f"{names[token]} ({token})" for token in sorted(names)[:5])
        warnings.warn(
            f"The tokenizer of {name} has {len(names)} tokens for which the model's embedding, of {rows} rows, has none: {shown}"
            f"{', ..' if len(names) > 5 else ''}. Texts with them are refused.",
            stacklevel=2,
        )


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id that texts may have, plus 1."""
    highest = max(tokenizer.get_vocab().values())
    return min(highest + 1, getattr(tokenizer, ROWS, highest + 1))


def check(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    """The tokens. Raises ValueError for an id that the target has no embedding for."""
    rows = getattr(tokenizer, ROWS, None)
    if rows is not None and max(tokens, default=0) >= rows:
        wrong = max(tokens)
        raise ValueError(
            f"The text, or what is put around it, has the token {tokenizer.convert_ids_to_tokens(wrong)} ({wrong}), and the "
            f"embedding of {tokenizer.name_or_path} has {rows} rows. Remove it, or take the tokenizer that belongs to the model."
        )
    return tokens
