"""The text of an answer whose tokens come one by one, and the texts that end it.

A character may take several tokens, and a token may end one character and begin the next. A byte-fallback vocabulary (Llama 2, Gemma,
Mistral) spells a rare character with a token for each byte, and its decoder turns a whole run of these into U+FFFD until the run is
valid, also the characters in it that were complete before. So bytes are put together here, and the decoder gets the other tokens.
"""

import codecs
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
INCOMPLETE = 3  # U+FFFD at most that stand for a character which the next tokens may complete
CONTEXT = 8  # tokens that are decoded with the next one, as spaces and characters depend on what is before


@dataclass(frozen=True)
class TextDecoder:
    """Token ids -> text.

    decode: token ids -> text, of which no token changes more than INCOMPLETE times U+FFFD at the end of the text before it
    byte_tokens: what the tokens of single bytes stand for, from 128 on, in a byte-fallback vocabulary; they are not decoded
    anchor: a token of that vocabulary whose text is one letter
    """

    decode: Callable[[list[int]], str]
    byte_tokens: Mapping[int, bytes] = field(default_factory=dict)
    anchor: int = -1

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> "TextDecoder":
        """That of a tokenizer. special: whether special tokens show in the text"""
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        decode = lambda tokens: str(tokenizer.decode(tokens, **options))
        ids: dict[int, Any] = {}
        for byte in range(256):
            name = f"<0x{byte:02X}>"
            ids[byte] = tokenizer.convert_tokens_to_ids(name)
            if ids[byte] is None or tokenizer.convert_ids_to_tokens(ids[byte]) != name:
                del ids[byte]
        sample = "\u00e9A".encode()
        if not ids.keys() >= set(sample) or decode([ids[byte] for byte in sample]) != sample.decode():
            return cls(decode)
        return cls(decode, {id: bytes([byte]) for byte, id in ids.items() if byte > 127}, ids[ord("A")])

    def text(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of all tokens: what the pieces of a TextStream are together. before: as there"""
        if not before:
            text = self.decode(list(tokens))
            if not self.byte_tokens or BROKEN not in text:
                return text
        stream = TextStream(self, before)
        return "".join([*map(stream.add, tokens), stream.end()])

    def is_silent(self, token: int) -> bool:
        """Whether a token has no text wherever it stands, as a special one that does not show."""
        return not self.decode([token, token])


class TextStream:
    """Turns the tokens of an answer into pieces of text, each as soon as its characters are complete. Together they are its text.

    before: the tokens of a text that the answer continues
    """

    def __init__(self, decoder: TextDecoder, before: Sequence[int] = ()):
        self.decoder = decoder
        self.window, self.text = list[int](), ""  # the last tokens but those of bytes, and what they decode to
        self.num_shown = 0  # characters of this text that were given out
        self.run = codecs.getincrementaldecoder("utf-8")("replace")  # of adjacent tokens of bytes
        context = itertools.islice((token for token in reversed(before) if not decoder.is_silent(token)), CONTEXT)
        for token in reversed([*context]):
            self.add(token)

    def add(self, token: int) -> str:
        """The piece of text that the next token completes; empty if it ends inside of a character."""
        decoder = self.decoder
        byte = decoder.byte_tokens.get(token)
        if byte is not None:
            if not self.window:  # what follows does not begin the text
                self._begin([decoder.anchor], 0)
            return self.run.decode(byte)
        text = decoder.decode([*self.window, token])
        if text == self.text and decoder.is_silent(token):
            return ""
        self.window.append(token)
        self.text = text
        num_broken = len(text) - len(text.rstrip(BROKEN))
        waiting = 0 if decoder.byte_tokens else min(num_broken, INCOMPLETE)
        end = max(self.num_shown, len(text) - waiting)
        piece = self.run.decode(b"", final=True) + text[self.num_shown : end]
        self.num_shown = end
        if len(self.window) > 2 * CONTEXT:
            self._begin(self.window[-CONTEXT:], len(text) - end)
        return piece

    def end(self) -> str:
        """What no token completed, as U+FFFD."""
        rest = self.run.decode(b"", final=True) + self.text[self.num_shown :]
        self.num_shown = len(self.text)
        return rest

    def _begin(self, window: list[int], waiting: int) -> None:
        """The window begins later. If that is inside of a character, all of it was given out, as the tokens behind it show.

        waiting: characters at its end that were not given out
        """
        self.window, self.text = window, self.decoder.decode(window)
        self.num_shown = len(self.text) - waiting


@dataclass(frozen=True)
class StopStrings:
    """Texts that end an answer: its last token is the one that completes a stop string.

    continues: whether the answer's text goes on from its prompt's
    """

    strings: tuple[str, ...]
    decoder: TextDecoder
    continues: bool = False

    def __post_init__(self):
        if not all(self.strings):
            raise ValueError("A stop string must hold a character: every text holds the empty one.")

    def finder(self, prompt: Sequence[int] = ()) -> "StopFinder":
        """What looks for them in one answer."""
        return StopFinder(self.strings, TextStream(self.decoder, prompt if self.continues else ()))


class StopFinder:
    """Looks for stop strings in the text of an answer, as its tokens come."""

    def __init__(self, strings: Sequence[str], stream: TextStream):
        self.strings, self.stream = strings, stream
        self.longest = max(map(len, strings))
        self.text = ""  # the end of the answer's text, in which a stop string may have begun

    def end(self, new: Iterable[int]) -> int | None:
        """How many of the next tokens belong to the answer; None if it does not end there."""
        for num, token in enumerate(new, start=1):
            self.text += self.stream.add(token)
            if any(string in self.text for string in self.strings):
                return num
            self.text = self.text[max(0, len(self.text) - self.longest + 1) :]
        return None


def find_stop_tokens(tokenizer: PreTrainedTokenizerBase, strings: Iterable[str]) -> frozenset[int]:
    """Ids of the stop strings that are special tokens, which never show in an answer's text.

    Raises ValueError for a stop string that holds such a token beside other text.
    """
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = {**dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)), **added}
    for string in strings:
        name = next((name for name in special if name and name in string), None)
        if name is not None and string not in special:
            raise ValueError(
                f"The stop string {string!r} holds the special token {name}, which never shows in a text: give the token alone, "
                "or the text without it."
            )
    return frozenset(special[string] for string in strings if string in special)
