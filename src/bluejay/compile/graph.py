"""From a module to graphs of tensor operations, and the cut of a deep module into parts that are compiled once each.

Nothing here reads a weight or an input: modules and examples may live on the meta device.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bluejay.compile.host import OPERATION, HostCall
from bluejay.compile.lowering import FewRows
from bluejay.compile.signature import Signature, TensorSpec, named_weights
from bluejay.errors import ConfigError

# From this many layers on, one program per layer kind builds faster than one program of all layers (measured: about
# five CPU seconds per program, and one per layer that is written out in it; see docs/decisions/0011).
SHARED_FROM_LAYERS = 9
# Links of reused elementwise values before one is stored, and the elements it may have for that to cost nothing.
_MAX_DUPLICATION = 3
_SMALL = 4096


@dataclass(frozen=True)
class Call:
    """One run of a program: which, and the places of its inputs and outputs in the table of values."""

    program: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A graph to be compiled by itself.

    Attributes:
        examples: its inputs (fake: shapes without storage).
        spelling: all its operations in order; parts of equal spelling on one device are one program.
    """

    graph: fx.GraphModule
    examples: tuple[Tensor, ...]
    spelling: tuple[str, ...]


@dataclass(frozen=True)
class Traced:
    """A module as parts and the order to call them in.

    The table of values begins with the weights and the inputs of `signature`, in order; parts add theirs.

    Attributes:
        returns: places of the module's outputs in the table.
        num_values: size of the table.
        workspace_bytes: upper bound of the intermediate tensors alive at once (before fusion removes most).
    """

    signature: Signature
    parts: tuple[Part, ...]
    calls: tuple[Call | HostCall, ...]
    returns: tuple[int, ...]
    num_values: int
    workspace_bytes: int


def trace(module: nn.Module, examples: Sequence[Tensor], names: Sequence[str], device: str, blocks: str) -> Traced:
    """The operations of `module.forward(*examples)`, cut at what the host does, and at layers where `blocks` says so.

    Raises:
        ConfigError: the module makes a constant tensor with dimensions, or returns something that is no tensor.
    """
    exported, weights, num_inputs = _export(module, examples, device)
    graph = exported.graph
    placeholders = graph.find_nodes(op="placeholder")
    # Unused weights and inputs stay in the contract's inputs, and out of every program.
    used = [(name, node) for name, node in zip(weights, placeholders, strict=False) if node.users]
    inputs = placeholders[len(weights) :]
    assert len(inputs) == num_inputs
    outputs = _outputs(graph)
    signature = Signature(
        device,
        weights=tuple(TensorSpec.of(name, _value(node)) for name, node in used),
        inputs=tuple(TensorSpec.of(name, _value(node)) for name, node in zip(names, inputs, strict=True)),
        outputs=tuple(TensorSpec.of(f"output[{i}]", _value(node)) for i, node in enumerate(outputs)),
    )
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # true at fixed shapes, and written once per tensor: equal layers would look different
    layers = _layers(module)
    table = {node: place for place, node in enumerate([node for _, node in used] + inputs)}
    num_layers_run = _num_layers_run(graph, layers)
    if blocks == "inline" or (blocks == "auto" and num_layers_run < SHARED_FROM_LAYERS):
        layers = frozenset()
    cut = _cut(graph, layers)
    parts, calls, size = _assemble(exported, cut, table)
    returns = tuple(table[_source(node)] for node in outputs)
    return Traced(signature, parts, calls, returns, size, _workspace_bytes(graph))


