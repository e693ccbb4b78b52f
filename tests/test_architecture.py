"""What may import what, what `import tvm_energy` may load, and that `__all__` tells the truth.

The layers are those of the design: an import points to the same layer or downwards, never upwards.
Every check is also run on a wrong example, because a check that cannot fail is worth nothing.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "tvm_energy"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

#: From the ground up. A new module or folder of the package must be given a place here.
LAYERS = {
    "ground": {"errors", "measurement", "spelling", "version"},
    "parts": {
        "ansor_log",
        "clock_choice",
        "clocks",
        "dvfs",
        "energy_model",
        "features",
        "json_lines",
        "manifest",
        "meters",
        "objective",
        "policy",
        "progress",
        "ranking",
        "record_schema",
        "records",
        "simulation",
        "stock_files",
        "work_dir",
    },
    "workflow": {
        "clock_search",
        "compare",
        "logs",
        "policy_replay",
        "protocol",
        "replay",
        "self_test",
        "session",
        "stretch",
        "tuning_run",
    },
    "adapters": {"ansor", "kernels", "meta_schedule"},
    "edges": {
        "",
        "__main__",
        "cli",
        "doctor",
        "report",
        "report_charts",
        "report_facts",
        "report_html",
        "report_markdown",
        "testing",
    },
}
HEIGHT = {name: height for height, names in enumerate(LAYERS.values()) for name in names}

#: Foreign package -> the only places that may import it, as module prefixes.
DOORS = {
    "tvm": ("meta_schedule", "ansor", "kernels"),
    "tvm_ffi": ("meta_schedule", "ansor", "kernels"),
    "onnx": ("meta_schedule",),
    "pandas": ("logs",),
    "pyarrow": ("logs.table",),
    "pynvml": ("meters.nvml",),
    "torch": ("meta_schedule.pt2",),
    "xgboost": ("energy_model",),
    "zeus": ("meters.zeus",),
    "matplotlib": ("dvfs.plot", "cli.dvfs_plan"),
}
HEAVY = (
    "tvm",
    "tvm_ffi",
    "pynvml",
    "xgboost",
    "scipy",
    "onnx",
    "torch",
    "zeus",
    "matplotlib",
    "pandas",
    "pyarrow",
)


@dataclass(frozen=True)
class Import:
    """One import statement: who, what, where, and whether it runs when the module is imported."""

    importer: str  # dotted, without the package: "meters.nvml"; "" is the package itself
    imported: str  # dotted, complete
    line: int
    at_import_time: bool


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Module name without the package -> file."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, source: str, is_package: bool = False) -> Iterator[Import]:
    """Every import in ``source``, those inside functions and for type checking included."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while pending:
        node, eager = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, eager)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node, is_package)
            # `from package import x`: x may be a module; the longest match is looked up later.
            for alias in node.names:
                yield Import(name, f"{base}.{alias.name}", node.lineno, eager)
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            pending.append((child, eager and not lazy and not guarded))


