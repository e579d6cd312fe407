"""The report as a person meets it, in headless Chromium: it draws, its controls work, it loads nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from onecopy.report.page import render
from onecopy.report.run import CATEGORIES, LANES, read_run
from report_runs import EVENTS, add_events, raw_trace, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM: Final = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

CHARTS: Final = ("memory-steps", "traffic-steps", "timeline", "memory-step", "loss", "speed", "gradient-norm")
QUIET: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(write_run(tmp_path_factory.mktemp("report") / "run"))


def save(run: Path) -> Path:
    path = run / "report.html"
    path.write_text(render(read_run(run)), encoding="utf-8")
    return path


def open_page(browser: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> Any:
    """The page, with what went wrong in ``page.troubles`` and what it asked for in ``page.requests``."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.troubles, page.requests = [], []
    page.on("console", lambda message: page.troubles.append(message.text))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(path.as_uri())
    return page


def drawn(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_draws_everything_and_loads_nothing(browser: Any, report: Path, width: int, scheme: str) -> None:
    page = open_page(browser, report, width=width, scheme=scheme)
    for chart in CHARTS:
        box = page.locator(f"#{chart} svg").bounding_box()
        assert box["width"] > 200, chart
        assert box["height"] > 100, chart
    assert drawn(page, "#memory-steps path[data-category]") == len(CATEGORIES)
    assert drawn(page, "#memory-step path[data-category]") == len(CATEGORIES)
    assert {path.get_attribute("data-lane") for path in page.locator("#timeline path[data-lane]").all()} == set(LANES)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("path[d*=NaN], [x1*=NaN], [y*=NaN], [cy*=NaN]").count() == 0
    # No text is cut off at an edge of its chart, but for names inside bars.
    assert (
        page.evaluate(
            """[...document.querySelectorAll(".plot")].flatMap((plot) => {
            const frame = plot.getBoundingClientRect();
            return [...plot.querySelectorAll("text:not(.bar-name)")]
                .filter((text) => text.getBoundingClientRect().right > frame.right + 1
                    || text.getBoundingClientRect().left < frame.left - 1)
                .map((text) => plot.id + ": " + text.textContent);
        })"""
        )
        == []
    )
    assert page.troubles == []
    assert page.requests == [report.as_uri()]


@pytest.mark.parametrize("width", [1400, 400])
def test_lost_and_slow_ranks_are_marked_on_the_timeline(browser: Any, tmp_path: Path, width: int) -> None:
    """Oracle: `report_runs.EVENTS`."""
    run = write_run(tmp_path / "run")
    add_events(run)
    page = open_page(browser, save(run), width=width)
    assert [mark.get_attribute("data-event") for mark in page.locator("#events-steps [data-event]").all()] == [
        event["kind"] for event in EVENTS
    ]
    # What cost more stands higher.
    tops = [mark.bounding_box()["y"] for mark in page.locator("#events-steps [data-event]").all()]
    seconds = [float(event.get("lost_seconds", event["seconds"])) for event in EVENTS]
    assert sorted(range(4), key=lambda one: tops[one]) == sorted(range(4), key=lambda one: -seconds[one])
    for chart in ("memory-steps", "traffic-steps", "loss", "speed"):
        assert drawn(page, f"#{chart} .happened") == len(EVENTS), chart
    page.locator("#events-steps svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tip = page.locator("#events-steps .tip").text_content()
    assert tip == "step 21" + "rank 1 slow for 0.80 s, given up" + "rank 1 lost and replaced, 1.25 s lost"
    box, frame = (page.locator(f"#events-steps {part}").bounding_box() for part in (".tip", "svg"))
    assert frame["x"] <= box["x"]
    assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("path[d*=NaN], [x1*=NaN], [y*=NaN], [cy*=NaN]").count() == 0
    assert page.troubles == []


def test_categories_go_and_come_back(browser: Any, report: Path) -> None:
    page = open_page(browser, report)
    activations = page.locator('#memory [data-key="activations"]')
    highest = page.locator("#memory-steps svg").get_attribute("aria-label")
    activations.click()
    assert activations.get_attribute("aria-pressed") == "false"
    assert drawn(page, '[data-category="activations"]') == 0
    assert drawn(page, "#memory-steps path[data-category]") == len(CATEGORIES) - 1
    # The same chip of the other chart follows, and the scale fits what is left.
    assert page.locator('#step [data-key="activations"]').get_attribute("aria-pressed") == "false"
    assert page.locator("#memory-steps svg").get_attribute("aria-label") != highest
    page.locator('#step [data-key="activations"]').click()
    assert drawn(page, '[data-category="activations"]') == 2
    assert page.locator("#memory-steps svg").get_attribute("aria-label") == highest
    page.locator('#memory [data-key="process"]').click()
    assert drawn(page, '#memory-steps [data-category="process"]') == 1
    assert page.troubles == []


def test_ranks_and_lanes(browser: Any, report: Path) -> None:
    page = open_page(browser, report)
    assert drawn(page, "#timeline .rank-name") == 2
    page.select_option("#rank", label="1")
    assert page.locator("#timeline .rank-name").all_text_contents() == ["rank 1"]
    assert drawn(page, '#timeline [data-rank="0"]') == 0
    assert page.locator("#memory-step-title").text_content().startswith("Memory within the step: rank 1")
    page.locator('#step [data-key="wait"]').click()
    assert drawn(page, '#timeline [data-lane="wait"], #timeline .held') == 0
    assert drawn(page, '#timeline [data-lane="gather"]') == 2  # forward, backward
    for lane in LANES[:3]:
        page.locator(f'#step [data-key="{lane}"]').click()
    assert drawn(page, "#timeline path[data-lane]") == 0
    assert page.troubles == []


def test_exposed_waits_are_red(browser: Any, report: Path) -> None:
    page = open_page(browser, report)
    fill = page.locator('#timeline [data-lane="wait"]').first.evaluate("path => getComputedStyle(path).fill")
    red, green, blue = (int(part) for part in fill.removeprefix("rgb(").removesuffix(")").split(","))
    assert red > 2 * max(green, blue)


def test_zoom(browser: Any, report: Path) -> None:
    page = open_page(browser, report)
    label = page.locator("#timeline svg").get_attribute("aria-label")
    assert page.locator("#zoom-reset").is_disabled()
    page.locator("#zoom-in").click()
    zoomed = page.locator("#timeline svg").get_attribute("aria-label")
    assert zoomed != label
    page.locator("#zoom-out").click()
    assert page.locator("#timeline svg").get_attribute("aria-label") == label
    box = page.locator("#timeline svg").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 40, steps=4)
    page.mouse.up()
    dragged = page.locator("#timeline svg").get_attribute("aria-label")
    assert dragged not in (label, zoomed)
    # A quick double click is one that does not drag.
    page.locator("#timeline svg").dblclick(position={"x": 400, "y": 60})
    assert page.locator("#timeline svg").get_attribute("aria-label") == label
    assert page.troubles == []


def test_cursor_by_pointer_and_by_keys(browser: Any, report: Path) -> None:
    page = open_page(browser, report)
    page.locator("#timeline svg").hover(position={"x": 600, "y": 40})
    assert "backward h." in page.locator("#timeline .tip").text_content()
    page.locator("#loss svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "step 2" in page.locator("#loss .tip").text_content()
    page.keyboard.press("ArrowLeft")
    assert "step 1" in page.locator("#loss .tip").text_content()
    page.keyboard.press("Tab")
    assert page.locator("#loss .tip").text_content() == ""
    assert page.troubles == []


def test_light_and_dark(browser: Any, report: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = open_page(browser, report, scheme="light").evaluate(ground)
    page = open_page(browser, report, scheme="dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.get_by_role("button", name="light").click()
    assert page.evaluate(ground) == light
    page.get_by_role("button", name="dark").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="system").click()
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: Any, report: Path, scheme: str) -> None:
    """WCAG's 4.5 for text, names inside bars included."""
    page = open_page(browser, report, scheme=scheme)
    ratios = page.evaluate(
        """() => {
            const probe = document.body.appendChild(document.createElement("p"));
            const light = (color) => {
                probe.style.color = color;
                const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
                const [r, g, b] = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const lanes = ["compute-0", "compute-1", "compute-2", "gather", "reduce", "wait"];
            const pairs = [["ink", "ground"], ["quiet", "ground"], ["quiet", "raised"], ["ink", "raised"],
                ...lanes.map((lane) => ["on-bar", "l-" + lane])];
            return pairs.map(([text, back]) => {
                const [a, b] = [light(`var(--${text})`), light(`var(--${back})`)].sort((x, y) => y - x);
                return [text, back, (a + 0.05) / (b + 0.05)];
            });
        }"""
    )
    assert [pair for pair in ratios if pair[2] < 4.5] == []


def test_one_step_of_one_rank_without_memory(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, ranks=1, memory=False)
    (run / "trace/rank-0.json").write_text(json.dumps(raw_trace(0, 1) | {"memory": []}))
    page = open_page(browser, save(run), width=400)
    assert drawn(page, "#timeline path[data-lane]") > 0
    assert drawn(page, '#memory-steps [data-category="process"]') == 1
    assert "was not recorded" in page.locator('[data-note="memory-step"]').text_content()
    assert page.locator("path[d*=NaN], [x1*=NaN], [y*=NaN], [cy*=NaN]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.troubles == []


def test_run_that_was_killed_before_its_first_step(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[parallel]\nstage = 2\n")
    page = open_page(browser, save(tmp_path))
    assert "No step was recorded." in page.locator("#training").text_content()
    assert page.troubles == []


def test_many_ranks_and_steps_stay_light(browser: Any, tmp_path: Path) -> None:
    path = save(write_run(tmp_path / "run", steps=20_000, ranks=32))
    assert path.stat().st_size < 2_000_000
    page = open_page(browser, path)
    assert drawn(page, "#timeline .rank-name") == 1
    assert page.locator("#rank option").count() == 33
    page.select_option("#rank", label="all")
    assert drawn(page, "#timeline .rank-name") == 32
    assert page.troubles == []
