"""Fill the tables of README.md and of the pages on few steps, many steps, methods and evaluation from the committed
results: python -m reproduce.readme."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shiva.checkpoint import write_atomically
from shiva.evaluate.frontier import Kind, Point, best
from shiva.show.documents import tables_of, texts_of

ROOT = Path(__file__).parents[1]
EVALUATION = ROOT / "results" / "eval" / "emoji-128-turbo-16" / "tables" / "floor.json"
BY_FOUR = ROOT / "results" / "eval" / "emoji-128-turbo-16-by-4" / "tables" / "floor.json"
LARGE = ROOT / "results" / "eval" / "emoji-128-32" / "tables" / "main.json"
FRONTIER = ROOT / "results" / "frontier" / "emoji-128-16" / "frontier.json"
FLOORS = {
    "64 px, 256 tokens": ROOT / "results" / "floor" / "emoji-64.json",
    "the turbo, 1024 tokens": ROOT / "results" / "floor" / "emoji-128-turbo.json",
}
TURBO = ROOT / "results" / "frontier" / "emoji-128-turbo-4" / "frontier.json"
COMMAND = (
    "shiva eval models/emoji-128-turbo --methods recipes/eval/emoji-128-turbo.yaml --protocol floor --limit 16 "
    "--seeds 0,1,2 --rounds 9 --record"
)
SHORT = (
    r"dense",
    r"\d+ steps(, trained)?",
    r"Shiva (66 in 3|70 in 2) steps",
    r"identity .*",
    r"Lattice 66 in 3 steps",
    r"Sweep \d+ in 3 steps",
    r"ToMeSD",
    r"ToMA",
)
"""Rows of the README, by their names."""
WHOLE = (
    r"dense",
    r"\d+ steps(, trained)?",
    r"Shiva \d+ in \d steps(, .*)?",
    r"identity .*",
    r"(NeuralSort|DyDiT) in 3 steps",
    r"Lattice \d+ in 3 steps(, .*)?",
    r"Sweep .*",
    r"ToMeSD|ToFu|ToMA|SDTM",
)
EVERY = (r".*",)
COLUMNS = {
    "saved": "FLOPs saved",
    "latency, s": "seconds an image",
    "speed-up": "speed-up",
    "PSNR to dense": "PSNR to dense, dB ↑",
    "SSIM to dense": "SSIM ↑",
    "LPIPS to dense": "LPIPS to dense ↓",
    "Fréchet": "Fréchet distance ↓",
    "top-1": "right label ↑",
}
"""The main table's columns by how their headings start, and what they are called here."""
OURS, RIVALS, LONGER = "Shiva 66 in 3 steps", ("2 steps", "2 steps, trained"), "3 steps"
"""What few steps are about, what it is held against, and where the line from those leads."""
PARTS = {
    "all but the router (fill, `recall`, `steady`, `cover`, `span`), beside the paper's identity": (
        OURS,
        "identity 66 in 3 steps",
    ),
    "the router, beside the lattice's tokens in the same checkpoint": (OURS, f"{OURS}, lattice for its router"),
    "Lattice, fitted only, beside two steps": ("Lattice 66 in 3 steps", "2 steps"),
    "of that, what it takes from the step before (`recall`, `steady`)": (
        "Lattice 66 in 3 steps",
        "Lattice 66 in 3 steps, nothing recalled",
    ),
}
"""What each part is worth: the row with it, and the row without."""
FILLS = {
    "oracle, attending to all": "oracle: tokens that the fill would miss most, all keys",
    "Lattice, attending to all": "Lattice, attending to all",
    "Lattice, recalling": "Lattice, recalling",
    "Lattice, recalling, steady": "Lattice, recalling, steady",
    "Lattice": "Lattice, nothing recalled",
    "Lattice, not fitted": "Lattice, neighbours alone (not fitted)",
    "Lattice, regression alone": "Lattice, map alone",
    "Lattice, mean update": "Lattice, mean update",
    "random, same fill": "random tokens, same fill",
    "random, identity": "random tokens, identity",
    "Sweep": "Sweep",
    "fewer steps": "fewer steps: 3, 2",
}
"""Series of the floors, and what they are called here."""
BUDGETS = (0.6, 0.4)
CHOOSERS = {"its router": "its router", "a lattice": "a lattice", "random": "random tokens"}
SHARES = (0.5, 0.38, 0.35, 0.25)
"""Of the dense run's FLOPs, that the best of each kind is shown for."""
TIMES = (0.8, 0.75, 0.6, 0.55, 0.45, 0.35)
"""Of the turbo's time, that the best of either side is shown for."""
FEATURES = "Fréchet distance is on EfficientNet-Lite0 features, not FID."
KINDS: dict[Kind, str] = {
    "fewer steps": "fewer steps",
    "even steps": "fewer steps, evenly spaced",
    "multistep": "fewer steps, second order (UniPC)",
    "cache": "a step cache",
    "tokens": "fewer tokens, alone or with these",
}
PLAIN = re.compile(r"[\d.]+")
PLACE = re.compile(r"(<!-- (main|ahead|parts|times|fills|choosers): [^>]+ -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def table_of(document: dict[str, Any], chosen: Sequence[str]) -> list[str]:
    """The chosen rows and columns in Markdown; columns that nobody measured are left out."""
    every = {heading: cells for table in tables_of(document) for heading, cells in texts_of(table).items()}
    columns = {
        name: every[heading]
        for start, name in COLUMNS.items()
        for heading in every
        if heading.startswith(start) and "MACs" not in heading and any(every[heading].values())
    }
    methods = [name for wanted in chosen for name in max(every.values(), key=len) if re.fullmatch(wanted, name)]
    shown = [aligned([cells.get(name, "") for name in methods]) for cells in columns.values()]
    rows = [list(row) for row in zip(methods, *shown, strict=True)]
    return markdown([["", *columns], ["---", *["---:"] * len(columns)], *rows])


def aligned(cells: Sequence[str]) -> Sequence[str]:
    """A column's plain numbers to as many decimals as its largest has in four digits; others as they are."""
    figures = [float(cell) for cell in cells if PLAIN.fullmatch(cell)]
    if len(figures) < sum(map(bool, cells)) or not any(figures):
        return cells
    decimals = max(0, 3 - math.floor(math.log10(max(figures))))
    return [cell and f"{float(cell):.{decimals}f}" for cell in cells]


def on_the_turbo(shown: Sequence[str]) -> str:
    document = json.loads(EVALUATION.read_text())
    about = (
        f"*{measured_on(document)}, no guidance. "
        "The number behind a name is the percentage of tokens computed. What is trained has the same adapter, target "
        "and images; identity is the paper's: a skipped token gets nothing. Lattice is fitted in under a minute; "
        f"Sweep and what merges tokens need neither. {FEATURES} "
        f"`{COMMAND}` prints it.*"
    )
    return "\n".join([*table_of(document, shown), "", about])


def in_short() -> str:
    """The README's: some rows, and how far ours is ahead."""
    two, trained = (ahead(json.loads(EVALUATION.read_text()), rival) for rival in RIVALS)
    told = f"**{OURS} beside 2 steps: {two[0]:+.1f} dB for their FLOPs, {two[1]:+.1f} dB for the same time"
    told += f"; beside 2 trained steps {trained[0]:+.1f} and {trained[1]:+.1f} dB.**"
    return f"{on_the_turbo(SHORT)}\n\n{told}"


def ahead(document: dict[str, Any], rival: str) -> tuple[float, float]:
    """dB by which ours is nearer to dense than a rival, and than the rival's line to one step more at our time."""
    psnr: dict[str, float] = {
        name: scores["psnr"] for name, scores in document["results"]["quality"].items() if "psnr" in scores
    }
    way = (time_of(document, OURS) - time_of(document, rival)) / (time_of(document, LONGER) - time_of(document, rival))
    return psnr[OURS] - psnr[rival], psnr[OURS] - psnr[rival] - way * (psnr[LONGER] - psnr[rival])


def time_of(document: dict[str, Any], name: str) -> float:
    """An image's, as a share of dense."""
    cost = document["results"]["cost"]
    return float(cost[name]["latency"]["median"] / cost["dense"]["latency"]["median"])


def beside_fewer_steps() -> str:
    one, four = (json.loads(path.read_text()) for path in (EVALUATION, BY_FOUR))
    rows = [["for their FLOPs", *(f"{ahead(one, rival)[0]:+.1f} dB" for rival in RIVALS)]]
    for document, calls in ((one, ""), (four, ", four images a call (`--batch 4`)")):
        they = [time_of(document, rival) for rival in RIVALS]
        name = f"for the same time{calls}: {time_of(document, OURS):.0%}, they {they[0]:.0%} and {they[1]:.0%}"
        rows.append([name, *(f"{ahead(document, rival)[1]:+.1f} dB" for rival in RIVALS)])
    quality = one["results"]["quality"]
    called = {"lpips": "LPIPS to dense ↓", "frechet": "Fréchet distance ↓", "kernel": "kernel distance ↓"}
    for metric, name in called.items():
        form = ".0f" if metric == "frechet" else ".3f"
        ours = quality[OURS][metric]
        rows.append([name, *(f"{ours:{form}}, they {quality[rival][metric]:{form}}" for rival in RIVALS)])
    return "\n".join(markdown([[OURS, *(f"beside {rival}" for rival in RIVALS)], ["---", "---:", "---:"], *rows]))


def parts() -> str:
    quality = json.loads(EVALUATION.read_text())["results"]["quality"]
    rows = [["part", "PSNR to dense", "LPIPS to dense"], ["---", "---:", "---:"]]
    for part, (on, off) in PARTS.items():
        nearer = f"{quality[on]['psnr'] - quality[off]['psnr']:+.1f} dB"
        rows.append([part, nearer, f"{quality[off]['lpips']:.3f} to {quality[on]['lpips']:.3f}"])
    return "\n".join(markdown(rows))


def by_time() -> str:
    """The nearest to dense of the turbo for some shares of its time, with and without dropping tokens."""
    points = [Point(**point) for point in json.loads(TURBO.read_text())["results"]["points"]]
    sides = [p for p in points if p.kind == "tokens"], [p for p in points if p.kind != "tokens"]
    rows = [["share of the time", "nearest with fewer tokens", "nearest with all tokens"], ["---"] * 3]
    for share in TIMES:
        pair = [best(side, share) for side in sides]
        nearest = max((point for point in pair if point is not None), key=lambda point: point.to_dense, default=None)
        rows.append([f"{share:.0%}", *(described(point, point is nearest) for point in pair)])
    return "\n".join(markdown(rows))


def fills() -> str:
    """dB and share of FLOPs in four steps, of each series at each budget."""
    floors = [json.loads(path.read_text())["points"] for path in FLOORS.values()]
    heads = [f"{name}: budget {budget:g}" for name in FLOORS for budget in BUDGETS]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for series, name in FILLS.items():
        settings = (3, 2) if series == "fewer steps" else BUDGETS
        found = [point_of(points, series, setting) for points in floors for setting in settings]
        rows.append([name, *(f"{point['mean']:.1f} ({point['flops']:.0%})" for point in found)])
    return "\n".join(markdown(rows))


def point_of(points: Sequence[dict[str, Any]], series: str, setting: float) -> dict[str, Any]:
    return next(p for p in points if (p["series"], p["steps"], p["setting"]) == (series, 4, setting))


def choosers() -> str:
    """dB of a trained Shiva in three steps by who chooses its tokens, the mean over seeds."""
    found = json.loads(FLOORS["the turbo, 1024 tokens"].read_text())["who_chooses"]
    rows = [["tokens by", *(f"budget {budget:g}" for budget in BUDGETS)], ["---", *["---:"] * len(BUDGETS)]]
    for start, name in CHOOSERS.items():
        means = [[p["mean"] for p in found if p["series"].startswith(start) and p["setting"] == at] for at in BUDGETS]
        rows.append([name, *(f"{statistics.fmean(each):.1f} dB" for each in means)])
    return "\n".join(markdown(rows))


def described(point: Point | None, bold: bool) -> str:
    if point is None:
        return "–"
    mark = "**" if bold else ""
    return f"{mark}{point.name}: {point.to_dense:.1f} dB{mark}, {point.time:.0%}"


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def on_the_base() -> str:
    document = json.loads(LARGE.read_text())
    return "\n".join([*table_of(document, EVERY), "", f"*{measured_on(document)}. {FEATURES}*"])


def measured_on(document: dict[str, Any]) -> str:
    settings, where = document["settings"], document["environment"]
    seeds = "one seed" if len(settings["seeds"]) == 1 else f"{len(settings['seeds'])} seeds"
    return (
        f"{settings['model']}, {settings['count']} prompts and {seeds}, {where['cores']} cores of an {where['cpu']}, "
        f"{settings['steps']} steps where no other number stands"
    )


def front() -> str:
    """The best of each kind for some shares of the FLOPs."""
    document = json.loads(FRONTIER.read_text())
    points = [Point(**point) for point in document["results"]["points"]]
    lines = [["", *(f"{share:.0%} of FLOPs" for share in SHARES)], ["---"] * (1 + len(SHARES))]
    for kind, name in KINDS.items():
        cells = []
        for share in SHARES:
            able = [p for p in points if p.kind == kind and p.flops < share + 0.005]
            found = max(able, key=lambda point: point.to_dense, default=None)
            quality = "" if found is None else f"{found.to_dense:.1f} dB, Fréchet {found.quality['frechet']:.0f}"
            cells.append("–" if found is None else f"{found.name}: {quality}, {found.time:.0%} of the time")
        lines.append([name, *cells])
    return "\n".join(markdown(lines))


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"main": in_short},
    ROOT / "docs" / "how-to" / "few-steps.md": {
        "ahead": beside_fewer_steps,
        "main": lambda: on_the_turbo(WHOLE),
        "parts": parts,
        "times": by_time,
    },
    ROOT / "docs" / "how-to" / "many-steps.md": {"main": front},
    ROOT / "docs" / "methods.md": {"fills": fills, "choosers": choosers},
    ROOT / "docs" / "evaluation.md": {"main": on_the_base},
}
"""What stands in a page's marked places, by their names."""


def filled(page: Path) -> str:
    """The page's text with the tables that the results have for it."""
    return PLACE.sub(lambda place: f"{place[1]}\n{PAGES[page][place[2]]()}\n\n{place[3]}", page.read_text())


if __name__ == "__main__":
    for page in PAGES:
        write_atomically(page, filled(page).encode())
