"""Tests of specdec/measuring/privacy.py: what is published has no keys, addresses and folders."""

import pytest

from specdec.measuring.privacy import hide_places, hide_private


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--api-key  sk-X --port 1", "--api-key .. --port 1"),
        ("--api-key \\\n  sk-X --port 1", "--api-key .. --port 1"),
        ("--api-key k1 k2 --port 1", "--api-key .. .. --port 1"),
        ("--api-key=abc -t ab/c", "--api-key=.. -t ab/c"),
        ("-H Authorization: Bearer X --port 1", "-H Authorization:.. .. .. --port 1"),
        ("HF_TOKEN=hf_X OMP_NUM_THREADS=2 vllm serve", "HF_TOKEN=.. OMP_NUM_THREADS=2 vllm serve"),
        ("--host 10.1.2.3 --num-speculative-tokens 3", "--host .. --num-speculative-tokens 3"),
        ("-x http://user:pw@internal/a file:///home/alice/x", "-x http://.. file://.."),
        ("--proxy=user:pw@internal:80 api_key=X", "--proxy=.. api_key=.."),
        ("~alice/m ~alice /home/alice --d=/home/alice/m/", "m .. .. --d=m"),
        ("-v /home/alice/x:/data target.name=targets/small a/b/c", "-v x:data target.name=targets/small c"),
        ("--top-p .5 --model Qwen/Qwen3-8B@main -n -1", "--top-p .5 --model Qwen/Qwen3-8B@main -n -1"),
    ],
)
def test_a_command_line_loses_keys_addresses_and_folders(flags, words):
    assert hide_private(flags) == words.split()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--header 'Authorization: Bearer X'", ".."),
        ("-e 'Authorization: Bearer X'", "Authorization:.."),
        ('-c \'{"model": "~/heads/a", "n": 3, "api_key": "X"}\'', '{"model": "a", "n": 3, "api_key": ".."}'),
        ("-c '{n: 3, api_key: X}'", "{n: 3, api_key:.."),
        ("serve '--api-key sk-X'", "--api-key .."),
        ("-m '/home/alice smith/models/x'", "x"),
        ("-c 'vllm serve /home/alice/m --api-key X'", "vllm serve m --api-key .."),
    ],
)
def test_quoted_values_lose_them_too(flags, word):
    assert hide_private(flags)[1] == word


def test_an_error_does_not_quote_the_command_line():
    with pytest.raises(ValueError, match=r"^flags= is no command line \(No closing quotation\): quote it"):
        hide_private("'--api-key sk-X")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("http://u:p@h:80/v1/completions refuses", "the server/completions refuses"),
        ("http://h:80: it ended, http://h:8001/v1.", "the server: it ended, the control."),
        ("http://h:8002 answers. Give http://localhost:8000.", "http://.. answers. Give http://..."),
        ("(NO_PROXY=internal asks it directly)", "(NO_PROXY=.. asks it directly)"),
        ("No '/home/alice smith/x.json' in (/home/alice), ~bob/y: z", "No 'x.json' in (..), y: z"),
        ("20 tokens/s, 1/2 of org/name and / more", "20 tokens/s, 1/2 of org/name and / more"),
    ],
)
def test_a_sentence_names_servers_and_files_without_their_places(text, hidden):
    assert hide_places(text, {"http://u:p@h:80/v1/": "the server", "http://h:8001": "the control"}) == hidden
