"""openvino_front.py and openvino_convert.py without OpenVINO: stand-ins for its modules, and for optimum-intel."""

import json
import sys
from types import SimpleNamespace

import pytest

from specdec.engines.front import converted, front, openvino_convert
from specdec.engines.front.openvino_convert import keep_openvino, read_layers
from specdec.engines.front.openvino_front import OpenVino, OpenvinoOptions, make_streamer

ROUNDS = [7, [8, 9, 10], [11], [12, 13]]  # the prompt's own pass, then rounds with 2, 0 and 1 accepted drafts


class StandIn:
    """The module openvino_genai, whose pipeline gives ROUNDS."""

    __version__ = "2026.4.1.0"
    StreamerBase = type("StreamerBase", (), {})
    StreamingStatus = SimpleNamespace(CANCEL="cancel", RUNNING="running")
    GenerationConfig = SchedulerConfig = SimpleNamespace

    def __init__(self):
        self.built, self.settings, self.states = None, None, []

    def draft_model(self, folder, device, **properties):
        return folder, device, properties

    def LLMPipeline(self, target, device, **arguments):
        self.built = (target, device, arguments)
        return self

    def generate(self, ids, settings, streamer):
        self.settings = settings
        for tokens in ROUNDS:
            self.states.append(streamer.write(tokens))
            if self.states[-1] == "cancel":
                break
        return SimpleNamespace(extended_perf_metrics=SimpleNamespace(get_num_draft_tokens=lambda: 4))


@pytest.fixture
def genai(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "openvino_genai", module)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda matrix: matrix.tolist()))
    return module


def raise_gone(tokens) -> None:
    raise front.ClientGone


def write_converted(folder, **config) -> str:
    folder.mkdir()
    (folder / openvino_convert.GRAPH).write_text("")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 50, "eos_token_id": 13, **config}))
    return str(folder)


def test_each_call_of_the_streamer_is_a_round(genai, tmp_path):
    target, head = write_converted(tmp_path / "t", max_position_embeddings=99), write_converted(tmp_path / "h")
    engine = OpenVino(OpenvinoOptions(target, head, drafts=2, dtype="bfloat16", cache="float32", threads=1))
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    scheduler = SimpleNamespace(enable_prefix_caching=False)
    draft = (head, "CPU", properties)
    assert genai.built == (target, "CPU", {"scheduler_config": scheduler, "draft_model": draft, **properties})
    assert (engine.stop, engine.max_length, engine.vocabulary, engine.longest) == (frozenset([13]), 99, 50, 2)

    answer = front.FrontAnswer(engine, {"prompt": [1, 2], "max_tokens": 20, "temperature": 0})
    assert [tokens for tokens, _ in answer.yield_rounds()] == [[7], [8, 9, 10], [11], [12, 13]]
    settings = vars(genai.settings)
    assert settings["stop_token_ids"] == {13} and settings["num_assistant_tokens"] == 2
    assert not settings["ignore_eos"] and not settings["do_sample"] and settings["max_new_tokens"] == 20
    counts = answer.count_usage()["speculation"]
    assert (counts["rounds"], counts["accepted"], counts["drafted"]) == (3, 3, 5)  # 4, and 1 of the last round
    assert engine.version == StandIn.__version__

    with pytest.raises(front.FrontError, match="prompts of two tokens or more"):
        list(engine.generate([1], 4, set()))


def test_an_answer_that_nobody_waits_for_is_cancelled(genai, tmp_path):
    engine = OpenVino(OpenvinoOptions(write_converted(tmp_path / "t"), lookup=True))
    assert genai.built[2]["prompt_lookup"] and engine.longest == 3
    streamer = make_streamer(genai)(raise_gone)
    assert streamer.write(5) == streamer.write([5, 6]) == "cancel"
    answer = front.FrontAnswer(engine, {"prompt": [1, 2], "max_tokens": 7, "temperature": 0, "ignore_eos": True})
    assert sum(len(tokens) for tokens, _ in answer.yield_rounds()) == 7
    counts = answer.count_usage()["speculation"]
    assert counts["accepted"] == 3 and counts["drafted"] is None  # OpenVINO does not say
    assert genai.settings.ignore_eos and genai.states == ["running"] * 4
    plain = OpenVino(OpenvinoOptions(write_converted(tmp_path / "plain")))
    assert plain.longest is None and not {"prompt_lookup", "draft_model"} & genai.built[2].keys()
    assert list(plain.generate([1], 20, set())) == [[7], *ROUNDS[1:]]
    assert not hasattr(genai.settings, "num_assistant_tokens")


