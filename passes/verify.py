"""Rules that hold after every pass. A broken one is a bug of the rewrite, caught before anything runs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from jagg_fx import _torch, control
from jagg_fx.errors import VerifyError

from .joint import Joint, body_of, choices, data_flow, getitems, is_call, is_region, results, value, view_chain
from .slim import SAME

_MARKERS = (torch.ops.jagg_fx.call.default, torch.ops.jagg_fx.cotangent.default)


def verify(joint: Joint, after: str) -> None:
    """Raise VerifyError naming the pass and the rule if the graph breaks one."""
    try:
        joint.graph.lint()
    except Exception as error:
        raise VerifyError(f"after {after}: the graph is not well formed: {error}") from error
    rules = (
        _names_are_alive,
        _no_marker,
        _calls_are_closed,
        _independent,
        _one_role,
        _regions_fit,
        _branches_agree,
        _sums_are_added,
    )
    for rule in rules:
        _report(rule(joint), after)
    if after == "merge":
        with _torch.real_tensors():
            _report(_weights_are_sound(joint), after)
            _report(_choices_are_sound(joint), after)
        _report(_groups_are_apart(joint), after)
    if after == "branch":
        _report(_skips_are_zero(joint), after)
        _report(_gates_are_kept(joint), after)
    _report(_pruned_is_gone(joint, after), after)
    if after == "slim":
        _report(_outputs_are_apart(joint), after)


def _report(broken: str | None, after: str) -> None:
    if broken:
        raise VerifyError(f"after {after}: {broken}")


def _names_are_alive(joint: Joint) -> str | None:
    alive = set(joint.graph.nodes)
    for index, site in joint.sites.items():
        if site.backward is not None and site.backward not in alive:
            return f"call {index} still names a backward that was erased"
    return None


def _no_marker(joint: Joint) -> str | None:
    left = [n.name for n in joint.graph.nodes if n.op == "call_function" and n.target in _MARKERS]
    return f"markers are left in the graph: {left}" if left else None


def _calls_are_closed(joint: Joint) -> str | None:
    """A backward call reads its own forward's saved values, its operands and cotangents, nothing else."""
    for index, site in joint.sites.items():
        if site.backward is None:
            continue
        operands = set(site.operands)
        fed = {*site.cotangents, *joint.sums.get(site.backward, ())}
        for position, arg in enumerate(site.backward.args[2:], start=2):
            if position in fed or not isinstance(arg, fx.Node):
                continue
            chain = view_chain(arg)
            if any(n in operands for n in chain):
                continue
            arg = chain[0] if isinstance(chain[0], fx.Node) else arg  # a view of what was saved
            if is_call(arg, operator.getitem) and is_region(arg.args[0]):
                owner = arg.args[0]
                if owner is site.forward:
                    continue
                return f"the backward of call {index} reads {arg.name}, saved by another call"
            if isinstance(value(arg), torch.Tensor):
                return f"the backward of call {index} reads {arg.name}, which is neither saved nor an operand"
    return None


def _independent(joint: Joint) -> str | None:
    of = {s.backward: f"the backward of call {i}" for i, s in joint.sites.items() if s.backward is not None}
    calls = {n: of.get(n, n.name) for n in joint.backwards(joint.graph)}
    above: dict[fx.Node, set[str]] = {}  # the backwards that a node depends on
    for node in joint.graph.nodes:
        # The sums of earlier gradients feed nothing but a call's own sums: see `_sums_are_added`.
        sums = joint.sums.get(node, ())
        found = set().union(*(above[a] for a in _inputs(node, sums)))
        if node in calls:
            if found:
                return f"{found.pop()} feeds {calls[node]}"
            found = {calls[node]}
        above[node] = found
    return None


def _inputs(node: fx.Node, without: Sequence[int]) -> list[fx.Node]:
    """What a node reads, but for the arguments at these positions."""
    if not without:
        return node.all_input_nodes
    return [a for i, a in enumerate(node.args) if i not in without and isinstance(a, fx.Node)]


