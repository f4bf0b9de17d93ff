"""Figures as data: lines, bars, bands, points and heat maps, with the words that stand for them; drawn by Altair.

>>> from regard.lab.figure import Figure
>>> figure = Figure("lines", "key", "weight", {"softmax": ([0, 1, 2], [0.1, 0.2, 0.7])}, alt="Weights rise with the key.")
>>> "Weights rise with the key." in figure.svg()
True
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

INK, GRID = "#1f2933", "#d9dee4"
COLOURS = ["#0b62a4", "#c2410c", "#2f7d32", "#7b3fa0", "#8a6d00", "#00707a"]  # each ≥ 4.5 : 1 on white
DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [1, 3]]  # a second sign besides colour


@dataclass(frozen=True)
class Figure:
    """`series`: name → (x, y) for "lines", "points" and "bars", (x, low, middle, high) for "bands".

    `rows`: the matrix of a "heat" map. `alt` is the figure in words. `guides`: name → y of horizontal lines.
    """

    kind: str
    x: str
    y: str
    series: Mapping[str, Sequence] = field(default_factory=dict)
    alt: str = ""
    rows: Sequence[Sequence[float]] = ()
    log_x: bool = False
    log_y: bool = False
    guides: Mapping[str, float] = field(default_factory=dict)
    title: str = ""

    def chart(self, width: int = 320, height: int = 210):
        """The Altair chart."""
        drawn = {"heat": self._heat, "bars": self._bars, "bands": self._bands}.get(self.kind, self._lines)(width, height)
        for place, value in enumerate(self.guides.values()):
            drawn = drawn + self._guide(value, place)
        drawn = drawn.properties(description=self.alt)
        if self.title:
            drawn = drawn.properties(title=self.title)
        return (
            drawn.configure(background="white", font="sans-serif")
            .configure_axis(labelFontSize=11, titleFontSize=12, titleFontWeight="normal", gridColor=GRID, titleColor=INK)
            .configure_legend(orient="bottom", title=None, labelFontSize=11, columns=2, labelLimit=240, symbolSize=80)
            .configure_view(stroke=None)
            .configure_title(fontSize=12, fontWeight="normal", anchor="start")
        )

    def svg(self, width: int = 320, height: int = 210) -> str:
        """Inline SVG that scales with the page and carries `alt` for those who do not see it."""
        import vl_convert

        text = vl_convert.vegalite_to_svg(self.chart(width, height).to_json())
        size = re.search(r'width="([\d.]+)" height="([\d.]+)" viewBox="([^"]+)"', text)
        if size is None:
            raise RuntimeError("vl-convert wrote an SVG without a size")
        head = f'<svg class="figure" role="img" aria-label="{escape(self.alt)}" width="{size[1]}" viewBox="{size[3]}"'
        inner = re.sub(r' (aria-[a-z]+|role|aria-roledescription)="[^"]*"', "", text[text.index(">") + 1 :])
        return f'{head} xmlns="http://www.w3.org/2000/svg"><title>{escape(self.alt)}</title>{inner}'

    def _axes(self, alt):
        x = alt.X("x:Q", title=self.x, scale=alt.Scale(type="log" if self.log_x else "linear", nice=False, zero=False))
        y = alt.Y("y:Q", title=self.y, scale=alt.Scale(type="log" if self.log_y else "linear", zero=False))
        return x.axis(tickCount=6, format="~g"), y.axis(tickCount=5, format="~g")

    def _lines(self, width, height):
        import altair as alt

        data = [dict(x=x, y=y, name=name) for name, (xs, ys) in self.series.items() for x, y in zip(xs, ys, strict=True)]
        x, y = self._axes(alt)
        chart = alt.Chart(alt.Data(values=_plain(data)), width=width, height=height)
        if self.kind == "points":
            return chart.mark_point(filled=True, size=28, opacity=0.75).encode(x, y, self._colour(alt))
        points = max((len(xs) for xs, _ in self.series.values()), default=0) <= 20
        return chart.mark_line(point=dict(size=26) if points else False, strokeWidth=2).encode(
            x, y, self._colour(alt), self._dash(alt)
        )

    def _bands(self, width, height):
        import altair as alt

        data = [
            dict(x=x, low=low, y=middle, high=high, name=name)
            for name, columns in self.series.items()
            for x, low, middle, high in zip(*columns, strict=True)
        ]
        x, y = self._axes(alt)
        chart = alt.Chart(alt.Data(values=_plain(data)), width=width, height=height)
        band = chart.mark_area(opacity=0.18).encode(x, y.field("low"), alt.Y2("high:Q"), self._colour(alt))
        return band + chart.mark_line(point=dict(size=26), strokeWidth=2).encode(x, y, self._colour(alt), self._dash(alt))

    def _bars(self, width, height):
        import altair as alt

        data = [
            dict(x=str(x), y=y, name=name, base=1e-300 if self.log_y else 0.0)
            for name, (xs, ys) in self.series.items()
            for x, y in zip(xs, ys, strict=True)
        ]
        order = list(dict.fromkeys(row["x"] for row in data))
        y = alt.Y("y:Q", title=self.y, scale=alt.Scale(type="log" if self.log_y else "linear")).axis(
            tickCount=5, format="~g"
        )
        chart = alt.Chart(alt.Data(values=_plain(data)), width=width, height=height)
        x = alt.X("x:N", title=self.x, sort=order, axis=alt.Axis(labelAngle=0, labelLimit=90))
        if self.log_y:
            return chart.mark_point(filled=True, size=70).encode(x, y, self._colour(alt))
        return chart.mark_bar().encode(
            x, y, self._colour(alt), alt.XOffset("name:N", sort=list(self.series))
        )

    def _heat(self, width, height):
        import altair as alt

        data = [dict(i=i, j=j, v=v) for i, row in enumerate(self.rows) for j, v in enumerate(row)]
        largest = max((abs(cell["v"]) for cell in data), default=1.0) or 1.0
        signed = any(cell["v"] < 0 for cell in data)
        scale = (
            alt.Scale(scheme="redblue", domain=[-largest, largest]) if signed else alt.Scale(scheme="blues", domain=[0, largest])
        )
        side = min(width, height + 60)
        return (
            alt.Chart(alt.Data(values=_plain(data)), width=side, height=side * len(self.rows) / max(len(self.rows[0]), 1))
            .mark_rect()
            .encode(
                alt.X("j:O", title=self.x, axis=alt.Axis(labelAngle=0, labelOverlap=True)),
                alt.Y("i:O", title=self.y, axis=alt.Axis(labelOverlap=True)),
                alt.Color("v:Q", scale=scale, legend=alt.Legend(orient="right", format="~g", gradientLength=120)),
            )
        )

    def _guide(self, value: float, place: int):
        import altair as alt

        name = list(self.guides)[place]
        line = alt.Chart(alt.Data(values=[dict(y=float(value), name=name)]))
        rule = line.mark_rule(color=INK, strokeDash=[3, 3]).encode(y="y:Q")
        return rule + line.mark_text(align="right", dy=-6, color=INK, fontSize=11).encode(
            y="y:Q", x=alt.value(316), text="name:N"
        )

    def _colour(self, alt):
        legend = alt.Legend() if len(self.series) > 1 else None
        return alt.Color("name:N", scale=alt.Scale(domain=list(self.series), range=COLOURS), sort=None, legend=legend)

    def _dash(self, alt):
        legend = alt.Legend() if len(self.series) > 1 else None
        return alt.StrokeDash("name:N", scale=alt.Scale(domain=list(self.series), range=DASHES), sort=None, legend=legend)


def _plain(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensors' numbers as Python's own, for JSON."""
    return [{name: float(v) if hasattr(v, "__float__") and not isinstance(v, str) else v for name, v in row.items()} for row in data]
