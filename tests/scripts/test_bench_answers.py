"""Tests of scripts/bench_answers.py: three ways, the same number of tokens, ratios of neighbours."""

import json

import pytest

from scripts import bench_answers
from tests.small_server import Model, SmallServer
from tests.support import save_target, write_prompts

CLIENT = """#!/bin/sh
while [ "$1" != --result-dir ]; do
  [ "$1" = --max-concurrency ] && echo "$2" >> "$0.calls"
  shift
done
echo '{"output_throughput": 20.0}' > "$2/result.json"
"""


@pytest.fixture
def run(run_script, tmp_path):
    save_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", 6)

    def run(*arguments):
        with SmallServer(Model()) as server:
            run.server = server
            given = {"engine": server.url, "prompts": f"{tmp_path}/prompts.jsonl", "target.name": f"{tmp_path}/target", "limit": 4,
                     "target.dtype": "float32", "target.device": "cpu", "max_new_tokens": 5, "in_flight": 3, "repeats": 2,
                     "client": "null", "out": f"{tmp_path}/out.json"} | dict(each.split("=", 1) for each in arguments)  # fmt: skip
            printed = run_script(bench_answers, *(f"{key}={value}" for key, value in given.items()))
        return printed, json.loads((tmp_path / "out.json").read_text())

    return run


def test_three_ways_write_the_same_number_of_tokens(run, tmp_path):
    client = tmp_path / "client"
    client.write_text(CLIENT)
    client.chmod(0o755)
    printed, figures = run(f"client={client}")
    rates = figures["tokens_per_second"]
    assert list(rates) == ["answer.py engine=URL", "answer.py, own decoder", "vllm bench serve"]
    assert all(len(each) == 2 and min(each) > 0 for each in rates.values()) and rates["vllm bench serve"] == [20, 20]
    assert figures["ratio"]["vllm bench serve"] == pytest.approx(sum(rates["answer.py engine=URL"]) / 2 / 20)
    bodies = [body for path, body in run.server.requests if path == "v1/completions" and body["max_tokens"] > 1]
    assert len(bodies) == 3 * 4 and all(body["stop_token_ids"] == [] and body["ignore_eos"] for body in bodies)
    assert (tmp_path / "client.calls").read_text().split() == ["3", "3"] and "vllm bench serve" in printed


def test_ways_can_be_left_out(run):
    _, figures = run("own=false")
    assert list(figures["ratio"].items()) == [("answer.py engine=URL", 1.0)]


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        ("engine=http://a,http://b", "must be the URL of one server"),
        ("engine=vllm", "must be the URL of one server"),
        ("repeats=0", "must be a whole number of 1 or more"),
        ("client=nowhere", "client=nowhere does not exist"),
        ("client=/bin/false", "benchmark client ended with an error"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, argument, what):
    with pytest.raises(ValueError, match=what):
        run(argument, "own=false")
