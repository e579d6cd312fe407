"""Build the site: gather the pages, let Zensical make build/site of them, and check what came out.

    pip install -e '.[docs]'
    python website/build.py
    python -m http.server --directory build/site

It needs no network. It ends with exit code 1, and a line for each fault, if a link leads nowhere or a page would load
anything from another host.
"""

from __future__ import annotations

import subprocess
import sys

from check import faults
from pages import ROOT, gather


def main() -> int:
    """Build and check; the exit code."""
    site = ROOT / "build/site"
    try:
        gather(ROOT / "build/pages")
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=300)
    if done.returncode:
        return 1
    found = list(faults(site.resolve()))
    print("\n".join(f"error: {fault}" for fault in found), file=sys.stderr, end="\n" if found else "")
    count = len(list(site.rglob("*.html")))
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
    print(f"build/site: {count} pages, {size / 1e6:.1f} MB")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
