"""The rules of docs/architecture.md that a reader relies on: layers, packaging,
torch-free start."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from draftsmith.commands.table import COMMANDS
from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[2]
BELOW = {
    "kernels": set(),
    "drafters": {"kernels"},
    "train": {"kernels", "drafters"},
    "serve": {"kernels", "drafters"},
    "distill": {"kernels", "drafters", "train"},
    "fleet": {"kernels", "drafters", "train", "distill"},
}
CODE_FOLDERS = tuple(BELOW)
# The chapters of each folder; a chapter imports only those before it.
ORDER = {
    "kernels": "attention products sampling divergence verify",
    "drafters": "layouts quirks target unrolled autoregressive compiled lm blocks trees heads states "
    "text",
    "train": "data objective evaluate check export",
    "serve": "sampling control requests audit cache engine metrics tools http bench",
    "distill": "buffer learn gate monitor generate",
    "fleet": "recording store swaps vllm observe",
}
# The command line imports everything and is imported by nothing: the table, and the commands that
# join folders. So do the names that the package itself gives, which are loaded when they are used.
ABOVE = ("__init__", "cli", "commands")
BASE = ROOT / "src" / "draftsmith"
COMMAND_LINE = BASE / "commands"
PROMPTS = BASE / "prompts"
TESTS = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
BASE_FILES = sorted(one for folder in (BASE, COMMAND_LINE, PROMPTS) for one in folder.glob("*.py"))
TORCH_FREE = (
    "kernels/constants.py",
    "drafters/options.py",
    "serve/requests/request.py",
    "serve/engine/scheduler.py",
    "serve/control/auto.py",
    *(
        str(path.relative_to(ROOT))
        for folder in CODE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*config.py"))
    ),
    *(str(path.relative_to(BASE)) for path in BASE_FILES),
)
# What may ask which kind of device it has.
PLACEMENT = {"kernels/dispatch.py", "drafters/target/device.py", "drafters/target/sharded.py"}
# Of README.md and docs/, the generated reference apart.
WORDS = 25_000
HEAVY = (
    "torch", "transformers", "datasets", "deepspeed", "peft", "triton", "pyarrow", "fastapi",
    "matplotlib",
)  # fmt: skip


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported_modules(source: str) -> list[str]:
    """Every module that the source names in an import statement, inside functions too."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def upward_imports(folder: str, source: str) -> list[str]:
    """Imports of a draftsmith code folder that `folder` may not know, and of the command line above
    it."""
    above = {*ABOVE, *BELOW} - BELOW[folder] - {folder}
    split = [(name, name.split(".")) for name in imported_modules(source)]
    return [name for name, parts in split if parts[0] == "draftsmith" and above & {*parts[1:2]}]


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_imports_run_downward(folder: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in sources(folder)
        if (found := upward_imports(folder, path.read_text()))
    }
    assert not wrong


def test_base_modules_import_no_code_folder() -> None:
    for path in BASE_FILES:
        if path.parent == COMMAND_LINE or (path.parent == BASE and path.stem in ABOVE):
            continue
        names = [one for one in imported_modules(path.read_text()) if one.startswith("draftsmith.")]
        assert not [name for name in names if name.split(".")[1] in (*BELOW, *ABOVE)], path.name


@pytest.mark.long
def test_no_bare_imports_of_our_folders() -> None:
    paths = [
        path
        for folder in (*CODE_FOLDERS, "tests", "scripts", "src/draftsmith")
        for path in sources(folder)
    ]
    assert len(paths) > 10
    names = {(name, path) for path in paths for name in imported_modules(path.read_text())}
    assert not {(name, path) for name, path in names if name.split(".")[0] in BELOW}


def test_code_folders_are_namespace_folders_behind_relative_links() -> None:
    for folder in CODE_FOLDERS:
        # As a package of its own it would hide the library of that name, or be found in its place.
        assert not (ROOT / folder / "__init__.py").exists()
        link = ROOT / "src" / "draftsmith" / folder
        assert link.is_symlink() and os.readlink(link) == f"../../{folder}"


def unit(parts: tuple[str, ...]) -> str:
    """The chapter of a module of a code folder, or the module itself where it stands in no chapter."""
    return parts[1] if len(parts) > 2 else parts[-1]


def modules(*folders: str) -> dict[tuple[str, ...], Path]:
    paths = [path for folder in folders for path in sources(folder) if path.stem != "__init__"]
    return {path.relative_to(ROOT).with_suffix("").parts: path for path in paths}


def imports_of(path: Path, known: Mapping[tuple[str, ...], Path]) -> set[tuple[str, ...]]:
    """The modules in `known` that a file imports, for type checking too."""
    names = [tuple(name.split(".")[1:]) for name in imported_modules(path.read_text())]
    return {name for name in names if name in known}


