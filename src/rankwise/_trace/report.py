"""What `rankwise trace` shows of a run: a table, a timeline for Perfetto, and a page with a picture."""

from __future__ import annotations

import base64
import html
import json
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import IO, Final

from rankwise._text import ranks_text
from rankwise._trace.lateness import lateness_of, milliseconds
from rankwise._trace.reading import Run

_HEAD: Final = ("call site", "calls", "last", "in", "others waited", "late", "without that")
_MOST_ROWS: Final = 20
_MOST_RANKS: Final = 3
_COLUMNS: Final = 600
_ROW_PIXELS: Final = 22
_WIDTH: Final = 900
# Waits of less than this part of the time are not in the table.
_LEAST: Final = 0.001


def table(run: Run) -> list[tuple[str, ...]]:
    """Return who was last, how often, and what it has cost, by call site: the largest cost first, under a head."""
    calls = Counter(call.text for call in run.complete)
    waits: dict[tuple[str, int], list[float]] = defaultdict(list)
    for wait in run.waits:
        waits[wait.call.text, wait.rank].append(wait.seconds)
    arrivals = ((list(call.came), call.text, list(call.came.values())) for call in run.complete)
    chronic = {(one.call, one.rank): one.is_chronic for one in lateness_of(arrivals)}
    rows: list[tuple[str, ...]] = [_HEAD]
    for (text, rank), seconds in sorted(waits.items(), key=lambda item: -sum(item[1]))[:_MOST_ROWS]:
        if sum(seconds) > _LEAST * run.seconds:
            often = f"{100 * len(seconds) / calls[text]:.0f} %"
            late = "as a rule" if chronic[text, rank] else f"worst {milliseconds(max(seconds))}"
            without = f"{1 - sum(seconds) / run.seconds:.2f}"
            rows.append((text, str(calls[text]), f"rank {rank}", often, f"{sum(seconds):.3g} s", late, without))
    return rows


def summary(run: Run) -> list[str]:
    """Return what is known of the run, and of each rank that has cost time, in lines."""
    hosts = dict.fromkeys(record.host for record in run.records)
    lines = [
        f"{run.folder}: {len(run.records)} ranks on {', '.join(hosts)}",
        f"{len(run.complete)} calls to which all ranks of a group came, in {run.seconds:.3g} s",
    ]
    cost: dict[int, float] = defaultdict(float)
    for wait in run.waits:
        cost[wait.rank] += wait.seconds
    lines += [
        f"without the lateness of rank {rank}: {1 - seconds / run.seconds:.2f} of the time"
        for rank, seconds in sorted(cost.items(), key=lambda item: -item[1])[:_MOST_RANKS]
        if seconds > _LEAST * run.seconds
    ]
    for text, (came, absent) in run.missing().items():
        lines.append(f"at the end: {ranks_text(came)} in {text}; not there: {ranks_text(absent)}")
    return [*lines, *run.problems]


def write_timeline(run: Run, file: IO[str]) -> None:
    """Write all calls of all ranks as events of Chrome's trace format, which ui.perfetto.dev shows."""
    start = min((min(call.came.values()) for call in run.calls.values()), default=0.0)
    events = [
        {"ph": "M", "name": "process_name", "pid": one.rank, "args": {"name": f"rank {one.rank} on {one.host}"}}
        for one in run.records
    ]
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    file.write(",\n".join(map(json.dumps, [*events, *_events(run, start)])))
    file.write("\n]}\n")


def _events(run: Run, start: float) -> Iterator[dict[str, object]]:
    threads = {group: index for index, group in enumerate(sorted(run.members, key=abs))}
    for (group, sequence), call in run.calls.items():
        half = median_low(call.came.values())
        for rank, came in call.came.items():
            late = {"call": sequence, "late_ms": round(1000 * max(0.0, came - half), 3)}
            event = {"name": call.text, "pid": rank, "tid": threads[group], "ts": 1e6 * (came - start), "args": late}
            if rank in call.ended:
                yield {**event, "ph": "X", "dur": 1e6 * (call.ended[rank] - came)}
            else:
                yield {**event, "ph": "i", "s": "t"}


def page(run: Run) -> str:
    """Return a page of HTML that needs no other file: the table, and the lateness by rank and call as a picture."""
    rows = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table(run)]
    text = "".join(f"<p>{html.escape(line)}</p>\n" for line in summary(run))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Lateness of ranks</title>\n'
        "<style>body{font:14px sans-serif;margin:2em}td{padding:2px 12px 2px 0}tr:first-child{font-weight:bold}"
        "svg{font:12px sans-serif}</style></head>\n"
        f"<body><h1>Lateness of ranks</h1>\n{text}<table>{''.join(rows)}</table>\n{_picture(run)}\n</body></html>\n"
    )


def _picture(run: Run) -> str:
    """Return the picture as SVG: a row for each rank, a column for some calls, redder the later the rank came."""
    ranks = [record.rank for record in run.records]
    late = _most_late(run, ranks)
    most = max((max(row, default=0.0) for row in late), default=0.0)
    pixels = [[_color(seconds / most if most else 0.0) for seconds in row] for row in late]
    height = max(1, min(_ROW_PIXELS, 1200 // max(1, len(ranks)))) * len(ranks)
    every = -(-len(ranks) * 14 // max(1, height))
    labels = "".join(
        f'<text x="60" y="{(place + 0.5) * height / len(ranks) + 4:.0f}" text-anchor="end">rank {rank}</text>'
        for place, rank in enumerate(ranks)
        if place % every == 0
    )
    data = base64.b64encode(png(pixels)).decode() if run.complete else ""
    return (
        f"<p>From white to red: 0 to {milliseconds(most)} late, after half of the ranks. From left to right: "
        f"{len(run.complete)} calls.</p>\n"
        f'<svg width="{_WIDTH + 70}" height="{height + 10}">{labels}<image x="66" y="0" width="{_WIDTH}" '
        f'height="{height}" preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{data}"/></svg>'
    )


def _most_late(run: Run, ranks: Sequence[int]) -> list[list[float]]:
    """Return for each rank how late it came at most, in each of some calls in a row."""
    places = {rank: place for place, rank in enumerate(ranks)}
    num_columns = min(_COLUMNS, len(run.complete))
    late = [[0.0] * num_columns for _ in ranks]
    for number, call in enumerate(run.complete):
        column, half = number * num_columns // len(run.complete), median_low(call.came.values())
        for rank, came in call.came.items():
            row = late[places[rank]]
            row[column] = max(row[column], came - half)
    return late


def _color(part: float) -> bytes:
    """Return red, green and blue of a lateness between 0 and 1; small ones can be told from none."""
    rest = round(255 * (1 - part**0.5))
    return bytes((255 - (255 - rest) // 6, rest, rest))


def png(pixels: Sequence[Sequence[bytes]]) -> bytes:
    """Return an image in the format PNG, of rows of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    rows = b"".join(b"\0" + b"".join(row) for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
