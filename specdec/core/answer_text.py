"""The text of an answer whose tokens come one by one, and the texts that end it.

A character may take several tokens, and a token may end one character and begin the next. A byte-fallback vocabulary (Llama 2, Gemma,
Mistral) spells a rare character with a token for each byte, and its decoder turns a whole run of these into U+FFFD until the run is
valid, also the characters in it that were complete before. So bytes are put together here, and the decoder gets the other tokens.
"""

import codecs
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # stands for bytes that are no character, or not yet
MAX_INCOMPLETE = 3  # U+FFFD at most that stand for a character which the next tokens may complete
CONTEXT_TOKENS = 8  # tokens that are decoded with the next one, as spaces and characters depend on what is before


@dataclass(frozen=True)
class TextDecoder:
    """Token ids -> text.

    decode: token ids -> text, of which no token changes more than INCOMPLETE times U+FFFD at the end of the text before it
    byte_tokens: what the tokens of single bytes stand for, from 128 on, in a byte-fallback vocabulary; they are not decoded
    anchor: a token of that vocabulary whose text is one letter
    special: the special tokens that do not show in the text
    """

    decode: Callable[[list[int]], str]
    byte_tokens: Mapping[int, bytes] = field(default_factory=dict)
    anchor: int = -1
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> "TextDecoder":
        """That of a tokenizer. special: whether special tokens show in the text"""
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        decode = lambda tokens: str(tokenizer.decode(tokens, **options))
        hidden = {} if special else find_special(tokenizer)
        ids, sample = find_byte_tokens(tokenizer), "\u00e9A".encode()
        if not ids.keys() >= set(sample) or decode([ids[byte] for byte in sample]) != sample.decode():
            return cls(decode, special=hidden)
        return cls(decode, {id: bytes([byte]) for byte, id in ids.items() if byte > 127}, ids[ord("A")], hidden)

    def text(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of all tokens: what the pieces of a TextStream are together. before: as there"""
        if not before:
            text = self.decode(list(tokens))
            if not self.byte_tokens or REPLACEMENT not in text:
                return text
        stream = TextStream(self, before)
        return "".join([*map(stream.add, tokens), stream.end()])

    def is_silent(self, token: int) -> bool:
        """Whether a token has no text wherever it stands, as a special one that does not show."""
        return not self.decode([token, token])


def find_special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens and their ids"""
    added = tokenizer.added_tokens_decoder
    known = added.items() if isinstance(added, dict) else ()  # mistral-common's tokenizers have no such table
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)
    return {
        str(name): id for name, id in [*named, *((token.content, id) for id, token in known if token.special)] if name
    }


def find_byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """byte -> id of the token that is called like it; empty for a vocabulary that has no byte fallback"""
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if find_token_id(tokenizer, names[ord("A")]) is None:
        return {}
    ids = {byte: find_token_id(tokenizer, name) for byte, name in names.items()}
    return {byte: id for byte, id in ids.items() if id is not None}


def find_token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    """The id of a token; None if there is none, where a tokenizer may give that of its unknown token"""
    id: Any = tokenizer.convert_tokens_to_ids(name)
    return id if id is not None and tokenizer.convert_ids_to_tokens(id) == name else None


class TextStream:
    """Turns the tokens of an answer into pieces of text, each as soon as its characters are complete. Together they are its text.

    before: the tokens of a text that the answer continues
    """

    def __init__(self, decoder: TextDecoder, before: Sequence[int] = ()):
        self.decoder = decoder
        self.window, self.text = list[int](), ""  # the last tokens but those of bytes, and what they decode to
        self.num_shown = 0  # characters of this text that were given out
        self.byte_run = codecs.getincrementaldecoder("utf-8")("replace")  # of adjacent tokens of bytes
        context = itertools.islice(
            (token for token in reversed(before) if not decoder.is_silent(token)), CONTEXT_TOKENS
        )
        for token in reversed([*context]):
            self.add(token)

    def add(self, token: int) -> str:
        """The piece of text that the next token completes; empty if it ends inside of a character."""
        decoder = self.decoder
        byte = decoder.byte_tokens.get(token)
        if byte is not None:
            if not self.window:  # what follows does not begin the text
                self._restart_window([decoder.anchor], 0)
            return self.byte_run.decode(byte)
        text = decoder.decode([*self.window, token])
        if text == self.text and decoder.is_silent(token):
            return ""
        self.window.append(token)
        self.text = text
        num_broken = len(text) - len(text.rstrip(REPLACEMENT))
        waiting = 0 if decoder.byte_tokens else min(num_broken, MAX_INCOMPLETE)
        end = max(self.num_shown, len(text) - waiting)
        piece = self.byte_run.decode(b"", final=True) + text[self.num_shown : end]
        self.num_shown = end
        if len(self.window) > 2 * CONTEXT_TOKENS:
            self._restart_window(self.window[-CONTEXT_TOKENS:], len(text) - end)
        return piece

    def end(self) -> str:
        """What no token completed, as U+FFFD."""
        remainder = self.byte_run.decode(b"", final=True) + self.text[self.num_shown :]
        self.num_shown = len(self.text)
        return remainder

    def _restart_window(self, window: list[int], waiting: int) -> None:
        """The window begins later. If that is inside of a character, all of it was given out, as the tokens behind it show.

        waiting: characters at its end that were not given out
        """
        self.window, self.text = window, self.decoder.decode(window)
        self.num_shown = len(self.text) - waiting


class StopStrings:
    """Texts that end an answer: its last token is the one that completes a stop string, or the special token that is one.

    decoder: of the answer's text; continues: whether that goes on from the text of `prompt`, the tokens before the answer
    Raises ValueError for an empty stop string, and for one that holds a special token beside other text.
    """

    def __init__(
        self, strings: Sequence[str], decoder: TextDecoder, *, continues: bool = False, prompt: Sequence[int] = ()
    ):
        if not all(strings):
            raise ValueError("A stop string must hold a character: every text holds the empty one.")
        for string, name in itertools.product(strings, decoder.special):
            if name in string and string not in decoder.special:
                raise ValueError(
                    f"The stop string {string!r} holds the special token {name}, which never shows in a text: give the token "
                    "alone, or the text without it."
                )
        self.strings, self.decoder, self.continues = tuple(strings), decoder, continues
        self.tokens = {decoder.special[string] for string in strings if string in decoder.special}
        self.stream = TextStream(decoder, prompt if continues else ())
        self.text = ""  # the end of the answer's text, in which a stop string may have begun
        self.num_read = 0  # tokens of the answer

    def begin(self, prompt: Sequence[int]) -> "StopStrings":
        """The same for one answer, whose tokens it reads as they come."""
        return StopStrings(self.strings, self.decoder, continues=self.continues, prompt=prompt)

    def end(self, written: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the `new` tokens, which follow `written`, belong to the answer; None if it does not end there."""
        for token in written[self.num_read :]:
            self._read(token)
        return next((num for num, token in enumerate(new, start=1) if self._read(token)), None)

    def _read(self, token: int) -> bool:
        """Whether the next token ends the answer."""
        self.num_read += 1
        text = self.text + self.stream.add(token)
        self.text = text[max(0, len(text) + 1 - max(map(len, self.strings))) :]
        return token in self.tokens or any(string in text for string in self.strings)