def _absolute(name: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = [PACKAGE, *filter(None, name.split("."))]
    cut = len(parts) - node.level + (1 if is_package else 0)
    return ".".join(parts[:cut] + ([node.module] if node.module else []))


def layer_problems(found: list[Import]) -> list[str]:
    """Imports that point upwards, and modules without a place."""
    problems = []
    for item in found:
        top, _, rest = item.imported.partition(".")
        if top != PACKAGE or item.importer == "":  # the package itself re-exports, lazily
            continue
        lower, upper = item.importer.split(".")[0], rest.split(".")[0]
        if upper not in HEIGHT:
            upper = ""  # `from tvm_energy import name`: the package itself
        if lower not in HEIGHT:
            problems.append(f"{item.importer}: has no layer; give {lower!r} a place in LAYERS")
        elif HEIGHT[upper] > HEIGHT[lower]:
            problems.append(f"{item.importer}:{item.line} imports {item.imported}, a higher layer")
    return problems


def door_problems(found: list[Import]) -> list[str]:
    """Foreign packages imported outside the places made for them."""
    return [
        f"{item.importer}:{item.line} imports {item.imported}; only {', '.join(doors)} may"
        for item in found
        for package, doors in DOORS.items()
        if item.imported.split(".")[0] == package
        and not any(f"{item.importer}.".startswith(f"{door}.") for door in doors)
    ]


def cycle(found: list[Import], names: set[str]) -> list[str]:
    """Modules that import each other in a ring when they are imported; empty if there is none."""
    graph: dict[str, set[str]] = {name: set() for name in names}
    for item in found:
        inner = item.imported.removeprefix(PACKAGE).lstrip(".")
        while inner and inner not in names:
            inner = inner.rpartition(".")[0]
        # A module of a package may be loaded by that package's __init__: no ring by itself.
        if item.at_import_time and inner and item.importer != inner:
            graph[item.importer].add(inner)
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            ring = visit(other, [*path, name])
            if ring:
                return ring
        done.add(name)
        return []

    return next((ring for name in sorted(names) if (ring := visit(name, []))), [])


def public_names(source: str) -> set[str]:
    """Functions and classes at the top of a module whose names do not start with an underscore."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, kinds) and not node.name.startswith("_")
    }


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return [
        item
        for name, path in modules().items()
        for item in imports_of(name, path.read_text(encoding="utf-8"), path.stem == "__init__")
    ]


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[0] for name in modules()} <= set(HEIGHT)


def test_imports_point_downwards_only(found: list[Import]) -> None:
    assert layer_problems(found) == []


def test_foreign_packages_stay_behind_their_doors(found: list[Import]) -> None:
    assert door_problems(found) == []


def test_no_modules_import_each_other(found: list[Import]) -> None:
    assert cycle(found, set(modules())) == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("records", "import tvm_energy.session"),
        ("records", "from tvm_energy.session import Session"),
        ("records", "from tvm_energy import session"),
        ("records", "from . import session"),
        ("meters.nvml", "from ..session import Session"),
        ("errors", "def f():\n    import tvm_energy.records"),
        ("session", "if TYPE_CHECKING:\n    from tvm_energy.meta_schedule import tuning"),
        ("meta_schedule.tuning", "from tvm_energy import report"),
        ("policy", "from tvm_energy import options"),
        ("nowhere", "import tvm_energy.errors"),
    ],
)
def test_the_layer_check_can_fail(importer: str, source: str) -> None:
    assert layer_problems(list(imports_of(importer, source)))


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("session", "import tvm"),
        ("session", "from tvm.s_tir import meta_schedule"),
        ("meters.base", "def f():\n    import pynvml"),
        ("meters.nvml_more", "import pynvml"),
        ("features", "import xgboost as xgb"),
    ],
)
def test_the_door_check_can_fail(importer: str, source: str) -> None:
    assert door_problems(list(imports_of(importer, source)))


def test_allowed_imports_pass() -> None:
    allowed = [
        *imports_of("meters.nvml", "import pynvml\nfrom tvm_energy.errors import MeterUnavailable"),
        *imports_of("meta_schedule.compat", "import tvm.s_tir\nfrom tvm_energy import session"),
        *imports_of("energy_model.xgb", "import xgboost\nfrom .base import EnergyModel"),
    ]
    assert layer_problems(allowed) == door_problems(allowed) == []


def test_the_cycle_check_can_fail() -> None:
    ring = [
        *imports_of("a", "from tvm_energy.b import x"),
        *imports_of("b", "import tvm_energy.c"),
        *imports_of("c", "from tvm_energy import a"),
    ]
    assert cycle(ring, {"a", "b", "c"}) == ["a", "b", "c", "a"]
    lazy = [*ring[:2], *imports_of("c", "def f():\n    from tvm_energy import a")]
    assert cycle(lazy, {"a", "b", "c"}) == []


# ---- what is loaded ---------------------------------------------------------------------------


def loaded_by(statement: str) -> tuple[set[str], float]:
    """Heavy packages loaded by a statement in a fresh interpreter, and the seconds it took."""
    code = (
        "import sys, time; start = time.perf_counter()\n"
        f"{statement}\n"
        "print(time.perf_counter() - start)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, names = done.stdout.splitlines()[-2:]
    return set(names.split()), float(seconds)


def test_importing_the_package_is_light() -> None:
    names, seconds = loaded_by("import tvm_energy")
    print(f"import tvm_energy: {seconds:.3f} s")
    assert names == set()


@pytest.mark.parametrize("name", sorted(LAYERS["ground"]))
def test_the_ground_layer_is_light(name: str) -> None:
    assert loaded_by(f"import tvm_energy.{name}")[0] == set()


def test_the_light_import_check_can_fail() -> None:
    assert loaded_by("import xgboost.core")[0] >= {"xgboost", "scipy"}


# ---- what is public ---------------------------------------------------------------------------


def listed() -> list[str]:
    """Modules that define ``__all__``; that of ``ansor`` is checked where there is an Ansor."""
    return [
        name
        for name, path in modules().items()
        if "\n__all__ = " in path.read_text("utf-8") and name != "ansor"
    ]


def test_the_package_lists_its_public_names() -> None:
    assert "" in listed()


@pytest.mark.parametrize("name", listed())
def test_all_lists_what_exists_and_nothing_public_is_left_out(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}".rstrip("."))
    names = module.__all__
    assert list(names) == sorted(set(names))
    missing = [item for item in names if not hasattr(module, item)]
    assert missing == []
    if module.__file__ and Path(module.__file__).name != "__init__.py":
        assert public_names(Path(module.__file__).read_text("utf-8")) <= set(names)


def test_the_public_name_check_can_fail() -> None:
    assert public_names("def f(): ...\nclass C: ...\ndef _g(): ...\nX = 1") == {"f", "C"}
