"""Public suites from files of their published form: prompts, turns, categories, protocols, and what is refused."""

import copy
import gzip
import json

import datasets
import pytest
import yaml
from pyarrow import Table, parquet

from scripts import answer
from specdec.measuring import questions
from specdec.text import chat_template, reading
from specdec.tools.suites import suites
from specdec.tools.suites.suites import encode_turn, load_suite, read_protocol
from tests.support import ROOT, small_tokenizer, write_prompts, write_rows
from train.data.encoding import Encoding, load_rows

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TURNS = ["Count to 3.", "And back?"]
FILLED = {name: f"{name} of Hello" for name in ("question", "prompt", "problem", "instruction", "question_content")}
SUITES = sorted(path.stem for path in (suites.CONF / "suite").glob("*.yaml"))
PROTOCOLS = sorted(path.stem for path in (suites.CONF / "protocol").glob("*.yaml"))
TERMS = "License: other\nlicense_name: nvidia-evaluation-dataset-license\n"
HOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSummarise {article}"


def texts(suite) -> list[list[str]]:
    return [[turn["messages"][-1]["content"] for turn in question.turns] for question in suite.questions]


def text_of(prompt) -> str:
    return small_tokenizer().decode(prompt.tokens)


def written(folder, name: str, rows: list[dict]) -> str:
    """Rows in a published file of a folder -> the folder"""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        parquet.write_table(Table.from_pylist(rows), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    else:
        write_rows(path, rows)
    return str(folder)


def benches(num: int = 2) -> list[dict]:
    """Rows as Spec-Bench and MT-Bench have them."""
    return [{"question_id": 81 + n, "category": "writing", "turns": TURNS, "reference": []} for n in range(num)]


def speeds(turns: list) -> dict:
    return {
        "question_id": "c_1",
        "category": "coding",
        "sub_category": "x",
        "turns": turns,
        "multiturn": len(turns) > 1,
    }


# The five suites


def test_spec_bench_keeps_turns_and_the_published_tasks(tmp_path):
    translation = {"question_id": 161, "category": "translation", "turns": ["Translate German to English: Ja."]}
    folder = written(tmp_path, "data/spec_bench/question.jsonl", [*benches(), translation])
    suite = load_suite("spec_bench", folder)
    assert texts(suite) == [TURNS, TURNS, translation["turns"]]
    assert [(each.id, each.category, each.tags) for each in suite.questions[1:]] == [
        ("82", "mt_bench", ("writing",)), ("161", "translation", ()),
    ]  # fmt: skip
    assert suite.note == "3 of 480 published questions of suite=spec_bench" and "Apache-2.0" in suite.licence
    assert [len(load_suite("spec_bench", folder, subset=part).questions) for part in ("mt_bench", "writing")] == [2, 2]
    assert suite.max_new_tokens == 1024


def test_mt_bench_has_two_forms(tmp_path):
    published = load_suite("mt_bench", written(tmp_path / "a", "question.jsonl", benches()))
    hub = [{"prompt": TURNS, "prompt_id": 81 + n, "category": "writing", "reference": []} for n in range(2)]
    copied = load_suite("mt_bench", written(tmp_path / "b", "data/train-00000-of-00001.parquet", hub))
    assert texts(published) == texts(copied) == [TURNS, TURNS]
    assert [each.id for each in copied.questions] == ["81", "82"] and copied.questions[0].category == "writing"


def test_gsm8k_has_the_template_that_publications_share_and_specforge_its_examples(tmp_path):
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(7)]
    folder = written(tmp_path, "test.jsonl", rows)
    assert texts(load_suite("gsm8k", folder))[6] == [f"What is 6?{BOXED}"]
    protocol = read_protocol("specforge")
    suite = load_suite("gsm8k", folder, protocol=protocol)
    examples = "".join(f"Question: What is {n}?\nAnswer: It is {n}.\n#### {n}\n\n" for n in range(5))
    prompt = encode_turn(suite.questions[6], 0, [], small_tokenizer(), protocol=protocol)
    assert text_of(prompt) == f"{examples}Question: What is 6?\nAnswer:"  # without a chat template
    assert protocol.max_new_tokens["gsm8k"] == 512 and "own copy of the template" in suite.note


