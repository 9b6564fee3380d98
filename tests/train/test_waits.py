"""How often the host waits for the device, and that nothing mixes devices: on a pretended accelerator."""

from concurrent.futures import Future

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file

from specdec.core import clock
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.engines.engine_target import EngineTarget
from specdec.proposers import costs
from specdec.proposers.auto import AutoProposer
from specdec.proposers.heads import HeadProposer
from specdec.text.conversations import Row
from specdec.unroll import replay
from tests.support.decoding import random_tokens
from tests.support.drafters import HEADS, load_head
from tests.support.targets import make_target
from tests.train.pretend_device import ELSEWHERE, Elsewhere, PretendDevice
from train.data.batches import collate
from train.features.feature_files import FeatureFolder
from train.features.outputs import ComputedFeatures, StoredFeatures
from train.objective.objective import Objective, list_slots

VOCAB = 61


@pytest.fixture
def device():
    with PretendDevice() as device:
        yield device


def make_drafter(head: str):
    """A target and a drafter with a reduced vocabulary on the pretended device, as in training"""
    target = make_target(VOCAB, num_layers=4, device=ELSEWHERE)
    drafter = instantiate(load_head(head)["drafter"], target, vocab=torch.arange(3, 50), _convert_="all")
    return drafter.double().to(ELSEWHERE)


def make_batch():
    """Two packs; in the first one two documents"""
    rows = [Row(str(seed), "all", random_tokens(seed, 24, VOCAB), [False] * 8 + [True] * 16) for seed in range(3)]
    return collate([rows[:2], rows[2:]], length=52, pad_token=0)


def test_the_device_counts_waits_and_refuses_to_mix(device):
    values = torch.arange(4.0).to(ELSEWHERE, non_blocking=True)
    assert isinstance(values * 2, Elsewhere) and not device.waits
    for wait in (lambda: values.sum().item(), lambda: values.tolist(), lambda: values[values > 1],
                 lambda: values.nonzero(), lambda: bool(values[0] > 1), lambda: values.cpu(),
                 lambda: torch.arange(4).to(ELSEWHERE),
                 lambda: torch.tensor([1], device=ELSEWHERE)):  # fmt: skip
        wait()
        assert sum(device.waits.values()) >= 1
        device.waits.clear()
    assert (values + 1).cpu().tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="on the CPU"):
        values + torch.arange(4.0)


@pytest.mark.parametrize("head", HEADS)
def test_a_training_step_never_waits(head, device):
    """Beside the passes of the target, and of a draft model, in which transformers looks at the positions once."""
    drafter = make_drafter(head)
    objective = Objective(drafter, **load_head(head)["objective"])
    online = ComputedFeatures(drafter.target, drafter.target_layers)
    for _ in range(2):
        device.waits.clear()
        batch = make_batch().move_to(ELSEWHERE)
        output = online(batch)
        assert sum(device.waits.values()) <= 1, device.waits
        device.waits.clear()
        loss = objective(batch, output, compare=False)
        (loss.total / loss.num_goals).backward()
        assert sum(device.waits.values()) <= (head == "draft"), device.waits
    grads = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    assert grads and all(isinstance(grad, Elsewhere) and grad.values_here.isfinite().all() for grad in grads)


