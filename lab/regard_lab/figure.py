"""`Figure`: lines, points, bars, dots, bands and heat maps as data with a text alternative, drawn by Vega-Lite."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

INK, GRID = "#1f2933", "#d9dee4"
COLOURS = ["#0b62a4", "#c2410c", "#2f7d32", "#7b3fa0", "#8a6d00", "#00707a"]  # contrast ≥ 4.5 : 1 on white
DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [1, 3]]  # so that series differ not by colour alone
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
WIDTHS = [3.5, 1.8, 1.8, 1.8, 1.8, 1.8]  # the first stays visible below one that coincides with it
CROWDED = 48  # letters that fit side by side below an axis
FEW = 8  # at most so many values are labelled themselves on a logarithmic axis
AXIS = {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal", "gridColor": GRID, "titleColor": INK}
LEGEND = {"orient": "bottom", "title": None, "labelFontSize": 11, "columns": 2, "labelLimit": 240, "symbolSize": 80}
CONFIG = {"background": "white", "font": "sans-serif", "axis": AXIS, "legend": LEGEND, "view": {"stroke": None}}


@dataclass(frozen=True)
class Figure:
    """A figure. `series`: name → (x, y) for "lines", "points", "bars" and "dots", (x, low, middle, high) for "bands".

    The x of bars and dots are names. `rows` is the matrix of a "heat" map, `alt` the figure in words, `log` names its
    logarithmic axes ("x", "y" or "xy"), `guides` is name → y of horizontal lines, `unjoined` the series of "lines" that
    are points with nothing between them.
    """

    kind: str
    x: str
    y: str
    series: Mapping[str, Sequence] = field(default_factory=dict)
    alt: str = ""
    rows: Sequence[Sequence[float]] = ()
    log: str = ""
    guides: Mapping[str, float] = field(default_factory=dict)
    unjoined: Sequence[str] = ()

    def svg(self, width: int = 320, height: int = 210) -> str:
        """Return the figure as SVG with `alt` as its title."""
        import vl_convert

        text = vl_convert.vegalite_to_svg(json.dumps(self.spec(width, height)))
        end = text.index(">") + 1
        return f"{text[:end]}<title>{escape(self.alt)}</title>{text[end:]}"

    def img(self) -> str:
        """Return a self-contained HTML image with `alt` as its text alternative."""
        text = self.svg()
        across, down = (float(re.findall(rf'<svg[^>]*? {side}="([\d.]+)"', text)[0]) for side in ("width", "height"))
        data = base64.b64encode(text.encode()).decode()
        size = f'width="{across:.0f}" height="{down:.0f}"'
        return f'<img class="figure" src="data:image/svg+xml;base64,{data}" alt="{escape(self.alt)}" {size}>'

    def spec(self, width: int = 320, height: int = 210) -> dict:
        """Return the Vega-Lite specification."""
        layers = {"heat": self._heat, "bars": self._bars, "dots": self._bars, "bands": self._bands}.get(
            self.kind, self._lines
        )()
        if self.kind == "heat":
            width = min(width, height + 50)
            height = round(width * len(self.rows) / max(len(self.rows[0]), 1))
        layers += [layer for name, y in self.guides.items() for layer in self._guide(name, y, width)]
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "description": self.alt,
            "width": width,
            "height": height,
            "config": CONFIG,
            "layer": layers,
        }

    def _points(self) -> list[dict]:
        pairs = ((name, x, y) for name, (xs, ys) in self.series.items() for x, y in zip(xs, ys, strict=True))
        return [dict(x=x, y=y, name=name) for name, x, y in pairs]

    def _lines(self) -> list[dict]:
        data = self._points()
        few = max((len(xs) for xs, _ in self.series.values()), default=0) <= 20
        mark: dict = {"type": "line", "point": {"size": 26} if few else False}
        if self.kind == "points":
            mark = {"type": "point", "filled": True, "size": 28, "opacity": 0.75}
        encoding = {**self._axes(), **self._channels(dash=self.kind == "lines", shape=self.kind == "points")}
        apart = [row for row in data if row["name"] in self.unjoined]
        joined = [row for row in data if row["name"] not in self.unjoined]
        layers = [{"data": {"values": _to_json(joined)}, "mark": mark, "encoding": encoding}]
        if apart:
            alone = {**self._axes(), **self._channels(dash=False)}
            point = {"type": "point", "filled": True, "size": 40, "opacity": 1}
            layers.append({"data": {"values": _to_json(apart)}, "mark": point, "encoding": alone})
        return layers

    def _bands(self) -> list[dict]:
        data = [
            dict(x=x, low=low, y=middle, high=high, name=name)
            for name, columns in self.series.items()
            for x, low, middle, high in zip(*columns, strict=True)
        ]
        values, axes = {"values": _to_json(data)}, self._axes()
        area = {**axes, "y": {**axes["y"], "field": "low"}, "y2": {"field": "high"}, **self._channels(dash=False)}
        line = {**axes, **self._channels(dash=True)}
        return [
            {"data": values, "mark": {"type": "area", "opacity": 0.18}, "encoding": area},
            {"data": values, "mark": {"type": "line", "point": {"size": 26}}, "encoding": line},
        ]

    def _bars(self) -> list[dict]:
        data = [{**row, "x": str(row["x"])} for row in self._points()]
        crowded = sum(map(len, {row["x"] for row in data})) > CROWDED
        axis = {"labelAngle": -35 if crowded else 0, "labelLimit": 110 if crowded else 80}
        x = {"field": "x", "type": "nominal", "title": self.x, "sort": None, "axis": axis}
        y = {**self._axes()["y"], "scale": self._scale("y" in self.log, zero=self.kind == "bars")}
        encoding = {"x": x, "y": y, **self._channels(dash=False)}
        if "y" in self.log or self.kind == "dots":  # a logarithmic axis has no 0 for a bar to start at
            mark = {"type": "point", "filled": True, "size": 70}
        else:
            mark = {"type": "bar"}
            encoding["xOffset"] = {"field": "name", "sort": list(self.series)}
        return [{"data": {"values": _to_json(data)}, "mark": mark, "encoding": encoding}]

    def _heat(self) -> list[dict]:
        data = [dict(i=i, j=j, v=v) for i, row in enumerate(self.rows) for j, v in enumerate(row)]
        largest = max((abs(cell["v"]) for cell in data), default=1.0) or 1.0
        signed = any(cell["v"] < 0 for cell in data)
        scale = {"domain": [-largest, 0.0, largest], "range": [COLOURS[1], "white", COLOURS[0]], "interpolate": "rgb"}
        if not signed:
            scale = {"domain": [0.0, largest], "range": ["white", COLOURS[0]], "interpolate": "rgb"}
        axis = {"labelAngle": 0, "labelOverlap": True}
        legend = {"orient": "right", "format": ".4~g", "gradientLength": 120}
        encoding = {
            "x": {"field": "j", "type": "ordinal", "title": self.x, "axis": axis},
            "y": {"field": "i", "type": "ordinal", "title": self.y, "axis": axis},
            "color": {"field": "v", "type": "quantitative", "scale": scale, "legend": legend},
        }
        return [{"data": {"values": _to_json(data)}, "mark": "rect", "encoding": encoding}]

    def _guide(self, name: str, y: float, width: int) -> list[dict]:
        data, place = {"values": [{"y": float(y), "name": name}]}, {"y": {"field": "y", "type": "quantitative"}}
        words = {"type": "text", "align": "right", "dy": -6, "color": INK, "fontSize": 11}
        halo = {**words, "color": "white", "stroke": "white", "strokeWidth": 3, "opacity": 0.85}  # on a bar or a line
        spot = {**place, "x": {"value": width - 4}, "text": {"field": "name"}}
        return [
            {"data": data, "mark": {"type": "rule", "color": INK, "strokeDash": [3, 3]}, "encoding": place},
            {"data": data, "mark": halo, "encoding": spot},
            {"data": data, "mark": words, "encoding": spot},
        ]

    def _axes(self) -> dict:
        def axis(name, title, log):
            ticks = {"tickCount": 6 if name == "x" else 5, "format": ".4~g"}
            if name == "x" and log:
                where = sorted({float(x) for columns in self.series.values() for x in columns[0]})
                if len(where) <= FEW and all(map(_is_round, where)):
                    ticks = {"values": where, "format": ".5~g"}
            return {"field": name, "type": "quantitative", "title": title, "scale": self._scale(log), "axis": ticks}

        return {"x": axis("x", self.x, "x" in self.log), "y": axis("y", self.y, "y" in self.log)}

    def _scale(self, log: bool, zero: bool = False) -> dict:
        return {"type": "log", "nice": False} if log else {"type": "linear", "zero": zero}

    def _channels(self, dash: bool, shape: bool = False) -> dict:
        names = list(self.series)
        stroke = {"symbolType": "stroke", "symbolSize": 500} if self.kind in ("lines", "bands") else {}
        legend = {"symbolOpacity": 1, **stroke} if len(names) > 1 else None
        colour = {"field": "name", "sort": None, "scale": {"domain": names, "range": COLOURS}, "legend": legend}
        strokes = {"field": "name", "sort": None, "scale": {"domain": names, "range": DASHES}, "legend": legend}
        if shape and len(names) > 1:
            return {"color": colour, "shape": {**colour, "scale": {"domain": names, "range": SHAPES}}}
        if not dash:
            return {"color": colour}
        widths = {"field": "name", "sort": None, "scale": {"domain": names, "range": WIDTHS}, "legend": legend}
        return {"color": colour, "strokeDash": strokes, "strokeWidth": widths}


def _is_round(x: float) -> bool:
    """True for round numbers such as 16384, 0.05 or 1e-7; not for 2.286e-7."""
    return x == float(f"{x:.2g}") or (x < 1e5 and x == int(x))


def _to_json(data: list[dict]) -> list[dict]:
    """Convert numbers to JSON: no tensors, and None where not finite."""

    def convert(value):
        if isinstance(value, str):
            return value
        return float(value) if math.isfinite(float(value)) else None

    return [{name: convert(value) for name, value in row.items()} for row in data]
