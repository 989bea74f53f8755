"""The table, the figures and the picture of `bench.step`, from its JSON alone: they can be made again later."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.demo_report import EMPTY, markdown

Entry = Mapping[str, Any]

PER_STEP = ("exact-steps", "exact-steps-eager")
CHECKPOINT = ("exact-checkpoint", "exact-checkpoint-eager")
EXACT = ("exact-unrolled", "exact-unrolled-eager", "exact-flat", *PER_STEP, *CHECKPOINT)
AUTHOR = ("author", "author-eager")
COLOURS = {"exact": "tab:gray", "author": "tab:orange", "half": "tab:green"}
"""By how the name of a family starts; ours are blue."""


class Results:
    """What one run measured, and what follows from it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.settings: Mapping[str, Any] = content["settings"]
        self.entries: list[Entry] = content["contenders"]

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(json.loads(path.read_text(encoding="utf-8")))

    @property
    def Ws(self) -> list[int]:
        return sorted({e["W"] for e in self.entries if e["W"] is not None})

    def get(self, families: str | Sequence[str], W: int | None = None) -> Entry | None:
        """The fastest of these that was timed."""
        families = (families,) if isinstance(families, str) else families
        found = [e for e in self.entries if e["family"] in families and e["W"] in (W, None) and e["seconds"]]
        return min(found, key=lambda e: statistics.median(e["seconds"]), default=None)

    def unit(self, kind: str, name: str) -> float | None:
        values = self.content["units"].get(kind, {}).get(name)
        return statistics.median(values) if values else None

    def bound(self, cost: Sequence[int]) -> float | None:
        """Seconds of these calls of the network alone, compiled or eager, whichever takes less.

        The first backward of a step finds `.grad` empty, every other one adds to it.
        """
        forwards, saving, backwards = cost
        found = []
        for kind in ("compiled", "eager"):
            forward, save, back, add = (self.unit(kind, n) for n in ("forward", "saving", "backward", "accumulating"))
            if forward is None or save is None or back is None or add is None:
                continue
            found.append(forwards * forward + saving * save + min(backwards, 1) * back + max(backwards - 1, 0) * add)
        return min(found, default=None)

    def over_bound(self, entry: Entry | None) -> float | None:
        return None if entry is None else ratio(median(entry), self.bound(entry["cost"]))


