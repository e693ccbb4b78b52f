"""One self-contained page about a run: opens offline, holds no script, loads nothing.

The page is built as an element tree, so whatever a log holds becomes text and never markup.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from xml.etree import ElementTree as ET

from tvm_energy import report_charts as charts
from tvm_energy.clock_choice import DEFAULT, points_by_workload
from tvm_energy.errors import ConfigurationError
from tvm_energy.logs.load import comparable
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.objective import parse_objective
from tvm_energy.ranking import TIE_SIGMA, Kernel, choose, kernels_by_workload
from tvm_energy.records import CandidateRecord, ClockRecord, FinalRecord, Record, RoundRecord
from tvm_energy.replay import KernelSummary, RunSummary, TaskSummary
from tvm_energy.report import (
    clock,
    clock_notes,
    format_quantity,
    printable,
    shorten,
    simulated_banner,
)
from tvm_energy.report_facts import (
    MeterQuality,
    effort,
    meter_quality,
    pareto_front,
    saving,
)
from tvm_energy.version import __version__

#: Points drawn in all charts together; more would make the page slow on a phone.
_POINTS = 12_000
_LEAST_POINTS = 60
#: Rows of a table of kernels, and rounds for which the best kernel so far is worked out.
_ROWS, _ROUNDS = 40, 200
#: Characters of one schedule; the database has the whole.
_SOURCE_LENGTH = 30_000
_NOTHING = "–"

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render_html(
    summary: RunSummary,
    records: Sequence[Record],
    *,
    schedules: Mapping[str, str] | None = None,
    no_schedules: str | None = None,
) -> str:
    """The page.

    Args:
        summary: what was found.
        records: of the same log, in order.
        schedules: source of the chosen kernel by workload hash.
        no_schedules: why there are none.

    Returns:
        HTML; write it as UTF-8.
    """
    page = _Page(summary, records, schedules or {}, no_schedules)
    text = ET.tostring(page.build(), encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n"


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    """A child with text; names such as ``class_`` and ``aria_label`` become attributes."""
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    child = ET.SubElement(parent, tag, {key: _clean(value) for key, value in names.items()})
    if text is not None:
        child.text = _clean(text)
    return child


def _clean(text: str) -> str:
    """Without control characters, lone surrogates and what turns the writing direction around."""
    return "\n".join(printable(line) for line in text.replace("\t", "    ").split("\n"))


class _Page:
    def __init__(
        self,
        summary: RunSummary,
        records: Sequence[Record],
        schedules: Mapping[str, str],
        no_schedules: str | None,
    ) -> None:
        self.summary = summary
        self.records, _ = comparable(records, summary.header)
        self.schedules = schedules
        self.no_schedules = no_schedules
        self.kernels = kernels_by_workload(self.records)
        self.points = points_by_workload(self.records)
        self.candidates: dict[str, list[CandidateRecord]] = defaultdict(list)
        self.rounds: dict[str, list[RoundRecord]] = defaultdict(list)
        self.measured: dict[str, list[EnergyMeasurement]] = defaultdict(list)
        for record in self.records:
            if isinstance(record, CandidateRecord):
                self.candidates[record.workload].append(record)
            elif isinstance(record, RoundRecord):
                self.rounds[record.workload].append(record)
            if isinstance(record, (CandidateRecord, FinalRecord, ClockRecord)) and record.measured:
                self.measured[record.workload].append(record.measured)
        self.drawn = max(_LEAST_POINTS, _POINTS // max(1, len(summary.tasks)))

    def build(self) -> ET.Element:
        html = ET.Element("html", {"lang": "en"})
        head = ET.SubElement(html, "head")
        _add(head, "meta", charset="utf-8")
        _add(head, "meta", http_equiv="Content-Security-Policy", content=_POLICY)
        _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
        _add(head, "meta", name="referrer", content="no-referrer")
        _add(head, "title", f"Energy report: {self.summary.device}")
        # An icon of its own keeps the browser from asking a server for one.
        _add(head, "link", rel="icon", href="data:,")
        style = resources.files("tvm_energy").joinpath("report_style.css")
        ET.SubElement(head, "style").text = style.read_text(encoding="utf-8")
        body = ET.SubElement(html, "body")
        _add(body, "a", "Skip to the results", class_="skip", href="#results")
        self._header(body)
        main = _add(body, "main", id="results")
        self._outcome(main)
        self._price(main)
        for number, task in enumerate(self.summary.tasks):
            self._task(main, number, task)
        self._meter(main)
        self._about(body)
        return html

    # -- top ---------------------------------------------------------------------------------

    def _header(self, body: ET.Element) -> None:
        header = _add(body, "header")
        _add(header, "h1", f"Energy report for {self.summary.device}")
        if self.summary.simulated:
            _add(
                header, "p", simulated_banner(self.summary.device), class_="simulated", role="note"
            )
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self._created()))
        _add(
            header,
            "p",
            f"Kernels chosen by {self.summary.objective}; policy {self.summary.policy}; last run begun {when}.",
        )

    def _created(self) -> float:
        return min(max(float(self.summary.header.created), 0.0), 253402300799.0)  # year 9999

    def _outcome(self, main: ET.Element) -> None:
        section = _add(main, "section", aria_labelledby="outcome")
        _add(section, "h2", "What was saved, and at what price in time", id="outcome")
        cards = _add(section, "dl", class_="cards")
        saved, totals = saving(self.summary), self.summary.totals
        if saved is not None and totals is not None and totals.best_energy_j is not None:
            _card(
                cards,
                "energy saved per pass",
                _percent(saved.fraction),
                f"± {100 * saved.margin:.1f} percentage points; {_quantity(totals.fastest_energy_j, 'J')} "
                f"to {_quantity(totals.best_energy_j, 'J')}",
            )
            _card(
                cards,
                "price in time",
                f"{100 * saved.slowdown:+.1f} %",
                f"{_quantity(totals.fastest_latency_s, 's')} to {_quantity(totals.best_latency_s, 's')}",
            )
        elif totals is not None:
            _card(
                cards, "time per pass", _quantity(totals.best_latency_s, "s"), "no energy compared"
            )
        tried = sum(task.candidates for task in self.summary.tasks)
        measured = sum(task.energy_measurements for task in self.summary.tasks)
        part = f"{100 * measured / tried:.0f} % of those tried" if tried else "none was tried"
        _card(cards, "kernels measured for energy", f"{measured} of {tried}", part)
        for note in clock_notes(self.summary):
            _add(section, "p", note)
        _add(
            section,
            "p",
            "Compared are, for each kernel of the network, the fastest one found and the chosen one, "
            "both from this log and both measured; all calls of one pass are added up.",
            class_="soft",
        )
        if any(task.best for task in self.summary.tasks):
            self._table(section)
        for task in self.summary.tasks:
            if task.reason is not None:
                _add(section, "p", f"No kernel for {task.name}: {task.reason}")
        if self.summary.set_aside:
            _add(
                section,
                "p",
                f"Not used, because earlier runs measured in another way: {self.summary.set_aside} energies.",
            )

    def _table(self, section: ET.Element) -> None:
        names = ["kernel", "calls", "fastest: time", "energy", "chosen: time", "energy", "saved"]
        clocks = self.summary.clock_choice != DEFAULT
        if clocks:
            names += ["clock", "saved by clock"]
        rows = [
            (
                f"#task{number}",
                task.name,
                f"{task.weight:g}",
                *_time_and_energy(task.fastest),
                *_time_and_energy(task.best),
                ("≈ " if task.ties else "") + _percent(task.saved_fraction),
                *((clock(task.best), _percent(task.clock_saved_fraction)) if clocks else ()),
            )
            for number, task in enumerate(self.summary.tasks)
            if task.fastest and task.best
        ]
        body = _new_table(section, "Time and energy of one launch, ± two standard errors", names)
        for target, name, *cells in rows:
            row = _add(body, "tr")
            heading = _add(row, "th", scope="row")
            _add(heading, "a", shorten(name, 60), href=target)
            for cell in cells:
                _add(row, "td", cell)
        totals = self.summary.totals
        if totals is not None and len(rows) > 1:
            row = _add(body, "tr", class_="total")
            _add(row, "th", "one pass of all", scope="row")
            for cell in (
                "",
                _quantity(totals.fastest_latency_s, "s"),
                _quantity(totals.fastest_energy_j, "J"),
                _quantity(totals.best_latency_s, "s"),
                _quantity(totals.best_energy_j, "J"),
                _percent(totals.saved_fraction),
                *(("", _percent(totals.clock_saved_fraction)) if clocks else ()),
            ):
                _add(row, "td", cell)
        if any(task.ties for task in self.summary.tasks):
            _add(
                section,
                "p",
                "≈ other kernels are as good within the error of the measurements; the fastest of these was chosen.",
                class_="soft",
            )

    def _price(self, main: ET.Element) -> None:
        section = _add(main, "section", aria_labelledby="price")
        _add(section, "h2", "What the tuning took, and when it has paid for itself", id="price")
        took = effort(self.records, self.summary)
        saved = saving(self.summary)
        virtual = " (virtual, simulated)" if self.summary.simulated else ""
        cards = _add(section, "dl", class_="cards")
        _card(cards, "device time of measurements", _duration(took.device_s), virtual.strip(" ()"))
        _card(cards, "energy of that time", _quantity(took.device_j, "J"), virtual.strip(" ()"))
        if took.passes is not None and self.summary.totals is not None:
            hours = took.passes * self.summary.totals.best_latency_s
            _card(
                cards,
                "break-even after",
                f"{float(f'{took.passes:.3g}'):,.0f} passes",
                f"{_duration(hours)} of running",
            )
            text = "After that many passes of the network, the saving equals the joules of the measurements."
        elif saved is None:
            text = "There is no break-even: no saving in energy can be computed from this log."
        elif saved.energy_j > 0:
            text = (
                "There is no break-even: the saving is not larger than two standard errors, "
                "and may be nothing."
            )
        else:
            text = "There is no break-even: the chosen kernels save no energy against the fastest ones."
        _add(section, "p", text)
        _add(
            section,
            "p",
            "Counted are the energy measurements alone: each kernel's mean power times the time it was "
            "measured for. Compiling, timing runs and the host come on top; the log does not hold their joules."
            + (
                f" Measuring and learning took {_duration(took.host_s)} of wall time on the host."
                if took.host_s
                else ""
            ),
            class_="soft",
        )

    # -- one task ----------------------------------------------------------------------------

    def _task(self, main: ET.Element, number: int, task: TaskSummary) -> None:
        section = _add(main, "section", aria_labelledby=f"task{number}")
        _add(section, "h2", task.name, id=f"task{number}")
        if task.best is None:
            _add(section, "p", f"No kernel: {task.reason}")
        kernels = self.kernels.get(task.workload, {})
        self._scatter(section, task, list(kernels.values()))
        self._clock_table(section, task)
        self._history(section, task)
        self._schedule(section, task)
        for error, count in list(task.errors.items())[:5]:
            _add(section, "p", f"Failed {count} times: {error}", class_="soft")

    def _scatter(self, section: ET.Element, task: TaskSummary, kernels: list[Kernel]) -> None:
        measured = [k for k in kernels if k.measured is not None]
        if not measured:
            _add(
                section,
                "p",
                "No energy was measured, so that there is nothing to plot.",
                class_="soft",
            )
            return
        predicted = [k for k in kernels if k.measured is None and k.predicted_energy_j]
        kept = sorted(measured, key=lambda k: k.energy_j or 0.0)[: self.drawn]
        must = [
            k
            for k in measured
            if task.best and task.fastest and k.key in (task.best.key, task.fastest.key)
        ]
        kept += [k for k in must if k not in kept]
        rest = sorted(predicted, key=lambda k: k.predicted_energy_j or 0.0)[: self.drawn // 2]
        left_out = len(measured) - len(kept) + len(predicted) - len(rest)
        front = pareto_front(measured)
        figure = _add(section, "figure")
        figure.append(
            charts.scatter(
                title=_clean(f"Energy and time of the kernels of {task.name}"),
                description=_clean(self._description(task, measured, predicted, front)),
                measured=[
                    (k.latency_s, k.measured.energy_j, TIE_SIGMA * k.measured.stderr_j)
                    for k in kept
                    if k.measured
                ],
                predicted=[(k.latency_s, k.predicted_energy_j or 0.0) for k in rest],
                front=[(k.latency_s, k.energy_j or 0.0) for k in front],
                marks=[
                    charts.Mark(
                        x=kernel.latency_s,
                        y=kernel.energy_j,
                        shape=shape,
                        title=f"{what}: {' '.join(_time_and_energy(kernel))}",
                    )
                    for kernel, shape, what in (
                        (task.best, "diamond", "chosen"),
                        (task.fastest, "square", "fastest"),
                    )
                    if kernel and kernel.energy_j is not None
                ],
            )
        )
        caption = _add(figure, "figcaption")
        for kind, text in (
            ("measured", "measured, with two standard errors"),
            ("predicted", "only predicted"),
            ("front", "Pareto front of the measured"),
            ("square", "fastest"),
            ("diamond", "chosen"),
        ):
            _legend(caption, kind, text)
        if left_out:
            _add(caption, "span", f"{left_out} kernels that cost more are not drawn.", class_="key")
        self._kernel_table(section, front)

    def _description(
        self,
        task: TaskSummary,
        measured: Sequence[Kernel],
        predicted: Sequence[Kernel],
        front: Sequence[Kernel],
    ) -> str:
        parts = [
            f"{len(measured)} measured and {len(predicted)} only predicted kernels; "
            f"{len(front)} lie on the Pareto front."
        ]
        for what, kernel in (("Fastest", task.fastest), ("Chosen", task.best)):
            if kernel is not None:
                parts.append(f"{what}: {', '.join(_time_and_energy(kernel))}.")
        return " ".join(parts)

    def _kernel_table(self, section: ET.Element, front: Sequence[Kernel]) -> None:
        details = _add(section, "details")
        _add(details, "summary", "The Pareto front as a table")
        names = ("kernel", "time", "energy", "mean power", "measured as")
        body = _new_table(details, "Measured kernels that no other beats in both", names)
        for kernel in front[:_ROWS]:
            if kernel.measured is None:
                continue
            row = _add(body, "tr")
            _add(row, "th", kernel.key, scope="row")
            for cell in (
                _quantity(kernel.latency_s, "s"),
                _with_margin(kernel.measured.energy_j, kernel.measured.stderr_j),
                _quantity(kernel.measured.power_w, "W"),
                "finalist" if kernel.final else "candidate",
            ):
                _add(row, "td", cell)

    def _clock_table(self, section: ET.Element, task: TaskSummary) -> None:
        """What was measured at locked clocks."""
        points = sorted(
            self.points.get(task.workload, {}).values(), key=lambda p: (p.clock_mhz, p.key)
        )
        if not points:
            return
        details = _add(section, "details")
        count = len({point.clock_mhz for point in points})
        _add(details, "summary", f"Finalists at {count} locked clocks")
        names = ("clock", "observed", "kernel", "time", "energy", "mean power", "measured as")
        body = _new_table(details, "Finalists while the core clock was locked", names)
        for point in points[: 4 * _ROWS]:
            measured = point.measured
            row = _add(body, "tr")
            _add(row, "th", f"{point.clock_mhz:g} MHz", scope="row")
            for cell in (
                _NOTHING if measured.clock_mhz is None else f"{measured.clock_mhz:.4g} MHz",
                point.key,
                _quantity(measured.latency_s, "s"),
                _with_margin(measured.energy_j, measured.stderr_j),
                _quantity(measured.power_w, "W"),
                "confirmed" if point.confirmed else "sweep",
            ):
                _add(row, "td", cell)

    def _history(self, section: ET.Element, task: TaskSummary) -> None:
        rounds = self.rounds.get(task.workload, [])
        if not rounds:
            return
        best = self._best_energies(task)
        snr = [(i + 1, r.snr_db) for i, r in enumerate(rounds) if r.snr_db is not None]
        pair = _add(section, "div", class_="pair")
        for label, unit, points, text in (
            (
                "energy",
                "J",
                best,
                "Energy of the chosen kernel among those measured up to each round",
            ),
            ("SNR", "dB", snr, "Signal-to-noise ratio of the energy predictions of each round"),
        ):
            if len(points) > 1:
                figure = _add(pair, "figure")
                figure.append(
                    charts.lines(
                        title=_clean(f"{text}, {task.name}"),
                        description=_clean(
                            "; ".join(f"round {x}: {_in_words(y, unit)}" for x, y in points[:60])
                        ),
                        label=f"{label} ({unit})" if unit == "dB" else label,
                        unit=unit,
                        points=points,
                    )
                )
                _add(figure, "figcaption", text)
        details = _add(section, "details")
        tried = sum(r.candidates for r in rounds)
        measured = sum(r.measured for r in rounds)
        _add(
            details,
            "summary",
            f"{len(rounds)} round{'s' * (len(rounds) != 1)}: {tried} kernels tried, {measured} measured for energy",
        )
        names = (
            "round",
            "tried",
            "fast enough",
            "measured",
            "SNR",
            "best time",
            "device time",
            "host time",
        )
        body = _new_table(details, "What each round did", names)
        for index, record in enumerate(rounds[:_ROUNDS]):
            row = _add(body, "tr")
            _add(row, "th", str(index + 1), scope="row")
            host = sum(
                _seconds(record, name) for name in record.seconds if name != "measure_device"
            )
            for cell in (
                str(record.candidates),
                str(record.gated),
                str(record.measured),
                _NOTHING if record.snr_db is None else f"{record.snr_db:.1f} dB",
                _quantity(record.best_latency_s, "s"),
                _duration(_seconds(record, "measure_device")),
                _duration(host),
            ):
                _add(row, "td", cell)
        if len(rounds) > _ROUNDS:
            _add(details, "p", f"{len(rounds) - _ROUNDS} more rounds are in the log.")

    def _best_energies(self, task: TaskSummary) -> list[tuple[int, float]]:
        """Energy of the kernel that the objective would have chosen after each round."""
        header = self.summary.header
        try:
            objective = parse_objective(
                self.summary.objective, max_power_w=(header.meter or {}).get("max_power_w")
            )
        except ConfigurationError:
            return []
        by_round: dict[int, list[CandidateRecord]] = defaultdict(list)
        for record in self.candidates.get(task.workload, []):
            if record.measured is not None and record.latency_s is not None:
                by_round[record.round].append(record)
        known: list[Kernel] = []
        points = []
        for number in sorted(by_round)[:_ROUNDS]:
            known += [
                Kernel(key=r.key, latency_s=r.latency_s, measured=r.measured)
                for r in by_round[number]
                if r.latency_s is not None
            ]
            choice = choose(known, objective)
            if choice is not None and choice.best.energy_j is not None:
                points.append((number + 1, choice.best.energy_j))
        return points

    def _schedule(self, section: ET.Element, task: TaskSummary) -> None:
        if task.best is None:
            return
        source = self.schedules.get(task.workload)
        details = _add(section, "details")
        _add(details, "summary", f"Schedule of the chosen kernel {task.best.key}")
        if source is None:
            reason = self.no_schedules or "it is not in the tuning records"
            _add(details, "p", f"The schedule cannot be shown: {reason}")
            return
        if len(source) > _SOURCE_LENGTH:
            source = source[:_SOURCE_LENGTH] + "\n… (cut; the database has the whole)"
        frame = _add(
            details, "pre", tabindex="0", role="region", aria_label=f"Schedule of {task.name}"
        )
        _add(frame, "code", source)

    # -- bottom ------------------------------------------------------------------------------

    def _meter(self, main: ET.Element) -> None:
        section = _add(main, "section", aria_labelledby="meter")
        _add(section, "h2", "Clocks and quality of the measurements", id="meter")
        meter = self.summary.header.meter
        if meter is None:
            _add(section, "p", "The run had no energy meter.")
            return
        facts = [
            f"Meter {meter.get('meter', 'unknown')}",
            f"method {meter.get('method', 'unknown')}",
            f"scope {meter.get('scope', 'unknown')}",
            f"driver {meter.get('driver_version') or 'unknown'}",
        ]
        period = meter.get("update_period_s")
        if isinstance(period, (int, float)) and 0 < period < 1e6:
            facts.append(f"the sensor updates every {_quantity(float(period), 's')}")
        _add(section, "p", "; ".join(facts) + ".")
        notes = meter.get("notes")
        for note in notes if isinstance(notes, list) else []:
            _add(section, "p", f"Note: {note}")
        names = (
            "kernel",
            "measurements",
            "clock",
            "temperature",
            "sensor updates",
            "typical error",
            "limits and doubts",
        )
        body = _new_table(section, "Ranges over all measurements of a kernel", names)
        for task in self.summary.tasks:
            quality = meter_quality(self.measured.get(task.workload, []))
            row = _add(body, "tr")
            _add(row, "th", shorten(task.name, 60), scope="row")
            for cell in _quality_cells(quality):
                _add(row, "td", cell)

    def _about(self, body: ET.Element) -> None:
        footer = _add(body, "footer")
        _add(footer, "h2", "About this run")
        header = self.summary.header
        items = [
            *(
                (f"version of {name}", str(value))
                for name, value in sorted(header.versions.items())
            ),
            ("device", str(header.device.get("name"))),
            ("device id", str(header.device.get("uuid"))),
            ("target", str(header.device.get("target"))),
            ("seed", str(header.seed)),
            ("runs in the log", str(self.summary.runs)),
            *((f"plan: {name}", str(value)) for name, value in sorted(header.plan.items())),
        ]
        details = _add(footer, "details")
        _add(details, "summary", "Versions, device and measuring plan")
        rows = _new_table(details, "As the log's header has it", ("what", "value"))
        for name, value in items:
            row = _add(rows, "tr")
            _add(row, "th", name, scope="row")
            _add(row, "td", value, class_="text")
        _add(footer, "p", f"Made by tvm-energy {__version__}.", class_="soft")


def _in_words(value: float, unit: str) -> str:
    """A value of a line chart in words."""
    return format_quantity(value, unit) if unit == "J" else f"{value:.1f} {unit}"


def _new_table(parent: ET.Element, caption: str, names: Sequence[str]) -> ET.Element:
    frame = _add(parent, "div", class_="wide", tabindex="0", role="region", aria_label=caption)
    table = _add(frame, "table")
    _add(table, "caption", caption)
    row = _add(_add(table, "thead"), "tr")
    for name in names:
        _add(row, "th", name, scope="col")
    return _add(table, "tbody")


def _card(cards: ET.Element, name: str, value: str, note: str) -> None:
    card = _add(cards, "div")
    _add(card, "dt", name)
    _add(_add(card, "dd", value), "small", note)


def _legend(caption: ET.Element, kind: str, text: str) -> None:
    key = _add(caption, "span", class_="key")
    svg = _add(key, "svg", viewBox="0 0 24 20", aria_hidden="true")
    shapes = {
        "front": "M1 10H23",
        "square": "M5 3h14v14h-14z",
        "diamond": "M12 2l8 8l-8 8l-8 -8z",
    }
    _add(svg, "path", class_=kind, d=shapes.get(kind, "M12 10h0"))
    svg.tail = f" {text}"


def _quality_cells(quality: MeterQuality) -> Iterator[str]:
    yield str(quality.measurements)
    yield _span(quality.clock_mhz, "MHz")
    yield _span(quality.temperature_c, "°C")
    yield _span(quality.sensor_updates, "")
    error = quality.median_relative_stderr
    yield _NOTHING if error is None else f"{100 * error:.2g} %"
    yield ", ".join((*quality.throttle_reasons, *quality.doubts)) or "none"


def _span(values: tuple[float, float] | None, unit: str) -> str:
    if values is None:
        return _NOTHING
    low, high = (f"{value:.4g}" for value in values)
    return f"{low if low == high else f'{low} to {high}'} {unit}".strip()


def _time_and_energy(kernel: KernelSummary | None) -> tuple[str, str]:
    if kernel is None:
        return _NOTHING, _NOTHING
    return _quantity(kernel.latency_s, "s"), _with_margin(kernel.energy_j, kernel.energy_stderr_j)


def _with_margin(energy_j: float | None, stderr_j: float | None) -> str:
    if energy_j is None or stderr_j is None:
        return _quantity(energy_j, "J")
    return f"{_quantity(energy_j, 'J')} ± {200 * stderr_j / energy_j:.2g} %"


def _quantity(value: float | None, unit: str) -> str:
    return _NOTHING if value is None else format_quantity(value, unit)


def _percent(fraction: float | None) -> str:
    return _NOTHING if fraction is None else f"{100 * fraction + 0.0:.1f} %"


def _seconds(record: RoundRecord, name: str) -> float:
    value = record.seconds.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0.0


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
