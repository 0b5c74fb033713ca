"""Commands of draftsmith that the quickstart starts, one after the other or at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.paths import ROOT

RUN = ROOT / "runs" / "quickstart"
COMMAND = [sys.executable, "-m", "draftsmith.cli"]


Words = Sequence[str | Path]


def show(words: Words) -> None:
    shown = [str(word).replace(str(ROOT) + "/", "") for word in words]
    print("  $ draftsmith " + " ".join(shown), flush=True)


def draftsmith(*arguments: str | Path) -> None:
    show(arguments)
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, cwd=ROOT)


def together(name: str, *commands: Words) -> None:
    """All commands at once, a core each; the first shows its progress, the others write into logs
    named after `name`. Raises `CalledProcessError` once all have ended and one has failed."""
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        children = []
        for place, words in enumerate(commands):
            show(words)
            log = stack.enter_context(open(RUN / f"{name}-{place}.log", "wb")) if place else None
            child = subprocess.Popen(
                [*COMMAND, *map(str, words)], cwd=ROOT, env=one_core, stdout=log, stderr=log
            )
            children.append(stack.enter_context(child))
        codes = [child.wait() for child in children]
    for place, (child, code) in enumerate(zip(children, codes)):
        if code != 0:
            log_path = RUN / f"{name}-{place}.log"
            said = log_path.read_text(encoding="utf-8", errors="replace") if place else ""
            print(said[-2000:], flush=True)
            raise subprocess.CalledProcessError(code, child.args)
