"""Small charts as SVG elements: a scatter plot and a line chart, with axes and a text for screen readers.

Elements are built as a tree and never as text, so nothing from a log can become markup.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from tvm_energy.report import format_quantity

_WIDTH, _HEIGHT = 640.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 106.0, 30.0, 14.0, 54.0

#: Ranges wider than this get a logarithmic axis.
_LOGARITHMIC = 4.0

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: a quantity in a unit, mapped to pixels."""

    label: str
    unit: str
    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    @classmethod
    def over(cls, values: Sequence[float], label: str, unit: str, start: float, end: float) -> Axis:
        """An axis that holds all values, with a margin; logarithmic when they spread widely."""
        low, high = min(values), max(values)
        logarithmic = unit in ("s", "J") and low > 0 and high / low > _LOGARITHMIC
        if logarithmic:
            margin = (high / low) ** 0.05
            low, high = low / margin, high * margin
        else:
            margin = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
            low, high = low - margin, high + margin
        return cls(label, unit, low, high, start, end, logarithmic)

    def at(self, value: float) -> float:
        """Pixel of a value."""
        if self.logarithmic:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the axis, about five."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1,)):
                ticks = [digit * 10.0**decade for decade in decades for digit in digits]
                ticks = [tick for tick in ticks if self.low <= tick <= self.high]
                if len(ticks) <= 8:
                    break
            return ticks[:: max(1, len(ticks) // 8)]
        span = (self.high - self.low) / 5
        step = 10.0 ** math.floor(math.log10(span))
        step *= next(digit for digit in (1, 2, 5, 10) if digit * step >= span)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, math.floor(self.high / step) + 1)]

    def text(self, value: float) -> str:
        """A tick's label."""
        if self.unit in ("s", "J"):
            return "0" if abs(value) < 1e-30 else format_quantity(value, self.unit)
        return f"{value:.4g}{' ' + self.unit if self.unit else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with a name: its shape is a class in the style sheet and a sign in the drawing."""

    x: float
    y: float
    shape: str  # "square" or "diamond"
    title: str


def scatter(
    *,
    title: str,
    description: str,
    measured: Sequence[tuple[float, float, float]],
    predicted: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
) -> ET.Element:
    """Energy (J) over latency (s).

    Args:
        title, description: for screen readers.
        measured: latency, energy, and half the length of the error bar.
        predicted: latency, energy.
        front: the Pareto front, fastest first.
        marks: fastest and chosen.
    """
    points = [(x, y) for x, y, _ in measured] + list(predicted)
    x_axis = Axis.over([x for x, _ in points], "time of one launch", "s", _LEFT, _WIDTH - _RIGHT)
    y_axis = Axis.over([y for _, y in points], "energy of one launch", "J", _HEIGHT - _BOTTOM, _TOP)
    svg = _frame(title, description, x_axis, y_axis)
    _path(svg, "predicted", (_dot(x_axis, y_axis, x, y) for x, y in predicted))
    _path(
        svg,
        "error",
        (
            f"M{x_axis.at(x):.1f} {y_axis.at(max(y - e, y_axis.low)):.1f}V{y_axis.at(y + e):.1f}"
            for x, y, e in measured
        ),
    )
    _path(svg, "measured", (_dot(x_axis, y_axis, x, y) for x, y, _ in measured))
    if len(front) > 1:
        line = "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in front)
        _path(svg, "front", [f"M{line}"])
    for mark in marks:
        _mark(svg, x_axis.at(mark.x), y_axis.at(mark.y), mark)
    return svg


def lines(
    *,
    title: str,
    description: str,
    label: str,
    unit: str,
    points: Sequence[tuple[int, float]],
) -> ET.Element:
    """A quantity over the rounds, from 1."""
    x_axis = Axis.over([float(x) for x, _ in points], "round", "", _LEFT, _WIDTH - _RIGHT)
    y_axis = Axis.over([y for _, y in points], label, unit, _HEIGHT - _BOTTOM, _TOP)
    svg = _frame(title, description, x_axis, y_axis)
    line = "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in points)
    _path(svg, "line", [f"M{line}"])
    _path(svg, "measured", (_dot(x_axis, y_axis, x, y) for x, y in points))
    return svg


def _dot(x_axis: Axis, y_axis: Axis, x: float, y: float) -> str:
    return f"M{x_axis.at(x):.1f} {y_axis.at(y):.1f}h0"


def _frame(title: str, description: str, x_axis: Axis, y_axis: Axis) -> ET.Element:
    number = next(_numbers)
    svg = ET.Element(
        "svg",
        {
            "viewBox": f"0 0 {_WIDTH:g} {_HEIGHT:g}",
            "role": "img",
            "aria-labelledby": f"chart{number}t chart{number}d",
        },
    )
    ET.SubElement(svg, "title", {"id": f"chart{number}t"}).text = title
    ET.SubElement(svg, "desc", {"id": f"chart{number}d"}).text = description
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    whole_rounds = x_axis.label == "round"
    for tick in x_axis.ticks():
        if whole_rounds and tick != int(tick):
            continue
        across = x_axis.at(tick)
        _path(svg, "grid", [f"M{across:.1f} {_TOP:g}V{bottom:g}"])
        _text(svg, f"{across:.1f}", f"{bottom + 18:g}", x_axis.text(tick), "middle")
    for tick in y_axis.ticks():
        place = y_axis.at(tick)
        _path(svg, "grid", [f"M{_LEFT:g} {place:.1f}H{right:g}"])
        _text(svg, f"{_LEFT - 8:g}", f"{place + 4:.1f}", y_axis.text(tick), "end")
    _text(svg, f"{(_LEFT + right) / 2:g}", f"{_HEIGHT - 8:g}", x_axis.label, "middle")
    label = _text(svg, "0", "0", y_axis.label, "middle")
    label.set("transform", f"translate(14 {(_TOP + bottom) / 2:g}) rotate(-90)")
    return svg


def _path(svg: ET.Element, kind: str, parts: Iterable[str]) -> None:
    data = "".join(parts)
    if data:
        ET.SubElement(svg, "path", {"class": kind, "d": data})


def _text(svg: ET.Element, x: str, y: str, text: str, anchor: str) -> ET.Element:
    element = ET.SubElement(svg, "text", {"x": x, "y": y, "text-anchor": anchor})
    element.text = text
    return element


def _mark(svg: ET.Element, x: float, y: float, mark: Mark) -> None:
    if mark.shape == "square":
        data = f"M{x - 8:.1f} {y - 8:.1f}h16v16h-16z"
    else:
        data = f"M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z"
    shape = ET.SubElement(svg, "path", {"class": mark.shape, "d": data})
    ET.SubElement(shape, "title").text = mark.title
