"""Functions of tensors, traced for the shapes they are called with and compiled by inductor.

torch.compile checks guards and unpacks modules at every call, which for a small model costs more than the arithmetic
(results/15-compiled-decoder.md). Here there are no guards: the caller must not change anything but the tensors that it passes. On a CPU the
weights of linear layers are reordered once into oneDNN's blocked layout, and several products of one tensor are joined.
"""

import copy
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specdec.core import fast, precision
from specdec.core.devices import name_cause

LINEAR = {torch.ops.aten.mm.default: (None, 0, 1), torch.ops.aten.addmm.default: (0, 1, 2)}  # bias, input, weight.T
# The kernels between the products are too small for several threads; C++ around them saves a third of the overhead.
# Asserts of sizes are not needed: Runner compares shapes and strides itself, and packed weights have none.
CPU_OPTIONS = {"cpp.threads": 1, "cpp_wrapper": True, "size_asserts": False}

MAX_GRAPHS = 32  # CUDA graphs that a runner keeps; each holds its inputs and outputs

torch.library.define("specdec::packed_linear", "(Tensor input, Tensor weight) -> Tensor")


@torch.library.impl("specdec::packed_linear", "CompositeExplicitAutograd")
def _packed_linear(input: Tensor, weight: Tensor) -> Tensor:
    """input [M, D], weight [E, D] as `pack` returns it -> [M, E]"""
    return torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")


@torch.library.register_fake("specdec::packed_linear")
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


@functools.cache
def _lower_packed_linear() -> None:
    """Makes inductor call oneDNN directly: its own lowering of that operator accepts constants only."""
    from torch._inductor import ir, mkldnn_ir  # slow to import, and needed only to compile
    from torch._inductor.lowering import register_lowering

    def lower(input, weight):
        input = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(input))
        weight = ir.ExternKernel.realize_input(weight)
        layout = ir.FixedLayout(input.get_device(), input.get_dtype(), [input.get_size()[0], weight.get_size()[0]])
        return ir.TensorBox.create(mkldnn_ir.LinearUnary(layout, [input, weight], [None, "none", [-1], ""]))

    register_lowering(torch.ops.specdec.packed_linear.default, type_promotion_kind=None)(lower)


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN packs a weight of this device and dtype, and this CPU computes in it (precision.py)."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    return torch.backends.mkldnn.is_available() and (
        weight.dtype == torch.float32 or precision.choose_dtype(weight.device).dtype == "bfloat16"
    )


def pack_weights(weights: Sequence[Tensor]) -> Tensor:
    """[E_i, D] each -> [sum of E_i, D] in oneDNN's blocked layout, an opaque tensor"""
    return torch.ops.mkldnn._reorder_linear_weight(torch.cat(list(weights)).contiguous(), 1)


JOINED_LAYERS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers of a module that read one tensor


def join_products(model: nn.Module) -> None:
    """Puts weights of layers that read one tensor behind one another in memory, so that a compiled function has one product of
    them without a copy. Call it before anything else keeps their addresses, and where nothing shares or converts them."""
    for module in model.modules():
        for names in JOINED_LAYERS:
            layers = [getattr(module, name, None) for name in names]
            linear = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linear) == len(layers) and len({(each.in_features, each.weight.dtype) for each in linear}) == 1:
                joined = torch.cat([layer.weight.data for layer in linear])
                for layer, row_slice in zip(linear, joined.split([layer.out_features for layer in linear])):
                    layer.weight.data = row_slice


def is_joined(weights: Sequence[Tensor]) -> bool:
    """Whether they are several, as `join_products` leaves them."""
    ends = itertools.accumulate((weight.numel() for weight in weights), initial=weights[0].storage_offset())
    return len(weights) > 1 and all(
        weight.is_contiguous() and _memory_location(weight) == (_memory_location(weights[0])[0], end)
        for weight, end in zip(weights, ends)
    )


