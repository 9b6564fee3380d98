"""Counts what a GPU would be given to do, without one: the project's own code runs on tensors that have shapes but no values.

    target = meta_target(config)                     # on the device "meta", so every branch for a device beside the CPU is taken
    with Count() as count, Autocast():
        ...
    count.launches, count.moved, count.live, count.waits

A view is no launch, attention of torch is one, and an operation that is several kernels counts as several (KERNELS). Bytes moved are those
of all arguments and results of launches, as caches are small beside them; live bytes are those of the tensors that were made.
Where the host reads a value it waits, and it reads a one. What stays the same from run to run is the use: numbers are compared with budgets.

`count.seconds` is a roofline of one H100: a product runs at a share of the peak that depends on its smallest dimension (EFFICIENCY),
attention over texts at ATTENTION, everything else at 80 % of the bandwidth and in at least 2 microseconds. `model_blocks` stands for
torch.compile: in a compiled block, everything between two products is one kernel, that reads its inputs and writes its results once.
"""

import contextlib
import unittest.mock
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specdec.core.compile import Runner
from specdec.target import attention
from specdec.target.model import Target

aten = torch.ops.aten
PEAK, BANDWIDTH = 989e12, 0.8 * 3.35e12  # of an H100 in bfloat16; bytes/s that kernels reach
EFFICIENCY = ((512, 0.65), (128, 0.5), (32, 0.35), (0, 0.1))  # of a product whose smallest dimension is at least this
ATTENTION = 0.45
LAUNCH, PRODUCT_LAUNCH = 2e-6, 3e-6
GEMMS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
TEXTS = {
    "attend_segments": 1.0,
    "attend_segments_backward": 2.5,
    "attend_texts": 1.0,
}  # products of queries and keys, of forward ones
VIEWS = set(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze alias as_strided split split_with_sizes unbind "
    "detach _reshape_alias diagonal lift_fresh empty empty_like new_empty empty_strided new_empty_strided is_same_size".split()
)
KERNELS = {"logsumexp": 7, "sort": 6, "topk": 3, "cumsum": 2, "cummax": 2, "index_put_": 2, "index_put": 3, "nonzero": 4,
           "_index_put_impl_": 2, "embedding_dense_backward": 6, "argmax": 2, "max": 2,
           "attend_segments_backward": 3}  # fmt: skip
FILLS = set(
    "zeros ones full zeros_like ones_like full_like new_zeros new_full fill_ zero_ arange rand rand_like".split()
)
WRITES = {"index_put_", "_index_put_impl_"}
GATHERS = {"index_select", "gather", "embedding", "index"}
PRODUCTS = {
    F.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.bmm,
    torch.mm,
}


def meta_target(config: PreTrainedConfig, monkeypatch) -> Target:
    """A target without values in bfloat16, of which nothing is checked that values would be needed for"""
    monkeypatch.setattr("specdec.target.model.fingerprint_of_model", lambda *_: "0" * 16)
    monkeypatch.setattr(Target, "_check_logits", lambda self: None)
    with torch.device("meta"), Count():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
        return Target(model, name="meta")


