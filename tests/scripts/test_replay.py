"""Tests of scripts/replay.py on tiny checkpoints: figures, heads side by side, candidates, refusals."""

import itertools
import json

import pytest
import torch

from scripts import replay
from specdec import checkpoint, loading
from specdec.heads.dflash import BlockDrafter
from specdec.heads.medusa import Medusa2
from specdec.measuring.questions import read_answers
from specdec.measuring.replay import BATCH_TOKENS, batch_texts, encode_answers
from specdec.options.command_defaults import read_group
from specdec.options.target import TargetOptions
from specdec.target.model import load_tokenizer
from specdec.text import conversations
from specdec.unroll.replay import count_rounds
from tests.support.commands import write_rows
from tests.support.drafters import save_eagle
from tests.support.loops import acceptance
from tests.support.targets import save_target

pytestmark = [pytest.mark.full, pytest.mark.gpu]
ANSWERS = [(f"w{n} w3", f"w{n} w{4 * n} w{36 - 4 * n} w8 w4") for n in range(2, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, two heads, one that adapts the target, and answers that were written at temperature 1."""
    folder = tmp_path_factory.mktemp("replay")
    target = save_target(folder / "target")
    for seed, name in enumerate(("one", "two")):
        save_eagle(folder / name, target, seed=seed)
    lattice = {"_target_": "specdec.heads.dflash.BlockDrafter", "dependence": {"kind": "selector", "rank": 4, "top": 8}}
    torch.manual_seed(0)
    checkpoint.save(folder / "lattice", BlockDrafter(target, dependence=lattice["dependence"]).frozen_copy(), lattice)
    shape = {"num_heads": 2, "lora_rank": 2}
    adapting = Medusa2(target, **shape)
    checkpoint.save(folder / "adapting", adapting.frozen_copy(), {"_target_": "specdec.heads.medusa.Medusa2", **shape})
    rows = []
    for number, (question, answer) in enumerate(ANSWERS):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"id": str(number), "temperature": 1, "category": "a", "messages": messages})
    write_rows(folder / "answers.jsonl", rows)
    return folder


@pytest.fixture
def run(folder, run_script, tmp_path):
    """run(key=value ..) -> results.json"""

    def run(*arguments):
        answers = [f"answers={folder}/answers.jsonl", "hold_out=null", "decode.temperature=1", f"out={tmp_path}/replay"]
        run_script(replay, f"checkpoint={folder}/one", *answers, "target.dtype=float32", *arguments)
        return json.loads((tmp_path / "replay" / "results.json").read_text())

    return run


def test_heads_are_compared_on_the_same_answers(run, folder, tmp_path):
    """With figures that are computed here, answer by answer."""
    document = run(f"checkpoint={folder}/one,{folder}/two", "decode.depth=4")
    taus = []
    for name in ("one", "two"):
        loaded = loading.load_head(f"{folder}/{name}", read_group(TargetOptions, "target", dtype="float32"))
        emitted, num_rounds = 0, 0.0
        for line in (folder / "answers.jsonl").read_text().splitlines():
            encoded = conversations.encode(loaded.tokenizer, json.loads(line))
            start, stop = conversations.find_last_answer(encoded)
            prompt, answer = encoded.tokens[:start], encoded.tokens[start:stop]
            num_rounds += count_rounds(acceptance(loaded.drafter, prompt, answer, depth=4, temperature=1))[0]
            emitted += len(answer) - 1
        taus.append(emitted / num_rounds)
    first, second = document["results"]
    assert [first["method"], second["method"]] == [f"{folder.name}/{name}, chain of 4" for name in ("one", "two")]
    assert [first["replayed_tau"], second["replayed_tau"]] == pytest.approx(taus) and first["replayed_prompts"] == 4
    assert first["difference"] == [0, [0, 0]] and second["difference"][0] == pytest.approx(taus[1] - taus[0])
    assert first["replayed_tau"] == pytest.approx(1 + sum(first["replayed_survival"]))
    settings = document["settings"]
    assert settings["num_questions"] == 4 and len(settings["checkpoint"]) == 2
    assert "4 questions of" in document["protocol"] and "T=1" in document["protocol"]
    written = (tmp_path / "replay" / "results.md").read_text()
    assert f"| {second['method']} |" in written and f"tau minus that of {first['method']}" in written


@pytest.mark.parametrize(("depth", "steps"), [(3, 3), (1000, 4)])
def test_candidates_of_a_lattice_are_reported_to_its_last_step(run, folder, depth, steps):
    first, lattice = run(f"checkpoint={folder}/one,{folder}/lattice", f"decode.depth={depth}")["results"]
    assert "candidates" not in first and len(lattice["candidates"]["recall"]) == steps
    assert lattice["method"].endswith(f"chain of {steps}")


def test_answers_are_cut_and_need_two_tokens(folder):
    tokenizer = load_tokenizer(f"{folder}/target")
    question_set = read_answers(f"{folder}/answers.jsonl", arguments={}, temperature=1)
    _, texts = encode_answers(question_set, tokenizer, temperature=1, length=1000)
    shortest = min(len(text.prompt) for text in texts)
    _, texts = encode_answers(question_set, tokenizer, temperature=1, length=shortest + 2)
    assert {len(text.answer) for text in texts} == {2}
    with pytest.raises(ValueError, match="No answer has a second token"):
        encode_answers(question_set, tokenizer, temperature=1, length=shortest + 1)


def test_texts_are_read_in_batches_that_are_full_with_their_padding(small_target):
    lengths = [BATCH_TOKENS // 2, 5000, 100, BATCH_TOKENS // 2, 1500, *[10] * 500]
    batches = batch_texts(range(len(lengths)), lengths, small_target)
    assert batches[:2] == [[1], [0, 3]] and sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    sizes = [len(batch) * lengths[batch[0]] for batch in batches]  # the longest text comes first
    assert max(sizes[1:]) <= BATCH_TOKENS and sizes[0] == 5000


def test_what_cannot_be_replayed_is_refused(refuse, folder, tmp_path):
    refuse(r"adapts its target, which did not write these answers", f"checkpoint={folder}/adapting")
    refuse(r"no row at decode\.temperature=0", "decode.temperature=0")
    refuse(r"No answer has a second token within length=2", "length=2")
    refuse(r"Only 0 rows were written at temperature 0: lower hold_out=60", "hold_out=60")
    write_rows(tmp_path / "wrong.jsonl", [{"id": "r7", "messages": [{"role": "user", "content": "a"}]}])
    refuse(r"wrong\.jsonl: Row r7 has no assistant turn", f"answers={tmp_path}/wrong.jsonl")
