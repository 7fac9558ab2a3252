"""A plot with logarithmic axes, as SVG: for `benchmarks/growth.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

PANEL, GAP, HEIGHT = 170, 14, 250
LEFT, TOP, BOTTOM = 62, 46, 44
COLORS = {"rankwise": "#1667b7", "torch": "#c25a12"}


def log_log_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return the seconds of rankwise and of torch by the number of ranks, with one panel for each call."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    ranks = sorted({row["ranks"] for row in rows})
    seconds = [row[side] for row in rows for side in COLORS]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))

    def x_of(number: int) -> float:
        span = math.log2(ranks[-1] / ranks[0]) or 1.0
        return 10 + (PANEL - 20) * math.log2(number / ranks[0]) / span

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (high - math.log10(value)) / (high - low)

    width = LEFT + len(names) * (PANEL + GAP)
    parts = [_start(width)]
    for index, name in enumerate(names):
        left = LEFT + index * (PANEL + GAP)
        parts.append(
            f'<g transform="translate({left} 0)"><rect y="{TOP}" width="{PANEL}" height="{HEIGHT}" class="box"/>'
        )
        parts.append(_text(PANEL / 2, TOP - 8, name.replace("`", ""), "middle"))
        for power in range(low, high + 1):
            y = y_of(10.0**power)
            parts.append(f'<line x2="{PANEL}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            if not index:
                parts.append(_text(-6, y + 4, _duration(power), "end"))
        parts += [_text(x_of(number), TOP + HEIGHT + 16, str(number), "middle") for number in ranks]
        for side, color in COLORS.items():
            points = [(x_of(row["ranks"]), y_of(row[side])) for row in rows if row["name"] == name]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        parts.append("</g>")
    parts.append(_text(LEFT + (width - LEFT) / 2, TOP + HEIGHT + 36, "ranks", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _start(width: int) -> str:
    height = TOP + HEIGHT + BOTTOM
    legend = [
        f'<circle cx="{LEFT + 6 + 90 * index}" cy="16" r="4" fill="{color}"/>'
        + _text(LEFT + 16 + 90 * index, 20, side, "start")
        for index, (side, color) in enumerate(COLORS.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        "<style>text{font:12px sans-serif;fill:#222}.box{fill:none;stroke:#999}.grid{stroke:#ddd}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(legend)
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _duration(power: int) -> str:
    """Return a power of ten in seconds as "10 us"."""
    for unit, exponent in (("s", 0), ("ms", -3), ("us", -6)):
        if power >= exponent:
            return f"{10 ** (power - exponent)} {unit}"
    return f"1e{power} s"