def _export(module: nn.Module, examples: Sequence[Tensor], device: str) -> tuple[fx.GraphModule, list[str], int]:
    """The module's graph with weights and inputs as placeholders; the weights' names; the number of inputs."""
    mode = FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False, trace_asserts=True),
        allow_non_fake_inputs=True,
        export=True,
    )

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    # A deep copy whose memo already holds every tensor copies the module's structure and none of its content.
    memo: dict[int, Any] = {}
    for tensor in named_weights(module).values():
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake(tensor), requires_grad=False) if is_parameter else fake(tensor)
    hollow = copy.deepcopy(module, memo)
    inputs = tuple(map(fake, examples))
    rewrite = FewRows() if device == "cpu" else nullcontext()
    with torch.no_grad(), tracing(TracingContext(mode)), rewrite:
        exported = torch.export.export(hollow, inputs, strict=False)
    names = []
    for spec, node in zip(
        exported.graph_signature.input_specs, exported.graph.find_nodes(op="placeholder"), strict=True
    ):
        if spec.kind.name in ("PARAMETER", "BUFFER"):
            names.append(str(spec.target))
        elif spec.kind.name != "USER_INPUT":
            _write_out(exported.graph, node, exported.constants[str(spec.target)], type(module).__qualname__)
    return exported.graph_module, names, len(inputs)


def _write_out(graph: fx.Graph, placeholder: fx.Node, constant: Any, where: str) -> None:
    """Turn a constant that tracing lifted out of the code back into code. Assigning a number to a slice makes one."""
    if not isinstance(constant, Tensor) or constant.dim() > 0:
        raise ConfigError(
            asked=f"compile {where}",
            found=f"forward makes the constant tensor {constant}",
            rule="programs hold no data, so that every model of one shape can share them",
            fix="make it with torch.full or torch.arange, or register it as a buffer",
        )
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        made = graph.call_function(
            torch.ops.aten.full.default,
            ([], constant.item()),
            {"dtype": constant.dtype, "device": _value(placeholder).device, "pin_memory": False},
        )
    made.meta = {"val": _value(placeholder)}
    placeholder.replace_all_uses_with(made)
    graph.erase_node(placeholder)


def _stop_duplication(graph: fx.Graph) -> None:
    """Give small, often reused intermediate values a buffer of their own.

    The code generator writes an elementwise value out at each of its uses, so a chain in which every link is used
    twice (`word ^ (word >> 16)`, as hashes have) doubles its work per link: a quarter of a minute for a sampler's.
    """
    depth: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
            continue
        # Python's operators on integers (`__xor__`) are elementwise without being tagged so.
        elementwise = torch.Tag.pointwise in node.target.tags or node.target.__name__.startswith("__")
        if (not elementwise and not _is_view(node)) or _changed_argument(node) is not None:
            continue  # what changes a tensor in place ends in that tensor's own memory
        inherited = max((depth.get(argument, 0) for argument in node.all_input_nodes), default=0)
        depth[node] = inherited + (elementwise and _num_uses(node) > 1)
        value = _value(node)
        if elementwise and depth[node] >= _MAX_DUPLICATION and value.numel() <= _SMALL and value.is_contiguous():
            with graph.inserting_after(node):
                kept = graph.call_function(torch.ops.aten.as_strided.default, (node, value.shape, value.stride()))
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept, lambda user, kept=kept: user is not kept)
            depth[kept] = 0


def _num_uses(node: fx.Node) -> int:
    """How often operations take `node`; `x * x` takes x twice."""
    taken: list[fx.Node] = []
    for user in node.users:
        fx.node.map_arg((user.args, user.kwargs), taken.append)
    return taken.count(node)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    (returned,) = graph.output_node().args
    nodes = list(returned) if isinstance(returned, list | tuple) else [returned]
    if wrong := [node for node in nodes if not isinstance(node, fx.Node)]:
        raise ConfigError(
            asked="compile a step",
            found=f"it returns {wrong[0]!r}",
            rule="a step takes tensors and returns a flat tuple of tensors",
            fix="return tensors only",
        )
    return [node for node in nodes if isinstance(node, fx.Node)]


def _layers(module: nn.Module) -> frozenset[str]:
    """Paths of the children of the longest outermost ModuleList whose children are of one class."""
    lists: list[list[str]] = []
    for path, child in module.named_modules():
        inside = any(path.startswith(layer + ".") for paths in lists for layer in paths)
        if isinstance(child, nn.ModuleList) and len({type(layer) for layer in child}) == 1 and not inside:
            lists.append([f"{path}.{i}" for i in range(len(child))])
    longest: list[str] = max(lists, key=len, default=[])
    return frozenset(longest)


