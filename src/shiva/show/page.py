"""One self-contained HTML file: text, tables, figures and images, no network; it reads without JavaScript too."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiva.core.method import MethodConfig
from shiva.evaluate.candidates import slug
from shiva.show.style import encode, family

STYLE = """
:root { color-scheme: light dark; --page: #fff; --line: #8884; --soft: #8881; --dim: #666; --shiva: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --dim: #999; --shiva: #ff9a4d; } body { color: #e6e6e6; }
  .plot img { filter: invert(.91) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { background: var(--page); font: 16px/1.55 system-ui, sans-serif; }
body { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: .5rem 0; } h2 { font-size: 1.25rem; margin: 2.8rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem; }
p { max-width: 48rem; } a { color: inherit; }
details { border-top: 1px solid var(--line); padding: .2rem 0; }
summary { padding: .45rem 0; cursor: pointer; } summary h2 { display: inline; font-size: 1.1rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: .5rem 0; border-block: 1px solid var(--line); }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { padding: .34rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { background: linear-gradient(var(--soft), var(--soft)) var(--page); vertical-align: bottom; }
tbody th { background: var(--page); font-weight: 400; } th:first-child { position: sticky; left: 0; }
.number { text-align: right; white-space: nowrap; } .paper { color: var(--dim); }
tr.shiva th { color: var(--shiva); font-weight: 600; }
dl { max-width: 60rem; } dt { font-weight: 600; } dd { margin: 0 0 .5rem; }
.note, figcaption, footer { color: var(--dim); font-size: .85rem; }
figure { margin: 0; } img { display: block; max-width: 100%; height: auto; }
.plot { display: inline-block; vertical-align: top; max-width: min(100%, 46rem); margin: .6rem 0; }
.plot img { border-radius: 6px; } .plot img, .photo img { min-width: 38rem; }
.gallery { margin-top: .5rem; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; padding: .5rem 0; }
.controls[hidden], .shot[hidden] { display: none; }
select, button { font: inherit; padding: .3rem .6rem; min-height: 2.4rem; max-width: 100%; }
.cells { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(9rem, 28vw), 1fr)); gap: .9rem .7rem; }
.cells figure { max-width: 11rem; } .cells img { width: 100%; border-radius: 8px; background: #fff; }
.cells figcaption { padding-top: .25rem; line-height: 1.3; } .cells .shiva figcaption { color: var(--shiva); }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .7rem; }
"""

SCRIPT = """
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
};
addEventListener("hashchange", unfold); unfold();
for (const gallery of document.querySelectorAll(".gallery")) {
  const shots = [...gallery.querySelectorAll(".shot")], controls = gallery.querySelector(".controls");
  const choice = controls.querySelector("select"), [back, on] = controls.querySelectorAll("button");
  const show = () => shots.forEach((shot, i) => { shot.hidden = choice.value !== "all" && +choice.value !== i; });
  const turn = by => {
    choice.value = choice.value === "all" ? 0 : (+choice.value + by + shots.length) % shots.length; show();
  };
  choice.addEventListener("change", show);
  back.addEventListener("click", () => turn(-1));
  on.addEventListener("click", () => turn(1));
  controls.hidden = false; show();
}
"""

KINDS = {"png": "png", "svg": "svg+xml"}
THUMBNAIL = 352
"""Pixels across of the widest image in a gallery: twice what it is shown at."""
PAPER = re.compile(r"paper(:|$)", re.IGNORECASE)
"""Headings of the paper's own figures; `paper's count` is ours, in its way of counting."""
NUMBER = re.compile(r"^[-+±−<>~]?\s*[\d.,]+\s*(?:[%x×a-zA-Zµ/]{0,6})?(?:\s*±.*)?$|^(?:inf|nan|∞)?$")


def escape(text: Any) -> str:
    return html.escape(str(text))


def emphasis(name: str) -> str:
    """The class of a row or picture: Shiva's own stand out."""
    return ' class="shiva"' if family(name).ours else ""


def scrolling(content: str, label: str) -> str:
    """What may be wider than a phone, in a box that scrolls by finger and by keyboard."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'


def data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(image: Any, alt: str) -> str:
    """A PIL image as an <img> that carries its own bytes: a small one as it is, a large one reduced."""
    data, kind = io.BytesIO(), "png" if image.width <= THUMBNAIL else "webp"
    if kind == "webp":
        image = image.convert("RGB").resize((THUMBNAIL, round(THUMBNAIL * image.height / image.width)))
    image.save(data, format=kind, optimize=True)
    width, height = image.size
    return f'<img src="{data_url(data.getvalue(), kind)}" alt="{escape(alt)}" width="{width}" height="{height}">'


@dataclass
class Page:
    """Parts are added from top to bottom; `str()` is the file."""

    title: str
    parts: list[str] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)
    """Headings by their anchors, for the list at the top."""
    lead: list[str] = field(default_factory=list)
    """Parts that come before all others."""
    folded: bool = False
    """Whether what follows a heading is shown when it is clicked."""

    def text(self, paragraph: str) -> None:
        self.parts.append(f"<p>{escape(paragraph)}</p>")

    def note(self, paragraph: str) -> None:
        self.parts.append(f'<p class="note">{escape(paragraph)}</p>')

    def heading(self, text: str, opened: bool = False) -> None:
        name = slug(text)
        while name in self.sections:
            name += "-more"
        if not self.folded:
            self.parts.append(f'<h2 id="{name}">{escape(text)}</h2>')
        else:
            fold = f'<details id="{name}"{" open" * opened}><summary><h2>{escape(text)}</h2></summary>'
            self.parts.append("</details>" * bool(self.sections) + fold)
        self.sections[name] = text

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", note: str = "") -> None:
        """Rows under headings; the paper's columns are grey, figures align to the right."""
        numeric = [bool(rows) and all(NUMBER.match(str(row[i])) for row in rows) for i in range(len(headings))]
        marks = [
            f' class="{" ".join(["number"] * is_number + ["paper"] * bool(PAPER.match(heading)))}"'
            for heading, is_number in zip(headings, numeric, strict=True)
        ]
        marks = [mark if '""' not in mark else "" for mark in marks]
        head = "".join(f'<th scope="col"{m}>{escape(cell)}</th>' for m, cell in zip(marks, headings, strict=True))
        body = "".join(
            f'<tr{emphasis(str(row[0]))}><th scope="row"{marks[0]}>{escape(row[0])}</th>'
            + "".join(f"<td{m}>{escape(cell)}</td>" for m, cell in zip(marks[1:], row[1:], strict=True))
            + "</tr>"
            for row in rows
        )
        caption = f"<caption>{escape(title)}</caption>" if title else ""
        content = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self.parts.append(scrolling(content, title or f"table by {headings[0]}"))
        if note:
            self.note(note)

    def glossary(self, terms: Mapping[str, str]) -> None:
        entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms.items())
        self.parts.append(f"<dl>{entries}</dl>")

    def figure(self, drawn: Any, caption: str, photo: bool = False) -> None:
        """A matplotlib figure, or the bytes of a PNG; `photo` holds pictures, which a dark page must not invert."""
        form = "png" if photo or isinstance(drawn, bytes) else "svg"
        url = data_url(drawn if isinstance(drawn, bytes) else encode(drawn, form), KINDS[form])
        name = "photo" if photo else "plot"
        box = scrolling(f'<img src="{url}" alt="{escape(caption)}">', "figure")
        self.parts.append(f'<figure class="{name}">{box}<figcaption>{escape(caption)}</figcaption></figure>')

    def gallery(self, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """Images of every method (columns) for one prompt (row) at a time; without JavaScript, all of them."""
        choices, shots = [], []
        for index, (name, images) in enumerate(rows):
            cells = "".join(
                f"<figure{emphasis(column)}>{picture(image, f'{name}, {column}')}"
                f"<figcaption>{escape(column)}</figcaption></figure>"
                for column, image in zip(columns, images, strict=True)
                if image is not None
            )
            choices.append(f'<option value="{index}">{escape(name)}</option>')
            shots.append(f'<section class="shot"><h3>{escape(name)}</h3><div class="cells">{cells}</div></section>')
        controls = (
            f'<div class="controls" hidden><label>Prompt <select>{"".join(choices)}'
            '<option value="all">all prompts</option></select></label>'
            '<button type="button">Previous</button><button type="button">Next</button></div>'
        )
        self.parts.append(f'<div class="gallery">{controls}{"".join(shots)}</div>')

    def footer(self, text: str) -> None:
        self.parts.append(f"<footer>{escape(text)}</footer>")

    def __str__(self) -> str:
        links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in self.sections.items())
        nav = f"<nav>{links}</nav>" if len(self.sections) > 1 and not self.folded else ""
        end = "</details>" if self.folded and self.sections else ""
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'
            f"<body><h1>{escape(self.title)}</h1>{nav}{''.join([*self.lead, *self.parts])}{end}"
            f"<script>{SCRIPT}</script></body></html>\n"
        )


@contextlib.contextmanager
def drawing(page: Page) -> Iterator[None]:
    """Without matplotlib the page has no figures, and says so."""
    try:
        yield
    except ImportError as error:
        page.note(f"No figure: {error}")


METRICS = {
    "Fréchet": "how far the generated images are from the real ones as a set, on features of EfficientNet-Lite0. "
    "It is not FID and not comparable with it; fewer images give a larger distance, so compare at equal counts.",
    "kernel": "the same question by a kernel distance, which does not depend on the count; not KID.",
    "LPIPS to real": "how different an image looks from the real one of its prompt, by AlexNet.",
    "text-image": "cosine of an image with its prompt, by the embedded model's own small towers; not CLIP score.",
    "top-1 label": "share of images that these towers give their own label first, of all labels of the set.",
    "top-5 labels": "share of images that have their own label among the first five.",
    "FID": "Fréchet distance to the real images on Inception features.",
    "CLIP score": "100 times the cosine of an image with its prompt, by CLIP.",
    "CLIP-IQA": "CLIP's probability of a good photo against a bad one.",
    "ImageReward": "score of a model of human preference.",
    "PSNR to dense": "pixels against the dense model's image of the same prompt and noise: how near, not how good.",
    "SSIM to dense": "structure against the dense model's image: how near, not how good.",
    "LPIPS to dense": "how different an image looks from the dense model's, by AlexNet.",
    "MSE to dense": "squared error of pixels against the dense model's image.",
    "cosine to dense": "cosine of pixels, around mid-grey, with the dense model's image.",
    "GFLOPs": "true ones of one transformer call, by the tokens that ran and a fill's own, a router's or a matching's "
    "not counted; of fewer steps, other solvers and step caches every matrix product of a run, over dense's steps.",
    "GFLOPs, MACs counted once": "the same as the paper counts them: a multiplication and addition in a linear layer "
    "is one.",
    "latency": "seconds of a whole image, as the median of turns that all methods take.",
    "limit": "the speed-up that FLOPs alone would allow.",
    "one-step": "the prediction of a single step against dense's, before errors add up over steps.",
    "paper:": "the paper's own figure, of SD3-Medium at 1024 x 1024: only order and sign can be compared.",
}
"""By how a column's heading starts."""
CANDIDATES = {
    "dense": "the model as it is, every token in every block.",
    "fine-tuned": "the dense model trained on as many images as the methods, nothing left out.",
    "Shiva": "trained: runs this percentage of tokens on average, chosen by a router under a learned table of "
    "shares by layer and step.",
    "Sweep": "Shiva with nothing trained: a band of tokens that moves with the steps runs, the others reuse their "
    "last update.",
    "cached": "tokens that are left out reuse their last update instead of none.",
    "shifted to": "the table shifted to another budget, without training again.",
    "flat": "the same checkpoint under one share everywhere instead of its learned table.",
    "fixed": "trained with one share everywhere, without a learned table.",
    "INT8": "feed-forward layers of the last blocks in 8-bit integers.",
    "FFN too": "tokens are merged before the feed-forward layers as well, not only before attention as published.",
}
"""By what a candidate's name has in it."""
OURS = ("Dense", "Shiva-DiT")
TITLE = re.compile(r"(?P<name>[\w -]+?)(?:: | \()")


def baselines() -> dict[str, str]:
    """Methods of others, by the name and paper that they or their module start with."""
    lines = map(first_line, MethodConfig.known.values())
    titled = {found["name"]: line for line in lines if (found := TITLE.match(line))}
    return {name: line.removeprefix(name).lstrip(": ") for name, line in titled.items() if name not in OURS}


def first_line(config: type[MethodConfig]) -> str:
    """Of a method's own description where that names it, of its module's otherwise."""
    own, module = ((of.__doc__ or "").partition("\n")[0] for of in (config, sys.modules[config.__module__]))
    return own if own.startswith(config.__name__) or "et al." in own else module


def meanings(headings: Iterable[str], candidates: Iterable[str]) -> dict[str, str]:
    """Of the words that these columns and candidates are named by."""
    columns, names = tuple(headings), tuple(candidates)
    methods = {**CANDIDATES, **baselines()}
    return {
        **{word: methods[word] for word in methods if any(word in name for name in names)},
        **{word: METRICS[word] for word in METRICS if any(column.startswith(word) for column in columns)},
    }
