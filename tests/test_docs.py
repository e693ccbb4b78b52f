"""README, CHANGELOG and docs tell the truth: links resolve, code compiles, command lines parse, calls fit.

Each check is also run on a wrong example, because a check that cannot fail is worth nothing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tvm_energy.cli import app
from tvm_energy.errors import IncompatibleVersions

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


# -- reading Markdown ------------------------------------------------------------------------------


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def fenced(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def inline_code(text: str) -> list[str]:
    """What stands between backticks, on one line or over two."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", prose(text), flags=re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


# -- links and files -------------------------------------------------------------------------------


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links without a file, and anchors without a heading."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (
            anchor and anchor not in anchors(text if target == page else target.read_text())
        ):
            broken.append(link)
    return broken


@every_page
def test_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "# A `b` c!\n[x](#a-b-c) [y](#b) [z](docs/none.md) [w](docs/logs.md#nothing) [v](docs/logs.md)"
    assert broken_links(ROOT / "README.md", text) == ["#b", "docs/none.md", "docs/logs.md#nothing"]


def missing_files(text: str) -> list[str]:
    """Files of this repository that are named in backticks and do not exist."""
    names = []
    for code in inline_code(text):
        match = re.match(r"(?:\./)?((?:scripts|tests|docs|tvm_energy)/[\w./-]+)", code)
        if match and not (ROOT / match[1]).exists():
            names.append(match[1])
        path, separator, test = code.partition("::")
        if separator and f"def {test}(" not in (ROOT / path).read_text():
            names.append(code)
    return names


@every_page
def test_files_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == []


def test_a_missing_file_is_found() -> None:
    text = "`scripts/demo`, `scripts/none --quick`, `tests/test_docs.py::test_no_such`"
    assert missing_files(text) == ["scripts/none", "tests/test_docs.py::test_no_such"]


def test_the_readme_leads_to_every_page() -> None:
    linked = re.findall(r"\]\((docs/[\w-]+\.md)", (ROOT / "README.md").read_text())
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} == set(linked)


# -- Python ----------------------------------------------------------------------------------------


def python_blocks() -> Iterator[Any]:
    for page, name in zip(PAGES, IDS, strict=True):
        for number, block in enumerate(fenced(page.read_text(), "python"), 1):
            yield pytest.param(block, id=f"{name}:{number}")


@pytest.mark.parametrize("block", list(python_blocks()))
def test_code_compiles_and_its_calls_fit(block: str) -> None:
    assert misuses(ast.parse(block)) == []


def misuses(tree: ast.Module) -> list[str]:
    """Names of ours that do not exist, and calls of ours whose arguments do not fit."""
    ours: dict[str, Any] = {}
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tvm_energy":
                    module = importlib.import_module(alias.name)
                    if "." not in alias.name or alias.asname:
                        ours[alias.asname or alias.name] = module
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tvm_energy"):
            for alias in node.names:
                try:
                    ours[alias.asname or alias.name] = member(node.module, alias.name)
                except AttributeError:
                    wrong.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        path = ast.unparse(node.func).split(".")
        # A page may go on from its blocks before, and leave the import out.
        called = ours.get(path[0], sys.modules["tvm_energy"] if path[0] == "tvm_energy" else None)
        if called is None:
            continue
        try:
            for name in path[1:]:
                called = getattr(called, name)
        except IncompatibleVersions:
            continue  # Ansor's side, which tests/ansor runs
        except AttributeError as exc:
            wrong.append(f"{ast.unparse(node)}: {exc}")
            continue
        try:
            inspect.signature(called).bind(
                *(None for item in node.args if not isinstance(item, ast.Starred)),
                **{item.arg: None for item in node.keywords if item.arg},
            )
        except TypeError as exc:
            wrong.append(f"{ast.unparse(node)}: {exc}")
    return wrong


