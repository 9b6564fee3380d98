"""What torch.compile and the kernel of KL save, for counts on tensors without values (train/prepare/count_tensors.py).

`model_block` stands for torch.compile: in a compiled block, everything between two products is one kernel, that reads
its inputs and writes its results once. What stays the same from run to run is the use: numbers are compared with
budgets.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedConfig

from specdec.core.tree_attention import cut_queries
from specdec.target.model import Target
from train.prepare.count_tensors import (
    ATTENTION_EFFICIENCY,
    GATHERS,
    HOST_READS,
    KERNELS,
    LAUNCH_SECONDS,
    PRODUCT_INDICES,
    TEXT_ATTENTION,
    VIEWS,
    WRITES,
    OperationCount,
    aten,
    count_read_bytes,
    list_tensors,
)

CACHED_ATTENTION = ("attend_texts", "attend_tree")  # attention of decoding, over keys of a cache


class WorkCount(OperationCount):
    """Counts decoding too, and of all operations launches, moved bytes, FLOPs, and waits of the host for the device.

    filled: share of a cache's entries in use, which `attend_texts` and `attend_tree` read
    """

    current: "WorkCount"

    def __init__(self, texts: Sequence[int] = (), *, filled: float = 1.0):
        super().__init__(texts)
        self.filled, self.flops = filled, 0.0
        self.launches = self.moved = self.waits = 0

    def __enter__(self):
        WorkCount.current = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "overloadpacket", func).__name__
        if torch.is_inference_mode_enabled() and func not in HOST_READS and name != "_to_copy":
            TorchDispatchMode.__enter__(self)  # counts the parts of an operation, which autograd takes apart elsewhere
            try:
                answer = func.decompose(*args, **(kwargs or {}))
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
            if answer is not NotImplemented:
                return answer
        return super().__torch_dispatch__(func, types, args, kwargs)

    def answer_host_read(self, func, tensor):
        self.waits += func is aten._local_scalar_dense.default
        return super().answer_host_read(func, tensor)

    def answer_device_copy(self, name, inputs, kwargs):
        device = kwargs.get("device")
        if name == "_to_copy" and device is not None and inputs[0].is_meta != (torch.device(device).type == "meta"):
            self.waits += inputs[0].is_meta or not kwargs.get("non_blocking")
        return super().answer_device_copy(name, inputs, kwargs)

    def add_operation(self, name, inputs, outputs, args):
        self.launches += KERNELS.get(name, 1)
        self.moved += self.count_moved(name, inputs, outputs, args)
        self.flops += self.count_flops(name, args)[0]
        super().add_operation(name, inputs, outputs, args)

    def count_moved(self, name, inputs, outputs, args):
        moved, sizes = super().count_moved(name, inputs, outputs, args), [count_read_bytes(tensor) for tensor in inputs]
        if name == "write_keys":  # of the cache only the pass's entries are written, as many as products are read
            cache = sum(count_read_bytes(tensor) for tensor in args[2:4])
            return sum(sizes) - cache + sum(tensor.nbytes for tensor in args[0])
        if name in CACHED_ATTENTION:
            moved += sum(int(self.filled * size) - size for size in sizes[1:3])
        return moved + self._count_parts(*args[:2]) if name == "attend_tree" else moved

    def _count_parts(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Bytes in float32 that the first kernel of `attend_tree` writes and the second reads: parts of the outputs."""
        *_, num_parts = cut_queries(query.shape, key.shape[1])
        used = min(num_parts, 1 + -(-int(self.filled * key.shape[2]) // 64))
        return 2 * 4 * query.numel() * used

    def count_flops(self, name, args):
        if name not in CACHED_ATTENTION:
            return super().count_flops(name, args)
        if name == "attend_texts":  # 128 queries at a time, of which a few may be real
            rows = args[0].shape[0] * -(-args[0].shape[1] // 128) * 128
            keys = self.filled * args[1].shape[0] / args[0].shape[0]
            flops = 4.0 * rows * keys * args[0].shape[2]
        else:
            rows, groups, capacity, width = args[1].shape
            size, tiles, _ = cut_queries(args[0].shape, groups)
            flops = 4.0 * rows * groups * tiles * size * self.filled * capacity * width
        return flops, ATTENTION_EFFICIENCY * self.peak


def meta_target(config: PreTrainedConfig) -> Target:
    """A target without values in bfloat16"""
    return Target.outline(config, name="meta")


def model_block(function: Callable) -> Callable:
    """A stand-in for `torch.compile(function)` while it is counted: the same operations, and one kernel between two
    products.
    """
    meta_functions: dict[tuple, Callable] = {}

    def run(module: torch.nn.Module, *inputs, **options):
        weights = dict(module.named_parameters())
        for name, part in module.named_modules():  # matrices that were cast once
            weights |= (
                {f"{name}.weight".lstrip("."): part.weight}
                if isinstance(part.__dict__.get("weight"), torch.Tensor)
                else {}
            )
        tensors = [*weights.values()] + [each for each in list_tensors(inputs) if each.requires_grad]
        training = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        key = (training, type(module), *(each.shape for each in list_tensors(inputs)))
        if not training:
            with _disable_current_modes():
                graph = make_fx(lambda *inputs_: function(module, *inputs_, **options))(*inputs)
            return _FusedRun(graph)(*inputs)
        if key not in meta_functions:
            names = list(weights)

            def plain(*arguments):
                with _replaced(module, dict(zip(names, arguments))):
                    return function(module, *arguments[len(names) :])

            meta_functions[key] = aot_function(
                plain,
                fw_compiler=lambda graph, _: _FusedRun(graph),
                bw_compiler=lambda graph, _: _FusedRun(graph),
                partition_fn=min_cut_rematerialization_partition,
            )
            count = WorkCount.current
            WorkCount.current = WorkCount()  # the first call traces, which is not counted
            with _disable_current_modes():
                meta_functions[key](*weights.values(), *inputs)
            WorkCount.current = count
        return meta_functions[key](*weights.values(), *inputs)

    return run


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, weights: dict[str, torch.Tensor]):
    """Within, the module computes with these."""
    before = []
    for name, value in weights.items():
        place, _, leaf = name.rpartition(".")
        owner = module.get_submodule(place)
        tensors = owner._parameters if leaf in owner._parameters else owner.__dict__
        before.append((tensors, leaf, tensors[leaf]))
        tensors[leaf] = value
    try:
        yield
    finally:
        for tensors, leaf, value in before:
            tensors[leaf] = value


class _FusedRun:
    """A graph of operations, counted as products and fused kernels between them."""

    def __init__(self, graph: torch.fx.GraphModule):
        self.graph = graph

    def __call__(self, *inputs):
        count = WorkCount.current
        with _disable_current_modes():
            run = _Values(self.graph)
            result = run.run(*inputs)
        for members in self._count_products(count, run.values).values():
            _count_fused_kernel(count, members, run.values)
        old_storages = {tensor.untyped_storage()._cdata for tensor in list_tensors(inputs)}
        for tensor in list_tensors(result if isinstance(result, list | tuple) else [result]):
            if tensor.untyped_storage()._cdata not in old_storages:
                count._watch_storage(tensor.untyped_storage())
        return result

    def _count_products(self, count: WorkCount, values: dict) -> dict[int, list[torch.fx.Node]]:
        """Counts the products. -> the pointwise operations by the number of products before them"""
        level: dict[torch.fx.Node, int] = {}
        groups: dict[int, list[torch.fx.Node]] = defaultdict(list)
        for node in self.graph.graph.nodes:
            levels = [level[source] + (_kind(source) == "product") for source in node.all_input_nodes]
            level[node] = max(levels, default=0)
            if _kind(node) == "product":
                factors = list_tensors([values[source] for source in node.all_input_nodes])
                args = torch.fx.map_arg(node.args, lambda source: values[source])
                count.add_operation(_name(node), factors, list_tensors([values[node]]), args)
            elif _kind(node) == "point":
                groups[level[node]].append(node)
        return groups


def _count_fused_kernel(count: WorkCount, members: list[torch.fx.Node], values: dict) -> None:
    """Counts the kernel that computes these pointwise operations."""
    inside = set(members)
    read_nodes = {_source(source) for node in members for source in _read_whole(node)} - inside
    written_nodes = {node for node in members if any(_outside(user, inside) for user in node.users)}
    written_nodes |= {node.args[2] for node in members if _name(node) in WRITES}  # into a part of a larger tensor
    moved_tensors = list_tensors([values.get(node) for node in read_nodes | written_nodes])
    moved = sum(count_read_bytes(tensor) for tensor in moved_tensors)
    # What was taken out of a larger tensor and is a factor of a product is made by a kernel of its own
    count.launches += 1 + sum(_name(node) == "index" and node in written_nodes for node in members)
    count.moved += moved
    count.seconds += max(LAUNCH_SECONDS, moved / count.bandwidth)


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
    if name in PRODUCT_INDICES or name in (*TEXT_ATTENTION, *CACHED_ATTENTION):
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
