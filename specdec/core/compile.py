"""Functions of tensors, traced for the shapes of their arguments and compiled by inductor.

torch.compile checks guards and unpacks modules at every call, which costs more than the arithmetic of a small model
(results/15-compiled-decoder.md). There are no guards here: the caller must change nothing but the tensors that it
passes. On a CPU the weights of linear layers are reordered once into oneDNN's blocked layout, and several products of
one tensor are joined.
"""

import copy
import functools
import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from specdec.core import fast, precision
from specdec.core.cache_memory import CacheMemory
from specdec.core.devices import name_cause

LINEAR = {torch.ops.aten.mm.default: (None, 0, 1), torch.ops.aten.addmm.default: (0, 1, 2)}  # bias, input, weight.T
# Kernels between products are too small for several threads. C++ around them saves a third of the overhead. Asserts of
# sizes are not needed: Runner compares shapes and strides itself, and packed weights have none.
CPU_OPTIONS = {"cpp.threads": 1, "cpp_wrapper": True, "size_asserts": False}

ALIGNMENT = 16  # bytes: inductor's loads need such addresses
# On CUDA a layer of Qwen3-8B has 13 kernels for one token in place of 16: products of one row become loops of inductor,
# with norms and activations inside, and a softmax over the few parts of a text is one kernel, not two.
CUDA_OPTIONS = {"coordinate_descent_tuning": True, "online_softmax": False}

MAX_GRAPHS = 32  # CUDA graphs of a runner, each of which holds its inputs and outputs

torch.library.define("specdec::packed_linear", "(Tensor input, Tensor weight) -> Tensor")


@torch.library.impl("specdec::packed_linear", "CompositeExplicitAutograd")
def _packed_linear(input: Tensor, weight: Tensor) -> Tensor:
    """input [M, D], weight [E, D] from `pack_weights` -> [M, E]"""
    return torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")


@torch.library.register_fake("specdec::packed_linear")
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


@functools.cache
def _lower_packed_linear() -> None:
    """Makes inductor call oneDNN directly: its own lowering of that operator accepts constants only."""
    from torch._inductor import ir, mkldnn_ir  # imported here: slow, and needed only to compile
    from torch._inductor.lowering import register_lowering

    def lower(input, weight):
        input = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(input))
        weight = ir.ExternKernel.realize_input(weight)
        layout = ir.FixedLayout(input.get_device(), input.get_dtype(), [input.get_size()[0], weight.get_size()[0]])
        return ir.TensorBox.create(mkldnn_ir.LinearUnary(layout, [input, weight], [None, "none", [-1], ""]))

    register_lowering(torch.ops.specdec.packed_linear.default, type_promotion_kind=None)(lower)


def is_packable(weight: Tensor) -> bool:
    """True if oneDNN packs a weight of this device and dtype, and this CPU computes in it (precision.py)"""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    return torch.backends.mkldnn.is_available() and (
        weight.dtype == torch.float32 or precision.choose_dtype(weight.device).dtype == "bfloat16"
    )


def pack_weights(weights: Sequence[Tensor]) -> Tensor:
    """[E_i, D] each -> [sum of E_i, D] in oneDNN's blocked layout, an opaque tensor"""
    return torch.ops.mkldnn._reorder_linear_weight(torch.cat(list(weights)).contiguous(), 1)


JOINED_LAYERS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers of a module with the same input


def decodes_joined(device: torch.device) -> bool:
    """Whether products of one input are joined where a model decodes. A CPU packs their weights itself."""
    return device.type == "cuda"


def join_products(model: nn.Module) -> None:
    """Makes weights of layers that read one tensor adjacent in memory, so that they need one product without a copy.

    Must come before anything keeps their addresses, and only where nothing shares or converts them. Values, names and
    saved files stay the same. A copy or a converted module is no longer joined.
    """
    for module in model.modules():
        for names in JOINED_LAYERS:
            layers = [getattr(module, name, None) for name in names]
            linear = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linear) == len(layers) and len({(layer.in_features, layer.weight.dtype) for layer in linear}) == 1:
                joined = torch.cat([layer.weight.data for layer in linear])
                for layer, row_slice in zip(linear, joined.split([layer.out_features for layer in linear])):
                    layer.weight.data = row_slice


