"""Reference pages of the documentation site, generated from the configuration dataclasses.

mkdocs loads this file as a hook (mkdocs.yml) and adds the pages while it builds, so that none is
stored. `python scripts/make_reference.py FOLDER` writes them to a folder.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from draftsmith import config as configuration  # noqa: E402
from draftsmith.commands.arguments import help_title  # noqa: E402
from draftsmith.commands.table import COMMANDS, load  # noqa: E402


def cell(text: str) -> str:
    """Text inside a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def optional(wanted: Any) -> Any:
    """The type of a field without `| None`."""
    arguments = [one for one in typing.get_args(wanted) if one is not type(None)]
    is_union = type(None) in typing.get_args(wanted)
    return arguments[0] if is_union else wanted


def type_name(wanted: Any) -> str:
    wanted = optional(wanted)
    if typing.get_origin(wanted) in (list, tuple):
        return f"list of {type_name(typing.get_args(wanted)[0])}"
    return {bool: "true/false", int: "integer", float: "number", str: "text"}.get(
        wanted, getattr(wanted, "__name__", str(wanted))
    )


def default_text(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return (
        ""
        if value is None or value == ""
        else str(value).lower()
        if value in (True, False) and isinstance(value, bool)
        else str(value)
    )


def help_text(field: dataclasses.Field) -> str:
    text = field.metadata.get("help", "")
    choices = field.metadata.get("choices")
    return f"{text} ({', '.join(choices)})" if choices else text


def row(key: str, field: dataclasses.Field, wanted: Any) -> tuple[str, str, str, str]:
    """(key, type, default, help) of an option."""
    return key, type_name(wanted), default_text(field), help_text(field)


def sections(cls: type, prefix: str = "") -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """Tables of (key, type, default, help) of a dataclass and of the dataclasses nested in it."""
    types = configuration.field_types(cls)
    rows, nested = [], []
    for field in dataclasses.fields(cls):
        wanted = optional(types[field.name])
        key = prefix + field.name
        if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
            nested += sections(wanted, key + ".")
        else:
            rows.append(row(key, field, wanted))
    return [(prefix.rstrip("."), rows), *nested]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(map(cell, row)) + " |" for row in rows),
        "",
    ]


def command_page() -> str:
    """Every command with its flags, as `--help` lists them."""
    lines = [
        "# Commands",
        "",
        "Each takes recipes too (also behind `--config`, under any name), and `key=value`.",
        "",
    ]
    lines += table(
        ("command", "", "extra"),
        [
            (f"[`draftsmith {name}`](#{name})", command.summary, command.extra or "")
            for name, command in COMMANDS.items()
        ],
    )
    for name, command in COMMANDS.items():
        cls = load(command.config)
        lines += [f"## {name}", "", command.summary[0].upper() + command.summary[1:] + ".", ""]
        lines += flag_tables(cls)
        if nested := [prefix for prefix, _ in sections(cls) if prefix]:
            names = ", ".join(
                f"[`{prefix}`](configuration.md#{name}-{anchor(prefix)})" for prefix in nested
            )
            lines += [f"Sections, set by a recipe or `key=value`: {names}.", ""]
    return "\n".join(lines)


def flag_tables(cls: type) -> list[str]:
    """Table of the flags under each heading of `--help`."""
    shown: dict[str, list[tuple[str, ...]]] = {"": []}
    for option in configuration.flag_options(cls):
        field = option.field
        flag = field.name.upper() if field.metadata.get("positional") else option.flag
        title = help_title(cls, field.name)
        shown.setdefault(title, []).append((f"`{flag}`", *row(flag, field, option.wanted)[1:]))
    lines = []
    for title, rows in shown.items():
        lines += [f"**{title}**", ""] if title else []
        lines += table(("flag", "type", "default", ""), rows)
    return lines


def anchor(prefix: str) -> str:
    return prefix.replace(".", "-").replace("_", "-")


def configuration_page() -> str:
    """Every section of every command's configuration; keys of recipes and overrides."""
    lines = [
        "# Configuration",
        "",
        "Keys of recipes (YAML) and of `key=value` overrides. Top-level keys are the flags of [commands](cli.md),",
        "with `_` for `-`; options of sections have no flags.",
        "",
    ]
    for name, command in COMMANDS.items():
        _, *nested = sections(load(command.config))
        if not nested:
            continue
        lines += [f"## {name}", ""]
        for prefix, rows in nested:
            lines += [f"### {prefix} {{ #{name}-{anchor(prefix)} }}", ""]
            lines += table(
                ("key", "type", "default", ""), [(f"`{key}`", *rest) for key, *rest in rows]
            )
    return "\n".join(lines)


def contributing_page() -> str:
    """CONTRIBUTING.md with links as seen from docs/."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


PAGES = {
    "reference/cli.md": command_page,
    "reference/configuration.md": configuration_page,
    "contributing.md": contributing_page,
}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs hook: add the generated pages."""
    from mkdocs.structure.files import File

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs hook: point links to the repository's CONTRIBUTING.md at the generated page."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./CONTRIBUTING\.md", r"](\1contributing.md", markdown)


def main(folder: str) -> None:
    for path, make in PAGES.items():
        target = Path(folder) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(make() + "\n", encoding="utf-8")
        print(target)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python scripts/make_reference.py FOLDER")
    main(sys.argv[1])
