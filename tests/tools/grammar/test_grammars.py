"""Tests of generate where the answer follows a grammar."""

import json

import pytest

from scripts import generate
from tests.support.drafters import save_eagle
from tests.support.targets import byte_fallback_tokenizer, save_target

pytestmark = pytest.mark.full
NUMBERS = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}, "numbers": NUMBERS}}
SCHEMA |= {"required": ["sky", "numbers"], "additionalProperties": False}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("grammars")
    save_eagle(folder / "head", save_target(folder / "target"))
    return f"checkpoint={folder / 'head'}"


def test_generate_says_whether_the_grammar_is_complete(run_script, refuse, head):
    common = [head, "prompt=Say it", f"decode.grammar=json:{json.dumps(SCHEMA)}"]
    out = run_script(generate, *common, "max_new_tokens=80")
    assert (
        '"sky": ' in out
        and "complete under the grammar" in out
        and "Both answers are the same" in out.replace("\n", " ")
    )
    refuse("regex cannot be used", generate, head, "prompt=a", "decode.grammar=regex:(a")
    assert "raise max_new_tokens=" in run_script(generate, *common, "max_new_tokens=4").replace("\n", " ")


def test_generate_writes_characters_of_many_tokens_whole(run_script, tmp_path):
    pytest.importorskip("llguidance")
    save_target(tmp_path / "target", tokenizer=byte_fallback_tokenizer())
    text = "春眠不觉晓, é 处处!"
    common = [f"target.name={tmp_path / 'target'}", "proposer=ngram", "prompt=Say", f"decode.grammar=regex:{text}"]
    assert f"\n{text}\n" in "\n" + run_script(generate, *common, "compare=false", "max_new_tokens=60")
    assert "春\ufffd\n" in run_script(generate, *common, "compare=false", "max_new_tokens=5")  # cut inside a character
