"""The text of an answer whose tokens come one by one, and the texts that end it.

A character may take several tokens. A token may end one character and begin the next. Vocabularies with byte fallback
(Llama 2, Gemma, Mistral) spell a rare character with one token a byte. Their decoders turn a whole run of such tokens
into U+FFFD until the run is valid, complete characters included. So this module joins bytes itself; the decoder gets
all other tokens.
"""

import codecs
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # character in place of bytes that are no character, or not yet
MAX_INCOMPLETE = 3  # characters U+FFFD of one incomplete character: UTF-8 has at most four bytes
CONTEXT_TOKENS = 8  # tokens decoded with the next one: spaces and characters depend on the tokens before


@dataclass(frozen=True)
class TextDecoder:
    """Token ids -> text.

    decode: function of token ids. A token changes at most MAX_INCOMPLETE
        characters U+FFFD at the end of the text before.
    byte_tokens: byte of each single-byte token from 128 on, in a vocabulary with byte fallback. They are not decoded.
    anchor: a token of that vocabulary whose text is one letter
    special: ids of the special tokens that the text does not show
    """

    decode: Callable[[list[int]], str]
    byte_tokens: Mapping[int, bytes] = field(default_factory=dict)
    anchor: int = -1
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> "TextDecoder":
        """The decoder of a tokenizer. special: True if the text shows special tokens"""

        def decode(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

        hidden = {} if special else find_special(tokenizer)
        ids = find_byte_tokens(tokenizer)
        sample = "\u00e9A".encode()
        if not ids.keys() >= set(sample) or decode([ids[byte] for byte in sample]) != sample.decode():
            return cls(decode, special=hidden)
        return cls(decode, {id: bytes([byte]) for byte, id in ids.items() if byte > 127}, ids[ord("A")], hidden)

    def text(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of `tokens`, equal to the joined pieces of a TextStream. before: tokens that the text continues"""
        if not before:
            text = self.decode(list(tokens))
            if not self.byte_tokens or REPLACEMENT not in text:
                return text
        stream = TextStream(self, before)
        return "".join([*map(stream.add, tokens), stream.end()])

    def is_silent(self, token: int) -> bool:
        """True for a token without text at any place, such as a special token that is not shown."""
        return not self.decode([token, token])


def find_special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """{name: id} of the special tokens"""
    added = tokenizer.added_tokens_decoder
    known = added.items() if isinstance(added, dict) else ()  # mistral-common's tokenizers have no such table
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)
    return {
        str(name): id for name, id in [*named, *((token.content, id) for id, token in known if token.special)] if name
    }


def find_byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """{byte: id of its token `<0xXX>`}; empty without byte fallback"""
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if find_token_id(tokenizer, names[ord("A")]) is None:
        return {}
    ids = {byte: find_token_id(tokenizer, name) for byte, name in names.items()}
    return {byte: id for byte, id in ids.items() if id is not None}


def find_token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    """The id of a token; None if the vocabulary lacks it, where some tokenizers answer with their unknown token"""
    id: Any = tokenizer.convert_tokens_to_ids(name)
    return id if id is not None and tokenizer.convert_ids_to_tokens(id) == name else None


class TextStream:
    """Turns the tokens of an answer into pieces of text. Each comes as soon as its characters are complete.

    before: tokens of a text that the answer continues
    """

    def __init__(self, decoder: TextDecoder, before: Sequence[int] = ()):
        self.decoder = decoder
        self.window: list[int] = []  # the last tokens but single bytes
        self.text = ""  # their text
        self.num_shown = 0  # characters of this text that were returned
        self.byte_run = codecs.getincrementaldecoder("utf-8")("replace")  # decoder of adjacent single-byte tokens
        context = itertools.islice(
            (token for token in reversed(before) if not decoder.is_silent(token)), CONTEXT_TOKENS
        )
        for token in reversed([*context]):
            self.add(token)

    def add(self, token: int) -> str:
        """The text that the next token completes; empty inside of a character"""
        decoder = self.decoder
        byte = decoder.byte_tokens.get(token)
        if byte is not None:
            if not self.window:  # the next token is not the text's first
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
        """U+FFFD for the bytes that no token completed"""
        remainder = self.byte_run.decode(b"", final=True) + self.text[self.num_shown :]
        self.num_shown = len(self.text)
        return remainder

    def _restart_window(self, window: list[int], waiting: int) -> None:
        """Begins the window later. Inside of a character, all of it was shown, as the tokens behind it prove.

        waiting: number of characters at the end of the window that were not shown
        """
        self.window = window
        self.text = self.decoder.decode(window)
        self.num_shown = len(self.text) - waiting


class StopStrings:
    """Texts that end an answer. Its last token completes a stop string, or is a special token that is a stop string.

    decoder: decoder of the answer's text
    continues: True if the answer's text continues that of `prompt`, the tokens before it
    Raises ValueError for an empty stop string, and for a special token beside other text.
    """

    def __init__(
        self, strings: Sequence[str], decoder: TextDecoder, *, continues: bool = False, prompt: Sequence[int] = ()
    ):
        if not all(strings):
            raise ValueError("A stop string must hold a character: every text holds the empty one.")
        for string, name in itertools.product(strings, decoder.special):
            if name in string and string not in decoder.special:
                raise ValueError(
                    f"The stop string {string!r} holds the special token {name}, which never shows in a text: "
                    "give the token alone, or the text without it."
                )
        self.strings = tuple(strings)
        self.decoder = decoder
        self.continues = continues
        self.tokens = {decoder.special[string] for string in strings if string in decoder.special}
        self.stream = TextStream(decoder, prompt if continues else ())
        self.text = ""  # end of the answer's text, long enough for the beginning of a stop string
        self.num_read = 0  # tokens of the answer read so far

    def begin(self, prompt: Sequence[int]) -> "StopStrings":
        """The same stop strings for one answer"""
        return StopStrings(self.strings, self.decoder, continues=self.continues, prompt=prompt)

    def end(self, written: Sequence[int], new: Sequence[int]) -> int | None:
        """The number of `new` tokens that belong to the answer; None if it goes on. written: its tokens before them"""
        for token in written[self.num_read :]:
            self._read(token)
        return next((num for num, token in enumerate(new, start=1) if self._read(token)), None)

    def _read(self, token: int) -> bool:
        """Reads the next token. Returns True if it ends the answer."""
        self.num_read += 1
        text = self.text + self.stream.add(token)
        self.text = text[max(0, len(text) + 1 - max(map(len, self.strings))) :]
        return token in self.tokens or any(string in text for string in self.strings)


class StoppedText:
    """Turns tokens into pieces of text, which together are the answer's text before the first stop string.

    stop_strings: texts that end the answer; text that may begin one of them is kept back
    """

    def __init__(self, stream: TextStream, stop_strings: Sequence[str] = ()):
        self.stream, self.stop_strings = stream, tuple(stop_strings)
        self.kept_back = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that the next token completes; it may be empty."""
        return self._release(self.stream.add(token))

    def end(self) -> str:
        """The text that was kept back."""
        text = self._release(self.stream.end()) + self.kept_back
        self.kept_back = ""
        return text

    def _release(self, new_text: str) -> str:
        if self.stopped:
            return ""
        text = self.kept_back + new_text
        starts = [text.find(string) for string in self.stop_strings if string in text]
        if starts:
            self.stopped, self.kept_back = True, ""
            return text[: min(starts)]
        keep = max((_overlap(text, string) for string in self.stop_strings), default=0)
        self.kept_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of the text with which the string begins."""
    return next((num for num in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:num])), 0)