def _memory_location(tensor: Tensor) -> tuple[int, int]:
    """Where it is in memory, also of a tensor without values: its storage, and the place there"""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class Graph:
    """`function`, traced on `inputs` and compiled; `captured` are the tensors that it closes over.

    If the function changes an argument in place, so does the compiled one. Outputs are a tensor or a flat tuple.
    """

    def __init__(self, function: Callable, inputs: Sequence[Tensor]):
        _lower_packed_linear()
        traced = make_fx(lambda *inputs: function(*inputs))(*inputs)  # fx would count the self of a bound method
        self.graph = traced.graph
        self.last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        self.captured: list[Tensor] = []
        self.weight_indices: list[list[int]] = []  # the weights of each joined product, by place in `captured`
        captured_nodes = self._lift(traced)
        self._pack_products(captured_nodes)
        output = next(node for node in self.graph.nodes if node.op == "output")
        self.single = isinstance(output.args[0], fx.Node)
        output.args = ((output.args[0],),) if self.single else (tuple(output.args[0]),)
        self.graph.set_codegen(fx.graph.CodeGen())
        self.graph.eliminate_dead_code()
        for node in self.graph.nodes:
            node.meta.clear()
        module = fx.GraphModule(traced, self.graph)
        options = CPU_OPTIONS if all(tensor.device.type == "cpu" for tensor in inputs) else {}
        # Inductor stores its results on disk if the examples are fake, static and not in oneDNN's layout.
        fake = FakeTensorMode(shape_env=ShapeEnv())
        fake_inputs, captured = (
            [fake.from_tensor(tensor, static_shapes=True) for tensor in tensors] for tensors in (inputs, self.captured)
        )
        with fake:
            joined = [torch.cat([captured[place] for place in places]) for places in self.weight_indices]
        examples: list = [*fake_inputs, *captured, *joined]
        self.compiled = torch._inductor.compile(module, examples, options=dict(options))

    def bind(self, captured: Sequence[Tensor], packed: dict[tuple, Tensor]) -> Callable:
        """The function with these tensors in place of those that it closes over; packed: weights packed so far"""
        compiled, constants = self.compiled, list(captured)
        for indices in self.weight_indices:
            weights = [captured[place] for place in indices]
            key = tuple(map(_memory_location, weights))
            if is_joined(weights):
                size = sum(map(len, weights)), weights[0].shape[1]
                constants.append(weights[0].as_strided(size, (size[1], 1)))
                continue
            if key not in packed:
                packed[key] = pack_weights(weights) if is_packable(weights[0]) else torch.cat(weights)
            constants.append(packed[key])
        if self.single:
            return lambda *inputs: compiled(*inputs, *constants)[0]
        return lambda *inputs: compiled(*inputs, *constants)

    def _placeholder(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.placeholder(name)
        return self.last

    def _lift(self, traced: fx.GraphModule) -> list[fx.Node]:
        """Turns the tensors that the function closes over into arguments."""
        nodes: dict[int, fx.Node] = {}
        for node in [node for node in self.graph.nodes if node.op == "get_attr"]:
            tensor = getattr(traced, node.target)
            if id(tensor) not in nodes:
                nodes[id(tensor)] = self._placeholder(f"captured_{len(self.captured)}")
                self.captured.append(tensor)
            node.replace_all_uses_with(nodes[id(tensor)])
            self.graph.erase_node(node)
        return list(nodes.values())

    def _pack_products(self, captured_nodes: list[fx.Node]) -> None:
        """Replaces x @ weight.T by the packed product, and several products of one x by one."""
        groups: dict[
            object, list[tuple[fx.Node, int, fx.Node | None]]
        ] = {}  # by x: products, each with the place of its weight and its bias
        for node in self.graph.nodes:
            if node.target not in LINEAR:
                continue
            bias, x, weight = _list_operands(node)
            if weight.target is torch.ops.aten.t.default and weight.args[0] in captured_nodes:
                weight_index = captured_nodes.index(weight.args[0])
                key = (x.args[0], *x.args[1]) if x.target is torch.ops.aten.view.default else x
                groups.setdefault((is_packable(self.captured[weight_index]), key), []).append(
                    (node, weight_index, bias)
                )
        for members in groups.values():
            first, weights = members[0][0], [self.captured[place] for _, place, _ in members]
            if not (is_packable(weights[0]) or is_joined(weights)):
                continue
            packed = self._placeholder(f"packed_{len(self.weight_indices)}")
            self.weight_indices.append([place for _, place, _ in members])
            with self.graph.inserting_before(first):
                x = _list_operands(first)[1]
                if is_packable(weights[0]):
                    product, factor = torch.ops.specdec.packed_linear.default, packed
                else:
                    product, factor = (
                        torch.ops.aten.mm.default,
                        self.graph.call_function(torch.ops.aten.t.default, (packed,)),
                    )
                joined_product = self.graph.call_function(product, (x, factor))  # [M, E]
                stop = 0
                for node, weight_index, bias in members:
                    start, stop = stop, stop + self.captured[weight_index].shape[0]
                    product_slice = self.graph.call_function(
                        torch.ops.aten.slice.Tensor, (joined_product, 1, start, stop)
                    )
                    if bias is not None:
                        product_slice = self.graph.call_function(torch.ops.aten.add.Tensor, (product_slice, bias))
                    node.replace_all_uses_with(product_slice)
            for node, _, _ in members:
                self.graph.erase_node(node)


def _list_operands(product: fx.Node) -> tuple:
    """bias (or None), input and transposed weight of a node whose target is in LINEAR"""
    return tuple(None if index is None else product.args[index] for index in LINEAR[product.target])  # type: ignore[index]


class Runner:
    """Calls functions, or compiles each of them for every set of shapes that it is called with.

    A compiled function is looked up by its name and shapes. So one name must always stand for one function, and what it
    reads besides its arguments, such as a model, must not change. `seconds`: time spent on tracing and compiling.
    cuda_graphs: whether `whole` captures CUDA graphs; of both None: not, until somebody finds out what is faster (decoding/fastest.py)
    What cannot be compiled is an error where compiling was asked for, else one warning, and nothing is compiled from then on.
    """

    def __init__(self, compile: bool | None = False, *, cuda_graphs: bool | None = False):
        self.requested = compile, cuda_graphs
        self.undecided = None in self.requested
        self.compile, self.cuda_graphs, self.seconds = bool(compile), bool(cuda_graphs), 0.0
        self.graphs, self.pool = dict[tuple, Replay](), GraphPool()
        self.compiled: dict[tuple, Callable | list[Callable]] = {}
        self.packed: dict[tuple, Tensor] = {}  # by the places of the weights

    def follow(self, leader: "Runner") -> None:
        """Does as another one in what this one was not told."""
        if self.undecided and not leader.undecided:
            self.compile, self.cuda_graphs, self.undecided = leader.compile, leader.cuda_graphs, False

    def stop_compiling(self, error: Exception) -> None:
        """Raises the error if compiling was asked for."""
        if self.requested[0]:
            raise error
        if self.compile:
            warnings.warn(f"Passes go on without compiling: {name_cause(error)}", stacklevel=4)
        self.compile = False

    @property
    def by_shape(self) -> bool:
        """Whether a new shape costs time, so that few should occur."""
        return self.compile or self.cuda_graphs

    def __call__(self, name: object, function: Callable, *inputs: Tensor):
        """function(*inputs), whose result is a tensor or a flat tuple of tensors"""
        if not self.compile:
            return function(*inputs)

        def build() -> Callable:
            graph = self._build(name, function, inputs)
            return graph.bind(graph.captured, self.packed)

        return (self._find_compiled(name, inputs, build) or function)(*inputs)

    def run_whole(
        self,
        name: object,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        memory: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """function(*inputs), from a CUDA graph of it if those are wanted. The function may itself call this runner.

        name: stands for all that the function reads besides tensors, as it was at its first call
        memory: tensors that it reads or writes in place besides its inputs and weights, such as a cache's K and V. The graph is
        for these tensors only, so another cache needs another graph. Any other tensor may be gone when the graph is replayed.
        Where a graph cannot be captured, one warning says so, and there are none from then on.
        """
        if not self.cuda_graphs:
            return function(*inputs)
        locations = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in memory)
        key = (name, locations, *(tensor.shape for tensor in inputs))
        if key not in self.graphs:
            compiling, start = self.seconds, time.perf_counter()
            try:
                self.graphs[key] = capture_graph(function, inputs, self.pool)
            except RuntimeError as error:
                self.cuda_graphs = False
                warnings.warn(f"No CUDA graphs, passes are started one by one: {name_cause(error)}", stacklevel=2)
                return function(*inputs)
            finally:
                self.seconds = compiling + time.perf_counter() - start
            if len(self.graphs) > MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
        return self.graphs[key](*inputs)

    def _find_compiled(self, name: object, inputs: Sequence[Tensor], build: Callable[[], Any]) -> Any:
        """What `build` compiles for inputs of these shapes, kept; None where that cannot be compiled."""
        key = (name, *((tensor.shape, tensor.stride()) for tensor in inputs))
        if key not in self.compiled:
            start = time.perf_counter()
            try:
                compiled = build()
                for function in compiled if isinstance(compiled, list) else [compiled]:
                    function(*inputs)  # the first call loads code and fills caches
                self.compiled[key] = compiled
            except Exception as error:
                self.stop_compiling(error)
                return None
            finally:
                self.seconds += time.perf_counter() - start
        return self.compiled[key]

    def compile_layers(
        self, name: object, function: Callable, modules: Iterable[nn.Module], *inputs: Tensor
    ) -> list[Callable]:
        """For each of several modules, which differ in their weights only: inputs -> function(module, *inputs)

        Raises ValueError if the modules' parameters differ in name or shape.
        """
        if not self.compile:
            return [functools.partial(function, module) for module in modules]
        modules = list(modules)
        compiled = self._find_compiled(name, inputs, lambda: self._build_layers(name, function, modules, inputs))
        return compiled or [functools.partial(function, module) for module in modules]

    def _build_layers(
        self, name: object, function: Callable, modules: Sequence[nn.Module], inputs: Sequence[Tensor]
    ) -> list[Callable]:
        first, *_ = modules
        shapes, *other_shapes = [
            {name: tensor.shape for name, tensor in _list_tensors(module).items()} for module in modules
        ]
        if any(other != shapes for other in other_shapes):
            raise ValueError(f"{name} differs from place to place in more than its weights: set compile=false.")
        graph = self._build(name, lambda *inputs: function(first, *inputs), inputs)
        names = {_memory_location(tensor): place for place, tensor in _list_tensors(first).items()}
        wanted = [(names.get(_memory_location(tensor)), tensor) for tensor in graph.captured]
        return [
            graph.bind([tensors[place] if place else shared for place, shared in wanted], self.packed)
            for tensors in map(_list_tensors, modules)
        ]

    def _build(self, name: object, function: Callable, inputs: Sequence[Tensor]) -> Graph:
        try:
            return Graph(function, inputs)
        except Exception as error:  # tracing runs the model's code and compiling runs a compiler: any error can occur
            raise ValueError(
                f"{name} could not be compiled ({name_cause(error)}). Inductor needs a C++ compiler on a CPU; compile=false "
                "decodes without it."
            ) from error


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# Blocks of a training step, by torch.compile: what stands between matrix products becomes few kernels, also in the backward pass.

BACKEND = "inductor"
RECOMPILE_LIMIT = 64  # for one function: kinds of layers, and numbers of slots until torch takes that size as unknown


@functools.cache
def _compile_block(function: Callable) -> Callable:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(function, fullgraph=True, backend=BACKEND)


def run_block(function: Callable, module: nn.Module, *inputs, **options):
    """function(module, *inputs, **options), compiled. Where torch cannot compile it, one sentence says so, and it runs as it is."""
    if function not in _not_compiled:
        try:
            return _compile_block(function)(module, *inputs, **options)
        except Exception as error:
            if not isinstance(error, TorchDynamoException | InductorError):
                raise
            _not_compiled.add(function)
            cause = getattr(error, "inner_exception", error)  # of a backend
            fast.leave_out("blocks", f"{function.__qualname__} could not be compiled ({name_cause(cause)})")
    return function(module, *inputs, **options)


_not_compiled: set[Callable] = set()


def training_block(function: Callable) -> Callable:
    """Decorates a method of a module, of tensors only, which training runs compiled where the device allows it."""

    @functools.wraps(function)
    def run(module: nn.Module, first: Tensor, *inputs):
        if torch.is_grad_enabled() and fast.allows("blocks", first.device):
            return run_block(function, cast_once(module, first.device), first, *inputs)
        return function(module, first, *inputs)

    return run


_mirrors: dict[nn.Module, nn.Module] = {}


def forget_casts() -> None:
    """A training step calls this first: weights have changed."""
    _mirrors.clear()


def cast_once(module: nn.Module, device: torch.device) -> nn.Module:
    """Under autocast the module with its matrices in 16 bits, cast once until `forget_casts`; else the module itself.

    Autocast inside a compiled function would cast them at every step of the unroll, and keep each copy for the backward pass.
    """
    dtype = autocast_dtype(device)
    if dtype is None:
        return module
    if module not in _mirrors:
        _mirrors[module] = mirror = _copy_module(module)
        for copied, original in zip(mirror.modules(), module.modules()):
            if isinstance(original, nn.Linear) and "weight" not in copied._parameters:
                copied.__dict__["weight"] = original.weight.to(dtype)
    return _mirrors[module]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast; None without it"""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _copy_module(module: nn.Module) -> nn.Module:
    """The same module and parameters, in which matrices of linear layers can be replaced."""
    mirror = copy.copy(module)
    mirror.__dict__ = dict(module.__dict__)
    mirror._modules = {name: child and _copy_module(child) for name, child in module._modules.items()}
    mirror._parameters = dict(module._parameters)
    if isinstance(module, nn.Linear) and module.weight.requires_grad and module.weight.dtype == torch.float32:
        del mirror._parameters["weight"]
    return mirror


def check_blocks(device: torch.device) -> None:
    """Compares a compiled MLP with the plain one on this device. Raises ValueError where they differ beyond rounding."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(device)
    results = []
    for function in (_compile_block(nn.Sequential.forward), nn.Sequential.forward):
        x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        out = function(mlp, x)
        results.append(
            [each.detach().cpu() for each in (out, *torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()]))]
        )
    fast.compare_with_reference("a compiled block", results[0], results[1], 0.02)


