"""docs/paper-claims.md, from the results that are committed: no figure on it was typed by hand.

shiva validate --write-docs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reproduce.claims import FROM_TABLES, ON_THE_MODEL, SYNTHETIC
from reproduce.claims.common import KEPT, ROOT
from shiva.checkpoint import write_atomically

PAGE = ROOT / "docs" / "paper-claims.md"
HEAD = """# The paper's claims, measured here

Written by `shiva validate --write-docs` from `results/validate/*.json`, each made by the command in its section;
`shiva validate --all` makes all of them at their full size; the last three read the committed tables of `shiva eval`
and `shiva bench`. What was assumed where the paper is silent stands at the head of each experiment. *Reproduced*: the
figure is met, by a tenth or by two standard errors where both are given; where a claim is an order, three seeds or
more agree on it and the mean difference, seed by seed, is beyond two standard errors. *In direction*: the sign or
order is right. *Not in the paper*: a measurement that the claim above it calls for. Quality is the embedded model's,
time a CPU's ratio to dense. [On 1024 tokens](#on-1024-tokens) {changed}. Experiments that answer no claim of the
paper are in [beyond-the-paper.md](beyond-the-paper.md).
"""
Record = dict[str, Any]
LARGE = "emoji-128"
"""The model of 1024 tokens."""


def load(folder: Path = KEPT) -> list[Record]:
    """The kept results, in the order of `shiva validate`."""
    paths = [folder / f"{name}.json" for name in (*SYNTHETIC, *ON_THE_MODEL, *FROM_TABLES)]
    missing = [path.stem for path in paths if not path.exists()]
    if missing:
        first = f"python -m reproduce.claims.{missing[0]} --record"
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; run `{first}` first")
    return [json.loads(path.read_text()) for path in paths]


def load_large(folder: Path = KEPT / LARGE) -> list[Record]:
    """What was measured on the model of 1024 tokens too, in the same order."""
    paths = [folder / f"{name}.json" for name in (*ON_THE_MODEL, *FROM_TABLES)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def on_both(records: list[Record], large: list[Record]) -> list[tuple[str, Record, Record]]:
    """Claims that were measured on both models, with the name of their experiment."""
    known = {(record["name"], claim["claim"]): claim for record in records for claim in record["claims"]}
    every = [(record["name"], claim) for record in large for claim in record["claims"]]
    return [(name, known[name, claim["claim"]], claim) for name, claim in every]


def changes(both: list[tuple[str, Record, Record]]) -> str:
    other = sum(small["verdict"] != large["verdict"] for _, small, large in both)
    return f"{other} of {len(both)} verdicts are others" if other else f"all {len(both)} verdicts are the same"


def on_1024_tokens(records: list[Record], large: list[Record]) -> list[str]:
    both = on_both(records, large)
    measured = {record["name"] for record in large}
    absent = ", ".join(f"`{name}`" for name in ON_THE_MODEL if name not in measured)
    lines = [
        "## On 1024 tokens",
        "",
        f"On `models/{LARGE}` {changes(both)}. What needs no trained model, or is measured at real shapes, does not "
        f"depend on it. {f'Not run there: {absent}. ' if absent else ''}Measured by:",
        "",
        *(f"- `{record['command']}` ([JSON](../results/validate/{LARGE}/{record['name']}.json))" for record in large),
        "",
        "| Experiment | Claim | 256 tokens | 1024 tokens | Verdict |",
        "|---|---|---|---|---|",
    ]
    for name, small, big in both:
        verdict = f"still {big['verdict']}"
        if small["verdict"] != big["verdict"]:
            verdict = f"**{big['verdict']}**, on 256 tokens {small['verdict']}"
        lines.append(f"| `{name}` | {cell(big['claim'])} | {cell(small['ours'])} | {cell(big['ours'])} | {verdict} |")
    return lines


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(records: list[Record], large: list[Record]) -> str:
    lines = [
        HEAD.format(changed=changes(on_both(records, large))),
        "| Experiment | Claim | Paper | Here | Verdict |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        link = f"[`{record['name']}`](#{record['name']})"
        lines += [
            f"| {link} | {cell(c['claim'])} | {cell(c['paper'])} | {cell(c['ours'])} | {c['verdict']} |"
            for c in record["claims"]
        ]
    lines += ["", *on_1024_tokens(records, large)]
    for record in records:
        name = record["name"]
        lines += ["", f"## {name}", "", f"{record['title']}. [Code](../reproduce/claims/{name}.py), "]
        lines[-1] += f"[JSON](../results/validate/{name}.json), `{record['command']}`."
        lines += ["", *(f"- *{c['verdict']}*: {c['claim']}. {c['sentence']}" for c in record["claims"])]
        if (KEPT / f"{name}.png").exists():
            lines += ["", f"![{record['title']}](../results/validate/{name}.png)"]
    machines = dict.fromkeys(map(measured_on, [*records, *large]))
    return "\n".join([*lines, "", *(f"Measured on {machine}." for machine in machines), ""])


def measured_on(record: Record) -> str:
    environment = record["environment"]
    packages = ", ".join(f"{package} {version}" for package, version in environment["packages"].items())
    return f"{environment['cpu']}, Python {environment['python']}, {packages}"


def write() -> Path:
    write_atomically(PAGE, page(load(), load_large()).encode())
    return PAGE.relative_to(ROOT)