def test_humaneval_is_read_compressed(tmp_path):
    code = 'def f():\n    """ {brace} """\n'
    folder = written(tmp_path, "HumanEval.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": code, "test": "x"}])
    asked = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    suite = load_suite("humaneval", folder)
    assert texts(suite) == [[f"{asked}{code}\n```"]] and suite.questions[0].id == "HumanEval/0"
    assert texts(load_suite("humaneval", folder, protocol=read_protocol("specforge"))) == [[code]]


def test_speed_bench_has_subsets_in_both_prepared_forms(tmp_path):
    written(tmp_path, "speed/qualitative/test.parquet", [speeds(TURNS)])
    messages = [{"role": "user", "content": turn} for turn in TURNS]
    written(tmp_path, "throughput_1k.jsonl", [speeds([]) | {"turns": None, "messages": messages}])
    one, two = (load_suite("speed_bench", str(tmp_path), subset=part) for part in (None, "throughput_1k"))
    assert texts(one) == texts(two) == [TURNS] and one.questions[0].category == "coding"
    assert "of 880" in one.note and "of 1536 published questions of suite=speed_bench subset=throughput_1k" in two.note
    for place in (tmp_path / "throughput_1k.jsonl", tmp_path / "speed" / "qualitative"):
        assert texts(load_suite("speed_bench", str(place))) == [TURNS]
    with pytest.raises(ValueError, match=r"subset=throughput_8k: it has 0 questions of 1536"):
        load_suite("speed_bench", str(tmp_path), subset="throughput_8k")
    write_rows(tmp_path / "qualitative.jsonl", [speeds([HOLDER])])
    with pytest.raises(ValueError, match=r"qualitative\.jsonl:1: the prompt is a placeholder.*prepare_data\.py"):
        load_suite("speed_bench", str(tmp_path))


# All entries


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_reads_a_folder_of_its_published_form(name, tmp_path):
    entry = yaml.safe_load((suites.CONF / "suite" / f"{name}.yaml").read_text())
    part = entry.get("subset") or next(iter(entry.get("subsets", {"": 0})))
    pattern = entry["file"] if isinstance(entry["file"], str) else entry["file"][0]
    file = pattern.replace("{subset}", part).replace("**/", "data/").replace("*", "-1")
    field = entry["prompt"] if isinstance(entry["prompt"], str) else entry["prompt"][0]
    template = entry.get("template", "{prompt}")
    fields = set(suites.FIELD.findall("".join(template))) - {"starter_code", "input"}
    row = {key: f"{key} of Hello" for key in fields} | {field: TURNS if field == "turns" else f"{field} of Hello"}
    suite = load_suite(name, written(tmp_path, file, [row | {"task_id": 11}]))
    assert len(suite.questions) == 1 and suite.questions[0].turns[0]["original"] in texts(suite)[0][0]
    assert suite.note and suite.licence and suite.source == str(tmp_path)
    assert encode_turn(suite.questions[0], 0, [], small_tokenizer()).tokens


