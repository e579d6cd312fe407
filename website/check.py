"""Check: what a browser would find wrong with the built site, or would fetch from elsewhere.

Every link leads to a file of the site and to a heading that is there. No page loads a script, a style, a font or an
image from another host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_LOADS: Final = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
_FETCHED_FOR: Final = {"mermaid", "glightbox", "pyodide"}
"""Classes for which the theme's script would fetch a library from a CDN."""
_CSS_LOADS: Final = re.compile(r"@import[^;]*https?:|url\(\s*[\"']?https?:")


class Page(HTMLParser):
    """What a page holds.

    Attributes:
        ids: that a link may lead to.
        leads: targets of its links.
        loads: what the browser fetches to show it.
        classes: of all elements.
        styles: what its style elements and attributes say.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.classes: set[str] = set()
        self.styles = ""
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found and tag != "meta"}
        self.classes |= set(found.get("class", "").split())
        self.styles += found.get("style", "")
        self._in_style = tag == "style"
        if tag == "a" and "href" in found:
            self.leads.append(found["href"])
        self.loads += [found[name] for name in _LOADS.get(tag, ()) if name in found]

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles += data


def faults(site: Path) -> Iterator[str]:
    """One sentence for each thing that is wrong below ``site``."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages"
    for file, page in pages.items():
        name = file.relative_to(site)
        for target in page.loads:
            if _elsewhere(target):
                yield f"{name} loads {target} from another host"
            elif (wrong := _missing(site, file, target, pages)) is not None:
                yield f"{name} loads {target}: {wrong}"
        # The page for addresses that are not there is shown at any of them, so its links begin at the root.
        for target in () if file.name == "404.html" else page.leads:
            if not _elsewhere(target) and (wrong := _missing(site, file, target, pages)) is not None:
                yield f"{name} links to {target}: {wrong}"
        for kind in sorted(_FETCHED_FOR & page.classes):
            yield f"{name} has an element of class {kind}, for which the theme loads a library from another host"
        if _CSS_LOADS.search(page.styles):
            yield f"{name} has a style that loads from another host"
    for file in sorted(site.rglob("*.css")):
        if _CSS_LOADS.search(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)} loads from another host"
    for file in sorted(site.rglob("*.svg")):
        drawing = Page(file.read_text(encoding="utf-8"))
        if any(map(_elsewhere, drawing.loads)) or _CSS_LOADS.search(drawing.styles):
            yield f"{file.relative_to(site)} loads from another host"


def _elsewhere(target: str) -> bool:
    parts = urlsplit(target)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "mailto")


def _missing(site: Path, file: Path, target: str, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a target within the site; None if nothing is."""
    parts = urlsplit(target)
    if parts.scheme in ("data", "javascript"):
        return None
    path = unquote(parts.path)
    start = site if path.startswith("/") else file.parent
    leads_to = (start / path.lstrip("/")).resolve() if path else file
    if leads_to.is_dir():
        leads_to /= "index.html"
    if not leads_to.is_file():
        return "there is no such file"
    if parts.fragment and leads_to in pages and unquote(parts.fragment) not in pages[leads_to].ids:
        return f"there is no heading {unquote(parts.fragment)!r}"
    return None