def is_joined(weights: Sequence[Tensor]) -> bool:
    """True for several weights that are adjacent, as after `join_products`"""
    ends = itertools.accumulate((weight.numel() for weight in weights), initial=weights[0].storage_offset())
    return len(weights) > 1 and all(
        weight.is_contiguous() and _memory_location(weight) == (_memory_location(weights[0])[0], end)
        for weight, end in zip(weights, ends)
    )


def join_weights(weights: Sequence[Tensor]) -> Tensor:
    """Adjacent weights [E_i, D] as one of [sum of E_i, D], a view"""
    width = weights[0].shape[1]
    return weights[0].as_strided((sum(map(len, weights)), width), (width, 1))


def _memory_location(tensor: Tensor) -> tuple[int, int]:
    """A tensor's storage and its place there, also without values"""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _make_example(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor without values in place of an argument of a compiled function.

    It is no part of a larger memory, as K and V are: inductor would copy all of it for operators that write a part.
    """
    if tensor.storage_offset() * tensor.element_size() % ALIGNMENT:
        return fake.from_tensor(tensor, static_shapes=True)  # inductor takes others for aligned
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


Product = tuple[fx.Node, int, fx.Node | None]  # a linear layer's node, its weight's index in `captured`, its bias


class Graph:
    """`function`, traced on `inputs` and compiled. `captured` are the tensors that it closes over.

    If the function changes an argument in place, so does the compiled one. Outputs are a tensor or a flat tuple.
    """

    def __init__(self, function: Callable, inputs: Sequence[Tensor]):
        _lower_packed_linear()
        traced = make_fx(lambda *inputs: function(*inputs))(*inputs)  # fx counts the self of a bound method
        self.graph = traced.graph
        self.last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        self.captured: list[Tensor] = []
        self.weight_indices: list[list[int]] = []  # places in `captured` of each joined product's weights
        captured_nodes = self._lift(traced)
        for products in self._group_products(captured_nodes):
            self._join_products(products)
        output = next(node for node in self.graph.nodes if node.op == "output")
        self.single = isinstance(output.args[0], fx.Node)
        output.args = ((output.args[0],),) if self.single else (tuple(output.args[0]),)
        self.graph.set_codegen(fx.graph.CodeGen())
        self.graph.eliminate_dead_code()
        for node in self.graph.nodes:
            node.meta.clear()
            # A slice of a joined product cannot be viewed as any shape
            if self.weight_indices and node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        module = fx.GraphModule(traced, self.graph)
        options = _choose_options({tensor.device.type for tensor in inputs})
        self.compiled = torch._inductor.compile(module, self._make_examples(inputs), options=dict(options))

    def _make_examples(self, inputs: Sequence[Tensor]) -> list:
        """Stand-ins for all arguments: inputs, captured tensors, joined weights.

        Inductor stores its results on disk if they are fake, static and not in oneDNN's layout.
        """
        fake = FakeTensorMode(shape_env=ShapeEnv())
        examples = [_make_example(fake, tensor) for tensor in (*inputs, *self.captured)]
        captured = examples[len(inputs) :]
        with fake:
            for indices in self.weight_indices:
                examples.append(torch.cat([captured[index] for index in indices]))
        return examples

    def bind(self, captured: Sequence[Tensor], packed: dict[tuple, Tensor]) -> Callable:
        """The function over these tensors in place of `self.captured`. packed: weights packed so far"""
        compiled = self.compiled
        constants = list(captured)
        for indices in self.weight_indices:
            weights = [captured[place] for place in indices]
            key = tuple(map(_memory_location, weights))
            if is_joined(weights):
                constants.append(join_weights(weights))
                continue
            if key not in packed:
                packed[key] = pack_weights(weights) if is_packable(weights[0]) else torch.cat(weights)
            constants.append(packed[key])
        if self.single:
            return lambda *inputs: compiled(*inputs, *constants)[0]
        return lambda *inputs: compiled(*inputs, *constants)

    def _placeholder(self, name: str) -> fx.Node:
        """A new last argument"""
        with self.graph.inserting_after(self.last):
            self.last = self.graph.placeholder(name)
        return self.last

    def _lift(self, traced: fx.GraphModule) -> list[fx.Node]:
        """Turns the tensors that the function closes over into arguments. Returns their nodes."""
        nodes: dict[int, fx.Node] = {}
        for node in [node for node in self.graph.nodes if node.op == "get_attr"]:
            tensor = getattr(traced, node.target)
            if id(tensor) not in nodes:
                nodes[id(tensor)] = self._placeholder(f"captured_{len(self.captured)}")
                self.captured.append(tensor)
            node.replace_all_uses_with(nodes[id(tensor)])
            self.graph.erase_node(node)
        return list(nodes.values())

    def _group_products(self, captured_nodes: list[fx.Node]) -> Iterable[list[Product]]:
        """Products x @ weight.T of captured weights, in groups that read the same x"""
        groups: dict[object, list[Product]] = defaultdict(list)
        for node in self.graph.nodes:
            if node.target not in LINEAR:
                continue
            bias, x, weight = _list_operands(node)
            if weight.target is torch.ops.aten.t.default and weight.args[0] in captured_nodes:
                weight_index = captured_nodes.index(weight.args[0])
                key = (x.args[0], *x.args[1]) if x.target is torch.ops.aten.view.default else x
                groups[is_packable(self.captured[weight_index]), key].append((node, weight_index, bias))
        return groups.values()

    def _join_products(self, products: list[Product]) -> None:
        """Replaces products of one x by slices of one product, if their weights are packable or adjacent."""
        first = products[0][0]
        weights = [self.captured[index] for _, index, _ in products]
        if not (is_packable(weights[0]) or is_joined(weights)):
            return
        factor = self._placeholder(f"packed_{len(self.weight_indices)}")
        self.weight_indices.append([index for _, index, _ in products])
        call = self.graph.call_function
        with self.graph.inserting_before(first):
            operator = torch.ops.specdec.packed_linear.default
            if not is_packable(weights[0]):
                operator = torch.ops.aten.mm.default
                factor = call(torch.ops.aten.t.default, (factor,))
            joined_product = call(operator, (_list_operands(first)[1], factor))  # [M, E]
            stop = 0
            for (node, _, bias), weight in zip(products, weights):
                start = stop
                stop = stop + weight.shape[0]
                product_slice = call(torch.ops.aten.slice.Tensor, (joined_product, 1, start, stop))
                if bias is not None:
                    product_slice = call(torch.ops.aten.add.Tensor, (product_slice, bias))
                node.replace_all_uses_with(product_slice)
        for node, _, _ in products:
            self.graph.erase_node(node)


def _choose_options(device_types: set[str]) -> dict:
    """Inductor's options for arguments on devices of these types"""
    if device_types == {"cuda"} and not torch.version.hip:
        return CUDA_OPTIONS
    return CPU_OPTIONS if device_types == {"cpu"} else {}


def _list_operands(product: fx.Node) -> tuple:
    """bias (or None), input and transposed weight of a node whose target is in LINEAR"""
    return tuple(None if index is None else product.args[index] for index in LINEAR[product.target])  # type: ignore[index]


class Runner:
    """Calls functions, or compiles each of them for every set of shapes of its arguments.

    A compiled function is found by its name and shapes. So a name must always stand for one function, and what it reads
    besides its arguments, such as a model, must not change. A function that cannot be compiled is an error if the user
    asked for compiling. Otherwise it is one warning, and nothing is compiled from then on.

    compile: True to compile; cuda_graphs: True if `run_whole` captures CUDA graphs
        None of either: False, until decoding/fastest.py has measured the faster mode
    `seconds`: time spent on tracing, compiling and capturing
    """

    def __init__(self, compile: bool | None = False, *, cuda_graphs: bool | None = False):
        self.requested = compile, cuda_graphs
        self.undecided = None in self.requested
        self.compile = bool(compile)
        self.cuda_graphs = bool(cuda_graphs)
        self.seconds = 0.0
        self.graphs = dict[tuple, Any]()  # the least recently used first
        self.memories = defaultdict[object, CacheMemory](CacheMemory)  # K and V of graphs, by the kind of cache
        self.pool = GraphPool()
        self.compiled: dict[tuple, list[Callable]] = {}
        self.packed: dict[tuple, Tensor] = {}  # packed weights, by the weights' locations in memory

    def follow(self, leader: "Runner") -> None:
        """Takes over the decisions of another runner that this one was not given."""
        if self.undecided and not leader.undecided:
            self.compile = leader.compile
            self.cuda_graphs = leader.cuda_graphs
            self.undecided = False

    def stop_compiling(self, error: Exception) -> None:
        """Stops compiling with a warning. Raises the error if the user asked for compiling."""
        if self.requested[0]:
            raise error
        if self.compile:
            warnings.warn(f"Passes go on without compiling: {name_cause(error)}", stacklevel=4)
        self.compile = False

    @property
    def by_shape(self) -> bool:
        """True if a new shape costs time, so that few should occur"""
        return self.compile or self.cuda_graphs

    def __call__(self, name: object, function: Callable, *inputs: Tensor):
        """function(*inputs), whose result is a tensor or a flat tuple of tensors"""
        if not self.compile:
            return function(*inputs)

        def build() -> list[Callable]:
            graph = self._build(name, function, inputs)
            return [graph.bind(graph.captured, self.packed)]

        functions = self._find_compiled(name, inputs, build) or [function]
        return functions[0](*inputs)

    def run_whole(
        self,
        name: object,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        memory: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """function(*inputs), from a CUDA graph if those are wanted. The function may itself call this runner.

        name: stands for everything that the function reads besides tensors, as at its first call
        memory: tensors that it reads or writes in place besides its inputs and weights, such as a cache's K and
            V. The graph holds for these only. Any other tensor may be gone when it is replayed.
        If a graph cannot be captured, one warning says so, and there are none from then on.
        """
        if not self.cuda_graphs:
            return function(*inputs)
        key = (name, locate_memory(memory), *(tensor.shape for tensor in inputs))
        replay = self.find_graph(key, lambda: capture_graph(function, inputs, self.pool))
        return function(*inputs) if replay is None else replay(*inputs)

    def find_graph(self, key: tuple, capture: Callable[[], Any]) -> Any:
        """The result of `capture`, as long as it is among the MAX_GRAPHS used last; None if there are no graphs.

        If `capture` fails, one warning says so, and there are none from then on.
        """
        if not self.cuda_graphs:
            return None
        if key not in self.graphs:
            compiling = self.seconds
            start = time.perf_counter()
            try:
                self.graphs[key] = capture()
            except RuntimeError as error:
                self.cuda_graphs = False
                warnings.warn(f"No CUDA graphs, passes are started one by one: {name_cause(error)}", stacklevel=3)
                return None
            finally:
                self.seconds = compiling + time.perf_counter() - start
            if len(self.graphs) > MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = self.graphs.pop(key)
        return self.graphs[key]

    def _find_compiled(
        self, name: object, inputs: Sequence[Tensor], build: Callable[[], list[Callable]]
    ) -> list[Callable] | None:
        """The result of `build` for inputs of these shapes, cached; None if it cannot be compiled"""
        key = (name, *((tensor.shape, tensor.stride()) for tensor in inputs))
        if key not in self.compiled:
            start = time.perf_counter()
            try:
                compiled = build()
                for function in compiled:
                    function(*inputs)  # loads code and fills caches
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
        """For each of several modules that differ only in their weights: inputs -> function(module, *inputs).

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
        tensors = list(map(_list_tensors, modules))
        shapes = tree_map(Tensor.size, tensors)
        if any(module_shapes != shapes[0] for module_shapes in shapes):
            raise ValueError(f"{name} differs from place to place in more than its weights: set compile=false.")
        graph = self._build(name, functools.partial(function, modules[0]), inputs)
        names = {_memory_location(tensor): key for key, tensor in tensors[0].items()}
        keys = [names.get(_memory_location(tensor)) for tensor in graph.captured]
        functions = []
        for module_tensors in tensors:  # tensors of no module are shared by all
            captured = [
                _view_like(module_tensors[key], tensor) if key else tensor for key, tensor in zip(keys, graph.captured)
            ]
            functions.append(graph.bind(captured, self.packed))
        return functions

    def _build(self, name: object, function: Callable, inputs: Sequence[Tensor]) -> Graph:
        try:
            return Graph(function, inputs)
        except Exception as error:  # models and compilers raise errors of any kind
            raise ValueError(
                f"{name} could not be compiled ({name_cause(error)}). On a CPU inductor needs a C++ compiler, and "
                "for experts bfloat16; compile=false decodes without it."
            ) from error


def locate_memory(tensors: Iterable[Tensor]) -> tuple:
    """Addresses and shapes of lasting memory, for the keys of graphs"""
    return tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)


def _view_like(tensor: Tensor, example: Tensor) -> Tensor:
    """The tensor, or from its first value on what `example` is of another one: joined weights."""
    return tensor if tensor.shape == example.shape else tensor.as_strided(example.shape, example.stride())


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name"""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# Blocks of a training step, by torch.compile: operations between matrix products become few kernels, in both passes

BACKEND = "inductor"
RECOMPILE_LIMIT = 64  # of one function: kinds of layers, and numbers of slots before torch makes them dynamic


@functools.cache
def _compile_block(function: Callable) -> Callable:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    torch._dynamo.config.optimize_ddp = False  # True cuts a block where DDP's buckets of gradients end
    return torch.compile(function, fullgraph=True, backend=BACKEND)


def run_block(function: Callable, module: nn.Module, *inputs, **options):
    """function(module, *inputs, **options), compiled.

    If torch cannot compile it, a warning says so, and it runs as it is. Any error of the first call may be the
    compiler's, if the function runs uncompiled. Of later calls, only errors of Dynamo and inductor are.
    """
    if function in _not_compiled:
        return function(module, *inputs, **options)
    try:
        result = _compile_block(function)(module, *inputs, **options)
        _called_compiled.add(function)
        return result
    except Exception as error:
        if function in _called_compiled and not type(error).__module__.startswith(COMPILERS):
            raise
        cause = name_cause(getattr(error, "inner_exception", error))  # the error of a backend
    result = function(module, *inputs, **options)
    _not_compiled.add(function)
    fast.leave_out("blocks", f"{function.__qualname__} could not be compiled ({cause})")
    return result


COMPILERS = "torch._dynamo", "torch._inductor"  # packages whose errors are those of compiling
_called_compiled: set[Callable] = set()
_not_compiled: set[Callable] = set()


def training_block(function: Callable) -> Callable:
    """Decorates a module's method over tensors, which training runs compiled where the device allows it."""

    @functools.wraps(function)
    def run(module: nn.Module, first: Tensor, *inputs):
        if torch.is_grad_enabled() and fast.allows("blocks", first.device):
            return run_block(function, cast_once(module, first.device), first, *inputs)
        return function(module, first, *inputs)

    return run


_mirrors: dict[nn.Module, nn.Module] = {}


def forget_casts() -> None:
    """Drops all casts of `cast_once`, before a training step with changed weights."""
    _mirrors.clear()


def cast_once(module: nn.Module, device: torch.device) -> nn.Module:
    """Under autocast, the module with 16-bit matrices, cast once until `forget_casts`; else the module itself.

    Autocast inside a compiled function casts at every step of the unroll, and keeps each copy for the backward pass.
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
    """The same module and parameters, with replaceable matrices in linear layers"""
    mirror = copy.copy(module)
    mirror.__dict__ = dict(module.__dict__)
    mirror._modules = {name: child and _copy_module(child) for name, child in module._modules.items()}
    mirror._parameters = dict(module._parameters)
    if isinstance(module, nn.Linear) and module.weight.requires_grad and module.weight.dtype == torch.float32:
        del mirror._parameters["weight"]
    return mirror


def check_blocks(device: torch.device) -> None:
    """Compares a compiled MLP with the plain one on this device. Raises ValueError if they differ beyond rounding."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(device)
    results = []
    for function in (_compile_block(nn.Sequential.forward), nn.Sequential.forward):
        x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        out = function(mlp, x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()])])
    fast.compare_with_reference("a compiled block", results[0], results[1], 0.02)