def _layer_of(node: fx.Node, layers: frozenset[str]) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in stack.values() if path in layers), None)


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _num_layers_run(graph: fx.Graph, layers: frozenset[str]) -> int:
    """How many layers are passed; an unrolled loop passes them once per token."""
    passed = [layer for layer, _ in itertools.groupby(_layer_of(node, layers) for node in _operations(graph))]
    return len(passed) - passed.count(None)


def _cut(graph: fx.Graph, layers: frozenset[str]) -> list[list[fx.Node]]:
    """The graph's operations in order, cut wherever a layer begins or ends; what the host does stands by itself.

    Where the host has a part in every layer, its parts are the borders: the end of one layer goes with the beginning
    of the next.
    """
    if any(node.target is OPERATION and _layer_of(node, layers) for node in graph.nodes):
        layers = frozenset()
    runs: list[list[fx.Node]] = []
    current: tuple[str | None, fx.Node | None] | None = None
    for node in _operations(graph):
        # Until the next one, what comes after an operation of the host is another run.
        place = _layer_of(node, layers), node if node.target is OPERATION else None
        if node.target is operator.getitem and current is not None:  # stays with what it picks from
            place = current
        if not runs or place != current:
            runs.append([])
            current = place
        runs[-1].append(node)
    return runs


@dataclass
class _Draft:
    """A part under construction: its graph, what it takes from outside, and a spelling that equal parts share."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    inner: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    number: dict[fx.Node, int] = field(default_factory=dict)
    spelling: list[str] = field(default_factory=list)

    def take(self, node: fx.Node, own: set[fx.Node]) -> fx.Node:
        """`node` inside this part: its own, an input, or a view of an input that is made again here.

        A view that crossed a boundary as a tensor of its own would lose its tie to what it looks at.
        """
        if node in self.inner:
            return self.inner[node]
        if node not in own:
            node = _source(node)
            if node in self.inner:
                return self.inner[node]
            if not _is_view(node):
                self.inner[node] = self.graph.placeholder(f"input_{len(self.inputs)}")
                self.inner[node].meta = {"val": _value(node)}
                self.inputs.append(node)
                spec = TensorSpec.of("", _value(node))
                self.spell(self.inner[node], f"{spec.dtype}{spec.shape}{spec.stride}")
                return self.inner[node]
        copied = self.graph.node_copy(node, lambda argument: self.take(argument, own))
        self.inner[node] = copied
        arguments = fx.node.map_arg((copied.args, copied.kwargs), lambda inner: f"%{self.number[inner]}")
        self.spell(copied, f"{copied.target}{arguments}{_code_within(node)}")
        return copied

    def spell(self, inner: fx.Node, text: str) -> None:
        self.number[inner] = len(self.spelling)
        self.spelling.append(text)


def _assemble(
    exported: fx.GraphModule, cut: list[list[fx.Node]], table: dict[fx.Node, int]
) -> tuple[tuple[Part, ...], tuple[Call | HostCall, ...], int]:
    """Parts, equal ones once, and the calls that make the whole; `table` gains the places of what they return."""
    parts: list[Part] = []
    calls: list[Call | HostCall] = []
    known: dict[tuple[str, ...], int] = {}
    needed = _last_uses(exported.graph, cut)
    free: list[int] = []
    size = len(table)
    for index, nodes in enumerate(cut):
        crossing = [node for node in nodes if needed.get(node, -1) > index]
        if not crossing and nodes[0].target is not OPERATION and not any(map(_changes, nodes)):
            continue  # views, each made again where it is used
        program, taken = -1, nodes[0].all_input_nodes
        if nodes[0].target is not OPERATION:
            program, taken = _add_part(exported, nodes, crossing, parts, known)
        inputs = tuple(table[node] for node in taken)
        for node in [n for n in table if needed.get(n, len(cut)) == index and n.op != "placeholder"]:
            free.append(table[node])
        for node in nodes if program < 0 else crossing:
            table[node] = free.pop() if free else size
            size = max(size, table[node] + 1)
        if program < 0:
            name, value = str(nodes[0].args[0]), TensorSpec.of("", _value(nodes[0]))
            calls.append(HostCall(name, inputs[0] if inputs else None, table[nodes[0]], value.shape, value.dtype))
        else:
            calls.append(Call(program, inputs, tuple(table[node] for node in crossing)))
    return tuple(parts), tuple(calls), size


def _add_part(
    exported: fx.GraphModule,
    nodes: list[fx.Node],
    crossing: list[fx.Node],
    parts: list[Part],
    known: dict[tuple[str, ...], int],
) -> tuple[int, list[fx.Node]]:
    """The number of the part that does `nodes` and returns `crossing`, a new one if need be; and what it takes."""
    draft, own = _Draft(), set(nodes)
    for node in nodes:
        draft.take(node, own)
    draft.graph.output(tuple(draft.inner[node] for node in crossing))
    spelling = (*draft.spelling, f"returns {[draft.number[draft.inner[node]] for node in crossing]}")
    if spelling not in known:
        known[spelling] = len(parts)
        _stop_duplication(draft.graph)
        examples = tuple(_value(node) for node in draft.inputs)
        parts.append(Part(fx.GraphModule(exported, draft.graph), examples, spelling))
    return known[spelling], draft.inputs


def _code_within(node: fx.Node) -> str:
    """The code of the branch or the body that a node names."""
    if node.op != "get_attr":
        return ""
    assert node.graph.owning_module is not None
    inner = node.graph.owning_module.get_submodule(str(node.target))
    return "".join(str(child.graph) for child in inner.modules() if isinstance(child, fx.GraphModule))


def _last_uses(graph: fx.Graph, cut: list[list[fx.Node]]) -> dict[fx.Node, int]:
    """Of each value that leaves its part: the last part that takes it (the number of parts if it is returned)."""
    home = {node: index for index, nodes in enumerate(cut) for node in nodes}
    last: dict[fx.Node, int] = {}

    def use(node: fx.Node, index: int) -> None:
        node = _source(node)
        if _is_view(node) and home[node] != index and index < len(cut):
            for argument in node.all_input_nodes:  # the view is made again where it is used
                use(argument, index)
        elif home.get(node) != index:
            last[node] = max(last.get(node, -1), index)

    for node in graph.nodes:
        for argument in node.all_input_nodes:
            use(argument, home.get(node, len(cut)))
    return last


def _source(node: fx.Node) -> fx.Node:
    """The node that made this tensor: an operation in place returns the tensor it was given."""
    while (changed := _changed_argument(node)) is not None:
        node = changed
    return node


def _changes(node: fx.Node) -> bool:
    return _changed_argument(node) is not None


def _changed_argument(node: fx.Node) -> fx.Node | None:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return None
    alias = node.target._schema.returns[0].alias_info
    if alias is None or not alias.is_write:
        return None
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            value = node.args[position] if position < len(node.args) else node.kwargs[argument.name]
            return value if isinstance(value, fx.Node) else None
    return None


def _is_view(node: fx.Node) -> bool:
    """Whether the node's tensor shows another node's memory. By its storage too: `to` or `reshape` may have copied."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    if alias is None or alias.is_write:
        return False
    storages = {tensor.untyped_storage()._cdata for base in node.all_input_nodes for tensor in _tensors(_value(base))}
    return any(tensor.untyped_storage()._cdata in storages for tensor in _tensors(_value(node)))


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _workspace_bytes(graph: fx.Graph) -> int:
    """Largest sum of intermediate tensors alive at once when every operation writes its own."""
    order = {node: step for step, node in enumerate(graph.nodes)}
    ends: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            for base in _bases(argument):
                ends[base] = order[node]
    alive, peak = 0, 0
    closing: dict[int, int] = {}
    for node, step in order.items():
        if node.op == "call_function" and not _is_view(node) and _changed_argument(node) is None:
            num_bytes = sum(t.numel() * t.itemsize for t in _tensors(node.meta.get("val")))
            alive += num_bytes
            closing[ends.get(node, step)] = closing.get(ends.get(node, step), 0) + num_bytes
        peak = max(peak, alive)
        alive -= closing.get(step, 0)
    return peak


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose memory this one shows."""
    node = _source(node)
    if _is_view(node):
        for argument in node.all_input_nodes:
            yield from _bases(argument)
    else:
        yield node


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
