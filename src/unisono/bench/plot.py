"""The scaling plot as an SVG, written by hand: tokens per second over ranks, beside what perfect scaling would give."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.bench.measure import Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 90, 30, 40, 60


def svg(rows: Sequence[Row], title: str) -> str:
    """Draw the rows; they must not be empty."""
    first, most_ranks = rows[0], max(row.ranks for row in rows)
    ideal = [(row.ranks, first.tokens_per_second * row.ranks / first.ranks) for row in rows]
    measured = [(row.ranks, row.tokens_per_second) for row in rows]
    top = max(value for _, value in (*ideal, *measured)) * 1.05

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / most_ranks
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point[1] / top

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
        return f'<polyline points="{path}" fill="none" {style}/>'

    floor = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, "middle"),
        f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="black"/>',
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "ranks (dashed: perfect scaling)", "middle"),
        _text(LEFT - 8, TOP - 8, "tokens/s", "end"),
    ]
    for quarter in range(5):
        value = top * quarter / 4
        parts.append(_text(LEFT - 8, place((0, value))[1] + 4, f"{value:,.0f}", "end"))
    parts.append(line(ideal, 'stroke="gray" stroke-dasharray="5 4"'))
    parts.append(line(measured, 'stroke="#1f5fa8" stroke-width="2"'))
    for row in rows:
        x, y = place((row.ranks, row.tokens_per_second))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f5fa8"/>')
        parts.append(_text(x - 6, y + 20, f"{row.efficiency:.0%}", "end"))
        parts.append(_text(x, floor + 18, f"{row.ranks}", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'
