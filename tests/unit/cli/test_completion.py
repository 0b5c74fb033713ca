"""`draftsmith completion`: what a shell offers."""

from __future__ import annotations

import subprocess

import pytest

from draftsmith.cli import main
from draftsmith.commands.table import COMMANDS


@pytest.fixture(scope="module")
def script() -> str:
    from draftsmith.commands.completion import script_for

    return script_for("bash")


def offered(script: str, *words: str) -> set[str]:
    """What bash offers behind `words`, of which the last has been begun."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"""{script}
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
_shtab_draftsmith draftsmith '{words[-1]}' '{words[-2]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_offers_commands_flags_and_values(script: str, tmp_path: object) -> None:
    assert offered(script, "draftsmith", "") == COMMANDS.keys()
    assert offered(script, "draftsmith", "se") == {"serve"}
    assert offered(script, "draftsmith", "serve", "--least") == {"--least-confidence"}
    assert offered(script, "draftsmith", "serve", "--compile", "") == {"auto", "off"}
    assert "eagle3" in offered(script, "draftsmith", "train", "")
    assert "README.md" in offered(script, "draftsmith", "run", "READ")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_script_names_all_and_is_understood(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*COMMANDS, "--least-confidence", "--config"))
    if shell == "bash":
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
