"""A picture of the method in a loss's graph, before and after the rewrite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx

from .report import Report

__all__ = ["condensed", "draw"]

_COLOURS = {"forward": "#9ecae1", "slim": "#deebf7", "head": "#d9d9d9", "backward": "#fdae6b", "sum": "#a1d99b"}


def condensed(report: Report, after: bool) -> nx.DiGraph:
    """The graph with one node for each velocity call, cotangent, backward, and the sum of gradients.

    Node attributes: kind (forward, slim, head, cotangent, backward, gate, sum), label, x, y. Edges from a
    cotangent to a backward carry their weight as label.
    """
    graph: nx.DiGraph = nx.DiGraph()
    n = len(report.sites)
    middle = (n - 1) / 2
    graph.add_node("head", kind="head", label="loss head, forward and backward", x=middle, y=2.0)
    graph.add_node("sum", kind="sum", label="gradient of the parameters", x=middle, y=-1.0)
    for x, call in enumerate(report.sites):
        k = call.index
        group = next(g for g in report.groups if k in g.calls)
        kept = not after or k in group.kept
        graph.add_node(f"v{k}", kind="forward" if kept else "slim", label=f"forward\n{k}", x=x, y=3.0)
        graph.add_edge(f"v{k}", "head")
        graph.add_node(f"g{k}", kind="cotangent", label=f"$g_{{{k}}}$", x=x, y=1.0)
        graph.add_edge("head", f"g{k}")
        if kept:
            graph.add_node(f"b{k}", kind="backward", label=f"backward\n{k}", x=x, y=0.0)
            graph.add_edge(f"b{k}", "sum")
    for group in report.groups:
        rows = report.weights[group.number] if after else None
        for j, node in enumerate(group.kept if after else group.calls):
            for c, k in enumerate(group.calls):
                weight = rows[j][c] if rows else float(node == k)
                if isinstance(weight, float) and weight == 0.0:
                    continue
                shown = weight.mean().item() if hasattr(weight, "mean") else weight
                graph.add_edge(f"g{k}", f"b{node}", label="" if shown == 1 else f"{shown:.2g}")
    return graph


def draw(report: Report, path: str | Path | None = None) -> Any:
    """Draw the graph before (above) and after (below) the rewrite; save it if a path is given.

    Needs matplotlib (`pip install jagg_fx[demo]`). Returns the figure. Light forwards keep nothing for a
    backward.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw() needs matplotlib: pip install 'jagg_fx[demo]'") from error
    figure = Figure(figsize=(1.25 * len(report.sites) + 1, 8.4), layout="constrained")
    before, after = report.sides
    titles = (
        f"before: {before.backward_calls} backwards",
        f"after (W={report.plan.W}, {report.plan.estimator.name}): {after.backward_calls} backwards"
        + ("" if report.plan.gate is None else ", where the gate is open"),
    )
    for axes, title, rewritten in zip(figure.subplots(2, 1), titles, (False, True), strict=True):
        _panel(axes, condensed(report, rewritten))
        axes.set_title(title, loc="left")
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _panel(axes: Any, graph: nx.DiGraph) -> None:
    at = {n: (d["x"], d["y"]) for n, d in graph.nodes(data=True)}
    nx.draw_networkx_edges(graph, at, ax=axes, node_size=900, width=0.8, edge_color="#888888", arrowsize=8)
    for node, data in graph.nodes(data=True):
        if data["kind"] == "cotangent":
            box = {"boxstyle": "circle,pad=0.2", "fc": "white", "ec": "#888888"}
        else:
            edge = "#bbbbbb" if data["kind"] == "slim" else "#333333"
            style = {"linestyle": "--"} if data["kind"] == "slim" else {}
            box = {"boxstyle": "round,pad=0.3", "fc": _COLOURS[data["kind"]], "ec": edge, **style}
        axes.text(*at[node], data["label"], ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    for a, b, data in graph.edges(data=True):
        if data.get("label"):
            (xa, ya), (xb, yb) = at[a], at[b]
            axes.text(
                xa + 0.35 * (xb - xa), ya + 0.35 * (yb - ya), data["label"], fontsize=7, color="#a63603", zorder=4
            )
    axes.set_axis_off()
    axes.margins(0.06, 0.12)