def _one_role(joint: Joint) -> str | None:
    """Where one call is made for several timesteps, all of them keep its backward, or none does."""
    pruned = {joint.sites[c].backward: c for g in joint.groups for c in g.pruned}
    for group in joint.groups:
        for call in group.kept:
            other = pruned.get(joint.sites[call].backward)
            if other is not None and joint.sites[call].backward is not None:
                return f"call {call} keeps the backward that it shares with call {other}, which is pruned"
    return None


def _sums_are_added(joint: Joint) -> str | None:
    """A sum of earlier gradients goes into additions alone, and comes back as the output that was said."""
    found: dict[tuple, int | None] = {}  # by body and argument
    for call, sums in joint.sums.items():
        body = body_of(joint.gm, call)
        for position, output in sums.items():
            key = (call.args[0].target, position)  # type: ignore[union-attr]
            if key not in found:
                found[key] = _lands(body, body.graph.find_nodes(op="placeholder")[position - 2])
            if found[key] != output:
                return f"{call.name} does not return the sum in its argument {position} with its gradient added"
    return None


def _lands(body: fx.GraphModule, node: fx.Node) -> int | None:
    """The output that is this value with something added to it; None if it is read in any other way."""
    added = False
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            return results(body.graph).index(node) if added and results(body.graph).count(node) == 1 else None
        if is_call(user, torch.ops.aten.add.Tensor) and user.args.count(node) == 1:
            node = user
        else:
            index = _lands_in_call(body, user, node)
            items = [n for n in user.users if is_call(n, operator.getitem) and n.args[1] == index]
            if index is None or len(items) != 1:
                return None
            (node,) = items
        added = True
    return None


def _lands_in_call(body: fx.GraphModule, call: fx.Node, operand: fx.Node) -> int | None:
    """The output of a region, or of both branches of a choice, to which this operand is added; None: there is none."""
    if is_region(call):
        bodies, operands = [body_of(body, call)], call.args[2:]
    else:
        bodies, operands = dict(choices(body)).get(call, []), call.args[-1]  # type: ignore[assignment]
    if not bodies or operands.count(operand) != 1:  # type: ignore[union-attr]
        return None
    position = operands.index(operand)  # type: ignore[union-attr]
    found = {_lands(b, b.graph.find_nodes(op="placeholder")[position]) for b in bodies}
    return found.pop() if len(found) == 1 else None


def _weights_are_sound(joint: Joint) -> str | None:
    """The weights of a step sum to one and lie in [0, 1], where the estimator promises it; seen on sample times."""
    estimator = joint.plan.estimator
    for n in {len(g.calls) for g in joint.groups if not g.exact and g.kept}:
        inner = torch.linspace(0, 1, n, dtype=torch.float64)[1:-1].square()
        rows = estimator.weights([0.0, *inner.unbind(), 1.0], estimator.slots(n))
        C = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in row]) for row in rows])
        off = (C.sum(0) - 1).abs().max()
        if not C.isfinite().all() or (estimator.sums_to_one and off > 1e-9):
            return f"the weights of {estimator.name} do not sum to one for every step of a group of {n}:\n{C}"
        if not estimator.extrapolates and (C.min() < -1e-12 or C.max() > 1 + 1e-12):
            return f"the weights of {estimator.name} leave [0, 1] in a group of {n}, which it does not announce:\n{C}"
    return None


def _groups_are_apart(joint: Joint) -> str | None:
    """A merged cotangent is made from the cotangents of its own group, each of which has a part in it or is dropped."""
    owner = {n: g.number for g in joint.groups for c in g.calls for n in joint.own.get(c, ())}
    for group in joint.groups:
        for call in joint.merged.keys() & set(group.calls):
            todo, seen = list(joint.merged.get(call, {}).values()), set()
            while todo:
                node = todo.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node in owner and owner[node] != group.number and node not in joint.own.get(call, ()):
                    return (
                        f"the cotangent of call {call}, in group {group.number}, has one of group {owner[node]} in it"
                    )
                if node not in owner:
                    todo += node.all_input_nodes
    return None


