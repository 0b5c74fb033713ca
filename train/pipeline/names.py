"""`${name}` in the options of a stage: the value of a setting, or the path of an earlier stage's
result. `$$` is a dollar sign."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Template
from typing import Any

from draftsmith.config import unknown_key
from draftsmith.errors import UserError


def substitute(value: Any, names: Mapping[str, Any]) -> Any:
    """`value` with names replaced, in nested mappings and lists too. Text that is one name alone
    becomes its value, a number or list included.

    Raises:
        UserError: a name is unknown, or has no value.
    """
    if isinstance(value, dict):
        return {key: substitute(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [substitute(item, names) for item in value]
    if not isinstance(value, str):
        return value
    found = list(names_in(value))
    for name in found:
        if name not in names:
            problem = unknown_key(name, list(names)).replace("option", "name")
            raise UserError(f"{value!r} has an {problem}")
        if names[name] is None:
            raise UserError(f"setting {name!r} has no value; give --set {name}=VALUE")
    if len(found) == 1 and value in (f"${{{found[0]}}}", f"${found[0]}"):
        return names[found[0]]
    return Template(value).substitute(names)


def names_in(value: Any) -> Iterator[str]:
    """Names that `value` holds, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from names_in(item)
    if not isinstance(value, str):
        return
    for match in Template.pattern.finditer(value):
        if match["invalid"] is not None:
            raise UserError(f"{value!r} has a $ without a name; write $$ for a dollar sign")
        if name := match["named"] or match["braced"]:
            yield name
