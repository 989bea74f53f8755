"""The one module that knows torch's private hooks and how they differ between versions (2.11 to 2.14)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.backends.common  # not loaded by `import torch`
import torch._functorch._aot_autograd.graph_compile
import torch._functorch.config
import torch.fx.experimental.proxy_tensor
from torch import fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule

from .errors import RefusedError

cond = torch.ops.higher_order.cond

__all__ = ["CustomGraphPass", "cond", "invoke_subgraph"]


def trace(fn: Callable, values: Sequence[Any]) -> fx.GraphModule:
    """The operations of fn on (fake) values, as a graph of Inductor's core operations."""
    from torch._inductor.decomposition import select_decomp_table

    mode = fake_mode(values)
    with mode or contextlib.nullcontext(), torch.no_grad():
        return torch.fx.experimental.proxy_tensor.make_fx(fn, decomposition_table=select_decomp_table())(*values)


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph with the modules it calls. Its Python code is written when it is called, printed or pickled, not after
    every change: writing it takes longer than any pass."""
    return _LazyGraphModule(root, graph)


def fake_mode(values: Sequence[Any]) -> Any:
    """The mode of these tensors without data; else the one in force. Dynamo's graph and its inputs have two."""
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    return modes[0] if modes else torch._guards.detect_fake_mode(values)


