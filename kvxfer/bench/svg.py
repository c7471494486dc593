"""Small charts as SVG text: lines over linear or logarithmic axes, and grouped bars. No script, no font, no network.

Colours are classes (`s0` to `s9`) that the page's style sheet fills in for light and dark; series also differ in their
dashes, so that a print in grey still tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
SERIES_MAX = 10
POINTS_MAX = 2000
SMALLEST = 1e-12  # what is below is nothing
Points = Sequence[tuple[float, float]]
Show = Callable[[float], str]


def plain(value: float) -> str:
    """A number as short as it can be."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: what it means, whether it is logarithmic, and how its numbers are written."""

    label: str
    log: bool = False
    base: int = 10
    show: Show = plain

    def limits(self, values: Sequence[float]) -> tuple[float, float]:
        """From and to, with room and never the same."""
        if self.log:
            good = [value for value in values if value > SMALLEST] or [1.0]
            low = self.base ** math.floor(math.log(min(good), self.base) + 1e-9)
            high = self.base ** math.ceil(math.log(max(good), self.base) - 1e-9)
            return float(low), float(high if high > low else low * self.base)
        high = max([*values, 0.0]) * 1.08
        return 0.0, high if high > SMALLEST else 1.0

    def place(self, value: float, low: float, high: float) -> float:
        """Where a value lies on the axis, from 0 (``low``) to 1 (``high``)."""
        if self.log:
            value = max(value, low)
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def ticks(self, low: float, high: float) -> list[float]:
        """A handful of round values."""
        if self.log:
            count = round(math.log(high / low, self.base))
            every = max(1, -(-count // 7))
            return [low * float(self.base) ** power for power in range(0, count + 1, every)]
        rough = (high - low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        return [step * index for index in range(int(high / step + 1e-9) + 1)]


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[tuple[str, Points]]) -> str:
    """Lines with dots; empty series are left out. Returns an <svg> element with its legend below the plot."""
    drawn = [(name, list(points)[:POINTS_MAX]) for name, points in series if points][:SERIES_MAX]
    if not drawn:
        return nothing(title)
    x_low, x_high = x.limits([point[0] for _, points in drawn for point in points])
    y_low, y_high = y.limits([point[1] for _, points in drawn for point in points])

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + x.place(point[0], x_low, x_high) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - y.place(point[1], y_low, y_high) * (HEIGHT - TOP - BOTTOM)
        return across, down

    parts = [_y_axis(y, y_low, y_high)]
    for tick in x.ticks(x_low, x_high):
        across, _ = at((tick, y_low))
        parts.append(f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        anchor = "middle" if across < WIDTH - 2 * RIGHT else "end"
        parts.append(_text(across, HEIGHT - BOTTOM + 16, x.show(tick), anchor))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x.label, "middle"))
    for index, (_, points) in enumerate(drawn):
        places = [at(point) for point in points]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline class="line s{index}" points="{path}"/>')
        if len(points) <= 16:
            parts += [f'<circle class="dot s{index}" cx="{a:.1f}" cy="{d:.1f}" r="3"/>' for a, d in places]
    return _framed(title, parts, [name for name, _ in drawn])


def bar_chart(title: str, y: Axis, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Groups of bars next to each other; the same name has the same colour in every group."""
    names = list(dict.fromkeys(name for _, bars in groups for name, _ in bars))[:SERIES_MAX]
    values = [value for _, bars in groups for name, value in bars if name in names]
    if not values:
        return nothing(title)
    low, high = y.limits(values)
    parts = [_y_axis(y, low, high)]
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    for place, (label, bars) in enumerate(groups):
        begin = LEFT + place * room + room * 0.1
        width = room * 0.8 / max(len(bars), 1)
        for number, (name, value) in enumerate(bar for bar in bars if bar[0] in names):
            tall = max(y.place(value, low, high), 0.0) * (HEIGHT - TOP - BOTTOM)
            parts.append(
                f'<rect class="bar s{names.index(name)}" x="{begin + number * width:.1f}" width="{width * 0.9:.1f}" '
                f'y="{HEIGHT - BOTTOM - tall:.1f}" height="{tall:.1f}"><title>{escape(f"{name}: {value:.3g}")}'
                "</title></rect>"
            )
        parts.append(_text(begin + room * 0.4, HEIGHT - BOTTOM + 16, label, "middle"))
    return _framed(title, parts, names)


def nothing(title: str) -> str:
    """A chart without data says so."""
    return _framed(title, [_text(WIDTH / 2, HEIGHT / 2, "not measured in this run", "middle")], [])


def _y_axis(axis: Axis, low: float, high: float) -> str:
    parts = []
    for tick in axis.ticks(low, high):
        down = HEIGHT - BOTTOM - axis.place(tick, low, high) * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(_text(LEFT - 6, down + 4, axis.show(tick), "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    label = escape(axis.label)
    parts.append(f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _text(across: float, down: float, text: str, anchor: str) -> str:
    return f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _framed(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    legend, across, down = [], float(LEFT), HEIGHT + 14
    for index, name in enumerate(names):
        width = 34 + 6.6 * len(name)
        if across + width > WIDTH and across > LEFT:
            across, down = float(LEFT), down + 18
        legend.append(f'<line class="line s{index}" x1="{across}" x2="{across + 20}" y1="{down - 4}" y2="{down - 4}"/>')
        legend.append(_text(across + 26, down, name, "start"))
        across += width
    height = down + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title>" + "".join([*parts, *legend]) + "</svg>"
    )
