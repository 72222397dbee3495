"""One self-contained HTML file: text, tables and images, no network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; } th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); }
td + td, th + th { text-align: right; } th { text-align: left; background: var(--soft); }
.wide { overflow-x: auto; } .grid td, .grid th { border: 0; text-align: center; padding: .2rem; background: none; }
.grid th:first-child { text-align: right; } img { display: block; image-rendering: auto; border-radius: 6px; }
footer { margin-top: 3rem; color: #888; font-size: .85rem; }
"""


def escape(text: Any) -> str:
    return html.escape(str(text))


def picture(image: Any, alt: str, size: int = 96) -> str:
    """A PIL image as an <img> that carries its own bytes."""
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<img src="data:image/png;base64,{encoded}" alt="{escape(alt)}" width="{size}" height="{size}">'


@dataclass
class Page:
    """Parts are added from top to bottom; `str()` is the file."""

    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, paragraph: str) -> None:
        self.parts.append(f"<p>{escape(paragraph)}</p>")

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self.parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')

    def grid(self, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Images by row name and column name."""
        head = "<th></th>" + "".join(f"<th>{escape(column)}</th>" for column in columns)
        lines = []
        for name, images in rows:
            cells = (picture(im, f"{name}, {col}") for col, im in zip(columns, images, strict=True))
            lines.append(f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        self.parts.append(f'<div class="wide"><table class="grid"><tr>{head}</tr>{"".join(lines)}</table></div>')

    def footer(self, text: str) -> None:
        self.parts.append(f"<footer>{escape(text)}</footer>")

    def __str__(self) -> str:
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
            f"<body><h1>{escape(self.title)}</h1>{''.join(self.parts)}</body></html>\n"
        )
