"""Pictures of measurements, with matplotlib, which is an extra."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingPackage
from ..extras import extra_remedy
from .output import output_file


def require_matplotlib() -> None:
    """Raise MissingPackage, before anything is measured, if pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackage(
            "a picture needs matplotlib, which is not installed",
            remedies=[extra_remedy("matplotlib"), "leave --png out"],
        )


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG. Raises what `output_file` does."""
    with output_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def draw_serve(result: Mapping[str, Any], path: Path) -> None:
    """Of `bench serve`: throughput, time to the first token and between tokens at each level, for each server."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    for axes, title in (
        (rate, "output tokens/s"),
        (first, "time to first token, ms"),
        (between, "between tokens, ms"),
    ):
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    labels: Sequence[str] = ()
    for number, (name, levels) in enumerate(result["servers"].items()):
        places = range(len(levels))
        labels = [str(level["concurrency"] or f"{level['rate']:g}/s") for level in levels]
        colour = f"C{number}"
        rate.plot(places, [level["output_tokens_per_s"] for level in levels], "o-", color=colour, label=name)
        for axes, figure_name in ((first, "ttft_ms"), (between, "itl_ms")):
            for percentile, style in (("p50", "o-"), ("p95", "^--")):
                values = [level[figure_name].get(percentile, float("nan")) for level in levels]
                axes.plot(places, values, style, color=colour, label=f"{name} {percentile}")
    is_rate = result["servers"] and next(iter(result["servers"].values()))[0]["rate"]
    for axes in (rate, first, between):
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlabel("requests a second" if is_rate else "requests at a time")
        axes.margins(y=0.1)
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.suptitle(" / ".join(dict.fromkeys(result["models"].values())), fontsize=11)
    save_figure(figure, path)


def draw_ops(result: Mapping[str, Any], path: Path) -> None:
    """Of `bench ops`: a roofline. Each call by its operations per byte and the rate it reached; the roof is made of
    the highest bandwidth and the highest rate among them."""
    from matplotlib.figure import Figure

    rows = [row for row in result["ops"] if row["intensity"]]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s")
    axes.grid(which="both", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    if rows:
        bandwidth, peak = (max(row[name] for row in rows) for name in ("gb_per_s", "gflop_per_s"))
        low, high = (pick(row["intensity"] for row in rows) for pick in (min, max))
        knee = peak / bandwidth
        places = [min(low, knee) / 2, knee, 2 * max(high, knee)]
        axes.plot(
            places,
            [bandwidth * places[0], peak, peak],
            color="0.5",
            label=f"best here: {bandwidth:.0f} GB/s, {peak:.0f} GFLOP/s",
        )
        markers = dict(zip(dict.fromkeys(row["op"] for row in rows), "os^vDP*X<>hp" * len(rows), strict=False))
        loads = {load: f"C{number}" for number, load in enumerate(dict.fromkeys(row["load"] for row in rows))}
        for row in rows:
            axes.plot(
                row["intensity"], row["gflop_per_s"], markers[row["op"]], color=loads[row["load"]], markersize=5
            )
        for op, marker in markers.items():
            axes.plot([], [], marker, color="0.3", label=op)
        for load, colour in loads.items():
            axes.plot([], [], "s", color=colour, label=load)
        axes.legend(fontsize=7, loc="lower right")
    axes.set_title(f"{result['model']} on {result['device']}, {result['dtype']}", fontsize=11)
    save_figure(figure, path)
