"""docs/paper-claims.md, from the results that are committed: no figure on it was typed by hand.

shiva validate --write-docs
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduce.claims import FROM_TABLES, ON_THE_MODEL, SYNTHETIC
from reproduce.claims.common import KEPT, ROOT
from shiva.checkpoint import write_atomically

PAGE = ROOT / "docs" / "paper-claims.md"
HEAD = """# The paper's claims, measured here

{conclusion}

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
QUALITY = "quality_tables"
"""The experiment whose claims are on image quality."""


def load(folder: Path = KEPT) -> list[Record]:
    """The kept results, in the order of `shiva validate`."""
    paths = [folder / f"{name}.json" for name in (*SYNTHETIC, *ON_THE_MODEL, *FROM_TABLES)]
    missing = [path.stem for path in paths if not path.exists()]
    if missing:
        first = f"python -m reproduce.claims.{missing[0]} --record"
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; run `{first}` first")
    return [json.loads(path.read_text()) for path in paths]


def load_large() -> list[Record]:
    """What was measured on the model of 1024 tokens too, in the same order."""
    paths = [KEPT / LARGE / f"{name}.json" for name in (*ON_THE_MODEL, *FROM_TABLES)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


@dataclass(frozen=True)
class Twice:
    """A claim of one experiment that was measured on both models."""

    name: str
    small: Record
    large: Record
    single: bool
    """The larger model's is of one seed, which cannot show an order to be more than "in direction"."""

    @property
    def changed(self) -> bool:
        return self.large["verdict"] != self.small["verdict"] and not self.undecided

    @property
    def undecided(self) -> bool:
        verdicts = (self.small["verdict"], self.large["verdict"])
        return self.single and verdicts == ("reproduced", "reproduced in direction")

    @property
    def verdict(self) -> str:
        if self.changed:
            return f"**{self.large['verdict']}**, on 256 tokens {self.small['verdict']}"
        plain = self.undecided or self.large["verdict"] == "not in the paper"
        return f"{'' if plain else 'still '}{self.large['verdict']}{', one seed' if self.single else ''}"


def on_both(records: list[Record], large: list[Record]) -> list[Twice]:
    known = {(record["name"], claim["claim"]): claim for record in records for claim in record["claims"]}
    return [
        Twice(record["name"], known[record["name"], claim["claim"]], claim, record["details"].get("seeds") == [0])
        for record in large
        for claim in record["claims"]
    ]


def changes(both: list[Twice]) -> str:
    other = sum(claim.changed for claim in both)
    return f"{other} of {len(both)} verdicts are others" if other else f"all {len(both)} verdicts are the same"


def conclusion(records: list[Record]) -> str:
    """How many of the paper's claims hold, and how many of those on image quality."""
    verdicts = Counter(claim["verdict"] for record in records for claim in record["claims"])
    del verdicts["not in the paper"]
    quality = [claim["verdict"] for record in records if record["name"] == QUALITY for claim in record["claims"]]
    return (
        f"**Of the paper's {verdicts.total()} claims {verdicts['reproduced']} are reproduced, "
        f"{verdicts['reproduced in direction']} in direction, {verdicts['not reproduced']} not. "
        f"Of the {len(quality)} on image quality {quality.count('not reproduced')} are not.**"
    )


def on_1024_tokens(records: list[Record], large: list[Record]) -> list[str]:
    both = on_both(records, large)
    measured = {record["name"] for record in large}
    absent = ", ".join(f"`{name}`" for name in ON_THE_MODEL if name not in measured)
    lines = [
        "## On 1024 tokens",
        "",
        f"On `models/{LARGE}` {changes(both)}. What needs no trained model, or is measured at real shapes, does not "
        f"depend on it. {f'Not run there: {absent}. ' if absent else ''}Of one seed an order is *in direction* at "
        "best, which is no other verdict than *reproduced*. Measured by:",
        "",
        *(f"- `{record['command']}` ([JSON](../results/validate/{LARGE}/{record['name']}.json))" for record in large),
        "",
        "| Experiment | Claim | 256 tokens | 1024 tokens | Verdict |",
        "|---|---|---|---|---|",
    ]
    for claim in both:
        cells = (claim.large["claim"], claim.small["ours"], claim.large["ours"], claim.verdict)
        lines.append(f"| `{claim.name}` | {' | '.join(map(cell, cells))} |")
    return lines


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(records: list[Record], large: list[Record]) -> str:
    lines = [
        HEAD.format(conclusion=conclusion(records), changed=changes(on_both(records, large))),
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