# CUDA graphs: what a function of tensors gives the device to do, recorded once and then started as a whole.
#
# A pass of a small or well compiled target is over before Python has launched the hundreds of kernels of the next one.
# torch's own way (inductor's cudagraphs) would copy all weights and K and V at each call, because here they are arguments
# of compiled functions (specdec/core/compile.py), so whole passes are captured instead.

WARM_UP_CALLS = 2  # calls before the capture, for what happens only once: workspaces, compiling, choosing kernels

Replay = Callable[..., tuple[Tensor, ...]]


class GraphPool:
    """The memory of all graphs of one runner: they are replayed one after the other, so they need it only once.

    A replay overwrites the intermediate results of other graphs, which is harmless on one stream: a graph reads only its own
    inputs, which lie outside of the pool, what stays in memory, and what the same replay has written. Its outputs stay its own
    while it is kept, and they are copied before the next replay. A graph that is dropped leaves its outputs' memory to later
    captures. The graphs beside it lose nothing, because torch gives no memory of a pool back while a graph of it lives.
    When none is left, torch refuses the handle: so it is a runner's, not the process's, and a runner keeps its newest graph.
    """

    @functools.cached_property
    def handle(self):
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """Of all captures: memory that one has left is used again on the same stream only."""
        return torch.cuda.Stream()