def _choices_are_sound(joint: Joint) -> str | None:
    """With tol, the weights of every step sum to one over the steps that run, whatever was chosen; seen on samples."""
    for group in [g for g in joint.groups if not g.exact] if joint.plan.tol is not None else ():
        inner = torch.linspace(0, 1, len(group.calls), dtype=torch.float64)[1:-1].square()
        tree = control.spans(group.nodes)
        for depth in range(4):  # merged, halved once, twice, down to single steps
            runs: list = [None] * len(group.calls)
            for span, d in zip(tree, _depths(tree), strict=True):
                runs[span.middle] = torch.tensor(d < depth or depth == 3)
            C = control.weights([0.0, *inner.unbind(), 1.0], runs)
            skipped = torch.tensor([r is not None and not r for r in runs])
            if (C.sum(0) - 1).abs().max() > 1e-9 or C[skipped].any() or C.min() < -1e-12:
                return f"the weights of a choice at depth {depth} are not those of an interpolation:\n{C}"
    return None


def _depths(tree: list) -> list[int]:
    found: list[int] = []
    for span in tree:
        found.append(0 if span.parent is None else found[span.parent] + 1)
    return found


def _gates_are_kept(joint: Joint) -> str | None:
    """Behind a gate, the first branch runs nodes with merged cotangents, the second every step with its own."""
    flow = data_flow(joint.graph) if joint.gated else None
    for group in (g for g in joint.groups if g.number in joint.opens):
        region = joint.gated[group.number]
        flag, operands, body = region.args[2], list(region.args[3:]), body_of(joint.gm, region)
        if not nx.has_path(flow, joint.opens[group.number], flag):
            return f"{region.name}, of group {group.number}, does not ask its gate"
        inside = list(group.calls)
        for call in (c for c in group.kept if joint.sites[c].backward is not None):
            inside.remove(call)
            for position, merged in joint.merged[call].items():
                own = joint.own[call][joint.sites[call].cotangents.index(position)]
                chosen = joint.sites[call].backward.args[position]  # type: ignore[union-attr]
                if not is_call(chosen, torch.ops.aten.where.self) or chosen.args != (flag, merged, own):
                    return f"call {call} does not choose between its merged cotangent and its own by its gate"
        wanted = [joint.merged[c][p] for c in inside if c in group.kept for p in joint.sites[c].cotangents]
        every = [g for c in inside for g in joint.own[c]]
        ((_, branches),) = choices(body)
        for branch, want in zip(branches, (wanted, every), strict=True):
            inputs = branch.graph.find_nodes(op="placeholder")
            positions = joint.sites[inside[0]].cotangents
            read: list = [c.args[p] for c in joint.backwards(branch.graph) for p in positions]
            found = [operands[inputs.index(n)] for n in read]
            if Counter(want) != Counter(found):
                return f"a branch of {region.name} does not run the backwards of group {group.number}, each once"
    return None


def _skips_are_zero(joint: Joint) -> str | None:
    """With tol, every call that may be skipped has a region, behind its own flag: its own backward, or zeros."""
    merged = {n: c for c, own in joint.merged.items() for n in own.values()}
    left = set(joint.runs)
    for node in (n for n in joint.graph.nodes if is_region(n)):
        body = body_of(joint.gm, node)
        for _, (run, skip) in choices(body) if joint.runs else ():
            calls = {merged[a] for a in node.args[3:] if a in merged}
            if len(calls) != 1 or node.args[2] is not joint.runs.get(*calls):
                return f"{node.name} runs the backward of {calls or 'no call'} by another call's flag"
            left -= calls
            if sum(is_region(n) for n in run.graph.nodes) != 1:
                return f"{node.name} does not run one backward where its flag is set"
            full = [view_chain(n)[0] for n in results(skip.graph)]
            if any(not is_call(n, torch.ops.aten.full.default) or n.args[1] != 0 for n in full):
                return f"{node.name} returns something else than zeros where its backward is skipped"
    return f"calls {sorted(left)} may be skipped, and have no branch" if left else None


