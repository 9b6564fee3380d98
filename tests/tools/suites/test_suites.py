"""Public suites from files of their published form: prompts, turns, categories, protocols, and what is refused."""

import copy
import gzip
import json

import datasets
import pytest
from pyarrow import Table, parquet

from scripts import answer
from specdec.measuring import questions
from specdec.text import chat_template, reading
from specdec.tools.suites import suites
from specdec.tools.suites.suites import NO_PROTOCOL, encode_turn, load_suite, read_protocol
from tests.support.commands import ROOT, write_prompts, write_rows
from tests.support.targets import small_tokenizer
from train.data.encoding import Encoding, load_rows

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TURNS = ["Count to 3.", "And back?"]
SUITES, PROTOCOLS = suites.list_names("suite"), suites.list_names("protocol")
TERMS = "License: other\nlicense_name: nvidia-evaluation-dataset-license\n"
HOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSummarise {article}"
BENCH = [{"question_id": 81 + n, "category": "writing", "turns": TURNS, "reference": []} for n in range(80)]
SPEED = {"question_id": "c_1", "category": "coding", "sub_category": "x", "turns": TURNS, "multiturn": True}


def list_contents(question) -> list[str]:
    return [turn["messages"][-1]["content"] for turn in question.turns]


def list_texts(suite) -> list[list[str]]:
    return [list_contents(question) for question in suite.questions]


def list_facts(suite) -> list[tuple]:
    return [(question.id, question.category) for question in suite.questions]


def text_of(question, turn: int = 0, answers=(), tokenizer=None, **settings) -> str:
    """The text of an encoded turn."""
    prompt = encode_turn(question, turn, list(answers), tokenizer or small_tokenizer(), **settings)
    return small_tokenizer().decode(prompt.tokens)


def write_suite(folder, name: str, rows: list[dict]) -> str:
    """Writes rows as a published file of a folder, and returns the folder."""
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


@pytest.fixture
def bench(tmp_path) -> str:
    """A folder with the first question of MT-Bench, which Spec-Bench has, too."""
    return write_suite(tmp_path / "bench", "question.jsonl", BENCH[:1])


# Suites


def test_spec_bench_and_mt_bench_keep_turns_and_the_published_tasks(tmp_path):
    translation = {"question_id": 161, "category": "translation", "turns": ["Translate German to English: Ja."]}
    folder = write_suite(tmp_path, "data/spec_bench/question.jsonl", [*BENCH[:2], translation])
    suite = load_suite("spec_bench", folder)
    assert list_texts(suite) == [TURNS, TURNS, translation["turns"]]
    assert list_facts(suite)[1:] == [("82", "mt_bench"), ("161", "translation")]
    assert [question.tags for question in suite.questions[1:]] == [("writing",), ()]
    assert suite.note == "3 of 480 published questions of suite=spec_bench" and "Apache-2.0" in suite.licence
    for subset in ("mt_bench", "writing"):
        assert len(load_suite("spec_bench", folder, subset=subset).questions) == 2
    hub = [{"prompt": TURNS, "prompt_id": 81 + n, "category": "writing", "reference": []} for n in range(2)]
    copied = load_suite("mt_bench", write_suite(tmp_path / "b", "data/train-00000-of-00001.parquet", hub))
    assert list_facts(copied) == [("81", "writing"), ("82", "writing")] and list_texts(copied) == [TURNS, TURNS]
    published = [load_suite("mt_bench", write_suite(tmp_path / name, "question.jsonl", BENCH)) for name in "cd"]
    assert published[0].note == "not the published questions of suite=mt_bench"  # other texts than the published
    assert published[0].digest == published[1].digest and list_texts(published[0])[:2] == list_texts(copied)


