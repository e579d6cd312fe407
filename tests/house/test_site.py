"""The site's pages: each is in the navigation, each link leads to a file, and faults of a built site are found.

The site itself is built by `.ci/run`, with Zensical. Oracles: the files of the repository; pages made by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import check
import pages
from places import ROOT


def _nav() -> list[str]:
    """Pages that mkdocs.yml names. Its tags for Python are none of YAML's, so it is read line by line."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    return [line.split(" ")[-1] for line in nav.splitlines() if line.endswith(".md")]


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(_nav()) == sorted({*pages.sources().values(), "examples/index.md"})


@pytest.mark.parametrize("page", pages.sources(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    for number, target in pages.links(page):
        assert (page.parent / target.partition("#")[0]).exists(), f"{page.relative_to(ROOT)}:{number} {target}"


def test_links_of_the_repository_lead_from_page_to_page(tmp_path: Path) -> None:
    pages.gather(tmp_path)
    start = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "](planner.md)" in start
    assert "](contributing.md)" in start
    assert "](examples/index.md)" in start
    guide = (tmp_path / "guides/lora.md").read_text(encoding="utf-8")
    assert "](../examples/lora_sft.md)" in guide
    code = (ROOT / "examples/lora_sft.py").read_text(encoding="utf-8")
    assert code in (tmp_path / "examples/lora_sft.md").read_text(encoding="utf-8")


PAGE = '<html><head><link rel="stylesheet" href="a.css"></head><body><h1 id="here">x</h1>{}</body></html>'


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="#here">x</a><a href="https://arxiv.org/">x</a><img src="a.svg">', None),
        ('<a href="#there">x</a>', "no heading 'there'"),
        ('<a href="none.html">x</a>', "no such file"),
        ('<img src="none.svg">', "no such file"),
        ('<script src="https://elsewhere.example/a.js"></script>', "from another host"),
        ('<img src="//elsewhere.example/a.png">', "from another host"),
        ('<p style="background: url(https://elsewhere.example/a.png)">x</p>', "from another host"),
        ("<style>@import url(https://elsewhere.example/a.css);</style>", "from another host"),
        ('<pre class="mermaid">graph</pre>', "class mermaid"),
    ],
)
def test_a_fault_of_a_page_is_found(body: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(body))
    (tmp_path / "a.css").write_text("body { color: red }")
    (tmp_path / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    faults = list(check.faults(tmp_path))
    assert (faults == []) if found is None else (len(faults) == 1 and found in faults[0]), faults


def test_fonts_and_pictures_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(""))
    (tmp_path / "a.css").write_text("@font-face { src: url(https://elsewhere.example/a.woff2) }")
    (tmp_path / "a.svg").write_text("<svg><image href='https://elsewhere.example/a.png'/></svg>")
    assert len(list(check.faults(tmp_path))) == 2


def test_a_link_that_leads_nowhere_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("docs/images", "examples", "website"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "website/website.css"):
        (tmp_path / name).write_text("")
    (tmp_path / "docs/a.md").write_text("# A\n\nSee [this](none.md).\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "__file__", str(tmp_path / "website/pages.py"))
    with pytest.raises(FileNotFoundError, match=r"docs/a\.md:3 links to 'none\.md'"):
        pages.gather(tmp_path / "out")
