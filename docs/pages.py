"""mkdocs hook: a page whose front matter has `source:` is those files of the repository, with their links followed.

A pattern may name several files; the newest comes first.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    pattern = page.meta.get("source")
    if pattern is None:
        return markdown
    pages = {file.src_uri: _source(file) for file in files.documentation_pages()}
    sources = sorted(ROOT.glob(pattern), reverse=True)
    if not sources:
        raise FileNotFoundError(f"{page.file.src_uri}: source: no file is named {pattern!r} in the repository.")
    return "\n\n".join(_with_links(source, page.file.src_uri, pages) for source in sources)


def _source(file: Any) -> str | None:
    """The pattern in a page's front matter."""
    found = re.match(r"---\nsource: (.*)\n---", file.content_string)
    return found[1] if found else None


def _with_links(source: Path, page: str, pages: dict[str, str | None]) -> str:
    """The text of a file, whose links between files become links between pages; mkdocs warns of what leads nowhere."""

    def follow(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve().relative_to(ROOT)
        uri = next((uri for uri, pattern in pages.items() if pattern and target.match(pattern)), None)
        if uri is None:
            uri = target.relative_to("docs").as_posix() if target.is_relative_to("docs") else target.as_posix()
        return f"]({posixpath.relpath(uri, posixpath.dirname(page) or '.')}"

    return LINK.sub(follow, source.read_text())
