"""Texts that several processes divide: losses, gradients and weights are those of one process."""

import importlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from accelerate import PartialState
from torch import distributed as dist

from specdec.core import context_parallel, fast
from specdec.core.context_parallel import WHOLE_TEXT, TextShare
from specdec.unroll.plan import plan_unroll
from tests.support.drafters import VARIANTS, make_drafter, name_of
from tests.support.targets import make_target
from tests.support.together import together
from tests.train.objective.test_fused import PATHS
from tests.train.objective.test_objective import make_objective, make_row
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.processes import share_texts

MODULE = "tests.train.objective.test_context_parallel"
VOCAB = 11
DIVIDED = [variant for variant in VARIANTS if variant[0] != "draft"]
STEPS = 3
FIRST = ["eagle3-whole", "mtp-reduced-num_modules-zero_first"]  # in the first tier


def make_batch():
    """A pack of one long text, whose first half is a prompt without goals, and a pack of several."""
    rows = [make_row(seed, *sizes, VOCAB) for seed, sizes in enumerate([(33, 24), (9, 12), (3, 5), (2, 23)])]
    return collate([rows[:1], rows[1:]], length=59, pad_token=0)


def choose_losses(drafter) -> dict[str, float]:
    """Losses of all kinds that the head has."""
    names = {"smooth_l1": drafter.estimates_state, "confidence": drafter.has_confidence,
             "candidates": drafter.has_candidates}  # fmt: skip
    return {"kl": 1.0, "ce": 0.5} | {name: 0.3 for name, is_used in names.items() if is_used}


def train_steps(drafter, batch, output, share: TextShare, *, fused: bool) -> list[torch.Tensor]:
    """Losses, matches, which gradients are missing, the first step's gradients, and the weights after some steps."""
    options = {} if fused else {"gradient_checkpointing": True, "weighting": "dpace"}
    objective = make_objective(drafter, losses=choose_losses(drafter), decay=1.0, **options)
    objective.text_share = share
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    results: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = objective(batch, output)
        loss.total.backward()
        is_missing = torch.tensor([value.grad is None for value in trained]).double()
        gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in trained]
        for gradient in gradients:
            share.sum(gradient)
        results += [share.sum(loss.total.detach()), loss.matches.double(), is_missing]
        results += gradients if step == 0 else []
        optimizer.step()
    return [value.clone() for value in (*results, *trained)]


@pytest.mark.parametrize("num", [4, 8])
@pytest.mark.parametrize("anchors", [None, 100])
def test_the_slots_of_each_step_are_in_the_part_of_the_process(num, anchors):
    """Those that fill up a multiple, too: a kernel computes all queries from the first slot to the last."""
    drafter, length = make_drafter(make_target(VOCAB), "eagle3", False, {}), 1025
    documents = torch.zeros(1, length, dtype=torch.long)
    positions = torch.arange(length)[None]
    num_slots = (length - 1) // num
    for rank in range(num):
        share = TextShare(rank, num)
        arguments = drafter, documents, positions, positions > 300
        for d, step in enumerate(plan_unroll(*arguments, depth=3, max_anchors=anchors, share=share).steps, start=1):
            columns = step.token_indices - d
            assert columns.min() >= rank * num_slots and columns.max() < (rank + 1) * num_slots
            if anchors is None:  # else they may be too scattered for the kernel
                assert step.key_spans.texts.num_queries <= num_slots
            elif d > 1:
                assert len(step.goals) <= math.ceil(anchors / num)