def example_input(shape: Sequence[int], inputs: Sequence[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An input like those that a backend is given, on the device of the first tensor among them."""
    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    with fake_mode(inputs) or contextlib.nullcontext():
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def real_tensors() -> Any:
    """A context in which tensors have data, for a computation in the middle of a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def random_state() -> list[Any]:
    """The state of torch's own generators, for `replayed`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


@contextlib.contextmanager
def replayed(state: list[Any]) -> Any:
    """Draw the same noise as from this state on; afterwards the generators stand where they stood."""
    devices = list(range(len(state) - 1))
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(state[0])
        for device in devices:
            torch.cuda.set_rng_state(state[1 + device], device)
        yield


def without_source(placeholder: fx.Node) -> None:
    """Mark an input that no value of the user's stands behind: AOTAutograd asks Dynamo's inputs for their source."""
    placeholder._dynamo_source = None  # type: ignore[attr-defined]


def keep_sources(copy: fx.GraphModule, original: fx.GraphModule) -> None:
    """Give a copy of a captured graph what Dynamo noted beside the nodes' metadata."""
    if hasattr(original, "_param_name_to_source"):
        copy._param_name_to_source = original._param_name_to_source
    pairs = zip(*(g.graph.find_nodes(op="placeholder") for g in (copy, original)), strict=True)
    for new, old in pairs:
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def mutated_arguments(target: Any) -> list[int]:
    """Positions of the arguments that an operator changes in place."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    return [i for i, a in enumerate(target._schema.arguments) if a.alias_info and a.alias_info.is_write]


def min_cut(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward as Inductor does."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(gm, inputs, compiler="inductor", **kwargs)


def split(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph where gradients meet the tangent (`passes/whole.py`), or as Inductor does if nowhere."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    marked = gm.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.scaled.default)
    if not marked:
        kwargs.pop("compiler", None)
        return min_cut(gm, inputs, **kwargs)
    saved = list(dict.fromkeys(n.args[0] for n in marked))
    for node in marked:
        node.target = torch.ops.aten.mul.Tensor
    return _extract_fwd_bwd_modules(gm, saved, saved_sym_nodes=[], num_fwd_outputs=kwargs["num_fwd_outputs"])


class _Split(CustomPartitionerFn):
    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return split(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._key


def _as_is(gm: fx.GraphModule, inputs: Any) -> Callable:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(gm.forward)


def compile_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], rewrite: Callable, look: Callable | None = None
) -> Callable:
    """Run the rewritten forward and backward graphs without code generation.

    look, if given, sees each joint graph before it is rewritten, with its inputs and number of outputs.
    """

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        if look is not None:
            look(joint, joint_inputs, kwargs["num_fwd_outputs"])
        rewrite(joint)
        return split(joint, joint_inputs, **kwargs)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=_as_is, partition_fn=partition)
    with _compile_context():
        return backend(gm, inputs)


class _JointPass(CustomGraphPass):
    """Our rewrite as Inductor's first joint-graph pass; `uuid` makes it a part of the compile cache's key."""

    def __init__(self, rewrite: Callable, key: str) -> None:
        self._rewrite, self._key = rewrite, key

    def __call__(self, graph: fx.Graph) -> None:
        self._rewrite(graph.owning_module)

    def uuid(self) -> str:
        return self._key


def compile_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], rewrite: Callable, key: str, options: dict[str, Any], whole: bool = False
) -> Callable:
    """Hand the graph to Inductor, with the rewrite as a pass of its joint graph.

    whole: split the graph where gradients meet the tangent.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = {**options, "joint_custom_pre_pass": _JointPass(rewrite, key)}
    if whole:
        patches["custom_partitioner_fn"] = _Split(key)
    with _compile_context():
        return compile_fx(gm, inputs, config_patches=patches)  # type: ignore[return-value]


def inductor_options(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """What torch.compile(mode=..., options=...) would set."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(mode) if mode else {}), **(options or {})}


@contextlib.contextmanager
def _compile_context() -> Any:
    with _schema_once_a_body(), _shapes_once_a_body(), _calls_without_backward(), _backward_twice():
        yield


@contextlib.contextmanager
def _in_place_of(names: Any, name: Any, new: Any) -> Any:
    """Another entry in a dictionary, or in the attributes of an object (`vars`), for a while."""
    missing = object()
    before = names.get(name, missing)
    names[name] = new
    try:
        yield
    finally:
        if before is missing:
            del names[name]
        else:
            names[name] = before


@contextlib.contextmanager
def _schema_once_a_body() -> Any:
    """invoke_subgraph looks for writes to its operands by a trace of the body, at every call: once a body is enough.

    The key is that of torch's own cache of the same schema, which only functionalisation asks. Dynamo compiles one
    frame at a time, so that no other thread sees the switch.
    """
    known: dict[tuple, tuple] = {}

    def gen_schema(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        key = (id(subgraph), identifier, tuple(map(type, operands)))
        if key not in known:  # the body is kept: its id is not given to another
            found = type(invoke_subgraph).gen_schema(invoke_subgraph, subgraph, identifier, *operands)
            known[key] = subgraph, found
        return known[key][1]

    with _in_place_of(vars(invoke_subgraph), "gen_schema", gen_schema):
        yield


@contextlib.contextmanager
def _shapes_once_a_body() -> Any:
    """The shapes that a body returns are worked out once for all of its calls.

    Torch keeps them too, but by the offsets of its operands in their storage as well: the states of a trajectory are
    slices of one tensor, each at another. Outputs that share memory with an operand or each other are left to torch.
    """
    fakes = getattr(torch._higher_order_ops.utils, "registered_hop_fake_fns", {})
    original = fakes.get(invoke_subgraph)
    if original is None:
        yield
        return
    known: dict[tuple, tuple] = {}

    def fake(subgraph: Any, identifier: Any, *operands: Any) -> Any:
        looks = [_look(x) for x in operands]
        if None in looks:
            return original(subgraph, identifier, *operands)
        key = (id(getattr(subgraph, "subgraph", subgraph)), type(subgraph), identifier, *looks)
        if key not in known:
            out = original(subgraph, identifier, *operands)
            known[key] = subgraph, _made_again(out, operands)  # the body is kept: its id is not given to another
            return out
        found = known[key][1]
        return original(subgraph, identifier, *operands) if found is None else found()

    with _in_place_of(fakes, invoke_subgraph, fake):
        yield


def _look(x: Any) -> tuple | None:
    """What the shapes of a body's outputs may depend on; None for what has no fixed shape."""
    if not isinstance(x, torch.Tensor):
        return (type(x), x) if isinstance(x, (int, type(None))) else None
    sizes = (*x.shape, *x.stride()) if x.layout == torch.strided else (None,)
    if not isinstance(x, FakeTensor) or not all(isinstance(n, int) for n in sizes):
        return None
    return (x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg(), x.dim(), *sizes)


def _made_again(out: Any, operands: Sequence[Any]) -> Callable | None:
    """What makes outputs like these, where each is a tensor with memory of its own."""
    if not isinstance(out, (tuple, list)):
        return None
    tensors = [x for x in out if x is not None]
    if any(_look(x) is None or not isinstance(x, torch.Tensor) or x.is_conj() or x.is_neg() for x in tensors):
        return None
    own = [x.untyped_storage()._cdata for x in tensors]
    others = {x.untyped_storage()._cdata for x in operands if isinstance(x, torch.Tensor)}
    if len({*own}) < len(own) or others & {*own}:
        return None
    likes = [None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device) for x in out]
    kind = type(out)

    def make() -> Any:
        return kind(
            None if like is None else torch.empty_strided(like[0], like[1], dtype=like[2], device=like[3])
            for like in likes
        )

    return make


@contextlib.contextmanager
def _calls_without_backward() -> Any:
    """Torch 2.11 pairs a body's calls with its backwards by their number, and stops where a call has no backward.

    Such a call (its velocity is detached, say) is given a name that is not counted. Newer versions pair by an id.
    """
    module, name = torch._functorch._aot_autograd.graph_compile, "run_joint_graph_passes_on_hops"
    original = getattr(module, name, None)
    if original is None or "call_id" in original.__code__.co_consts:
        yield
        return

    def paired(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        calls = [n for n in joint.graph.nodes if n.target is invoke_subgraph and isinstance(n.args[1], str)]
        forwards = [n for n in calls if n.args[1].startswith("fw")]
        backwards = [n for n in calls if n.args[1].startswith("bw")]
        if len(forwards) == len(backwards):
            return original(joint, *args, **kwargs)
        for backward in backwards:
            operands = backward.args[2:]  # those of its forward come first
            own = next((f for f in forwards if operands[: len(f.args) - 2] == f.args[2:]), None)
            if own is not None:
                forwards.remove(own)
        for alone in forwards:
            alone.update_arg(1, f"alone_{alone.args[1]}")
        return original(joint, *args, **kwargs)

    with _in_place_of(vars(module), name, paired):
        yield


@contextlib.contextmanager
def _backward_twice() -> Any:
    """Compile a backward that may run twice: with donated buffers, backward(retain_graph=True) is an error.

    The config switch alone does not do: torch reads it again when the backward runs.
    """
    module, name = torch._functorch._aot_autograd.graph_compile, "collect_bw_donated_buffer_idxs"
    if not hasattr(module, name):
        with torch._functorch.config.patch(donated_buffer=False):
            yield
        return
    with _in_place_of(vars(module), name, lambda *args, **kwargs: []):
        yield


attention = torch._C._nn.scaled_dot_product_attention


def folded_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Scaled dot-product attention under vmap as one attention over a larger batch.

    On CPUs torch has no batching rule for it, and would run and trace it once for each entry.
    """
    functorch: Any = torch._C._functorch
    level = functorch.maybe_current_level()
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    own = [x for x in tensors if functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == level]
    plain = len(tensors) == 3 and all(x is y for x, y in zip(tensors, args, strict=False))  # no mask, say
    if not plain or not own or any(x.ndim != 4 for x in tensors):
        return attention(*args, **kwargs)
    values = [functorch._unwrap_batched(x, level) for x in tensors]
    many = next(v.shape[dim] for v, dim in values if dim is not None)
    stacked = [v.expand(many, *v.shape) if dim is None else v.movedim(dim, 0) for v, dim in values]
    q, k, v = (x.flatten(0, 1) for x in stacked)
    out = attention(q, k, v, *args[3:], **kwargs)
    return functorch._add_batch_dim(out.unflatten(0, (many, -1)), 0, level)


def inside_functorch() -> list[str]:
    """Names of the torch.func transforms that are active, outermost first."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return [str(i.key()).rsplit(".", 1)[-1] for i in stack]


def outside_functorch() -> Any:
    """A context in which no torch.func transform is active, for work on plain tensors inside of one."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def needs_functorch_grad(x: Any) -> bool:
    """Whether the innermost torch.func transform differentiates with respect to this value."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_gradtrackingtensor(x) and x.requires_grad


class _OneDerivative(torch.autograd.Function):
    """A value as it is, whose gradient has no graph: asking for one is an error."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RefusedError(
                "The gradient of a step was asked for with create_graph=True, and has no second derivative: terms made "
                "of it would get no gradient. Compute them from the untransformed loss."
            )
        return g


def once_differentiable(loss: Any) -> Any:
    """A loss whose second derivative is an error, where torch does not see to that itself.

    2.11 detaches what a compiled function saves of views, and then gives gradients without a graph and without a word.
    """
    old = torch.__version__ < "2.12" and isinstance(loss, torch.Tensor) and loss.requires_grad
    return _OneDerivative.apply(loss) if old else loss


def unwrap_backend_error(error: BaseException) -> BaseException:
    """The exception that a backend raised, without the wrapper that Dynamo puts around it."""
    while type(error).__name__ == "BackendCompilerFailed" and hasattr(error, "inner_exception"):
        error = error.inner_exception
    return error


def capture_errors() -> tuple[type[BaseException], ...]:
    """What Dynamo raises where it cannot capture a function as one graph."""
    errors = [torch._dynamo.exc.TorchDynamoException]
    limit = getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", None)
    return tuple(errors if limit is None else [*errors, limit])


def short_message(error: BaseException) -> str:
    """Dynamo's message without its advice on debugging."""
    text = str(error).split("Set TORCHDYNAMO_VERBOSE")[0]
    return text.strip()


def many_captures() -> Any:
    """A context that allows a loss to be captured for more shapes than Dynamo's limit of 8."""
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    return torch._dynamo.config.patch({name: max(64, getattr(torch._dynamo.config, name))})


def is_recompile_limit(error: BaseException) -> bool:
    """Whether Dynamo gave up because a function was captured too often."""
    return type(error).__name__ == "FailOnRecompileLimitHit"
