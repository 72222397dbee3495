"""For mkdocs: what a page links to outside docs/ is named on the site, not linked."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>\.\./[^)#]*)(?P<anchor>#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    inside = {file.src_uri for file in files}
    here = posixpath.dirname(page.file.src_uri)

    def named(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link["path"]))
        if target in inside:
            return link[0]
        return f"*{link['text']}* (`{target.removeprefix('../')}`)" if link["image"] else link["text"]

    return LINK.sub(named, markdown)
