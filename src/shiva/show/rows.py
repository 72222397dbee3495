"""Who the demo shows: a model, a method for it and a number of steps, each a row of one list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shiva.evaluate.candidates import DENSE, Candidate, read_candidates
from shiva.evaluate.checkout import BASE, TURBO, checkpoint_for, embedded, usual_run

STEPS, GUIDANCE = usual_run(BASE[0])


@dataclass(frozen=True)
class Row:
    """Draws the prompts by a candidate, on a model, in so many steps."""

    name: str
    candidate: Candidate = Candidate()  # noqa: RUF009  (frozen)
    model: Path | None = None
    """The base model's where none is named."""
    steps: int = STEPS
    guidance: float = GUIDANCE

    @property
    def passes(self) -> int:
        """Passes of the transformer over one image."""
        return self.steps * (2 if self.guidance > 1 else 1)


def demo_rows(base: str) -> list[Row]:
    """At most eight: the dense model and ours beside it, then its rivals."""

    def checkpoint(method: str, budget: float) -> Candidate:
        return Candidate(checkpoint=str(checkpoint_for(base, method)), options={"budget": budget})

    turbo = embedded(base).parent / TURBO[0]
    steps, guidance = usual_run(turbo)
    few = [Row(f"turbo in {steps} steps", model=turbo, steps=steps, guidance=guidance)] if turbo.is_dir() else []
    return [
        Row(DENSE),
        Row("Sweep 40", Candidate(method="Sweep", options={"budget": 0.4})),
        Row("Shiva 80", checkpoint("Shiva 80", 0.8)),
        Row("Shiva 60", checkpoint("Shiva 60", 0.6)),
        Row("Lattice 60", checkpoint("Lattice", 0.6)),
        Row("ToMeSD", Candidate(method="ToMeSD", preset="paper")),
        Row("fewer steps", steps=10),
        *few,
    ]


def chosen_rows(methods: str | None, every: bool, steps: int | None) -> tuple[Path, list[Row], list[str]]:
    """The model, its rows that have what they need here, and why the others are left out.

    Those of the demo's list, or those of the main table of a file of candidates, dense first.
    """
    base = embedded(*BASE)
    if every and methods is None:
        methods = f"recipes/eval/{base.name}.yaml"
        if not Path(methods).is_file():
            raise FileNotFoundError(f"{methods} is not here; run shiva demo --all in a checkout, or pass --methods")
    rows = demo_rows(base.name)
    if methods is not None:
        read = read_candidates(methods)
        base = base if read.model is None else Path(read.model)
        named = {DENSE: Candidate(), **{name: read.candidates[name] for name in read.of("main")}}
        rows = [Row(name, candidate, None, read.steps, read.guidance) for name, candidate in named.items()]
    found, left_out = [], []
    for row in rows:
        try:
            row.candidate.config()
        except FileNotFoundError as error:
            left_out.append(f"{row.name}: {error}")
        else:
            model = row.model or base
            share = 1.0 if steps is None else steps / rows[0].steps
            found.append(replace(row, model=model, steps=max(2, round(row.steps * share))))
    return base, found, left_out