def test_speed_bench_has_subsets_in_both_prepared_forms(tmp_path):
    write_suite(tmp_path, "speed/qualitative/test.parquet", [SPEED])
    messages = [{"role": "user", "content": turn} for turn in TURNS]
    write_suite(tmp_path, "throughput_1k.jsonl", [SPEED | {"turns": None, "messages": messages}])
    usual, throughput = (load_suite("speed_bench", str(tmp_path), subset=name) for name in (None, "throughput_1k"))
    assert list_texts(usual) == list_texts(throughput) == [TURNS] and usual.questions[0].category == "coding"
    assert "of 880" in usual.note
    assert "of 1536 published questions of suite=speed_bench subset=throughput_1k" in throughput.note
    for path in (tmp_path / "throughput_1k.jsonl", tmp_path / "speed" / "qualitative"):
        assert list_texts(load_suite("speed_bench", str(path))) == [TURNS]
    with pytest.raises(ValueError, match=r"subset=throughput_8k: it has 0 questions of 1536"):
        load_suite("speed_bench", str(tmp_path), subset="throughput_8k")
    write_rows(tmp_path / "qualitative.jsonl", [SPEED | {"turns": [HOLDER]}])
    with pytest.raises(ValueError, match=r"qualitative\.jsonl:1: the prompt is a placeholder.*prepare_data\.py"):
        load_suite("speed_bench", str(tmp_path))


@pytest.mark.parametrize("name", [name for name in SUITES if name != "ruler"])
def test_every_suite_reads_a_folder_of_its_published_form(name, tmp_path):
    entry = suites.read_conf("suite", name)
    subset = entry.get("subset") or next(iter(entry.get("subsets", {"": 0})))
    file = suites.as_list(entry["file"])[0].replace("{subset}", subset).replace("**/", "data/").replace("*", "-1")
    field = suites.as_list(entry["prompt"])[0]
    template = entry.get("template", "{prompt}")
    template = template[subset] if isinstance(template, dict) else template
    fields = set(suites.FIELD.findall("".join(template))) - {"starter_code", "input"}
    row = {key: f"{key} of Hello" for key in fields} | {field: TURNS if field == "turns" else f"{field} of Hello"}
    suite = load_suite(name, write_suite(tmp_path, file, [row | {"task_id": 11}]))
    ((text, *_),) = list_texts(suite)
    assert suite.questions[0].turns[0]["original"] in text
    assert suite.note and suite.licence and suite.source == str(tmp_path) and text_of(suite.questions[0])


def test_a_subset_is_a_category_where_all_are_read(tmp_path):
    write_suite(tmp_path, "aime25.jsonl", [{"turns": ["Count."]}])
    folder = write_suite(tmp_path, "mt-bench.jsonl", [{"turns": TURNS}] * 2)
    suite = load_suite("deepspec", folder)
    assert list_facts(suite) == [("aime25/0", "aime25"), ("mt-bench/0", "mt-bench"), ("mt-bench/1", "mt-bench")]
    for subset, path in (("mt-bench", folder), (None, f"{folder}/mt-bench.jsonl")):
        assert load_suite("deepspec", path, subset=subset).questions == suite.questions[1:]
    for subset in ("gsm8k", "my_gsm8k"):
        write_suite(tmp_path, f"{subset}/question.jsonl", [{"turns": TURNS, "question_id": 5}] * 2)
    assert [name for name, _ in list_facts(load_suite("eagle", f"{folder}/gsm8k"))] == ["gsm8k/5", "gsm8k/5 (2)"]
    with pytest.raises(ValueError, match="has no questions of suite=eagle"):
        load_suite("eagle", f"{folder}/my_gsm8k")
    write_suite(tmp_path, "mine.jsonl", [{"turns": TURNS}])
    with pytest.raises(ValueError, match=r"Which part of suite=deepspec is .*mine\.jsonl\? Give subset="):
        load_suite("deepspec", f"{folder}/mine.jsonl")


def test_templates_are_filled_with_the_fields_of_a_row_and_others_are_dropped(tmp_path):
    code, specforge = 'def f():\n    """ {brace} """\n', read_protocol("specforge")
    folder = write_suite(tmp_path, "HumanEval.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": code, "test": "x"}])
    request = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    assert list_texts(load_suite("humaneval", folder)) == [[f"{request}{code}\n```"]]
    assert list_texts(load_suite("humaneval", folder, protocol=specforge)) == [[code]]
    rows = [{"instruction": "Say", "input": "Hello"}, {"instruction": "Count", "input": ""}]
    suite = load_suite("alpaca", write_suite(tmp_path, "alpaca_data.json", rows))
    assert list_texts(suite) == [["Say\n\nInput:\nHello"], ["Count"]]
    task = {"task_id": 11, "prompt": "Count.", "test_list": ["assert a", "assert b"]}
    folder = write_suite(tmp_path, "sanitized-mbpp.json", [task, task | {"task_id": 600}])  # of another split
    ((text,),) = list_texts(load_suite("mbpp", folder, protocol=specforge))
    assert text.endswith(
        "here is your task: Count. Your code should pass these tests:\n\nassert a\nassert b\n\n[BEGIN]\n"
    )
    row = {"question": "What is 1?", "answer": "1", "title": "long", "source": "long", "rounds": "long"}
    folder = write_suite(tmp_path, "test.jsonl", [row])
    for name, used in (("deepspec", {"question"}), ("specforge", {"question", "answer"})):  # it has examples
        ((_, read),) = suites.open_suite("gsm8k", folder, None, read_protocol(name)).read_subset("")
        assert {key for key, value in read.items() if value} == used


