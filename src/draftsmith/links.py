"""Check of the links to the code folders: git writes small text files in their place on a file
system without symbolic links."""

from __future__ import annotations

import sys
from pathlib import Path

LINKS = ("distill", "drafters", "fleet", "kernels", "serve", "train")
SENTENCE = (
    "{path} is a text file in place of a symbolic link, so this checkout has no code; install a "
    "wheel (pip wheel from another "
    "checkout), or clone again with `git clone -c core.symlinks=true` where symbolic links are "
    "allowed"
)


def check_links(package: Path) -> None:
    """Ends a command with one sentence, and an import with an ImportError of it, where a link of
    `package` is a text file."""
    broken = next((package / name for name in LINKS if (package / name).is_file()), None)
    if broken is None:
        return
    sentence = SENTENCE.format(path=broken)
    # The command's own module is imported after this package and could not print it.
    if Path(sys.argv[0] if sys.argv else "").stem in ("draftsmith", "-m"):
        raise SystemExit(f"draftsmith: error: {sentence}")
    raise ImportError(sentence)