class Count(TorchDispatchMode):
    """moved, live: bytes; live: the most at one time, of what was made within; waits: of the host for the device

    seconds, flops: of the roofline; texts: lengths of the documents that attention over texts reads
    filled: the share of a cache's entries that are in use, which is what `attend_texts` reads of them
    """

    supports_higher_order_operators = True
    current: "Count"

    def __init__(self, texts: Sequence[int] = (), *, filled: float = 1.0) -> None:
        super().__init__()
        self.filled = filled
        self.launches = self.moved = self.live = self.waits = self._now = 0
        self.seconds = self.flops = 0.0
        self.pairs = sum(num * (num + 1) / 2 for num in texts)  # of a query and a key that it sees
        self._known: dict[int, weakref.ref] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        Count.current = self
        self._undo.enter_context(_FusedAttention())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "overloadpacket", func).__name__
        given = _tensors([*args, *kwargs.values()])
        there = any(each.is_meta for each in given)
        if func is aten._local_scalar_dense.default and there:
            self.waits += 1
            return given[0].dtype.is_floating_point or given[0].dtype == torch.bool or 1
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and given[0].is_meta != (torch.device(to).type == "meta"):
            self.waits += there or not kwargs.get("non_blocking")
            if there:
                return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        parts = self._in_parts(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        made = [each for each in _tensors([out]) if each.is_meta]
        if not made and not there:
            return out
        old = {each.untyped_storage()._cdata for each in given}
        for each in made:
            if each.untyped_storage()._cdata not in old:
                self._watch(each.untyped_storage())
        if name not in VIEWS:
            self.add(name, given, made, args)
        return out

    def _in_parts(self, func, args, kwargs):
        """What autograd would take apart comes whole in inference mode."""
        if not torch.is_inference_mode_enabled():
            return NotImplemented
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def add(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor], args: Sequence) -> None:
        """One operation that is not a view."""
        self.launches += KERNELS.get(name, 1)
        read, written = [_read(each) for each in given], sum(each.nbytes for each in made)
        if name in FILLS:
            read = []
        elif name in GATHERS:  # of the first argument only what is taken
            read[0] = written
        elif name in WRITES:
            read, written = read[-1:], read[-1]
        elif name == "logsumexp":
            read = 5 * read
        elif name == "attend_texts":
            read[1:3] = [int(self.filled * each) for each in read[1:3]]
        self.moved += sum(read) + written
        self._take_time(name, sum(read) + written, args)

    def _take_time(self, name: str, moved: float, args: Sequence) -> None:
        flops, seconds, least = 0.0, moved / BANDWIDTH, LAUNCH * KERNELS.get(name, 1)
        if name in GEMMS:
            left, right = args[GEMMS[name]], args[GEMMS[name] + 1]
            flops, least = 2.0 * left.numel() * right.shape[-1], PRODUCT_LAUNCH
            smallest = min(left.shape[-2], left.shape[-1], right.shape[-1])
            share = next(share for size, share in EFFICIENCY if smallest >= size)
            seconds = max(seconds, flops / (share * PEAK if left.element_size() < 4 else 0.7 * 60e12))
        elif name == "attend_texts":  # 128 queries at a time, of which a few may be real
            rows = args[0].shape[0] * -(-args[0].shape[1] // 128) * 128
            keys = self.filled * args[1].shape[0] / args[0].shape[0]
            flops = 4.0 * rows * keys * args[0].shape[2]
            seconds = max(seconds, flops / (ATTENTION * PEAK))
        elif name in TEXTS:
            query = args[TEXTS[name] > 1]
            flops = 4.0 * TEXTS[name] * query.shape[1] * query.shape[2] * self.pairs
            seconds = max(seconds, flops / (ATTENTION * PEAK))
        self.flops += flops
        self.seconds += max(seconds, least)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.size()
        if key in self._known:
            return

        def gone(_) -> None:
            if self._known.pop(key, None) is not None:
                self._now -= size

        self._known[key] = weakref.ref(storage, gone)
        self._now += size
        self.live = max(self.live, self._now)


def model_block(function: Callable) -> Callable:
    """A stand-in for `torch.compile(function)` while it is counted: the same operations, and one kernel between two products."""
    known: dict[tuple, Callable] = {}

    def run(module: torch.nn.Module, *inputs, **options):
        weights = dict(module.named_parameters())
        for name, part in module.named_modules():  # matrices that were cast once
            weights |= (
                {f"{name}.weight".lstrip("."): part.weight}
                if isinstance(part.__dict__.get("weight"), torch.Tensor)
                else {}
            )
        tensors = [*weights.values()] + [each for each in _tensors(inputs) if each.requires_grad]
        training = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        key = (training, type(module), *(each.shape for each in _tensors(inputs)))
        if not training:
            with _disable_current_modes():
                graph = make_fx(lambda *given: function(module, *given, **options))(*inputs)
            return _FusedRun(graph)(*inputs)
        if key not in known:
            names = list(weights)

            def plain(*given):
                with _replaced(module, dict(zip(names, given))):
                    return function(module, *given[len(names) :])

            known[key] = aot_function(
                plain, fw_compiler=lambda graph, _: _FusedRun(graph), bw_compiler=lambda graph, _: _FusedRun(graph),
                partition_fn=min_cut_rematerialization_partition,
            )  # fmt: skip
            count, Count.current = Count.current, Count()  # the first call traces, which is not counted
            with _disable_current_modes():
                known[key](*weights.values(), *inputs)
            Count.current = count
        return known[key](*weights.values(), *inputs)

    return run


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, weights: dict[str, torch.Tensor]):
    """Within, the module computes with these."""
    before = []
    for name, value in weights.items():
        place, _, leaf = name.rpartition(".")
        owner = module.get_submodule(place)
        known = owner._parameters if leaf in owner._parameters else owner.__dict__
        before.append((known, leaf, known[leaf]))
        known[leaf] = value
    try:
        yield
    finally:
        for known, leaf, value in before:
            known[leaf] = value


class ModelledRunner(Runner):
    """Compiles as a runner does, but its compiled functions are counted as products and fused kernels between them."""

    def __init__(self) -> None:
        super().__init__(True)

    def _build(self, name, function, inputs):
        with (
            _disable_current_modes(),
            unittest.mock.patch("torch._inductor.compile", lambda module, *_, **__: _FusedRun(module)),
        ):
            return super()._build(name, function, inputs)