def capture_graph(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], pool: GraphPool) -> Replay:
    """`function` as a graph: the result copies its arguments to where the graph reads, starts it, and copies the outputs.

    The function is called several times with these inputs, which must have the same effect as once. It must not wait for
    the device, and what it reads or writes besides its arguments must stay where it is in memory.
    Raises RuntimeError where it cannot be captured.
    """
    if any(value.device.type != "cuda" for value in inputs):
        raise RuntimeError("only what runs on a CUDA device can be a CUDA graph")
    static_inputs, graph = [value.clone() for value in inputs], torch.cuda.CUDAGraph()
    with torch.cuda.device(static_inputs[0].device):  # streams are those of the current device
        current, side = torch.cuda.current_stream(), pool.stream
        side.wait_stream(current)
        with torch.cuda.stream(side):  # the documentation of torch asks for a stream other than the default one
            for _ in range(WARM_UP_CALLS):
                function(*static_inputs)
        current.wait_stream(side)
        # Other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=pool.handle, stream=side, capture_error_mode="thread_local"):
            outputs = function(*static_inputs)

    def replay(*arguments: Tensor) -> tuple[Tensor, ...]:
        for static_input, value in zip(static_inputs, arguments, strict=True):
            static_input.copy_(value)
        graph.replay()
        return tuple(value.clone() for value in outputs)  # the next replay overwrites them

    return replay


def check_graphs(device: torch.device) -> None:
    """Compares a captured function with the plain one on this device. Raises ValueError where they differ."""
    weight, memory = torch.randn(64, 64, device=device), torch.zeros(4, 64, device=device)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        memory.copy_(x @ weight)
        return memory.softmax(-1), memory + 1

    x = [torch.randn(4, 64, device=device) for _ in range(3)]
    replay = capture_graph(function, x[:1], GraphPool())
    for each in x:
        fast.compare_with_reference(
            "a CUDA graph", [part.cpu() for part in replay(each)], [part.cpu() for part in function(each)], 1e-5
        )
