"""Tests of the text of tokens that come one by one: together the pieces are the text, of every kind of vocabulary, cut anywhere."""

import itertools
import random
from dataclasses import replace

import pytest
from tokenizers import decoders

from specdec.core.answer_text import CONTEXT_TOKENS, StopStrings, TextDecoder, TextStream
from tests.support import byte_fallback_tokenizer, small_tokenizer

SIGNS = ["the", " sky", "  ", "\n", "é", "ß", "日本", "語", "😀", "👩‍🚀", "A", "\ufffd", "x", " ", "is blue", "天气"]
KINDS = ["bytes", "spelled", "spelled, no opening", "metaspace"]


def make_tokenizer(kind: str):
    if kind == "bytes":
        return small_tokenizer()
    tokenizer = byte_fallback_tokenizer(opening=kind != "spelled, no opening")
    if kind == "metaspace":
        tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}
SPECIAL = {kind: tokenizer.all_special_ids for kind, tokenizer in TOKENIZERS.items()}


def byte_of_signs() -> dict[str, int]:
    """The characters that stand for bytes in the vocabularies of GPT-2: printable ones for themselves, then those from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def reference(kind: str, tokens: list[int]) -> str:
    """The text of the tokens, from the bytes of their entries in the vocabulary; special ones have none."""
    tokenizer, signs, written = TOKENIZERS[kind], byte_of_signs(), b""
    names = tokenizer.convert_ids_to_tokens([token for token in tokens if token not in SPECIAL[kind]])
    for name in names:
        if kind == "bytes":
            written += bytes(signs[sign] for sign in name)
        elif name.startswith("<0x"):
            written += bytes([int(name[3:5], 16)])
        else:
            written += name.replace("\u2581", " ").encode()
    dropped = {"spelled": ("\u2581", "<0x20>"), "metaspace": ("\u2581",)}.get(kind, ())  # at a text's beginning
    return written.decode("utf-8", errors="replace")[any(name.startswith(dropped) for name in names[:1]) :]


def pieces(decoder: TextDecoder, tokens: list[int], before=()) -> list[str]:
    stream = TextStream(decoder, before)
    return [*map(stream.add, tokens), stream.end()]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_text_and_hold_whole_characters(kind):
    tokenizer, decoder = TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    for text in ["", "天气晴朗", "The sky is blue.", "é, 日本語 and 😀 in one", "a\n\n b  c", "x" * 30, "é the"]:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        parts = pieces(decoder, tokens)
        assert "".join(parts) == text == decoder.text(tokens) == tokenizer.decode(tokens)
        assert not any("\ufffd" in piece for piece in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_texts_cut_anywhere_are_their_bytes(kind):
    """With special tokens in between, from the middle of a character to the middle of another, and random tokens among them."""
    draw, tokenizer, decoder = random.Random(0), TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    for round in range(30):
        tokens = tokenizer("".join(draw.choices(SIGNS, k=30)), add_special_tokens=False)["input_ids"]
        for _ in range(round % 3):
            tokens.insert(draw.randrange(len(tokens)), draw.choice(tokenizer.all_special_ids))
        for _ in range(round % 4):
            tokens.insert(draw.randrange(len(tokens)), draw.randrange(len(tokenizer)))
        tokens = tokens[draw.randrange(3) : len(tokens) - draw.randrange(3)]
        stream, shown = TextStream(decoder), ""
        for num, token in enumerate(tokens, start=1):
            shown += stream.add(token)
            full_text = reference(kind, tokens[:num])
            assert (
                full_text.startswith(shown)
                and full_text[len(shown) :].strip("\ufffd") == ""
                and len(full_text) <= len(shown) + 3
            )
        assert shown + stream.end() == reference(kind, tokens) == decoder.text(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_random_tokens_are_their_bytes(kind):
    draw, tokenizer, decoder = random.Random(0), TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    parts = [token for token in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([token])]
    for choices in (parts, [*parts, *range(40)], range(len(tokenizer))):
        for num in (1, 5, 200) * 20:
            tokens = draw.choices(choices, k=num)
            assert "".join(pieces(decoder, tokens)) == reference(kind, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_as_much_in_a_long_text(kind):
    """Also one whose tokens are all in the middle of characters, one of nothing that is a character, and special tokens alone."""
    tokenizer, sizes = TOKENIZERS[kind], []
    decoder = TextDecoder.from_tokenizer(tokenizer)
    measured_decoder = replace(decoder, decode=lambda tokens: (sizes.append(len(tokens)), decoder.decode(tokens))[1])
    text = "天气晴朗" * 500
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) >= 3 * len(text) and "".join(pieces(measured_decoder, tokens)) == text
    (never,) = {
        token for token in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(token) in ("\u00ff", "<0xFF>")
    }
    assert "".join(pieces(measured_decoder, [never] * 500)) == "\ufffd" * 500
    assert "".join(pieces(measured_decoder, [tokenizer.eos_token_id] * 500)) == ""
    assert max(sizes, default=0) <= 1 + 2 * CONTEXT_TOKENS


def test_characters_that_no_token_begins_come_out_at_once():
    """Each token ends a character and begins the next, hundreds of times."""
    content = ("天气晴朗😀" * 100).encode()
    cuts = [0, *range(2, len(content), 3), len(content)]
    entries = [content[start:end] for start, end in itertools.pairwise(cuts)]
    decode = lambda tokens: b"".join(entries[token] for token in tokens).decode("utf-8", errors="replace")
    stream, shown = TextStream(TextDecoder(decode)), ""
    for token, end in enumerate(cuts[1:]):
        shown += stream.add(token)
        assert shown == content[:end].decode("utf-8", errors="ignore") and len(stream.window) <= 2 * CONTEXT_TOKENS
    assert shown + stream.end() == content.decode()


def test_a_space_is_kept_behind_bytes_and_special_tokens():
    tokenizer = TOKENIZERS["spelled"]
    decoder, the = TextDecoder.from_tokenizer(tokenizer), tokenizer.convert_tokens_to_ids("\u2581the")
    day = tokenizer.convert_tokens_to_ids(["<0xE5>", "<0xA4>", "<0xA9>"])
    space, end = tokenizer.convert_tokens_to_ids("\u2581"), tokenizer.eos_token_id
    for tokens, text in [
        ([the, *day, the], "the天 the"),
        ([*day, the], "天 the"),
        ([*day[:2], the], "\ufffd the"),
        ([day[0], the, *day], "\ufffd the天"),
        ([end, the, end, the], "the the"),
        ([space, the, space, space], " the  "),
        ([day[0], end, *day[1:], the], "天 the"),
    ]:
        assert "".join(pieces(decoder, tokens)) == decoder.text(tokens) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_goes_on_from_its_prompt(kind):
    """Wherever the tokens are cut, also where the prompt ends with special tokens, and where it ends inside a character."""
    tokenizer, decoder = TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    tokens = tokenizer("the sky 天气 is é blue", add_special_tokens=False)["input_ids"]
    marks = [tokenizer.eos_token_id] * 30
    for cut in range(1, len(tokens)):
        before, after = tokens[:cut] + marks, tokens[cut:]
        full_text = reference(kind, tokens[:cut]).rstrip("\ufffd")
        assert full_text + "".join(pieces(decoder, after, before)) == reference(kind, tokens)
        assert decoder.text(after, before) == "".join(pieces(decoder, after, before))


def test_special_tokens_show_where_they_should():
    for tokenizer in TOKENIZERS.values():
        tokens = [*tokenizer("é", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        decoder = TextDecoder.from_tokenizer(tokenizer, special=True)
        assert "".join(pieces(decoder, tokens)) == "é<|im_end|>" == decoder.text(tokens)


# Texts that end an answer


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_end_at_the_token_that_completes_them(kind):
    tokenizer, decoder = TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    text = "the 天气晴朗 😀é sky"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for stop in ("气", "晴朗", "😀", "é", " 😀é s", "the", "天气晴朗 😀"):
        expected = next(n for n in range(1, 1 + len(tokens)) if stop in reference(kind, tokens[:n]))
        for size in (1, 2, 5, len(tokens)):
            strings, written = StopStrings(("never", stop), decoder).begin([]), 0
            while (end := strings.end(tokens[:written], tokens[written : written + size])) is None:
                written += size
            assert written + end == expected


def test_a_stop_string_begins_in_the_answer_not_in_its_prompt():
    tokenizer = TOKENIZERS["spelled"]
    prompt, the = (
        tokenizer("the sky", add_special_tokens=False)["input_ids"],
        tokenizer.convert_tokens_to_ids("\u2581the"),
    )
    for stop, continued, alone in ((" the", 1, None), ("sky the", None, None), ("the", 1, 1)):
        for continues, expected in ((True, continued), (False, alone)):
            strings = StopStrings((stop,), TextDecoder.from_tokenizer(tokenizer), continues=continues)
            assert strings.begin(prompt).end([], [the]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_ends_the_answer_though_it_is_no_text(kind):
    tokenizer, decoder = TOKENIZERS[kind], TextDecoder.from_tokenizer(TOKENIZERS[kind])
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokens = tokenizer("a é <|im", add_special_tokens=False)["input_ids"]
    for stop, answer in ((["<|im_start|>", "x"], [*tokens, end, start, start]), (["<|im_"], [start, end, *tokens])):
        strings = StopStrings(stop, decoder)
        expected = answer.index(start) + 1 if "x" in stop else None
        assert strings.begin([]).end([], answer) == expected
    spelled = tokenizer.convert_tokens_to_ids([*"x<|im_end|>x"])  # as no model writes it, but found nevertheless
    assert StopStrings(["<|im_end|>"], decoder).end([], spelled) == 11
    for wrong in ("<|im_end|>\n", "a<|im_start|>", "<|im_end|><|im_end|>"):
        with pytest.raises(ValueError, match=r"holds the special token <\|im_(end|start)\|>, which never shows"):
            StopStrings(["a", wrong], decoder)
    assert (
        StopStrings(["<|im_end|>\n"], TextDecoder.from_tokenizer(tokenizer, special=True)).end([], [end]) is None
    )  # it shows there