def test_a_subset_is_a_category_where_all_are_read(tmp_path):
    written(tmp_path, "aime25.jsonl", [{"turns": ["Count."]}])
    folder = written(tmp_path, "mt-bench.jsonl", [{"turns": TURNS}] * 2)
    suite = load_suite("deepspec", folder)
    assert [(question.id, question.category) for question in suite.questions] == [
        ("aime25/0", "aime25"), ("mt-bench/0", "mt-bench"), ("mt-bench/1", "mt-bench"),
    ]  # fmt: skip
    assert texts(load_suite("deepspec", folder, subset="mt-bench")) == texts(
        load_suite("deepspec", f"{folder}/mt-bench.jsonl")
    )
    one = load_suite("deepspec", folder, subset="mt-bench").questions
    assert one == suite.questions[1:] == load_suite("deepspec", f"{folder}/mt-bench.jsonl").questions
    for part in ("gsm8k", "my_gsm8k"):
        written(tmp_path, f"{part}/question.jsonl", [{"turns": TURNS, "question_id": 5}] * 2)
    assert [each.id for each in load_suite("eagle", f"{folder}/gsm8k").questions] == ["gsm8k/5", "gsm8k/5 (2)"]
    with pytest.raises(ValueError, match="has no questions of suite=eagle"):
        load_suite("eagle", f"{folder}/my_gsm8k")
    written(tmp_path, "mine.jsonl", [{"turns": TURNS}])
    with pytest.raises(ValueError, match=r"Which part of suite=deepspec is .*mine\.jsonl\? Give subset="):
        load_suite("deepspec", f"{folder}/mine.jsonl")


def test_templates_choose_by_the_fields_that_a_row_has(tmp_path):
    rows = [{"instruction": "Say", "input": "Hello"}, {"instruction": "Count", "input": ""}]
    suite = load_suite("alpaca", written(tmp_path, "alpaca_data.json", rows))
    assert texts(suite) == [["Say\n\nInput:\nHello"], ["Count"]]
    task = {"task_id": 11, "prompt": "Count.", "test_list": ["assert a", "assert b"]}
    folder = written(tmp_path, "sanitized-mbpp.json", [task, task | {"task_id": 600}])  # 600 is not of the test split
    (text,) = texts(load_suite("mbpp", folder, protocol=read_protocol("specforge")))[0]
    assert text.endswith(
        "here is your task: Count. Your code should pass these tests:\n\nassert a\nassert b\n\n[BEGIN]\n"
    )


def test_only_fields_that_a_prompt_is_made_of_are_held(tmp_path):
    row = {"question": "What is 1?", "answer": "1", "title": "long", "source": "long", "rounds": "long"}
    folder, entry = written(tmp_path, "test.jsonl", [row]), suites.read_conf("suite", "gsm8k")
    held = lambda protocol: {
        key for key, value in suites.read_subset("gsm8k", entry, folder, "", protocol)[0][1].items() if value
    }
    assert held(read_protocol("deepspec")) == {"question"}
    assert held(read_protocol("specforge")) == {"question", "answer"}  # its examples have the answers


def test_a_dataset_of_the_hub_is_read_by_name_configuration_and_split(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "What is 1?", "answer": "1"}])
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: calls.append((*names, options)) or rows)
    suite = load_suite("gsm8k")
    assert calls == [("openai/gsm8k", "main", {"split": "test"})] and texts(suite) == [[f"What is 1?{BOXED}"]]
    assert suite.source == "openai/gsm8k, split test"
    rows.save_to_disk(tmp_path / "saved")
    assert load_suite("gsm8k", str(tmp_path / "saved")).digest == suite.digest
    with pytest.raises(ValueError, match="suite=spec_bench is not read from the Hub: give prompts="):
        load_suite("spec_bench")


# Protocols


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_sets_options_of_evaluate_and_names_suites(name):
    protocol = read_protocol(name)
    assert protocol.title and protocol.source and protocol.counting
    assert protocol.chat in ("target", "vicuna", "none") and protocol.turns in ("all", "first")
    assert {*protocol.templates, *protocol.few_shot, *protocol.max_new_tokens} <= set(SUITES)
    known_options = {
        "decode.temperature",
        "decode.top_p",
        "decode.top_k",
        "max_new_tokens",
        "template.enable_thinking",
        "chains",
        "trees",
        "seed",
    }
    assert set(protocol.options) <= known_options


