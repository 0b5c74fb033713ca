"""Commands, paths and links in the documents exist: flags parse, values are of the right kind."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
]
# Pages that somebody reads to run a pair; the statistics of the gate have a page of their own.
OPERATORS = [page for page in PAGES if page.startswith("docs/guides/")] + [
    "README.md",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/concepts.md",
]
GENERATED = ("reference/cli.md", "reference/configuration.md")
CODE = re.compile(r"^```(\w*)\n(.*?)^```|((?:^    .*\n)+)", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LAUNCHER = re.compile(r"^.*(?:-m|--module) draftsmith\.cli ")
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.-])(?:scripts|tests|docs|recipes|src)/[\w./*-]*\w")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """The lines of code blocks that call draftsmith, continued lines joined; pictures
    are `text`."""
    lines = [
        line.strip()
        for found in CODE.finditer(text)
        if found[1] != "text"
        for line in re.sub(r"\\\n\s*", "", found[2] or found[3]).splitlines()
    ]
    lines = [LAUNCHER.sub("draftsmith ", line) for line in lines]
    lines = [re.sub(r"^([^'#]*)'", r"\1", line) if line.count("'") == 1 else line for line in lines]
    return [line for line in lines if re.match(r"draftsmith [a-z]", line)]


def check(command: str) -> None:
    name, *argv = shlex.split(command, comments=True)[1:]
    config = load(COMMANDS[name].config)
    if argv == ["--help"]:
        return
    # A recipe is read from the repository's root, where documents are read.
    argv = [str(ROOT / word) if word.endswith(".yaml") else word for word in argv]
    configuration.build(config, collect(config, parse(parser_for(name, config), argv)))


def mentioned_flags(text: str) -> list[tuple[str, str]]:
    """(command, flag) of each inline code span such as `serve --redact module:function`."""
    found = []
    for span in SPAN.findall(FENCE.sub("", text)):
        name, *words = span.removeprefix("draftsmith ").split()
        if span.startswith("draftsmith ") and name.isidentifier() and name.islower():
            found.append((name, "--help"))
        if name in COMMANDS:
            flags = (word for word in words if word.startswith("--"))
            found += [(name, re.split(r"[=`,;]", flag)[0]) for flag in flags]
    return found


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_reference", ROOT / "scripts/make_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_made_with_the_standard_library_and_yaml(tmp_path: Path) -> None:
    """The environment of the site has nothing else of what the project requires."""
    code = f"""