class _FusedRun:
    """A graph of operations, counted as products and fused kernels between them."""

    def __init__(self, graph: torch.fx.GraphModule):
        self.graph = graph

    def __call__(self, *inputs):
        count = Count.current
        with _disable_current_modes():
            run = _Values(self.graph)
            result = run.run(*inputs)
        level: dict[torch.fx.Node, int] = {}
        groups: dict[int, list[torch.fx.Node]] = defaultdict(list)
        for node in self.graph.graph.nodes:
            before = [(level[each], each) for each in node.all_input_nodes]
            level[node] = max((number + (_kind(each) == "product") for number, each in before), default=0)
            if _kind(node) == "product":
                given = [
                    run.values[each] for each in node.all_input_nodes if isinstance(run.values[each], torch.Tensor)
                ]
                args = torch.fx.map_arg(node.args, lambda each: run.values[each])
                count.add(_name(node), given, _tensors([run.values[node]]), args)
            elif _kind(node) == "point":
                groups[level[node]].append(node)
        for members in groups.values():
            inside = set(members)
            read = {_source(each) for node in members for each in _read_whole(node)} - inside
            written = {node for node in members if any(_outside(user, inside) for user in node.users)}
            written |= {node.args[2] for node in members if _name(node) in WRITES}  # into a part of a larger tensor
            moved = sum(_read(each) for node in read | written for each in _tensors([run.values.get(node)]))
            # What was taken out of a larger tensor and is a factor of a product is made by a kernel of its own
            count.launches += 1 + sum(_name(node) == "index" and node in written for node in members)
            count.moved += moved
            count.seconds += max(LAUNCH, moved / BANDWIDTH)
        old = {each.untyped_storage()._cdata for each in _tensors(inputs)}
        for each in _tensors(result if isinstance(result, list | tuple) else [result]):
            if each.untyped_storage()._cdata not in old:
                count._watch(each.untyped_storage())
        return result


class _Values(torch.fx.Interpreter):
    """Keeps what each node gave."""

    def __init__(self, graph):
        super().__init__(graph, garbage_collect_values=False)
        self.values: dict[torch.fx.Node, object] = {}

    def run_node(self, node):
        self.values[node] = super().run_node(node)
        return self.values[node]


def _name(node: torch.fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))


def _kind(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return "place"
    name = _name(node)
    if name in GEMMS or name in TEXTS:
        return "product"
    return "place" if name in VIEWS or name == "getitem" else "point"


def _read_whole(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a node reads, but not the tensor of which it takes or writes a part only"""
    return [each for each in node.all_input_nodes if each is not node.args[0] or _name(node) not in WRITES | GATHERS]


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """What a view looks at"""
    while node.op == "call_function" and _kind(node) == "place" and _name(node) != "getitem":
        node = node.all_input_nodes[0]
    return node


def _outside(user: torch.fx.Node, inside: set) -> bool:
    """Whether a result is read behind its kernel, by another one or as a result of the graph"""
    if _kind(user) == "place" and user.op != "output":
        return any(_outside(each, inside) for each in user.users)
    return user not in inside


def _tensors(values) -> list[torch.Tensor]:
    """Those among them, and in lists of them"""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _read(tensor: torch.Tensor) -> int:
    """Bytes; those of an expanded tensor are read once."""
    return min(tensor.nbytes, tensor.untyped_storage().size()) if 0 in tensor.stride() else tensor.nbytes


@torch.library.custom_op("specdec_tests::attention", mutates_args=())
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("it is counted on meta tensors, never computed")


@_attention.register_fake
def _(query, key, value, mask):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)


@torch.library.custom_op("specdec_tests::kl", mutates_args=())
def _kl(logits: torch.Tensor, goal: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("it is counted on meta tensors, never computed")


@_kl.register_fake
def _(logits, goal, rows):
    return logits.new_empty(len(logits), dtype=torch.float32)


class _ModelledKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, goal, rows, temperature):
        ctx.slope = logits.detach()
        return _kl(logits, goal, rows)

    @staticmethod
    def backward(ctx, grad):
        slope, ctx.slope = ctx.slope, None
        return slope.mul_(grad[:, None].to(slope.dtype)), None, None, None


def model_kl(logits, goal, rows, temperature):
    """A stand-in for the kernel of KL, which reads logits and goals and writes slopes over the logits."""
    return _ModelledKL.apply(logits, goal, rows, temperature)


class _FusedAttention(TorchFunctionMode):
    """torch's attention, which decomposes itself on this device, is one operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            query, key, value, mask = (*args, *[None] * 4)[:4]
            return _attention(query, key, value, (kwargs or {}).get("attn_mask", mask))
        return func(*args, **(kwargs or {}))


class Autocast(TorchFunctionMode):
    """As torch.autocast to bfloat16, which there is not for this device: each weight is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = (tree_map(self._low, (args, kwargs or {}))) if func in PRODUCTS else (args, kwargs or {})
        return func(*args, **kwargs)

    def _low(self, value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        if id(value) not in self.cast:
            self.cast[id(value)] = value.to(torch.bfloat16)
        return self.cast[id(value)]