def median(entry: Entry | None, what: str = "seconds") -> float | None:
    return statistics.median(entry[what]) if entry and entry[what] else None


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _text(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return EMPTY if value is None else f"{value:{form}}{unit}"


def _bytes(value: int | None) -> str:
    if value is None:
        return EMPTY
    return f"{value / 2**20:,.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"


def _seconds(value: float | None) -> str:
    if value is None:
        return EMPTY
    return f"{value * 1000:.3g} ms" if value < 0.1 else f"{value:.3g} s"


def table(r: Results) -> str:
    """One row for each contender."""
    unrolled, steps = (median(r.get(f)) for f in ("exact-unrolled", "exact-steps"))
    best = r.get(EXACT)
    head = ["", "step", "speed to exact", "to (a)", "to (b)", "over its bound", "backward", "speed to exact's"]
    lines = [[*head, "compile", "joint graph", "saved", "peak", "gradient error", "cosine"]]
    for e in r.entries:
        if e["note"]:
            lines.append([e["title"], "not run", *[EMPTY] * 12])
            continue
        own, back = median(e), median(e, "backward_seconds")
        nodes = f"{e['nodes_before']} → {e['nodes_after']}" if e["nodes_before"] else EMPTY
        lines.append(
            [
                e["title"],
                _seconds(own),
                *(_text(ratio(x, own), ".2f", "x") for x in (median(best), unrolled, steps)),
                _text(r.over_bound(e)),
                _seconds(back),
                _text(ratio(median(best, "backward_seconds"), back), ".2f", "x"),
                _text(e["compile_seconds"], ".1f", " s"),
                nodes,
                _bytes(e["saved_bytes"]),
                _bytes(e["peak_bytes"]),
                _text(e["error"], ".2g"),
                _text(e["cosine"], ".4f"),
            ]
        )
    return markdown(lines)


def unit_table(r: Results) -> str:
    lines = [["one call", "forward, keeps nothing", "forward, saves", "backward", "backward that accumulates"]]
    for kind in r.content["units"]:
        values = [r.unit(kind, name) for name in ("forward", "saving", "backward", "accumulating")]
        lines.append([kind, *map(_seconds, values)])
    return markdown(lines)


def figures(r: Results) -> list[tuple[str, dict[int, float | None]]]:
    """What the run says of our step at each W, by name; exact is the fastest exact contender."""
    exact = r.get(EXACT)

    def over(families: str | Sequence[str], below: str, what: str = "seconds") -> Callable[[int], float | None]:
        return lambda W: ratio(median(r.get(families, W), what), median(r.get(below, W), what))

    def of_bytes(family: str, what: str) -> Callable[[int], float | None]:
        def share(W: int) -> float | None:
            own, whole = r.get(family, W), r.get("exact-unrolled")
            return ratio(own[what], whole[what]) if own and whole else None

        return share

    def bound_speed(W: int) -> float | None:
        own = r.get("ours", W)
        return ratio(r.bound(exact["cost"]), r.bound(own["cost"])) if own and exact else None

    def passes(W: int) -> float | None:
        own = r.get("ours", W)
        return own["pass_seconds"] + own["verifier_seconds"] if own else None

    def verifier(W: int) -> float | None:
        own = r.get("ours", W)
        return own["verifier_seconds"] if own else None

    found: list[tuple[str, Callable[[int], float | None]]] = [
        ("exact / ours", over(EXACT, "ours")),
        ("the same in processor time", over(EXACT, "ours", "cpu_seconds")),
        ("the same of the bounds", bound_speed),
        ("ours / its bound", lambda W: r.over_bound(r.get("ours", W))),
        ("backward alone, exact / ours", over(EXACT, "ours", "backward_seconds")),
        ("(b) a backward per step / ours", over(PER_STEP, "ours")),
        ("(c) checkpointed / ours", over(CHECKPOINT, "ours")),
        ("(d) written by hand / ours", over(AUTHOR, "ours")),
        ("(g) exact / a random half", lambda W: ratio(median(exact), median(r.get(("half", "half-eager"))))),
        ("exact / ours with known velocities", over(EXACT, "known")),
        ("exact / ours with batched calls", over(EXACT, "batched")),
        ("the same, backward alone", over(EXACT, "batched", "backward_seconds")),
        ("exact with batched calls / ours with batched calls", over("exact-batched", "batched")),
        ("exact / ours with known velocities and batched calls", over(EXACT, "known-batched")),
        ("exact / ours, group after group", over(EXACT, "group")),
        ("exact / ours, recomputed", over(EXACT, "recompute")),
        ("gate open / no gate", over("open", "ours")),
        ("head gate open / no gate", over("open-head", "ours")),
        ("gate shut / exact", lambda W: ratio(median(r.get("shut", W)), median(exact))),
        ("saved activations, ours / exact unrolled", of_bytes("ours", "saved_bytes")),
        ("peak, ours / exact unrolled", of_bytes("ours", "peak_bytes")),
        ("peak, group after group / exact unrolled", of_bytes("group", "peak_bytes")),
        ("peak, recomputed / exact unrolled", of_bytes("recompute", "peak_bytes")),
        ("seconds of passes and verifier", passes),
        ("of these, the verifier", verifier),
    ]
    rows = [(name, {W: value(W) for W in r.Ws}) for name, value in found]
    return [(name, row) for name, row in rows if any(v is not None for v in row.values())]


def rounds_text(r: Results, W: int) -> str | None:
    """How exact / ours varies from round to round."""
    exact, own = r.get(EXACT), r.get("ours", W)
    if exact is None or own is None:
        return None
    each = [a / b for a, b in zip(exact["seconds"], own["seconds"], strict=False)]
    return f"W={W}: {min(each):.2f} to {max(each):.2f}"


def notes(r: Results) -> list[str]:
    s, m = r.settings, r.content["machine"]
    kind = f"LoRA of rank {s['lora']} on a frozen base" if s["lora"] else "all weights train"
    kind += ", every block checkpointed" if s["checkpoint"] else ""
    rounds = max((len(e["seconds"]) for e in r.entries), default=0)
    exact = r.get(EXACT)
    spread = [x for x in (rounds_text(r, W) for W in r.Ws) if x]
    lines = [
        f"DiT {s['size']}, {r.content['parameters']:,} parameters, {r.content['trained']:,} trained ({kind}); "
        f"{s['image']}x{s['image']}x3 in patches of {s['patch']}, {s['dtype']}; T={s['T']}, batch {s['batch']}.",
        f"{m['name']}, {m['cores']} cores, {s['threads']} threads of torch {m['torch']}; compiler {s['compiler']}, "
        f"mode {s['mode']}; load average {m['load_before']:.1f} before, {m['load_after']:.1f} after. "
        f"Medians of {rounds} interleaved rounds, each contender once a round.",
    ]
    if exact:
        lines.append(f"Exact is the fastest exact contender: {exact['title']}, {_seconds(median(exact))}.")
    if spread:
        lines.append(f"exact / ours, round by round: {'; '.join(spread)}.")
    return [
        *lines,
        *(f"{e['title']}: {e['note']}" for e in r.entries if e["note"]),
        '(a): exact, unrolled, compiled through shared bodies (`estimator="exact"`); (b): a backward per step, with '
        "the compiled network and the head of the loss in eager code. Where a figure names (b), (c) or (d), the faster "
        "of compiled and eager is meant.",
        "Bound: the calls of the network that a step cannot do without, at the unit costs below; the head of the loss, "
        "merging and the optimiser count nothing. The first backward finds `.grad` empty, the others add to it. "
        "Batched calls may be faster than it: they read the weights once for many timesteps.",
        "The fastest exact contender is one that makes its calls one by one, as the loss does; exact with batched "
        "calls is ours too, and stands beside.",
        "Gradient error: |gradient - exact| / |exact|, against eager autograd in fp32 in the same run.",
        "Saved: the most that autograd keeps at one time for a backward, parameters and the batch not counted; not "
        "told where backwards run inside of the forward. Peak: what a step takes beyond what was there before, "
        f"gradients included, {'by the allocator' if s['device'] == 'cuda' else 'resident set of a fresh process'}.",
        "Compile: the first calls less as many of the fastest; "
        + ("caches empty." if s["cold"] else "the caches were not emptied.")
        + " Those who call the compiled network count its compilation in.",
    ]


def text(r: Results, command: str) -> str:
    wanted = figures(r)
    numbers = [["", *(f"W={W}" for W in r.Ws)], *([n, *(_text(row[W]) for W in r.Ws)] for n, row in wanted)]
    parts = ["# One step, every contender", "", table(r), ""]
    if len(numbers) > 1:
        parts += [markdown(numbers), ""]
    return "\n".join([*parts, unit_table(r), "", *(f"* {note}" for note in notes(r)), "", f"`{command}`", ""])


def growth(first: Results, second: Results) -> str:
    """How the contenders' numbers grow from one run to another, with more timesteps say."""
    whats = {"peak_bytes": "peak", "saved_bytes": "saved", "compile_seconds": "compile", "nodes_after": "nodes"}
    lines = [["", "step", *whats.values()]]
    others = {e["key"]: e for e in second.entries if not e["note"]}
    for e in first.entries:
        other = others.get(e["key"])
        if e["note"] or other is None:
            continue
        values = [ratio(median(other), median(e)), *(ratio(other[w], e[w]) for w in whats)]
        lines.append([e["title"], *(_text(v) for v in values)])
    a, b = first.settings, second.settings
    changed = [f"{k} {a[k]} → {b[k]}" for k in a if k != "name" and a[k] != b.get(k)]
    commands = "\n".join(f"* `{r.content['command']}`" for r in (first, second))
    return f"# Growth: {', '.join(changed)}\n\n{markdown(lines)}\n\n{commands}\n"


def picture(r: Results, path: Path) -> None:
    """Step times with their bounds, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [e for e in r.entries if e["seconds"]][::-1]
    if not shown:
        return
    size = (13, 1.6 + 0.3 * len(shown))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, constrained_layout=True, sharey=True)
    for y, e in enumerate(shown):
        own, back, bound = median(e), median(e, "backward_seconds"), r.bound(e["cost"])
        assert own is not None
        spread = [[own - min(e["seconds"])], [max(e["seconds"]) - own]]
        colour = next((c for start, c in COLOURS.items() if e["family"].startswith(start)), "tab:blue")
        left.barh(y, own, color=colour, alpha=0.5, xerr=spread, error_kw={"elinewidth": 0.8})
        if back is not None:
            left.barh(y, back, left=own - back, color=colour)
        if bound is not None:
            left.plot([bound, bound], [y - 0.4, y + 0.4], color="black", linewidth=1.5)
        for what, shift, shade in (("saved_bytes", 0.2, 0.5), ("peak_bytes", -0.2, 1.0)):
            if e[what]:
                right.barh(y + shift, e[what] / 2**20, height=0.4, color=colour, alpha=shade)
    left.set_yticks(range(len(shown)), [e["title"] for e in shown], fontsize=8)
    left.set(xlabel="seconds of a step; solid: its backward part; black: the bound of the unit costs")
    right.set(xlabel="MiB; pale: saved activations, solid: peak")
    for panel in (left, right):
        panel.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(content: Mapping[str, Any], folder: Path) -> str:
    """Writes NAME.json, .md and .png into the folder; returns the Markdown."""
    r, name = Results(content), content["settings"]["name"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    made = text(r, content["command"])
    (folder / f"{name}.md").write_text(made, encoding="utf-8")
    try:
        picture(r, folder / f"{name}.png")
    except ImportError as missing:
        made += f"\nNo picture: {missing}. `--remake` draws it where matplotlib is installed.\n"
    return made
