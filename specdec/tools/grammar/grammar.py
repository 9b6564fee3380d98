"""Answers that follow a grammar: a JSON schema, a regular expression, or a grammar in Lark's form (`llguidance`).

The grammar is part of the target's distribution, as top-p is. After each text, tokens with which no sentence of the
grammar goes on get probability 0, and the others are normalised. This happens before temperature and filters, and
before any acceptance rule. The distributions of drafts stay as they are.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec import DISTRIBUTION
from specdec.core import files
from specdec.core.constraint import FORMS

KINDS = ("json_schema", "regex", "lark")
# The whitespace of json.dumps, unless the schema's own "x-guidance" has another one. With free whitespace, small models
# write blanks without end.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """A grammar of answers. kind: one of KINDS; text: the schema (as JSON), the expression or the grammar"""

    kind: str
    text: str

    @classmethod
    def parse(cls, value: str) -> "Grammar":
        """The grammar of an option in one of FORMS. Raises ValueError for another form, and for an unreadable file."""
        name, colon, text = value.partition(":")
        kind = {"json": "json_schema"}.get(name, name)
        if not colon or kind not in KINDS:
            raise ValueError(f"grammar={value[:60]} cannot be read: give {FORMS}.")
        try:
            if len(text) < 1024:
                path = Path(files.expand_home(text))
                text = path.read_text(encoding="utf-8") if path.is_file() else text
            return cls.from_row({kind: json.loads(text) if kind == "json_schema" else text})
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"grammar={value[:60]} cannot be read ({error}): give {FORMS}; a schema is JSON, such as "
                '{"type": "object"}.'
            ) from None

    @classmethod
    def from_row(cls, document: Any) -> "Grammar":
        """The grammar of a row's field: {"json_schema": {..}}, {"regex": ".."} or {"lark": ".."}.

        Raises ValueError for another document.
        """
        if not isinstance(document, Mapping) or len(document) != 1 or not document.keys() <= {*KINDS}:
            raise ValueError(f"A grammar must be an object with one of the keys {', '.join(KINDS)}.")
        ((kind, value),) = document.items()
        if kind == "json_schema":
            return cls(kind, json.dumps(value, sort_keys=False))
        if not isinstance(value, str):
            raise ValueError(f"{kind} must be a text.")
        return cls(kind, value)

    def compile(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: set[int]
    ) -> "Callable[[], GrammarConstraint]":
        """A function that returns the state of a new answer. Raises ValueError as `GrammarCompiler`."""
        matcher = GrammarCompiler(tokenizer, vocab_size, stop).compile_once(self)
        return lambda: GrammarConstraint(matcher.deep_copy(), frozenset(stop))

    def to_row(self) -> dict:
        """The inverse of `from_row`."""
        return {self.kind: json.loads(self.text) if self.kind == "json_schema" else self.text}


class GrammarConstraint:
    """The state of one answer under a grammar.

    matcher: an llguidance.LLMatcher, which after an error allows only an end
    stop: token ids that end an answer. Where the grammar allows an end, it allows each of them. In a dead end, which
        some grammars have, only an end is allowed. That is a text with which no sentence begins, though each of its
        tokens was allowed.
    """

    def __init__(self, matcher: Any, stop: frozenset[int]):
        self._matcher, self._stop = matcher, stop
        self.ended = False  # after a token of `stop`, everything is allowed

    @property
    def complete(self) -> bool:
        """Whether the answer so far is a whole sentence of the grammar."""
        return not self._matcher.is_error() and self._matcher.is_accepting()

    def take(self, tokens: list[int]) -> None:
        """Adds tokens to the answer, which the grammar allows."""
        for token in tokens:
            self.ended = self.ended or token in self._stop
            if not self.ended:
                self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """The tokens that must follow the answer; empty where there is a choice."""
        return [] if self.ended else self._matcher.deep_copy().compute_ff_tokens()

    def fits(self, tokens: list[int]) -> bool:
        """Whether the text of these tokens may follow the answer. The masks may allow fewer spellings of it."""
        if self.ended:
            return True
        num_before_stop = next((index for index, token in enumerate(tokens) if token in self._stop), len(tokens))
        matcher = self._matcher.deep_copy()
        if matcher.validate_tokens(tokens[:num_before_stop]) < num_before_stop:
            return False
        return num_before_stop == len(tokens) or (
            all(map(matcher.consume_token, tokens[:num_before_stop])) and matcher.is_accepting()
        )

    def following(self) -> bytes | None:
        """The mask of the next token, as of `allowed`."""
        return self.allowed([0], [-1])[0]

    def allowed(self, tokens: list[int], parents: list[int]) -> list[bytes | None]:
        """The mask of the next token behind each node of a tree, of which node 0 is the newest token of the answer.

        tokens, parents [N]: nodes of the tree, see Tree
        A mask has a bit for each token id, the lowest bit of the first byte first. It is b"" behind the end of an
        answer, where all tokens may follow, and None for a node that the grammar does not allow.
        """
        if self.ended:
            return [b""] * len(tokens)
        masks: list[bytes | None] = [None] * len(tokens)
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], start=1):
            children[parent].append(node)

        def fill_masks(nodes: list[int], matcher: Any) -> None:
            """Nodes with the same text get their mask, and then their children. matcher: None behind the end"""
            mask = b"" if matcher is None else matcher.compute_bitmask()
            nodes_by_token: dict[int, list[int]] = {}
            for node in nodes:
                masks[node] = mask
                for child in children[node]:
                    nodes_by_token.setdefault(tokens[child], []).append(child)
            for token, following in nodes_by_token.items():
                if mask and not mask[token >> 3] >> (token & 7) & 1:
                    continue
                matcher_after = None
                if mask and token not in self._stop:
                    matcher_after = matcher.deep_copy()  # a dead end below must not reach this one
                    matcher_after.consume_token(token)
                fill_masks(following, matcher_after)

        fill_masks([0], self._matcher.deep_copy())
        return masks


class GrammarCompiler:
    """Compiles grammars for a tokenizer, each once.

    vocab_size: number of the target's logits, which may exceed that of the tokenizer's tokens
    stop: token ids that end an answer

    Raises ValueError without llguidance, without such ids, and for a tokenizer that llguidance cannot read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: set[int]):
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise ValueError(
                f"A grammar needs the package llguidance: pip install '{DISTRIBUTION}[grammar]', or leave it out."
            ) from None
        if not stop:
            raise ValueError("A grammar needs token ids that end an answer, and this target has none.")
        self._library, self._stop = llguidance, frozenset(stop)
        try:
            fast: Any = tokenizer
            self._tokenizer = llguidance.hf.from_tokenizer(fast, n_vocab=vocab_size, eos_token=sorted(stop))
        except Exception as error:
            raise ValueError(
                f"llguidance cannot read the tokenizer of {tokenizer.name_or_path} ({error}): grammars need a fast "
                "tokenizer (tokenizer.json)."
            ) from None
        self.compile_once = functools.lru_cache(maxsize=256)(self._compile_grammar)

    def make_constraint(self, grammar: Grammar | None) -> GrammarConstraint | None:
        """The state of a new answer. Raises ValueError for a wrong grammar, and for one that no text satisfies."""
        return None if grammar is None else GrammarConstraint(self.compile_once(grammar).deep_copy(), self._stop)

    def _compile_grammar(self, grammar: Grammar) -> Any:
        library = self._library.LLMatcher
        makers: dict[str, Callable] = {
            "json_schema": lambda text: library.grammar_from_json_schema(text, defaults=JSON_FORM),
            "regex": library.grammar_from_regex,
            "lark": library.grammar_from_lark,
        }
        try:
            matcher = library(self._tokenizer, makers[grammar.kind](grammar.text))
            why = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:
            why = str(error)
        if not why:
            first = matcher.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                why = "no text satisfies it"
        if why:
            reason = " ".join(why.split("<state>")[0].split())[:300]
            raise ValueError(
                f"The {grammar.kind.replace('_', ' ')} cannot be used: {reason}. Change it, or leave it out."
            )
        return matcher