def test_the_order_is_that_of_the_publication(tmp_path):
    rows = [{"turns": [f"Count to {n}.", "Again"]} for n in range(750)]
    folder, protocol = written(tmp_path, "arena-hard-v2.jsonl", rows), read_protocol("deepspec")
    suite = load_suite("deepspec", folder, subset="arena-hard-v2", protocol=protocol)
    assert (
        len(suite.questions) == 500
        and suite.note == "not the published questions of suite=deepspec subset=arena-hard-v2"
    )
    assert [each.id for each in suite.questions[:3]] == [
        "arena-hard-v2/228", "arena-hard-v2/712", "arena-hard-v2/412",
    ]  # fmt: skip
    # random.Random(980406).shuffle
    assert all(len(each.turns) == 1 for each in suite.questions)  # first turns only


def test_a_later_turn_reads_the_answers_that_the_target_gave(tmp_path):
    suite = load_suite("mt_bench", written(tmp_path, "question.jsonl", benches(1)))
    (question,), tokenizer = suite.questions, small_tokenizer()
    prompts = [encode_turn(question, turn, [" 1 2 3\n"][:turn], tokenizer) for turn in (0, 1)]
    assert [prompt.id for prompt in prompts] == ["81 turn 1", "81 turn 2"]
    user = lambda text: {"role": "user", "content": text}
    messages = [user(TURNS[0]), {"role": "assistant", "content": " 1 2 3\n"}, user(TURNS[1])]
    rendered = chat_template.render(tokenizer, messages, {}, add_generation_prompt=True)
    assert text_of(prompts[1]) == rendered and text_of(prompts[0]).endswith(
        f"{TURNS[0]}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_spec_bench_sends_the_form_of_vicuna_to_every_target(tmp_path):
    protocol = read_protocol("specbench")
    suite = load_suite("spec_bench", written(tmp_path, "question.jsonl", benches(1)), protocol=protocol)
    begin = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
        "polite answers to the user's questions. USER: Count to 3. ASSISTANT:"
    )
    base = copy.copy(small_tokenizer())
    base.chat_template = None
    for tokenizer in (small_tokenizer(), base):
        first, second, empty = (
            text_of(encode_turn(suite.questions[0], len(said), said, tokenizer, protocol=protocol))
            for said in ([], [" 1 2 3\n"], [" "])
        )
        assert first == begin and second == f"{begin} 1 2 3</s>USER: And back? ASSISTANT:"
        assert empty == f"{begin}USER: And back? ASSISTANT:"  # as FastChat writes an empty answer
    with pytest.raises(ValueError, match="Question 81 has several turns, and there is no form"):
        encode_turn(suite.questions[0], 1, ["1"], base)
    assert text_of(encode_turn(suite.questions[0], 0, [], base)) == TURNS[0]


def test_a_system_message_that_the_target_cannot_take_is_named(tmp_path):
    protocol, base = read_protocol("eagle"), copy.copy(small_tokenizer())
    suite = load_suite("mt_bench", written(tmp_path, "question.jsonl", benches(1)), protocol=protocol)
    for template in (None, "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"):
        base.chat_template = template
        with pytest.raises(ValueError, match="protocol=eagle sends a system message, which this target cannot take"):
            encode_turn(suite.questions[0], 0, [], base, protocol=protocol)


def test_a_protocol_knows_subsets_by_their_names(tmp_path):
    folder, protocol = written(tmp_path, "mt-bench.jsonl", [{"turns": TURNS}]), read_protocol("specforge")
    written(tmp_path, "gsm8k.jsonl", [{"turns": TURNS[:1]}])
    suite = load_suite("deepspec", folder, protocol=protocol)
    assert [each.turns[0]["messages"][0]["role"] for each in suite.questions] == ["user", "system"]
    assert "templates, limits and stop texts of SpecForge for gsm8k" in suite.note and "nothing" not in suite.note


def test_a_digest_tells_protocols_apart(tmp_path):
    digests = {read_protocol(name).digest for name in PROTOCOLS}
    assert len(digests) == len(PROTOCOLS) and all(len(each) == 16 for each in digests)
    folders = [written(tmp_path / name, "question.jsonl", benches(1)) for name in "ab"]
    assert load_suite("mt_bench", folders[0]).digest == load_suite("mt_bench", folders[1]).digest