class ThreadGroup:
    """In the place of torch.distributed: exchanges between threads of one process, whose ranks they set in `local`."""

    def __init__(self, num: int):
        self.num, self.local, self.values = num, threading.local(), [None] * num
        self.barrier = threading.Barrier(num, timeout=60)

    def exchange(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The values of all threads."""
        self.values[self.local.rank] = value
        self.barrier.wait()
        values = [value.clone() for value in self.values]
        self.barrier.wait()
        return values

    def all_gather(self, out, value, group) -> None:
        out.copy_(torch.cat(self.exchange(value)))

    def reduce_scatter(self, out, value, group) -> None:
        out.copy_(sum(self.exchange(value)).chunk(self.num)[self.local.rank])

    def all_reduce(self, value, group) -> None:
        value.copy_(sum(self.exchange(value)))

    def run(self, work) -> list:
        """The results of work(rank) in threads, by rank. A thread that fails frees the others."""

        def run_rank(rank: int):
            self.local.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.num) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(self.num)]
            wait(futures)
        failures = [future.exception() for future in futures if future.exception()]
        for failure in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise failure
        return [future.result() for future in futures]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="LocalTensorMode is used as torch 2.13 has it")
@pytest.mark.parametrize("num", [8, 64])
def test_many_processes_gather_all_keys(num):
    """All ranks in one process: each gets all keys, and its own keys get the gradients of all."""
    local = importlib.import_module("torch.distributed._local_tensor")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    torch.manual_seed(0)
    pair, slopes = torch.randn(2, 2, 3, 3 * num, 4), torch.randn(num, 2, 2, 3, 3 * num, 4)
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=num)
    try:
        with local.LocalTensorMode(num):
            parts = [local.LocalTensor(dict(enumerate(value.chunk(num, 2)))).requires_grad_() for value in pair]
            gathered = TextShare(0, num, dist.group.WORLD).gather(*parts, 3 * num)
            (torch.stack(gathered) * local.LocalTensor(dict(enumerate(slopes)))).sum().backward()
    finally:
        dist.destroy_process_group()
    for values, part, value, slope in zip(gathered, parts, pair, slopes.sum(0)):
        for rank, own_slope in enumerate(slope.chunk(num, 2)):
            assert torch.equal(values._local_tensors[rank], value)
            torch.testing.assert_close(part.grad._local_tensors[rank], own_slope)


def mark_variant(variant):
    return pytest.param(variant, marks=[] if name_of(variant) in FIRST else pytest.mark.full, id=name_of(variant))


@pytest.mark.parametrize(("num", "paths"), [(2, PATHS), (4, ())], ids=["two", "four"])
@pytest.mark.parametrize("variant", map(mark_variant, DIVIDED))
def test_processes_that_divide_texts_train_as_one(variant, num, paths, monkeypatch, in_float64):
    """The first ones have no goals of the first pack, and send keys to the others nevertheless."""
    target, batch = make_target(VOCAB), make_batch()
    group = ThreadGroup(num)
    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(context_parallel, name, getattr(group, name))
    monkeypatch.setattr(context_parallel.dist, "all_reduce", group.all_reduce)
    drafters = [make_drafter(target, *variant) for _ in range(num + 1)]
    output = ComputedFeatures(target, drafters[0].target_layers)(batch)

    def train_part(rank: int) -> list[torch.Tensor]:
        return train_steps(drafters[rank], batch, output, TextShare(rank, num, "group"), fused=bool(paths))

    with fast.force_paths(*paths):
        expected = train_steps(drafters[num], batch, output, WHOLE_TEXT, fused=bool(paths))
        results = group.run(train_part)
    for values in results:
        for value, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=1e-9, rtol=1e-9)


def compare_with_whole(names: list[str]) -> list[float]:
    """In each process: the largest difference of each head, relative to its largest value."""
    PartialState(cpu=True)
    torch.set_default_dtype(torch.float64)
    target, batch = make_target(VOCAB), make_batch()
    share = share_texts(dist.get_world_size(), "cpu", 59)
    differences = []
    for variant in DIVIDED:
        if name_of(variant) in names:
            drafters = [make_drafter(target, *variant) for _ in range(2)]
            output = ComputedFeatures(target, drafters[0].target_layers)(batch)
            whole = train_steps(drafters[0], batch, output, WHOLE_TEXT, fused=True)
            part = train_steps(drafters[1], batch, output, share, fused=True)
            errors = [float((a - b).abs().max() / (1 + a.abs().max())) for a, b in zip(whole, part, strict=True)]
            differences.append(max(errors))
    return differences


@pytest.mark.full
@pytest.mark.parametrize("num", [2, 4])
def test_processes_of_gloo_train_as_one(num):
    results = together(num, f"{MODULE}:compare_with_whole", FIRST)
    assert len(results) == num and all(len(result) == len(FIRST) and max(result) < 1e-9 for result in results)
