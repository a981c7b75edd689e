"""Hooks of the documentation's site: links that lead out of ``docs/`` become plain text there.

On a repository's page ``[tests](../tests)`` leads to the folder. The site has pages alone.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]\[]*(?:\[[^\]]*\])?[^\]\[]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]+)?\)")
_README = "README.md"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page's text, of whose relative links only those to other pages and pictures are left."""
    folder = posixpath.dirname(page.file.src_uri)
    known = {file.src_uri for file in files}

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target in known:
            return link[0]
        if posixpath.basename(target) == _README:
            return f"[{link[1]}]({posixpath.relpath('index.md', folder or '.')})"
        return link[1]

    return _LINK.sub(kept, markdown)
