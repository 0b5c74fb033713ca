"""Chat templates as packages ship them, and conversations as files hold them: what is trained is what
is served, or the row is refused by a sentence that is true."""

from __future__ import annotations

import collections
import os
from pathlib import Path

import pytest

from tests.chat_templates import (
    CONVERSATIONS,
    Template,
    eos_ids,
    faults,
    is_true,
    templates,
    tokenizer_of,
    trained,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def published() -> list[Template]:
    """Templates of llama.cpp, TRL and axolotl."""
    clients = Path(os.environ.get("DRAFTSMITH_CLIENTS", ".venv-clients"))
    folders = [clients / "templates", clients / "trl" / "lib", clients / "axolotl" / "lib"]
    if missing := [folder for folder in folders if not list(folder.rglob("*.jinja"))]:
        pytest.skip(f"no templates below {missing}; scripts/test --all installs them")
    return templates(*folders)


def test_what_is_trained_on_published_templates_is_what_is_served(
    published: list[Template], tmp_path: Path
) -> None:
    assert len(published) > 150
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for template in published:
        tokenizer = tokenizer_of(template.source)
        ends = eos_ids(template.source, tokenizer)
        for name, case in CONVERSATIONS.items():
            found = trained(case[0], tokenizer, ends, tmp_path)
            if isinstance(found, str):
                counts["refused"] += 1
                if not is_true(found, case, tokenizer, template.source):
                    wrong.append(f"{template.name}, {name}: refused: {found}")
            elif isinstance(found, Exception):
                wrong.append(f"{template.name}, {name}: {found!r}")
            else:
                counts["trained"] += 1
                wrong += [
                    f"{template.name}, {name}: {fault}"
                    for fault in faults(found, case, tokenizer, template.source)
                ]
    assert wrong == []
    # Most refusals are of calls, and of roles that do not alternate.
    assert counts["refused"] < counts["trained"] / 5, counts