@pytest.mark.parametrize("head", HEADS)
def test_a_closed_form_start_stays_on_the_device(head, device):
    drafter = make_drafter(head)
    batch = make_batch().move_to(ELSEWHERE)
    output = ComputedFeatures(drafter.target, drafter.target_layers)(batch)
    drafter.solve([list_slots(batch, output, 2)])
    assert all(isinstance(parameter.data, Elsewhere) for parameter in drafter.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", HEADS)
def test_a_round_waits_once(head, temperature, device):
    drafter = make_drafter(head).frozen_copy()
    for shape in (TreeShape(2, 1, 2), TreeShape(2, 2, 4)):
        sampling = Sampling(temperature=temperature)
        decoder = Decoder(drafter.target, HeadProposer(drafter, shape), sampling=sampling, stop=set())
        generator = torch.Generator().manual_seed(0)
        device.waits.clear()
        generation = decoder.generate([random_tokens(0, 9, VOCAB)], 8, generator=generator)
        assert len(generation.tokens[0]) == 8
        assert reads(device) <= len(generation.accepted[0]) + 2, device.waits


def reads(device) -> int:
    return sum(count for (kind, _), count in device.waits.items() if kind != "copy from the CPU")


@pytest.fixture
def events(device, monkeypatch) -> list:
    """CUDA's events on the pretended device: one a millisecond, once the host has waited. -> recorded events

    Nothing else of torch.cuda may be called.
    """
    recorded = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == f"stream of {ELSEWHERE}"
            recorded.append(self)
            self.milliseconds, self.waits = len(recorded), reads(device)

        def elapsed_time(self, end):
            assert max(self.waits, end.waits) < reads(device), "the device has not come so far"
            return float(end.milliseconds - self.milliseconds)

    def refuse(*_):
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(clock, "QUEUED_DEVICES", ("meta",))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", "stream of {}".format)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    return recorded


@pytest.mark.parametrize("head", [None, "eagle3"])
def test_the_times_of_a_round_need_no_wait_of_their_own(head, device, events):
    """What is done after a round's wait is read at the next one. Joining and leaving rows change nothing."""
    drafter = make_drafter(head or "eagle3").frozen_copy()
    proposer = head and HeadProposer(drafter, TreeShape(2, 2, 4))
    decoder = Decoder(drafter.target, proposer, sampling=Sampling(), stop=set())
    device.waits.clear()
    batch = decoder.batch()
    steps = []
    for prompt in (3, 5):
        request = Request(random_tokens(prompt, prompt, VOCAB), 6)
        prefill, waited = batch.prefill([request]), reads(device)
        batch.read(prefill, 2)
        batch.read(prefill, 2)
        assert reads(device) == waited
        batch.admit([request], prefill)
        assert reads(device) == waited + 1
        num_pieces = (prompt + 1) // 2  # of two tokens; those that are left are read where the request joins
        assert len(prefill.read_times) == num_pieces
        assert request.generation.prefill_seconds == pytest.approx(0.001 * (num_pieces + 1))  # and the first token
        for _ in range(2):
            waited = reads(device)
            steps.append(batch.run_round())
            assert reads(device) == waited + 1
    while batch.running:
        steps.append(batch.run_round())
    costs = [step.cost for step in steps]
    stages = {"draft": 0.001, "verify": 0.001, "keep": 0.001, "other": 0.001, "round": 0}
    assert costs[0].stages == pytest.approx(stages | {"keep": 0, "other": 0})
    for cost in costs[1:]:
        assert cost.stages == pytest.approx(stages) and cost.seconds == pytest.approx(0.004)


class There(torch.Generator):
    """Random numbers of the pretended device"""

    device = ELSEWHERE


SHAPES = {"plain": None, "chain": TreeShape(2, 1, 2), "tree": TreeShape(2, 2, 4)}


@pytest.mark.parametrize(
    "shape, children, kind",
    [("plain", "chosen", torch.Generator), ("chain", "chosen", There), ("tree", "chosen", torch.Generator),
     ("tree", "distinct", There)],
)  # fmt: skip
def test_a_round_of_answers_with_own_settings_waits_once_however_they_end(shape, children, kind, device):
    """The host copies nothing by itself either: such a copy waits for the device too."""
    drafter = make_drafter("eagle3").frozen_copy()
    proposer = SHAPES[shape] and HeadProposer(drafter, SHAPES[shape], children=children)
    batch = Decoder(drafter.target, proposer, sampling=Sampling(1.0), stop=set()).batch()
    settings = [Sampling(1.0), Sampling(0.5, top_k=5), Sampling(1.0)]
    batch.admit([
        Request(random_tokens(seed, 5, VOCAB), 4 + 3 * seed, generator=kind().manual_seed(seed), sampling=sampling)
        for seed, sampling in enumerate(settings)
    ])  # fmt: skip
    while batch.running:
        device.waits.clear()
        batch.run_round()
        assert sum(device.waits.values()) == 1, device.waits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_waits_twice_a_level_and_once_more_than_others(temperature, device):
    drafter, told = make_drafter("eagle3").frozen_copy(), {1: 1, 2: 1.05, 4: 1.1, 8: 1.15}
    known = costs.make_costs(told, plain=0.02, absorb=0.001, step=0.001)
    auto = AutoProposer.make_default(drafter.target, HeadProposer(drafter, TreeShape(3, 1, 3)), costs=known)
    batch = Decoder(drafter.target, auto, sampling=Sampling(temperature), stop=set()).batch()
    batch.admit([Request(random_tokens(seed, 5, VOCAB), 9) for seed in range(2)])
    while batch.running:
        device.waits.clear()
        batch.run_round()
        assert sum(device.waits.values()) <= 2 + 2 * auto.head.depth, device.waits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", HEADS)
def test_a_batch_is_replayed_with_one_wait(head, temperature, device):
    drafter = make_drafter(head).frozen_copy()
    texts = [(random_tokens(seed, 5 + seed, VOCAB), random_tokens(9, 8 - seed, VOCAB)) for seed in range(3)]
    output = replay.read_target(drafter, texts)
    device.waits.clear()
    accepts = [
        each.acceptance
        for each in replay.replay_answers(drafter, texts, depth=2, temperature=temperature, output=output)
    ]
    assert reads(device) <= 1 + (head == "draft"), device.waits
    assert [accept.shape for accept in accepts] == [(2, 8), (2, 7), (2, 6)]
    assert all(bool(((accept >= 0) & (accept <= 1)).all()) for accept in accepts)


class Ready:
    """A reader whose states are there already, on the CPU, as an engine gives them."""

    def __init__(self, width: int):
        self.width = width

    def submit(self, tokens, layers):
        future = Future()
        future.set_result([torch.full((len(tokens), self.width), 1.0 + layer).double() for layer in layers])
        return future


@pytest.mark.parametrize("is_kept", [False, True])
def test_states_of_an_engine_get_their_norm_where_the_step_takes_them(device, is_kept, tmp_path):
    """Without a wait, or with one for all documents of a batch, whose states a folder keeps."""
    target = make_target(VOCAB, num_layers=4, device=ELSEWHERE)
    folder = FeatureFolder(target, (1, 2), tmp_path / "cache") if is_kept else None
    if folder:
        folder.create()
    source, batch = (
        StoredFeatures(target, (1, 4), folder=folder, reader=Ready(target.width)),
        make_batch(),
    )  # 4: the final state
    device.waits.clear()
    begun = source.prefetch(batch)
    assert not device.waits
    output = begun(ELSEWHERE)
    assert sum(device.waits.values()) == (2 if is_kept else 0), device.waits  # to the device and back
    real = (batch.documents >= 0)[..., None]
    wanted = (
        (torch.full_like(output.final, 5.0) * target.norm.weight).cpu() / 5 * real
    )  # the norm of equal numbers is 1
    first, last = output.features.cpu().chunk(2, dim=-1)
    torch.testing.assert_close(output.final.cpu(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(last, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(first, 2.0 * real.expand_as(first))


def test_a_thread_that_reads_states_of_an_engine_leaves_the_device_alone(device, tmp_path):
    source = EngineTarget.__new__(EngineTarget)
    source.target, source.layers = make_target(VOCAB, num_layers=4, device=ELSEWHERE), (1, 2, 4)
    states, path = torch.randn(7, 3, source.target.width).double(), tmp_path / "states.safetensors"
    save_file({"token_ids": torch.arange(7), "hidden_states": states}, path, metadata={"layers": "[1, 2, 4]"})
    answer = {"choices": [{"token_ids": [9]}], "kv_transfer_params": {"hidden_states_path": str(path)}}
    device.waits.clear()
    new, parts = source.read_states(answer, list(range(7)), (2, 4))
    assert new == [9] and not device.waits and all(type(part) is torch.Tensor for part in parts)
    assert torch.equal(parts[0], states[:, 1]) and torch.equal(parts[1], states[:, 2]) and not path.exists()
