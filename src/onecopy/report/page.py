"""Page: a run as one HTML file. Its styles, script and numbers are inside, so it needs no network and lasts."""

from __future__ import annotations

import json
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from onecopy.report import tables
from onecopy.report.figures import figures
from onecopy.report.run import Run

_SCRIPTS: Final = ("draw.js", "plot.js", "series.js", "timeline.js", "page.js")


def render(run: Run) -> str:
    """The page."""
    loader = PackageLoader("onecopy.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )

    def source(name: str) -> Markup:
        return Markup(loader.get_source(environment, name)[0])

    charts = figures(run)
    return environment.get_template("page.html").render(
        run=run,
        tables=tables,
        charts=charts,
        style=source("style.css"),
        script=Markup("\n").join(map(source, _SCRIPTS)),
        # "<" escaped: no text in the data can end the script element that holds it.
        data=Markup(json.dumps(charts, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")),
    )