def _pruned_is_gone(joint: Joint, after: str) -> str | None:
    """Once a pruned backward is taken out, nothing calls it, and its forward computes nothing for it."""
    if after not in ("prune", "slim"):
        return None
    # With tol: those that always run.
    direct = {joint.sites[c].backward for g in joint.groups if g.number not in joint.opens for c in g.kept}
    kept = len(direct) + sum(len(g.kept) > 1 for g in joint.groups if g.number in joint.opens)  # one beside its branch
    bodies = {n.args[0].target for n in joint.graph.nodes if is_region(n)} & joint.backward_bodies
    calls = sum(is_region(n) and n.args[0].target in bodies for n in joint.graph.nodes)
    if calls != kept:
        return f"{calls} backward calls are in the graph, the plan keeps {kept}"
    for group in joint.groups if after == "slim" else ():
        for call in (c for c in group.pruned if c not in joint.runs):
            forward = joint.sites[call].forward
            if forward not in joint.forwards:  # its velocity was known
                continue
            used = {i for i, nodes in getitems(forward).items() if any(n.users for n in nodes)}
            spare = len(results(body_of(joint.gm, forward).graph)) - len(used)
            if spare and used:
                return f"the forward of pruned call {call} still computes {spare} values that nothing reads"
    return None


def _outputs_are_apart(joint: Joint) -> str | None:
    """No value is returned twice by a velocity call, as one of its own and as a view: Inductor would write over it."""
    for forward in joint.forwards:
        used = [i for i, nodes in getitems(forward).items() if any(n.users for n in nodes)]
        chains = [view_chain(results(body_of(joint.gm, forward).graph)[i]) for i in used]
        roots = [c[0] for c in chains]
        twice = [c[0].name for c in chains if all(v.target in SAME for v in c[1:]) and roots.count(c[0]) > 1]
        if twice:
            return f"{forward.name} returns {twice[0]} twice"
    return None


def _regions_fit(joint: Joint) -> str | None:
    """Every call of a body, in the graph and in branches, has an operand for each input, of its shape and dtype."""
    called = {n.args[0].target: body_of(joint.gm, n) for n in joint.graph.nodes if is_region(n)}  # type: ignore[union-attr]
    found = [(body, *choice) for body in called.values() for choice in choices(body)]
    for _, choice, branches in found:
        for branch in branches:
            broken = _fits(choice.name, choice.args[3], branch)  # type: ignore[arg-type]
            if broken:
                return broken
    for gm in (joint.gm, *(branch for _, _, branches in found for branch in branches)):
        for node in (n for n in gm.graph.nodes if is_region(n)):
            broken = _fits(node.name, node.args[2:], body_of(gm, node))
            if broken:
                return broken
    return None


def _fits(name: str, operands: Sequence, body: fx.GraphModule) -> str | None:
    inputs = body.graph.find_nodes(op="placeholder")
    if len(inputs) != len(operands):
        return f"{name} has {len(operands)} operands, its body takes {len(inputs)}"
    for arg, placeholder in zip(operands, inputs, strict=True):
        a, b = _brief(arg), _brief(placeholder)
        if a and b and a != b:
            return f"{name}: operand {arg.name} is {a[0]} {a[1]}, its body takes {b[0]} {b[1]}"
    return None


def _brief(x: Any) -> tuple[torch.dtype, tuple] | None:
    v = x.meta.get("val") if isinstance(x, fx.Node) else None
    # A symbolic size is compared by its name: asking whether two are equal would make it so.
    return (
        (v.dtype, tuple(s if isinstance(s, int) else str(s) for s in v.shape)) if isinstance(v, torch.Tensor) else None
    )


def _branches_agree(joint: Joint) -> str | None:
    """The two branches of a gate return the same shapes, dtypes and strides, and none of their inputs."""
    for name, body in joint.gm.named_children():
        if not isinstance(body, fx.GraphModule):
            continue
        for _, branches in choices(body):
            looks = [[_look(n) for n in results(b.graph)] for b in branches]
            if looks[0] != looks[1]:
                return f"the branches of {name} disagree: {looks[0]} and {looks[1]}"
            if any(n.op == "placeholder" for b in branches for n in results(b.graph)):
                return f"a branch of {name} returns one of its inputs"
    return None


def _look(node: fx.Node) -> tuple:
    v = value(node)
    return tuple(v.shape), v.dtype, tuple(v.stride()), v.device