# CUDA graphs: the device's work in a function, recorded once and then started as a whole
#
# A pass of a small or well compiled target ends before Python has launched the hundreds of kernels of the next one.
# Inductor's own CUDA graphs would copy all weights, K and V at each call, because these are arguments of compiled
# functions here. So whole passes are captured.

WARM_UP_CALLS = 2  # before the capture: workspaces, compiling and the choice of kernels happen in the first calls

Replay = Callable[..., tuple[Tensor, ...]]


class GraphPool:
    """The memory of all graphs of one runner. Graphs run one after the other, so they share it.

    A replay overwrites the intermediate results of other graphs. On one stream this is harmless: a graph reads only its
    inputs outside of the pool, other lasting memory, and results of the same replay. Its outputs stay its own while it
    is kept, and they are copied before the next replay. A dropped graph leaves its outputs' memory to later captures.
    Other graphs lose nothing, because torch gives back no memory of a pool while a graph of it lives. Without any
    graph, torch refuses the handle. So the pool is a runner's, not the process's, and a runner keeps its newest graph.
    """

    @functools.cached_property
    def handle(self):
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream of all captures: memory of an earlier capture is used again on the same stream only"""
        return torch.cuda.Stream()


def capture_graph(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], pool: GraphPool) -> Replay:
    """`function` as a graph. The result copies arguments into the graph's inputs, starts it, and copies the outputs.

    The function is called several times with these inputs, which must have the effect of one call. It must not wait for
    the device. Other memory that it reads or writes must stay in place. Raises RuntimeError if it cannot be captured.
    """
    if any(value.device.type != "cuda" for value in inputs):
        raise RuntimeError("only what runs on a CUDA device can be a CUDA graph")
    static_inputs = [value.clone() for value in inputs]
    outputs: list[Tensor] = []

    def run() -> None:
        outputs[:] = function(*static_inputs)

    start = capture_step(run, static_inputs[0].device, pool)

    def replay(*arguments: Tensor) -> tuple[Tensor, ...]:
        for static_input, value in zip(static_inputs, arguments, strict=True):
            static_input.copy_(value)
        start()
        return tuple(value.clone() for value in outputs)  # the next replay overwrites them

    return replay


def capture_step(
    function: Callable[[], None],
    device: torch.device,
    pool: GraphPool,
    *,
    restore: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """A function of lasting memory as a graph, which the result starts. Requirements and errors: `capture_graph`

    restore: function that takes back what a call has changed, between calls that warm up
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):  # streams belong to the current device
        current = torch.cuda.current_stream()
        side = pool.stream
        side.wait_stream(current)
        with torch.cuda.stream(side):  # torch asks for another stream than the default one
            for _ in range(WARM_UP_CALLS):
                function()
                restore()
        current.wait_stream(side)
        # Other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=pool.handle, stream=side, capture_error_mode="thread_local"):
            function()
    return graph.replay


def check_graphs(device: torch.device) -> None:
    """Compares a captured function with the plain one on this device. Raises ValueError if they differ."""
    weight = torch.randn(64, 64, device=device)
    memory = torch.zeros(4, 64, device=device)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        memory.copy_(x @ weight)
        return memory.softmax(-1), memory + 1

    inputs = torch.randn(3, 4, 64, device=device).unbind()
    replay = capture_graph(function, inputs[:1], GraphPool())
    for x in inputs:
        fast.compare_with_reference("a CUDA graph", replay(x), function(x), 1e-5)