def circles(arrows: Mapping[Any, Collection[Any]]) -> list[Any]:
    """Nodes that reach themselves."""
    reached = {node: set(direct) for node, direct in arrows.items()}
    for middle in reached:
        for node in reached:
            if middle in reached[node]:
                reached[node] |= reached[middle]
    return sorted(node for node in reached if node in reached[node])


@pytest.mark.long
def test_no_file_imports_itself_in_a_circle() -> None:
    known = modules(*CODE_FOLDERS)
    assert len(known) > 250
    assert not circles({name: imports_of(path, known) for name, path in known.items()})


def chapter_arrows(folder: str) -> dict[str, set[str]]:
    known = modules(folder)
    arrows: dict[str, set[str]] = {unit(name): set() for name in known}
    for name, path in known.items():
        arrows[unit(name)] |= {unit(other) for other in imports_of(path, known)} - {unit(name)}
    return arrows


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_chapters_import_only_chapters_before_them(folder: str) -> None:
    arrows, order = chapter_arrows(folder), ORDER[folder].split()
    assert {name for name in arrows if (ROOT / folder / name).is_dir()} == set(order)
    upward = {
        (name, other)
        for name in order
        for other in arrows[name] & set(order)
        if order.index(other) > order.index(name)
    }
    assert not upward and not circles(arrows)