def member(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(name) from None


def test_a_wrong_call_is_found() -> None:
    code = """
    import tvm_energy
    from tvm_energy.clocks import locked_clocks, unlocked_clocks
    from tvm_energy import ansor
    tvm_energy.load_log("out")
    tvm_energy.load_log()
    locked_clocks(1200, voltage=3)
    tvm_energy.tune_relay("out")
    len(1, 2)
    """
    found = misuses(ast.parse(textwrap.dedent(code)))
    assert [text.split(":")[0] for text in found] == [
        "tvm_energy.clocks.unlocked_clocks",
        "tvm_energy.load_log()",
        "locked_clocks(1200, voltage=3)",
        "tvm_energy.tune_relay('out')",
    ]


@pytest.mark.tuning
def test_the_script_of_the_readme_runs(tmp_path: Path) -> None:
    (script,) = fenced((ROOT / "README.md").read_text(), "python")
    size = "32, num_trials_per_iter=16"
    assert script.count(size) == 2
    small = script.replace(size, "4, num_trials_per_iter=4")
    (tmp_path / "script.py").write_text(f"{small}\nassert schedule is not None\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("out", "out2"):
        assert {"database_workload.json", "database_tuning_record.json"} <= {
            path.name for path in (tmp_path / name).iterdir()
        }


# -- command lines ---------------------------------------------------------------------------------

COMMAND = typer.main.get_command(app)


def command_lines(text: str) -> Iterator[str]:
    """Every ``tvm-energy ...`` of the indented blocks, and of the inline code, that is more than a name."""
    for line in prose(text).splitlines():
        match = re.match(r" {4,}(?:\./|sudo )?(tvm-energy .*)", line)
        if match:
            yield re.split(r"\s+#", match[1])[0].strip()
    for code in inline_code(text):
        match = re.search(r"(?:^| )(tvm-energy .*)", code)
        if match:
            yield match[1]


def problem_with(line: str) -> str | None:
    """Why the command line interface would refuse this line, or None."""
    # `clocks show|restore` stands for two commands; `...` for more of the same.
    for words in alternatives(shlex.split(re.split(r" [|>&;]+ ", line)[0])[1:]):
        try:
            parse(COMMAND, "tvm-energy", words)
        except typer.Exit:  # as after --version
            continue
        except Exception as exc:
            return f"{type(exc).__name__}: {getattr(exc, 'message', exc)}"
    return None


def alternatives(words: list[str]) -> Iterator[list[str]]:
    words = [word for word in words if word != "..."]
    for index, word in enumerate(words):
        if "|" in word and not word.startswith("-"):
            for choice in word.split("|"):
                yield from alternatives([*words[:index], choice, *words[index + 1 :]])
            return
    yield words


def parse(command: Any, name: str, words: list[str], parent: Any = None) -> None:
    """As far as the command itself would begin to run; a group or command alone is only a name."""
    if parent is not None and not words:
        return
    context = command.make_context(name, list(words), parent=parent)
    if hasattr(command, "resolve_command"):
        protected = getattr(
            context, "_protected_args", None
        )  # without the underscore before click 8.2
        rest = [*(context.protected_args if protected is None else protected), *context.args]
        sub_name, sub, sub_words = command.resolve_command(context, rest)
        parse(sub, sub_name, sub_words, context)
    else:
        check_values(context.params)


def check_values(values: dict[str, Any]) -> None:
    """Specs must be those that the commands accept."""
    from tvm_energy.meta_schedule.workloads import parse_workload
    from tvm_energy.objective import parse_objective
    from tvm_energy.policy import parse_policy

    parsers = {
        "workload": parse_workload,
        "objective": lambda spec: parse_objective(spec, max_power_w=1.0),
        "policy": parse_policy,
        "policies": parse_policy,
    }
    for name, parser in parsers.items():
        given = values.get(name) or []
        for spec in [given] if isinstance(given, str) else given:
            if not spec.isupper():  # NAME and the like stand for something
                parser(spec)


@every_page
def test_command_lines_parse(page: Path) -> None:
    problems = {line: problem_with(line) for line in command_lines(page.read_text())}
    assert {line: problem for line, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    "line",
    [
        "tvm-energy tuna onnx:alexnet",
        "tvm-energy tune onnx:alexnet --trails 5",
        "tvm-energy tune onnx:alexnet --trials 0",
        "tvm-energy tune --workload matmull:m=3",
        "tvm-energy replay out --objective speed",
        "tvm-energy replay out --policy psychic",
        "tvm-energy log verify|state out",
        "tvm-energy report out more",
    ],
)
def test_a_wrong_command_line_is_found(line: str) -> None:
    assert problem_with(line)


def test_command_lines_are_found_in_blocks_and_in_prose() -> None:
    text = (
        "See `tvm-energy doctor` and\n\n    tvm-energy report out  # tables\n    ./scripts/test\n"
    )
    assert list(command_lines(text)) == ["tvm-energy report out", "tvm-energy doctor"]


def known_options() -> set[str]:
    found = set()

    def collect(command: Any) -> None:
        for parameter in command.params:
            found.update(parameter.opts)
        for sub in getattr(command, "commands", {}).values():
            collect(sub)
        found.update(["--help"])

    collect(COMMAND)
    for script in (ROOT / "scripts").iterdir():
        if script.is_file():
            found.update(re.findall(r"--[a-z][\w-]*", script.read_text()))
    return found


@every_page
def test_options_in_prose_exist(page: Path) -> None:
    known = known_options()
    for code in inline_code(page.read_text()):
        if code.startswith("--"):
            assert code.split()[0].split("=")[0] in known, code


def advice() -> Iterator[tuple[str, str]]:
    """Every command of ours that the package names in a message, a help text or a docstring."""
    for path in sorted((ROOT / "tvm_energy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for line in re.findall(
                    r"(?:^|[`:] ?|\b(?:or|with|run) )(tvm-energy [a-z]+(?: [a-z]+)?)", node.value
                ):
                    yield path.name, line


def test_commands_named_by_messages_exist() -> None:
    known = set(COMMAND.commands)
    found = list(advice())
    assert {"tvm-energy doctor", "tvm-energy clocks restore"} <= {line for _, line in found}
    for name, line in found:
        _, command, *sub = line.split()
        assert command in known, (name, line)
        subs = getattr(COMMAND.commands[command], "commands", None)
        assert not subs or not sub or sub[0] in subs, (name, line)
