"""The text of tokens that come one by one: its pieces are the whole text, for every kind of vocabulary."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
from tokenizers import decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.core.answer_text import CONTEXT_TOKENS, StopStrings, TextDecoder, TextStream
from tests.support.targets import byte_fallback_tokenizer, small_tokenizer

SIGNS = ["the", " sky", "  ", "\n", "é", "ß", "日本", "語", "😀", "👩‍🚀", "A", "\ufffd", "x", " ", "is blue", "天气"]


def make_tokenizer(kind: str):
    if kind == "bytes":
        return small_tokenizer()
    tokenizer = byte_fallback_tokenizer(opening=kind != "spelled, no opening")
    if kind == "metaspace":
        tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


TOKENIZERS = {kind: make_tokenizer(kind) for kind in ("bytes", "spelled", "spelled, no opening", "metaspace")}
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


def tokenise(kind: str, text: str) -> list[int]:
    return TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"]


BYTES_OF_SIGNS = {sign: byte for byte, sign in bytes_to_unicode().items()}


@functools.cache
def list_entries(kind: str) -> list[str]:
    """The entries of the vocabulary by token, those of special tokens empty."""
    tokenizer = TOKENIZERS[kind]
    special, names = set(tokenizer.all_special_ids), tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return ["" if token in special else name for token, name in enumerate(names)]


def reference(kind: str, tokens: list[int]) -> str:
    """The text of the tokens, from the bytes of their entries in the vocabulary."""
    entries, written = list_entries(kind), b""
    names = [entries[token] for token in tokens if entries[token]]
    for name in names:
        if kind == "bytes":
            written += bytes(BYTES_OF_SIGNS[sign] for sign in name)
        elif name.startswith("<0x"):
            written += bytes([int(name[3:5], 16)])
        else:
            written += name.replace("\u2581", " ").encode()
    dropped = {"spelled": ("\u2581", "<0x20>"), "metaspace": ("\u2581",)}.get(kind, ())  # at a text's beginning
    return written.decode("utf-8", errors="replace")[any(name.startswith(dropped) for name in names[:1]) :]


def join_pieces(decoder: TextDecoder, tokens: list[int], before=()) -> str:
    stream = TextStream(decoder, before)
    return "".join([*map(stream.add, tokens), stream.end()])


@every_kind
def test_pieces_hold_whole_characters(kind):
    decoder = TextDecoder.from_tokenizer(TOKENIZERS[kind])
    for text in ["", "天气晴朗", "The sky is blue.", "é, 日本語 and 😀 in one", "a\n\n b  c", "x" * 30, "é the"]:
        tokens, stream = tokenise(kind, text), TextStream(decoder)
        assert not any("\ufffd" in stream.add(token) for token in tokens)
        assert join_pieces(decoder, tokens) == text == decoder.text(tokens) == TOKENIZERS[kind].decode(tokens)


@every_kind
def test_pieces_of_texts_cut_anywhere_are_their_bytes(kind):
    """With special and random tokens in between, from the middle of a character to the middle of another."""
    draw, tokenizer, decoder = random.Random(0), TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    broken = [token for token in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([token])]
    for number in range(90):
        tokens = tokenise(kind, "".join(draw.choices(SIGNS, k=30)))
        if number >= 30:  # random tokens, of which many are no characters
            choices = (broken, [*broken, *range(40)], range(len(tokenizer)))[number % 3]
            tokens = draw.choices(choices, k=(5, 10, 200)[number // 3 % 3])
        for _ in range(number % 3):
            tokens.insert(draw.randrange(len(tokens)), draw.choice(tokenizer.all_special_ids))
        for _ in range(number % 4):
            tokens.insert(draw.randrange(len(tokens)), draw.randrange(len(tokenizer)))
        tokens = tokens[draw.randrange(3) : len(tokens) - draw.randrange(3)]
        stream, shown = TextStream(decoder), ""
        for num, token in enumerate(tokens, start=1):
            shown += stream.add(token)
            text = reference(kind, tokens[:num])
            assert text.startswith(shown) and text[len(shown) :].strip("\ufffd") == "" and len(text) <= len(shown) + 3
        assert shown + stream.end() == reference(kind, tokens) == decoder.text(tokens)


@every_kind
def test_a_token_costs_as_much_in_a_long_text(kind):
    """Also if all tokens are inside characters, if no bytes make a character, and for special tokens alone."""
    tokenizer, sizes = TOKENIZERS[kind], []
    decoder = TextDecoder.from_tokenizer(tokenizer)
    measured = replace(decoder, decode=lambda tokens: (sizes.append(len(tokens)), decoder.decode(tokens))[1])
    text = "天气晴朗" * 500
    tokens = tokenise(kind, text)
    assert len(tokens) >= 3 * len(text) and join_pieces(measured, tokens) == text
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    (never,) = (token for token, name in enumerate(names) if name in ("\u00ff", "<0xFF>"))
    assert join_pieces(measured, [never] * 500) == "\ufffd" * 500
    assert join_pieces(measured, [tokenizer.eos_token_id] * 500) == ""
    assert max(sizes, default=0) <= 1 + 2 * CONTEXT_TOKENS


def test_characters_that_no_token_begins_come_out_at_once():
    """Each token ends a character and begins the next, hundreds of times."""
    content = ("天气晴朗😀" * 100).encode()
    cuts = [0, *range(2, len(content), 3), len(content)]
    entries = [content[start:end] for start, end in itertools.pairwise(cuts)]
    stream = TextStream(TextDecoder(lambda tokens: b"".join(map(entries.__getitem__, tokens)).decode(errors="replace")))
    shown = ""
    for token, end in enumerate(cuts[1:]):
        shown += stream.add(token)
        assert shown == content[:end].decode(errors="ignore") and len(stream.window) <= 2 * CONTEXT_TOKENS
    assert shown + stream.end() == content.decode()


@every_kind
def test_the_text_goes_on_from_its_prompt(kind):
    """From any cut, also behind special tokens and inside a character; shown special tokens are text."""
    tokenizer, decoder = TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    tokens = tokenise(kind, "the sky 天气 is é blue")
    marks = [tokenizer.eos_token_id] * 30
    for cut in range(1, len(tokens)):
        before, after = tokens[:cut] + marks, tokens[cut:]
        text = reference(kind, tokens[:cut]).rstrip("\ufffd")
        assert text + join_pieces(decoder, after, before) == reference(kind, tokens)
        assert decoder.text(after, before) == join_pieces(decoder, after, before)
    shown = TextDecoder.from_tokenizer(tokenizer, special=True)
    tokens = [*tokenise(kind, "é"), tokenizer.eos_token_id]
    assert join_pieces(shown, tokens) == "é<|im_end|>" == shown.text(tokens)


# Texts that end an answer


@every_kind
def test_stop_strings_end_at_the_token_that_completes_them(kind):
    decoder, tokens = TextDecoder.from_tokenizer(TOKENIZERS[kind]), tokenise(kind, "the 天气晴朗 😀é sky")
    for stop in ("气", "晴朗", "😀", "é", " 😀é s", "the", "天气晴朗 😀"):
        expected = next(n for n in range(1, 1 + len(tokens)) if stop in reference(kind, tokens[:n]))
        for size in (1, 2, 5, len(tokens)):
            strings, written = StopStrings(("never", stop), decoder).begin([]), 0
            while (end := strings.end(tokens[:written], tokens[written : written + size])) is None:
                written += size
            assert written + end == expected


def test_a_stop_string_begins_in_the_answer_not_in_its_prompt():
    decoder = TextDecoder.from_tokenizer(TOKENIZERS["spelled"])
    prompt, the = tokenise("spelled", "the sky"), TOKENIZERS["spelled"].convert_tokens_to_ids("\u2581the")
    for stop, continued, alone in ((" the", 1, None), ("sky the", None, None), ("the", 1, 1)):
        for continues, expected in ((True, continued), (False, alone)):
            assert StopStrings((stop,), decoder, continues=continues).begin(prompt).end([], [the]) == expected


@every_kind
def test_a_special_token_ends_the_answer_though_it_is_no_text(kind):
    tokenizer, decoder = TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokens = tokenise(kind, "a é <|im")
    answer = [*tokens, end, start, start]
    assert StopStrings(["<|im_start|>", "x"], decoder).begin([]).end([], answer) == len(tokens) + 2
    assert StopStrings(["<|im_"], decoder).begin([]).end([], [start, end, *tokens]) is None
    spelled = tokenizer.convert_tokens_to_ids([*"x<|im_end|>x"])  # as no model writes it
    assert StopStrings(["<|im_end|>"], decoder).end([], spelled) == 11
    for wrong in ("<|im_end|>\n", "a<|im_start|>", "<|im_end|><|im_end|>"):
        with pytest.raises(ValueError, match=r"holds the special token <\|im_(end|start)\|>, which never shows"):
            StopStrings(["a", wrong], decoder)
    shown = TextDecoder.from_tokenizer(tokenizer, special=True)
    assert StopStrings(["<|im_end|>\n"], shown).end([], [end]) is None
