"""Checks of the built site, for `make docs-check`: its links, its search, and pictures of it in a browser.

    python -m tools.check_site build/docs/html

No network is used: a link to another site is checked by its form alone. Without Chromium there are no pictures.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS: Final = {"phone": 375, "desktop": 1280}
PICTURED: Final = ("docs/index.html", "docs/start.html", "docs/reference/collectives.html")
# What a reader may search for, and a page that has to have it.
SEARCHED: Final = {"sync_grad": "docs/reference/training", "requeu": "docs/recipes/slurm"}


class Page(HTMLParser):
    """The links of a page, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in {"href", "src"} and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield a line for each link that leads to nothing."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in {"data", "mailto"}:
                continue
            if parts.scheme or parts.netloc:
                if parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
                    yield f"{path.relative_to(site)}: {link} is not a link to another site"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link} has no such anchor"


def lost_words(site: Path) -> Iterator[str]:
    """Yield a line for each word by which the search does not find its page."""
    index = (site / "searchindex.js").read_text()
    names = re.findall(r'"([^"]+)"', index.partition('"docnames":[')[2].partition("]")[0])
    for word, page in SEARCHED.items():
        found = re.findall(rf'[{{,]"?{word}"?:(\[[\d,]*\]|\d+)', index.partition('"terms":')[2])  # of texts, of titles
        if page not in [names[int(number)] for numbers in found for number in re.findall(r"\d+", numbers)]:
            yield f"the search for {word!r} does not find {page}"


def pictures(site: Path, folder: Path) -> str:
    """Take pictures of some pages in a browser, and return where they are, or why there are none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return f"no pictures: none of {', '.join(BROWSERS)} is installed"
    folder.mkdir(exist_ok=True)
    for page in PICTURED:
        for name, width in WIDTHS.items():
            file = folder / f"{Path(page).stem}-{name}.png"
            options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},2000")
            command = [browser, *options, f"--screenshot={file}", (site / page).resolve().as_uri()]
            subprocess.run(command, check=True, timeout=100, capture_output=True)
    return f"pictures to look at: {folder}"


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    faults = [*broken_links(site), *lost_words(site)]
    print("\n".join(faults) or "all links and searches lead somewhere")
    print(pictures(site, site.parent / "pictures"))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
