"""The plot of the ratios in docs/benchmarks.md: `python -m benchmarks.ratios` draws docs/ratios.svg from the table."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import Final

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PLOT = PAGE.with_name("ratios.svg")
LEFT, WIDTH, ROW = 500, 400, 26
# The axis is logarithmic, from a hundredth of the other's time to ten times as much.
FIRST, LAST = -2, 1
STYLE: Final = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.equal{stroke:#666}"


def rows() -> list[tuple[str, float]]:
    """Return the text of each row of the table, and its ratio."""
    found = re.findall(r"^\| ([^|]+) \|[^|]*\| ([^|]+) \|[^|]*\| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    return [(f"{what}, beside {other}".replace("`", ""), float(ratio)) for what, other, ratio in found]


def plot() -> str:
    """Return the plot: a bar from 1 to the ratio, for each row."""

    def x(ratio: float) -> float:
        return LEFT + WIDTH * (math.log10(ratio) - FIRST) / (LAST - FIRST)

    table = rows()
    width, height = LEFT + WIDTH + 60, 40 + ROW * len(table)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for power in range(FIRST, LAST + 1):
        kind = "equal" if power == 0 else "grid"
        at = f"{x(10.0**power):.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="24" y2="{height - 8}" class="{kind}"/>')
        parts.append(f'<text x="{at}" y="16" text-anchor="middle">{10.0**power:g}</text>')
    for number, (text, ratio) in enumerate(table):
        y, start, end = 30 + ROW * number, min(x(1), x(ratio)), max(x(1), x(ratio))
        color = "#1667b7" if ratio <= 1 else "#c25a12"
        parts.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{html.escape(text)}</text>')
        parts.append(f'<rect x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="18" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 10}" y="{y + 14}">{ratio:g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PLOT.write_text(plot())