import runpy, sys
class Missing:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] not in {{*sys.stdlib_module_names, "draftsmith", "yaml", "_yaml"}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.argv = ["make_reference", {str(tmp_path)!r}]
runpy.run_path({str(ROOT / "scripts/make_reference.py")!r}, run_name="__main__")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert "## observe" in (tmp_path / "reference" / "cli.md").read_text()


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """All nested option keys, such as `optim.lr`."""
    make = reference()
    return {
        row[0]
        for command in COMMANDS.values()
        for prefix, rows in make.sections(load(command.config))
        if prefix
        for row in rows
    }


def unknown_keys(text: str, keys: set[str]) -> list[str]:
    """Inline code spans that begin with a section of the configuration and name no key of it."""
    top = {key.split(".")[0] for key in keys}
    known = keys | {".".join(key.split(".")[:n]) for key in keys for n in (1, 2)}
    spans = (re.match(r"([a-z_0-9]+)\.[a-z_0-9.]+(?==|$)", span) for span in SPAN.findall(text))
    return [
        found[0]
        for found in spans
        if found
        and found[1] in top
        and found[0] not in known
        and not found[0].endswith((".py", ".json", ".md", ".yaml", ".gguf"))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_documents_are_understood(page: str) -> None:
    for command in commands(read(page)):
        try:
            check(command)
        except (UserError, KeyError, ValueError) as error:
            raise AssertionError(f"{page}: {command}: {error}") from error


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_running_text_exist(page: str, keys: set[str]) -> None:
    wrong = [
        (name, flag)
        for name, flag in mentioned_flags(read(page))
        if name not in COMMANDS
        or flag not in parser_for(name, load(COMMANDS[name].config))._option_string_actions
    ]
    assert not wrong
    assert not unknown_keys(read(page), keys)


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_links_in_documents_exist(page: str) -> None:
    text = read(page)
    missing = [path for path in PATH.findall(text) if not list(ROOT.glob(path + "*"))]
    # What a GPU benchmark writes where there is a GPU.
    assert not [path for path in missing if not path.endswith("-gpu.json")]
    folder = (ROOT / page).parent
    links = [link.split("#")[0] for link in LINK.findall(text) if "://" not in link]
    wrong = [link for link in links if link and not (folder / link).exists()]
    assert not [link for link in wrong if not link.endswith(("cli.md", "configuration.md"))]


def test_every_guide_has_commands() -> None:
    guides = [page for page in PAGES if page.startswith("docs/guides/")]
    assert len(guides) >= 6
    assert all(commands(read(page)) for page in ["README.md", "docs/quickstart.md", *guides])


def test_documents_stay_short() -> None:
    assert len(read("README.md").splitlines()) <= 120
    assert len(read("docs/architecture.md").split()) <= 600
    for page in (ROOT / "docs" / "architecture").glob("*.md"):
        assert len(page.read_text().split()) <= 600, page.name


@pytest.mark.parametrize("folder", ["kernels", "drafters", "train", "serve", "distill", "fleet"])
def test_the_page_of_a_folder_lists_its_chapters(folder: str) -> None:
    page = read(f"docs/architecture/{folder}.md")
    chapters = {f"{path.parent.name}/" for path in (ROOT / folder).glob("*/*.py")}
    rows = re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \|", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+/)`", " ".join(rows))) == chapters


def test_operators_meet_no_statistics_of_the_gate() -> None:
    for page in OPERATORS:
        assert not re.search(r"tanh|martingale|\bbets?\b|\bstake|Shiryaev|Ville", read(page)), page


def test_the_site_shows_every_page() -> None:
    def leaves(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [leaf for child in children for leaf in leaves(child)]  # type: ignore[attr-defined]

    nav = yaml.safe_load(read("mkdocs.yml"))["nav"]
    assert len(nav) <= 7
    shown = leaves(nav)
    stored = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(shown) == sorted([*stored, *GENERATED, "contributing.md"])


def undocumented(flags: Iterable[str], text: str) -> list[str]:
    """Flags that the text names neither as such nor as an option of a recipe."""
    missing = []
    for flag in sorted(set(flags)):
        name = re.escape(flag.removeprefix("--"))
        key = name.replace("\\-", "_")
        if not re.search(rf"--(no-)?{name}\b|\b{key}\s*[=:]|`{key}`", text):
            missing.append(flag)
    return missing


def test_every_flag_is_in_a_page_that_somebody_wrote() -> None:
    files = [ROOT / page for page in PAGES] + sorted((ROOT / "recipes").rglob("*.yaml"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    lines = (ROOT / "tests/unit/cli/flags.txt").read_text().splitlines()
    flags = {line.split()[1] for line in lines if " --" in line}
    written = {flag for flag in flags if flag.replace("--no-", "--") not in flags - {flag}}
    assert len(written) > 100
    assert undocumented(written, text) == []
    assert undocumented(["--never-written", "--k"], "`--k 3`") == ["--never-written"]


def test_the_reference_has_every_flag_and_key(keys: set[str]) -> None:
    pages = reference().PAGES
    listed = (ROOT / "tests/unit/cli/flags.txt").read_text()
    flags = {
        flag for flag in re.findall(r"--[a-z0-9-]+", listed) if not flag.startswith("--no-")
    } - {"--help"}
    shown = set(re.findall(r"`(--[a-z0-9-]+)`", pages["reference/cli.md"]()))
    assert flags <= shown and len(flags) > 100
    assert keys == set(re.findall(r"^\| `([\w.]+)`", pages["reference/configuration.md"](), re.M))