def test_a_dataset_of_the_hub_is_read_by_name_configuration_and_split(tmp_path, monkeypatch):
    rows, calls = datasets.Dataset.from_list([{"question": "What is 1?", "answer": "1"}]), []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: calls.append((*names, options)) or rows)
    suite = load_suite("gsm8k")
    assert calls == [("openai/gsm8k", "main", {"split": "test"})] and list_texts(suite) == [[f"What is 1?{BOXED}"]]
    assert suite.source == "openai/gsm8k, split test"
    rows.save_to_disk(tmp_path / "saved")
    assert load_suite("gsm8k", str(tmp_path / "saved")).digest == suite.digest
    with pytest.raises(ValueError, match="suite=spec_bench is not read from the Hub: give prompts="):
        load_suite("spec_bench")


# Protocols


def test_every_protocol_sets_options_of_evaluate_and_names_suites():
    protocols = [read_protocol(name) for name in PROTOCOLS]
    known_options = (
        "decode.temperature decode.top_p decode.top_k max_new_tokens template.enable_thinking chains trees seed"
    )
    for protocol in protocols:
        assert protocol.title and protocol.source and protocol.counting
        assert protocol.chat in ("target", "vicuna", "none") and protocol.turns in ("all", "first")
        assert {*protocol.templates, *protocol.few_shot, *protocol.max_new_tokens} <= set(SUITES)
        assert set(protocol.options) <= set(known_options.split()) and len(protocol.digest) == 16
    assert len({protocol.digest for protocol in protocols}) == len(PROTOCOLS)


def test_specforge_has_examples_before_gsm8k_and_a_system_message_in_mt_bench_alone(tmp_path, bench):
    protocol = read_protocol("specforge")
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(7)]
    folder = write_suite(tmp_path, "test.jsonl", rows)
    assert list_texts(load_suite("gsm8k", folder))[6] == [f"What is 6?{BOXED}"]
    suite = load_suite("gsm8k", folder, protocol=protocol)
    examples = "".join(f"Question: What is {n}?\nAnswer: It is {n}.\n#### {n}\n\n" for n in range(5))
    plain = text_of(suite.questions[6], protocol=protocol)
    assert plain == f"{examples}Question: What is 6?\nAnswer:"  # without a chat template
    assert protocol.max_new_tokens["gsm8k"] == 512 and "own copy of the template" in suite.note
    for name, first_role in (("mt_bench", "system"), ("spec_bench", "user")):
        suite = load_suite(name, bench, protocol=protocol)
        assert suite.questions[0].turns[0]["messages"][0]["role"] == first_role
    assert "SpecForge publishes nothing on suite=spec_bench" in suite.note
    write_suite(tmp_path, "mt-bench.jsonl", [{"turns": TURNS}])
    suite = load_suite("deepspec", write_suite(tmp_path, "gsm8k.jsonl", [{"turns": TURNS[:1]}]), protocol=protocol)
    roles = [question.turns[0]["messages"][0]["role"] for question in suite.questions]
    assert roles == ["user", "system"]  # gsm8k, then mt-bench: subsets have the names of suites
    assert "templates, limits and stop texts of SpecForge for gsm8k" in suite.note and "nothing" not in suite.note