def chapters() -> list[Path]:
    paths = [path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*")]
    inner = [path for path in paths if path.is_dir() and path.name != "__pycache__"]
    return [COMMAND_LINE, PROMPTS, *inner]


def test_chapters_hold_3_to_14_files() -> None:
    folders = [BASE, *chapters(), *(ROOT / folder for folder in CODE_FOLDERS)]
    sizes = {
        path: len([one for one in path.glob("*.py") if one.stem != "__init__"]) for path in folders
    }
    assert len(sizes) > 40
    wrong = {str(path): size for path, size in sizes.items() if not 3 <= size <= 14}
    assert not wrong


def test_every_chapter_has_its_tests_in_the_folder_of_its_name() -> None:
    missing = [
        str(folder.relative_to(ROOT))
        for folder in chapters()
        if folder not in (COMMAND_LINE, PROMPTS)
        and not list((ROOT / "tests" / "unit" / folder.relative_to(ROOT)).glob("test_*.py"))
    ]
    assert missing == []
    # Tests of the command line have a folder of their own, and those of scripts another.
    folders = {path.parent.relative_to(ROOT / "tests" / "unit") for path in TESTS}
    known = {path.relative_to(ROOT) for path in chapters() if path != COMMAND_LINE}
    known |= {Path(one) for one in (".", *CODE_FOLDERS, "cli", "prompts", "scripts")}
    assert folders <= known


def test_a_chapters_docstring_lists_its_files_and_nothing_else_is_in_it() -> None:
    for chapter in chapters():
        tree = ast.parse((chapter / "__init__.py").read_text())
        assert len(tree.body) == 1, f"{chapter}/__init__.py holds more than a docstring"
        listed = re.findall(r"^- `(\w+)`: ", ast.get_docstring(tree) or "", re.MULTILINE)
        files = {path.stem for path in chapter.glob("*.py")} - {"__init__"}
        assert len(listed) == len(set(listed)) and set(listed) == files, chapter


def python(code: str, cwd: Path = ROOT) -> str:
    """Output of `python -c code` run in the repository root, where a folder could
    shadow a package."""
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_our_kernels_folder_does_not_pose_as_the_kernels_package() -> None:
    code = """
import importlib.util
from transformers.utils.import_utils import is_kernels_available
spec = importlib.util.find_spec("kernels")
print(spec is None or spec.origin is None or "site-packages" in spec.origin)
from importlib.metadata import packages_distributions
print(bool(is_kernels_available()) <= ("kernels" in packages_distributions()))
"""
    assert python(code).split() == ["True", "True"]


def test_torch_free_modules_load_nothing_heavy() -> None:
    modules = [
        "draftsmith." + path.removesuffix(".py").replace("/", ".")
        for path in TORCH_FREE
        if "__init__" not in path
    ]
    assert len(modules) >= 8
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    for name in {HEAVY!r}:
        if name in sys.modules:
            sys.exit(f"{{module}} imports {{name}}")
"""
    python(code)


@pytest.mark.long
def test_only_what_a_gpu_runs_needs_triton() -> None:
    """Triton is required on Linux alone."""
    names = [".".join(("draftsmith", *parts)) for parts in modules(*CODE_FOLDERS)]
    on_gpus = {one for one in names if one.endswith(("_triton", ".device_rewrite"))}
    code = f"""
import importlib, sys
sys.modules["triton"] = None
for name in {sorted(set(names) - on_gpus)!r}:
    importlib.import_module(name)
"""
    python(code)


def test_help_of_every_command_answers_at_once_without_torch() -> None:
    seconds = {}
    for arguments in ([], *([name] for name in COMMANDS)):
        code = f"""
import sys
from draftsmith.cli import main
try:
    status = main({[*arguments, "--help"]!r})
except SystemExit as stop:
    status = stop.code
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imports {{heavy}}" if heavy else status)
"""
        begun_s = time.monotonic()
        assert "usage: draftsmith" in python(code)
        seconds[" ".join(arguments)] = time.monotonic() - begun_s
    # One command takes about 0.15 s; the median tells a heavy import from a machine that was busy
    # for a moment.
    assert sorted(seconds.values())[len(seconds) // 2] < 1.0, seconds


def cuts_texts(source: str) -> list[int]:
    """Lines of calls that end a line at U+2028, U+0085 and a form feed too, as no file and no
    protocol does."""
    names = ("splitlines", "iter_lines", "aiter_lines")
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in names]


def test_no_line_ends_within_a_text() -> None:
    assert cuts_texts("a = 1\nlines = text.splitlines()") == [2]
    paths = [*BASE_FILES, *(path for folder in CODE_FOLDERS for path in sources(folder))]
    assert not {str(path): found for path in paths if (found := cuts_texts(path.read_text()))}


def test_console_script_is_quiet_when_its_reader_leaves() -> None:
    script = Path(sys.executable).with_name("draftsmith")
    finished = subprocess.run(
        ["bash", "-c", f"'{script}' serve --help | head -n 0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.stderr == ""


def test_no_tracked_file_names_a_machine_path() -> None:
    finished = subprocess.run(
        ["git", "grep", "-nIF", f"{ROOT.parent}/"], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.stdout == ""


def test_every_direct_dependency_is_pinned() -> None:
    # tomllib is younger than Python 3.10; quoted requirements are all that is wanted of the file.
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    named = {
        match[1].lower()
        for line in lines
        if (match := re.match(r'^    "([A-Za-z0-9-]+)[<>=]', line))
    }
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line[:40]
    }
    assert {"torch", "transformers", "pytest"} <= named
    assert named <= pinned


def test_the_wheel_holds_every_source_that_is_compiled_where_it_runs() -> None:
    # A kernel without its source falls back on torch without a word.
    section = (ROOT / "pyproject.toml").read_text().split("[tool.setuptools.package-data]")[1]
    patterns = {
        match[1].replace(".", "/"): re.findall(r'"([^"]+)"', match[2])
        for match in re.finditer(r'^"draftsmith\.([a-z.]+)" = \[(.*)\]$', section, re.M)
    }
    sources = [path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".cpp", ".h")]
    assert len(sources) > 5
    left_out = [
        path
        for path in sources
        if not any(
            path.match(pattern) for pattern in patterns.get(str(path.parent.relative_to(ROOT)), ())
        )
    ]
    assert not left_out


@pytest.mark.parametrize("script", ["scripts/test", "scripts/quickstart"])
def test_scripts_explain_themselves_without_an_environment(script: str) -> None:
    finished = subprocess.run([ROOT / script, "--help"], capture_output=True, text=True, timeout=30)
    assert finished.returncode == 0 and script in finished.stdout


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in itertools.chain.from_iterable(map(sources, (*CODE_FOLDERS, "src/draftsmith"))):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def lines_of(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def test_the_package_keeps_its_budgets() -> None:
    paths = [path for folder in (*CODE_FOLDERS, "src/draftsmith") for path in sources(folder)]
    assert len(paths) <= 420
    # Both are to become 60,000; until then neither grows.
    assert lines_of(paths) <= 70_900
    assert lines_of(sources("tests")) <= 63_450
    switches = {
        str(path.relative_to(ROOT))
        for path in paths
        if re.search(r"\bdevice\.type\b|\.is_cuda\b", path.read_text(encoding="utf-8"))
    }
    assert switches <= PLACEMENT


def test_laboratory_documents_and_changelog_keep_their_budgets() -> None:
    # Shell too; what ships as a model is data.
    scripts = (path for path in (ROOT / "scripts").rglob("*") if path.suffix in ("", ".py", ".sh"))
    lines = lines_of(path for path in scripts if path.is_file())
    words = sum(
        len(path.read_text().split()) for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    )
    assert lines <= 6_000
    assert words <= WORDS
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 40


def test_the_files_that_are_handed_out_first_are_there() -> None:
    assert len(set(LONGEST)) == len(LONGEST)
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_continuous_integration_runs_the_same_command() -> None:
    finished = subprocess.run(
        [ROOT / ".ci" / "run", "--help"], capture_output=True, text=True, timeout=30
    )
    assert finished.returncode == 0 and "scripts/test --all" in finished.stdout