def test_an_unknown_precision_is_named(genai, tmp_path):
    with pytest.raises(ValueError, match="no precision 'int8' here: take one of float32, bfloat16, float16"):
        OpenVino(OpenvinoOptions(write_converted(tmp_path / "t"), dtype="int8"))


@pytest.fixture
def optimum(monkeypatch):
    """What stands in for optimum-cli: [(model, options)] of its calls, and an error that it then raises."""
    state = SimpleNamespace(calls=[], error=None, layers=[])

    def run(model, out, options):
        state.calls.append((model, options))
        out.mkdir()
        if state.error:
            raise ValueError(state.error)
        (out / openvino_convert.GRAPH).write_text("")

    monkeypatch.setattr(openvino_convert, "run_optimum", run)
    monkeypatch.setattr(openvino_convert, "write_layers", lambda folder, layers: state.layers.append(layers))
    return state


def test_a_model_is_converted_once_for_each_of_its_states(optimum, tmp_path):
    head, out = tmp_path / "head", tmp_path / "out"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"draft_vocab_size": 9, "hidden_layers_list": [1, 3, 5]}))
    folder = keep_openvino(str(head), out)
    assert keep_openvino(str(head), out) == folder and len(optimum.calls) == 1 and optimum.layers == [[1, 3, 5]]
    assert optimum.calls == [(str(head), ["--trust-remote-code"])]
    (head / "model.safetensors").write_text("new weights")
    assert keep_openvino(str(head), out) == folder and len(optimum.calls) == 2
    assert keep_openvino(str(folder), out) == folder and len(optimum.calls) == 2  # converted already
    keep_openvino("owner/target", out)
    assert optimum.calls[2:] == [("owner/target", [])] and len(optimum.layers) == 2


def test_a_failed_conversion_leaves_what_was_there(optimum, tmp_path):
    head, out = tmp_path / "head", tmp_path / "out"
    head.mkdir()
    folder = keep_openvino(str(head), out)
    optimum.error = "no space"
    (head / "model.safetensors").write_text("new weights")
    with pytest.raises(ValueError, match="no space"):
        keep_openvino(str(head), out)
    assert (folder / openvino_convert.GRAPH).is_file() and [path.name for path in out.iterdir()] == [folder.name]


@pytest.mark.parametrize("export", ["exported", "."])
def test_no_folder_but_a_converted_one_is_replaced(optimum, tmp_path, monkeypatch, export):
    """The target and the export are beside what is converted, and the export may be named by its place."""
    folder, target = tmp_path / "exported", tmp_path / "target"
    for path in (folder, target):
        path.mkdir()
        (path / "model.safetensors").write_text(path.name)
    monkeypatch.chdir(folder if export == "." else tmp_path)
    places = [keep_openvino(name, folder.resolve().parent) for name in (export, str(target))]
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "target", *(path.name for path in places)}
    assert [path.name.rpartition("-")[0] for path in places] == ["exported", "target"]
    for path in (folder, target):
        assert (path / "model.safetensors").read_text() == path.name
        with pytest.raises(ValueError, match="exists and is no converted model: move it away"):
            converted.write_converted([str(target)], path, lambda out: out.mkdir())
    converted.write_converted([str(target)], places[0], lambda out: out.mkdir())
    assert [path.name for path in places[0].iterdir()] == [converted.SOURCE]


def test_a_head_of_another_format_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"draft_vocab_size": 9}))
    with pytest.raises(ValueError, match="says not which layers it reads: export it with format=openvino"):
        read_layers(str(tmp_path))
    assert read_layers("owner/target") is None