def test_the_order_is_that_of_the_publication(tmp_path):
    rows = [{"turns": [f"Count to {n}.", "Again"]} for n in range(750)]
    folder = write_suite(tmp_path, "arena-hard-v2.jsonl", rows)
    suite = load_suite("deepspec", folder, subset="arena-hard-v2", protocol=read_protocol("deepspec"))
    assert suite.note == "not the published questions of suite=deepspec subset=arena-hard-v2"
    names = [question.id for question in suite.questions]
    assert len(names) == 500 and names[:2] == ["arena-hard-v2/228", "arena-hard-v2/712"]  # Random(980406).shuffle
    assert all(len(question.turns) == 1 for question in suite.questions)  # first turns only
    few = load_suite(
        "deepspec", write_suite(tmp_path, "arena-hard-v2.jsonl", rows[:9]), protocol=read_protocol("deepspec")
    )
    assert [name for name, _ in list_facts(few)] == [f"arena-hard-v2/{n}" for n in range(9)]  # all of them, in order


def test_a_later_turn_reads_the_answers_that_the_target_gave(bench):
    (question,), tokenizer = load_suite("mt_bench", bench).questions, small_tokenizer()
    prompts = [encode_turn(question, turn, [" 1 2 3\n"][:turn], tokenizer) for turn in (0, 1)]
    assert [prompt.id for prompt in prompts] == ["81 turn 1", "81 turn 2"]
    first, second = ({"role": "user", "content": turn} for turn in TURNS)
    messages = [first, {"role": "assistant", "content": " 1 2 3\n"}, second]
    rendered = chat_template.render(tokenizer, messages, {}, add_generation_prompt=True)
    assert text_of(question, 1, [" 1 2 3\n"]) == rendered
    assert text_of(question).endswith(f"{TURNS[0]}<|im_end|>\n<|im_start|>assistant\n")
    thinking = {"enable_thinking": True}
    assert text_of(question, arguments=thinking, protocol=read_protocol("dflash2"))  # its mode, which this target lacks
    with pytest.raises(ValueError, match="has no thinking mode"):
        text_of(question, arguments=thinking)


def test_spec_bench_sends_the_form_of_vicuna_to_every_target(bench):
    protocol = read_protocol("specbench")
    (question,) = load_suite("spec_bench", bench, protocol=protocol).questions
    opening = f"{suites.VICUNA}USER: Count to 3. ASSISTANT:"
    base = copy.copy(small_tokenizer())
    base.chat_template = None
    for tokenizer in (small_tokenizer(), base):
        for answers, added in (
            ([], ""),
            ([" 1 2 3\n"], " 1 2 3</s>USER: And back? ASSISTANT:"),
            ([" "], "USER: And back? ASSISTANT:"),  # as FastChat writes an empty answer
        ):
            assert text_of(question, len(answers), answers, tokenizer, protocol=protocol) == opening + added
    with pytest.raises(ValueError, match="Question 81 has several turns, and there is no form"):
        encode_turn(question, 1, ["1"], base)
    assert text_of(question, 0, [], base) == TURNS[0]


def test_a_system_message_that_the_target_cannot_take_is_named(bench):
    protocol, base = read_protocol("eagle"), copy.copy(small_tokenizer())
    (question,) = load_suite("mt_bench", bench, protocol=protocol).questions
    for template in (None, "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"):
        base.chat_template = template
        with pytest.raises(ValueError, match="protocol=eagle sends a system message, which this target cannot take"):
            encode_turn(question, 0, [], base, protocol=protocol)


def test_ordinary_prompts_are_questions_of_one_turn(tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 2)
    question, _ = questions.read_plain_questions(str(tmp_path / "prompts.jsonl"))
    write_rows(tmp_path / "twice.jsonl", [{"id": name, "prompt": "Count."} for name in ("a", "a", "a (2)")])
    names = [question.id for question in questions.read_plain_questions(str(tmp_path / "twice.jsonl"))]
    assert names == ["a", "a (2)", "a (2) (2)"]
    assert (question.id, question.category) == ("0", "a") and "Count to 0." in text_of(question)


# What is refused