def test_other_texts_than_the_published_are_noted(tmp_path):
    folder = written(tmp_path, "question.jsonl", benches(80))
    assert load_suite("mt_bench", folder).note == "not the published questions of suite=mt_bench"


def test_specforge_has_a_system_message_in_mt_bench_alone(tmp_path):
    folder, protocol = written(tmp_path, "question.jsonl", benches(1)), read_protocol("specforge")
    roles = lambda name: [
        each["role"] for each in load_suite(name, folder, protocol=protocol).questions[0].turns[0]["messages"]
    ]
    assert (roles("mt_bench"), roles("spec_bench")) == (["system", "user"], ["user"])
    suite = load_suite("spec_bench", folder, protocol=protocol)
    assert "SpecForge publishes nothing on suite=spec_bench" in suite.note


def test_a_mode_of_a_protocol_is_left_out_where_the_target_has_none(tmp_path):
    suite = load_suite("mt_bench", written(tmp_path, "question.jsonl", benches(1)))
    ON = {"enable_thinking": True}
    encode = lambda **settings: encode_turn(suite.questions[0], 0, [], small_tokenizer(), arguments=ON, **settings)
    assert encode(protocol=read_protocol("dflash2")).tokens
    with pytest.raises(ValueError, match="has no thinking mode"):
        encode()


def test_ordinary_prompts_are_questions_of_one_turn(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 2)
    (question, _) = questions.read_plain_questions(str(tmp_path / "prompts.jsonl"))
    write_rows(tmp_path / "twice.jsonl", [{"id": each, "prompt": "Count."} for each in ("a", "a", "a (2)")])
    assert [each.id for each in questions.read_plain_questions(str(tmp_path / "twice.jsonl"))] == [
        "a",
        "a (2)",
        "a (2) (2)",
    ]
    prompt = encode_turn(question, 0, [], small_tokenizer())
    assert (prompt.id, prompt.category) == ("0", "a") and "Count to 0." in text_of(prompt)


# What is refused


@pytest.mark.parametrize(
    ("name", "content", "arguments", "sentence"),
    [
        ("gsmk8", "{}", {}, r"There is no suite=gsmk8\. Did you mean gsm8k\?"),
        ("gsm8k", "{}", {"split": "train"}, "suite=gsm8k is the split test, not train"),
        (
            "gsm8k",
            '{"query": "a"}',
            {},
            r"test\.jsonl:1: no field question, which holds the prompt \(the row has: query\)",
        ),
        ("gsm8k", "", {}, r"is not suite=gsm8k: it has 0 questions of 1319\. Download it: https"),
        ("gsm8k", '{"question": "a"', {}, r"suite=gsm8k: .*test\.jsonl:1: not valid JSON"),
        ("gsm8k", '{"question": "a"}\n' * 1320, {}, "is not suite=gsm8k: it has 1320 questions of 1319"),
        ("gsm8k", '{"question": "a"}', {"subset": "hard"}, "suite=gsm8k has no subset hard; it has: gsm8k"),
        ("gsm8k", '{"question": [1]}', {}, r"test\.jsonl:1: its prompt must be a text, or a list"),
        ("humaneval", "{}", {}, r"suite=humaneval: the folder .* has no HumanEval\.jsonl or .*Download it"),
        ("deepspec", "{}", {}, "has no questions of suite=deepspec"),
    ],
)
def test_what_is_not_the_suite_is_refused_with_a_sentence(name, content, arguments, sentence, tmp_path):
    (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        load_suite(name, str(tmp_path), **arguments)


def test_an_unknown_protocol_and_a_missing_template_field_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"There is no protocol=specbnch\. Did you mean specbench\?"):
        read_protocol("specbnch")
    folder = written(tmp_path, "sanitized-mbpp.json", [{"task_id": 11, "prompt": "Count."}])
    with pytest.raises(ValueError, match="row 0: no field test_list, which the prompt is made of"):
        load_suite("mbpp", folder, protocol=read_protocol("specforge"))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("README.md", TERMS),
        ("LICENSE", "This work is for Non-Commercial\nuse."),
        ("LICENSE.txt", "Attribution-NonCommercial 4.0 International"),
        ("NOTICE", "It serves non-commercial research purposes only."),
        ("README.md", "License: CC BY-NC-SA 4.0"),
        ("README.md", "---\nlicense:\n- cc-by-nd-4.0\n---\n"),
        ("README.md", "# Data\n\n## Licence\n\nThe rows are for\nnon-commercial use.\n"),
    ],
)
def test_a_licence_that_limits_the_use_must_be_accepted(file, text, tmp_path):
    folder = written(tmp_path, "a/data/qualitative.jsonl", [speeds(TURNS)])
    (tmp_path / "a" / file).write_text(text)
    for prompts in (f"{folder}/a/data", f"{folder}/a/data/qualitative.jsonl"):  # the licence lies above
        with pytest.raises(ValueError, match=rf'{file} says ".*accept_licence=true'):
            load_suite("speed_bench", prompts)
        assert f"accept_licence=true: {file} says" in load_suite("speed_bench", prompts, licence_accepted=True).licence


