"""The page: what it says, that nothing in a log becomes markup, and how a real browser takes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_examples import candidate, final, header, round_record, two_tasks, write_log

from tvm_energy.records import Record, TaskRecord
from tvm_energy.replay import summarize
from tvm_energy.report_charts import Axis
from tvm_energy.report_facts import effort, pareto_front, saving
from tvm_energy.report_html import render_html
from tvm_energy.report_markdown import render_markdown

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}\u202e\x00\ud800"


def page_of(records: list[Record], objective: str | None = None, **options) -> str:
    return render_html(summarize(records, objective), records, **options)


class Outline(HTMLParser):
    """Elements and text of a page, and whether its tags are balanced."""

    EMPTY = frozenset({"meta", "link", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def long_run() -> list[Record]:
    """Three rounds with a saving, predictions, and finalists."""
    return [
        header(),
        TaskRecord(task="conv", workload="w0", weight=2),
        candidate("a", 1.00e-3, 0.200),
        candidate("b", 1.20e-3, 0.220),
        round_record(snr_db=None, round=0, seconds={"learn": 0.5, "measure_device": 3.0}),
        candidate("c", 1.03e-3, 0.180, round=1),
        candidate("d", 1.04e-3, predicted_energy_j=0.19, round=1),
        round_record(snr_db=2.0, round=1),
        candidate("e", 1.02e-3, 0.150, round=2, predicted_energy_j=0.17),
        round_record(snr_db=5.5, round=2),
        final("a", 1.00e-3, 0.200, 5),
        final("e", 1.02e-3, 0.150, 5),
    ]


# -- what it says ----------------------------------------------------------------------------------


def test_saving_price_and_break_even() -> None:
    outline = Outline(page_of(long_run()))
    assert outline.open == []
    text = outline.text
    assert "SIMULATED DEVICE sim:a100: no real joules were measured" in text
    assert "energy saved per pass 25.0 %" in text
    assert "price in time +2.0 %" in text
    summary = summarize(long_run())
    took = effort(long_run(), summary)
    # Six measurements of 3 s, each at its own power.
    watts = [200, 0.22 / 1.2e-3, 0.18 / 1.03e-3, 0.15 / 1.02e-3, 200, 0.15 / 1.02e-3]
    assert took.device_s == 18
    assert took.device_j == pytest.approx(3 * sum(watts))
    assert took.passes == pytest.approx(took.device_j / (2 * 0.05))
    assert f"break-even after {float(f'{took.passes:.3g}'):,.0f} passes" in text


def test_no_break_even_is_told_with_its_reason() -> None:
    same = [header(), candidate("a", 1e-3, 0.2)]
    assert "the chosen kernels save no energy" in Outline(page_of(same)).text
    doubtful = [
        header(objective="edp"),
        candidate("a", 1.0e-3, 0.200, relative_stderr=0.06),
        candidate("b", 1.001e-3, 0.150, relative_stderr=0.06),
    ]
    saved = saving(summarize(doubtful))
    assert saved is not None
    assert 0 < saved.margin_j < saved.energy_j
    weak = [header(objective="latency", meter=None), candidate("a", 1e-3)]
    assert "no saving in energy can be computed" in Outline(page_of(weak)).text


def test_a_chart_for_each_measured_task_with_a_text_for_those_who_cannot_see_it() -> None:
    outline = Outline(page_of(long_run()))
    charts = [item for item in outline.named("svg") if item.get("role") == "img"]
    assert len(charts) == 3  # scatter, energy over rounds, SNR over rounds
    ids = {item["id"] for _, item in outline.tags if item.get("id")}
    for chart in charts:
        assert set((chart["aria-labelledby"] or "").split()) <= ids
    assert "4 measured and 1 only predicted kernels" in outline.text
    assert "round 2: 2.0 dB; round 3: 5.5 dB" in outline.text
    assert "round 1: 200 mJ; round 2: 180 mJ; round 3: 150 mJ" in outline.text


def test_every_id_is_used_once_and_every_link_leads_somewhere() -> None:
    outline = Outline(page_of(two_tasks()))
    ids = [item["id"] for _, item in outline.tags if item.get("id")]
    assert len(ids) == len(set(ids))
    for link in outline.named("a"):
        assert (link["href"] or "").removeprefix("#") in ids
    for region in outline.named("section"):
        assert region["aria-labelledby"] in ids


def test_schedules_are_shown_or_their_absence_is_explained() -> None:
    shown = Outline(page_of(long_run(), schedules={"w0": "sch.split(l1)\n  if a < b: pass"}))
    assert "sch.split(l1) if a < b: pass" in shown.text
    assert (
        "cannot be shown: the file is gone"
        in Outline(page_of(long_run(), no_schedules="the file is gone")).text
    )


def test_a_task_without_a_kernel_and_a_log_without_energy() -> None:
    assert "No kernel for broken: none of 2 candidates ran" in Outline(page_of(two_tasks())).text
    bare = [header("cpu", "latency", simulated=False, meter=None), candidate("a", 1e-3)]
    text = Outline(page_of(bare)).text
    assert "No energy was measured" in text
    assert "SIMULATED" not in text


def test_a_large_run_stays_small() -> None:
    records: list[Record] = [header()]
    for number in range(20):
        name = f"w{number}"
        records.append(TaskRecord(task=f"kernel {number}", workload=name))
        records += [
            candidate(f"m{i}", 1e-3 * (1 + i / 300), 0.2 + i * 1e-4, workload=name)
            for i in range(300)
        ]
        records += [
            candidate(f"p{i}", 2e-3, predicted_energy_j=0.3, workload=name) for i in range(1200)
        ]
        records += [round_record(name, round=i, snr_db=3.0) for i in range(40)]
    page = page_of(records, schedules={f"w{i}": "x" * 5000 for i in range(20)})
    assert len(page.encode()) < 1_000_000
    assert "are not drawn" in page


# -- hostile logs ----------------------------------------------------------------------------------


def hostile_run(text: str = EVIL) -> list[Record]:
    head = header(plan={text: text})
    head.versions[text] = text
    head.device["name"] = text
    assert head.meter is not None
    head.meter.update({"driver_version": text, "notes": [text], "method": text, "scope": text})
    return [
        head,
        TaskRecord(task=text, workload="w0"),
        candidate("a", 1e-3, 0.2, quality=text, throttle_reasons=(text,), method=text),
        candidate(text, 1.01e-3, 0.1),
        candidate("z", None, error=text),
        round_record(snr_db=1.0, seconds={text: "x"}),
        round_record(snr_db=2.0, round=1),
    ]


def test_a_hostile_log_becomes_text_only() -> None:
    page = page_of(hostile_run(), schedules={"w0": EVIL})
    page.encode("utf-8")
    outline = Outline(page)
    assert outline.open == []
    assert outline.named("script") == outline.named("img") == []
    assert "<script>alert(1)</script>" in outline.text
    assert not any(name.startswith("on") for _, item in outline.tags for name in item)
    assert not re.search("[\u202e\x00\ud800]", page)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80))
def test_any_text_gives_a_balanced_page(text: str) -> None:
    outline = Outline(page_of(hostile_run(text), schedules={"w0": text}))
    assert outline.open == []
    assert outline.named("script") == []


def test_markdown_cannot_be_broken_out_of() -> None:
    name = "a|b`c <img> [x](http://evil) @someone #1 www.evil.com\n# head"
    records = [header(), TaskRecord(task=name, workload="w0"), candidate("a", 1e-3, 0.2)]
    lines = render_markdown(summarize(records)).splitlines()
    (row,) = [line for line in lines if "evil" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 9
    for mark in ("<", "`c", "[x]", "://", "@s", " #1", "www."):
        assert mark not in row.replace("\\`", "").replace("\\[", "").replace("\\]", "")
    assert not any(line.startswith("# ") for line in lines)


def test_markdown_has_the_figures() -> None:
    text = render_markdown(summarize(long_run()))
    # Two standard errors: 2 sqrt(0.4^2 + 0.3^2) mJ of 400 mJ.
    assert re.search(r"\*\*25\.0 % ± 0\.[23] less energy\*\*", text)
    assert "than with the fastest kernels, at +2.0 % time" in text
    assert "| conv | 2 | 1.00 ms | 200 mJ | 1.02 ms | 150 mJ | 25.0 % | 4 of 5 |" in text
    assert "SIMULATED" in text


# -- pieces ----------------------------------------------------------------------------------------


def test_the_front_holds_what_no_other_kernel_beats() -> None:
    from tvm_energy.ranking import kernels_by_workload

    kernels = kernels_by_workload(two_tasks())["w0"].values()
    assert [kernel.key for kernel in pareto_front(kernels)] == ["a", "b", "c"]


@given(
    st.lists(st.floats(min_value=1e-12, max_value=1e6), min_size=1, max_size=5),
    st.sampled_from(["s", "J", "dB", ""]),
)
def test_axes_hold_their_values_and_have_ticks_inside(values: list[float], unit: str) -> None:
    axis = Axis.over(values, "x", unit, 100.0, 600.0)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(100 < place < 600 for place in places)
    ticks = axis.ticks()
    assert len(ticks) <= 16
    assert all(axis.low <= tick * (1 + 1e-9) and tick <= axis.high * (1 + 1e-9) for tick in ticks)


# -- a real browser --------------------------------------------------------------------------------


def browse(page: Path, *options: str) -> tuple[str, str, list[str]]:
    """The page's text after loading, the browser's log, and what it asked the network for."""
    log = page.with_suffix(".net.json")
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            *(
                "--enable-logging=stderr",
                f"--log-net-log={log}",
                "--net-log-capture-mode=Everything",
            ),
            f"--user-data-dir={page.parent / 'profile'}",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    urls = re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8", errors="replace"))
    asked = [url for url in urls if url.startswith(("http", "ws", "ftp"))]
    # What the browser wants for itself, such as a dictionary; no name but this machine's resolves.
    own = re.compile(r"https?://[^/]*\b(google|googleapis|gvt1)\.com[/:]")
    return done.stdout, done.stderr, [url for url in asked if not own.match(url)]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: chromium)")


@needs_chromium
def test_chromium_opens_a_hostile_page_silently(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(hostile_run(), schedules={"w0": EVIL}), encoding="utf-8")
    shown, log, urls = browse(page, "--dump-dom")
    assert "CONSOLE" not in log
    assert urls == []
    assert "<svg" in shown
    assert "<script" not in shown


@needs_chromium
def test_the_browser_check_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x"><script>console.error("no")</script>')
    _, log, urls = browse(page, "--dump-dom")
    assert "CONSOLE" in log
    assert "http://127.0.0.1:9/x" in urls


@needs_chromium
@pytest.mark.parametrize("width", [390, 1100])
def test_nothing_sticks_out_of_the_window(tmp_path: Path, width: int) -> None:
    # The page forbids scripts, so the measuring one is put in together with a policy that allows it.
    text = page_of(two_tasks()).replace("default-src 'none'", "script-src 'unsafe-inline'")
    probe = (
        f"<iframe id=f style='width:{width}px;height:900px' srcdoc='{{}}'></iframe><script>"
        "f.onload = () => { const d = f.contentDocument.documentElement;"
        "document.title = `${d.scrollWidth} ${d.clientWidth}`; }</script>"
    )
    page = tmp_path / "frame.html"
    page.write_text(probe.replace("{}", text.replace("&", "&amp;").replace("'", "&#39;")), "utf-8")
    shown, _, _ = browse(page, "--dump-dom", "--virtual-time-budget=3000")
    match = re.search(r"<title>(\d+) (\d+)</title>", shown)
    assert match is not None
    assert 0 < int(match[1]) <= int(match[2])


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tvm_energy.cli import app

    write_log(tmp_path / "out", two_tasks())
    run = CliRunner().invoke
    page = tmp_path / "report.html"
    assert run(app, ["report", str(tmp_path / "out"), "--html", str(page)]).exit_code == 0
    assert "cannot be shown" in Outline(page.read_text()).text
    assert run(app, ["report", str(tmp_path / "out"), "--html", str(tmp_path)]).exit_code == 2
    missing = str(tmp_path / "no" / "x.html")
    assert run(app, ["report", str(tmp_path / "out"), "--html", missing]).exit_code == 2
    both = run(app, ["report", str(tmp_path / "out"), "--markdown", "--json"])
    assert both.exit_code == 2
    printed = run(app, ["report", str(tmp_path / "out"), "--markdown", "-o", "latency"])
    assert "Objective latency" in printed.stdout
    plain = run(app, ["report", str(tmp_path / "out"), "--json", "-o", "latency"])
    assert json.loads(plain.stdout)["objective"] == "latency"