QUESTION = '{"question": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "arguments", "sentence"),
    [
        ("gsm8k", "{}", {"split": "train"}, "suite=gsm8k is the split test, not train"),
        ("infinitebench", "{}", {"split": "x"}, "suite=infinitebench is the split of each subset, not x: leave"),
        ("gsm8k", '{"query": "a"}', {}, r"test\.jsonl:1: no field question, which holds the prompt \(.*: query\)"),
        ("gsm8k", "", {}, r"is not suite=gsm8k: it has 0 questions of 1319\. Download it: https"),
        ("gsm8k", '{"question": "a"', {}, r"suite=gsm8k: .*test\.jsonl:1: not valid JSON"),
        ("gsm8k", QUESTION * 1320, {}, "is not suite=gsm8k: it has 1320 questions of 1319"),
        ("gsm8k", QUESTION, {"subset": "hard"}, "suite=gsm8k has no subset hard; it has: gsm8k"),
        ("gsm8k", '{"question": [1]}', {}, r"test\.jsonl:1: its prompt must be a text, or a list"),
        ("humaneval", "{}", {}, r"suite=humaneval: the folder .* has no HumanEval\.jsonl or .*Download it"),
        ("deepspec", "{}", {}, "has no questions of suite=deepspec"),
    ],
)
def test_what_is_not_the_suite_is_refused_with_a_sentence(name, content, arguments, sentence, tmp_path):
    (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        load_suite(name, str(tmp_path), **arguments)


def test_a_missing_template_field_is_named(tmp_path):
    folder = write_suite(tmp_path, "sanitized-mbpp.json", [{"task_id": 11, "prompt": "Count."}])
    with pytest.raises(ValueError, match="row 0: no field test_list, which the prompt is made of"):
        load_suite("mbpp", folder, protocol=read_protocol("specforge"))
    assert load_suite("mbpp", folder, protocol=NO_PROTOCOL).questions


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
    folder = write_suite(tmp_path, "a/data/qualitative.jsonl", [SPEED])
    (tmp_path / "a" / file).write_text(text)
    for prompts in (f"{folder}/a/data", f"{folder}/a/data/qualitative.jsonl"):  # the licence lies above
        with pytest.raises(ValueError, match=rf'{file} says ".*accept_licence=true'):
            load_suite("speed_bench", prompts)
        assert f"accept_licence=true: {file} says" in load_suite("speed_bench", prompts, licence_accepted=True).licence


def test_a_licence_counts_for_deep_files_but_not_from_above_a_repository_or_the_working_folder(tmp_path, monkeypatch):
    deep = write_suite(tmp_path / "deep", "b/c/qualitative/test.parquet", [SPEED])
    folder = write_suite(tmp_path, "a/qualitative.jsonl", [SPEED])
    for path in (tmp_path, tmp_path / "deep"):
        (path / "LICENSE").write_text(TERMS)
    for prompts in (deep, f"{folder}/a"):
        with pytest.raises(ValueError, match="accept_licence=true"):
            load_suite("speed_bench", prompts)
    (tmp_path / "a" / ".git").mkdir()
    assert load_suite("speed_bench", f"{folder}/a").questions
    (tmp_path / "a" / ".git").rmdir()
    monkeypatch.chdir(tmp_path)
    assert load_suite("speed_bench", "a").questions


def test_free_licences_limit_nothing(tmp_path):
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text())  # Apache 2.0
    (tmp_path / "README.md").write_text(
        "MIT; CC BY 4.0\n\n# Licence\n\nFor non-commercial and commercial use.\n\nOthers: CC-BY-NC"
    )
    (tmp_path / "NOTICE").write_text("You may use it for commercial and non-commercial purposes.")
    assert reading.find_limit([tmp_path / "a.jsonl"]) is None


def test_data_for_evaluation_alone_is_not_trained_on(tmp_path):
    (tmp_path / "README.md").write_text(TERMS)
    folder = write_suite(tmp_path, "data/train.jsonl", [{"prompt": "Say", "completion": "Hello"}])
    encoding = Encoding(small_tokenizer(), tmp_path / "cache")
    for source in (f"{folder}/data", f"{folder}/data/train.jsonl"):
        with pytest.raises(ValueError, match=r"data.* may not be trained on: .*README\.md says"):
            load_rows([source], encoding)
    with pytest.raises(ValueError, match=r"data may not be trained on"):
        answer.main([f"prompts={folder}/data", f"out={folder}/out.jsonl", "target.name=any"])
    with pytest.raises(ValueError, match="nvidia/speed-bench may not be trained on: NVIDIA Evaluation"):
        load_rows(["nvidia/speed-bench"], encoding)
    reading.check_trainable("openai/gsm8k")