def test_a_licence_of_the_folder_that_is_given_counts_for_deep_files(tmp_path):
    folder = written(tmp_path, "a/b/c/qualitative/test.parquet", [speeds(TURNS)])
    (tmp_path / "LICENSE").write_text(TERMS)
    with pytest.raises(ValueError, match="accept_licence=true"):
        load_suite("speed_bench", folder)


def test_a_licence_above_a_repository_or_in_the_working_folder_is_another_matter(tmp_path, monkeypatch):
    folder = written(tmp_path, "a/qualitative.jsonl", [speeds(TURNS)])
    (tmp_path / "LICENSE").write_text(TERMS)
    with pytest.raises(ValueError, match="accept_licence=true"):
        load_suite("speed_bench", f"{folder}/a")
    (tmp_path / "a" / ".git").mkdir()
    assert load_suite("speed_bench", f"{folder}/a").questions
    (tmp_path / "a" / ".git").rmdir()
    monkeypatch.chdir(tmp_path)
    assert load_suite("speed_bench", "a").questions


def test_free_licences_limit_nothing(tmp_path):
    root = ROOT
    (tmp_path / "LICENSE").write_text((root / "LICENSE").read_text())  # Apache 2.0
    (tmp_path / "README.md").write_text(
        "MIT; CC BY 4.0\n\n# Licence\n\nFor non-commercial and commercial use.\n\nOthers: CC-BY-NC"
    )
    (tmp_path / "NOTICE").write_text("You may use it for commercial and non-commercial purposes.")
    assert reading.find_limit([tmp_path / "a.jsonl"]) is None


def test_data_for_evaluation_alone_is_not_trained_on(tmp_path):
    (tmp_path / "README.md").write_text(TERMS)
    folder = written(tmp_path, "data/train.jsonl", [{"prompt": "Say", "completion": "Hello"}])
    encoding = Encoding(small_tokenizer(), tmp_path / "cache")
    for source in (f"{folder}/data", f"{folder}/data/train.jsonl"):
        with pytest.raises(ValueError, match=r"data.* may not be trained on: .*README\.md says"):
            load_rows([source], encoding)
    arguments = [f"prompts={folder}/data", f"out={folder}/out.jsonl", "target.name=any"]
    with pytest.raises(ValueError, match=r"data may not be trained on"):
        answer.main(arguments)
    with pytest.raises(ValueError, match="nvidia/speed-bench may not be trained on: NVIDIA Evaluation"):
        load_rows(["nvidia/speed-bench"], encoding)
    reading.check_trainable("openai/gsm8k")
