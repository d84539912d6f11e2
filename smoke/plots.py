"""Plots of a run, without a plotting library: the same picture as SVG (in the page) and as PNG (to attach). Pure."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from smoke.png import Colour, write_png

WIDTH, HEIGHT = 720, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 26, 22
_COLOURS: tuple[Colour, ...] = ((31, 99, 180), (200, 80, 20), (20, 140, 70), (140, 50, 160), (120, 120, 20))
_GREY: Colour = (205, 205, 205)
_BLACK: Colour = (30, 30, 30)
_WHITE: Colour = (255, 255, 255)

# 3 x 5 dots a character, one octal digit a row
_GLYPHS = (
    "A=25755 B=65656 C=34443 D=65556 E=74647 F=74644 G=34553 H=55755 I=72227 J=11152 K=55655 L=44447 "
    "M=57755 N=65555 O=25552 P=65644 Q=25563 R=65655 S=34216 T=72222 U=55557 V=55552 W=55775 X=55255 "
    "Y=55222 Z=71247 0=75557 1=26227 2=61247 3=61216 4=55711 5=74616 6=34757 7=71222 8=75757 9=75716 "
    ".=00002 -=00700 %=51245 /=11244 :=02020 (=12221 )=42224 +=02720 "
)
_FONT = {item[0]: item[2:] for item in _GLYPHS.split()}


@dataclass(frozen=True)
class Series:
    """Points (seconds, value). `line` joins them."""

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True


@dataclass(frozen=True)
class Plot:
    """One picture: series over the time of the run, `seconds` long."""

    title: str
    seconds: float
    series: Sequence[Series]

    @property
    def top(self) -> float:
        """Upper end of the value axis."""
        most = max((value for series in self.series for _, value in series.points), default=1.0)
        return most * 1.08 if most > 0 else 1.0

    def place(self, at: float, value: float) -> tuple[float, float]:
        """Pixel of a point."""
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * (at / self.seconds if self.seconds > 0 else 0.0)
        y = HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value / self.top)
        return x, y

    def ticks(self) -> list[tuple[float, str]]:
        """Three values of the axis with their labels."""
        return [(self.top * share, _short(self.top * share)) for share in (0.0, 0.5, 1.0)]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def svg(plot: Plot) -> str:
    """The plot as one SVG element."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(plot.title)}" font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="15" font-weight="bold">{html.escape(plot.title)}</text>',
    ]
    for value, label in plot.ticks():
        x, y = plot.place(0, value)
        parts.append(f'<line x1="{x:.0f}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ccc"/>')
        parts.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for share in (0.0, 0.5, 1.0):
        x, _ = plot.place(plot.seconds * share, 0)
        parts.append(
            f'<text x="{x:.0f}" y="{HEIGHT - 7}" text-anchor="middle">{plot.seconds * share / 60:.1f} min</text>'
        )
    for number, series in enumerate(plot.series):
        colour = "#{:02x}{:02x}{:02x}".format(*_COLOURS[number % len(_COLOURS)])
        placed = [plot.place(at, value) for at, value in series.points]
        if series.line and len(placed) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        else:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{colour}"/>' for x, y in placed]
        parts.append(
            f'<text x="{WIDTH - _RIGHT - 110 * (len(plot.series) - number)}" y="15" fill="{colour}">'
            f"{html.escape(series.name)}</text>"
        )
    return "".join([*parts, "</svg>"])


def png(plots: Sequence[Plot]) -> bytes:
    """The plots below each other as one PNG."""
    rows = [[_WHITE] * WIDTH for _ in range(HEIGHT * max(1, len(plots)))]
    for number, plot in enumerate(plots):
        _draw(rows, plot, HEIGHT * number)
    return write_png(rows)


def _draw(rows: list[list[Colour]], plot: Plot, down: int) -> None:
    _write(rows, _LEFT, down + 6, plot.title, _BLACK)
    for value, label in plot.ticks():
        x, y = plot.place(0, value)
        _line(rows, (x, y + down), (WIDTH - _RIGHT, y + down), _GREY)
        _write(rows, max(0, int(x) - 8 * len(label) - 6), int(y) + down - 5, label, _BLACK)
    for share in (0.0, 0.5, 1.0):
        label = f"{plot.seconds * share / 60:.1f} MIN"
        x, _ = plot.place(plot.seconds * share, 0)
        _write(rows, min(int(x), WIDTH - 8 * len(label)), down + HEIGHT - 16, label, _BLACK)
    for number, series in enumerate(plot.series):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [(x, y + down) for x, y in (plot.place(at, value) for at, value in series.points)]
        if series.line:
            for a, b in itertools.pairwise(placed):
                _line(rows, a, b, colour)
        else:
            for x, y in placed:
                _line(rows, (x - 1, y), (x + 1, y), colour)
                _line(rows, (x, y - 1), (x, y + 1), colour)
        _write(rows, WIDTH - _RIGHT - 110 * (len(plot.series) - number), down + 6, series.name, colour)


def _line(rows: list[list[Colour]], a: tuple[float, float], b: tuple[float, float], colour: Colour) -> None:
    steps = max(1, int(max(abs(b[0] - a[0]), abs(b[1] - a[1]))))
    for i in range(steps + 1):
        x = round(a[0] + (b[0] - a[0]) * i / steps)
        y = round(a[1] + (b[1] - a[1]) * i / steps)
        if 0 <= y < len(rows) and 0 <= x < WIDTH:
            rows[y][x] = colour


def _write(rows: list[list[Colour]], left: int, top: int, text: str, colour: Colour) -> None:
    for position, char in enumerate(text.upper()):
        for y, octal in enumerate(_FONT.get(char, "00000")):
            for x in range(3):
                if int(octal) >> (2 - x) & 1:
                    for dx in (0, 1):
                        for dy in (0, 1):
                            column, row = left + 8 * position + 2 * x + dx, top + 2 * y + dy
                            if 0 <= row < len(rows) and 0 <= column < WIDTH:
                                rows[row][column] = colour
