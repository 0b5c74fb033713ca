"""draftsmith: train drafters for any Hugging Face causal LM, serve the pair losslessly, learn from
every served token."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from draftsmith.version import __version__

_LINKS = ("distill", "drafters", "fleet", "kernels", "serve", "train")
_SENTENCE = (
    "{path} is a text file in place of a symbolic link, so this checkout has no code; install a "
    "wheel (pip wheel from another "
    "checkout), or clone again with `git clone -c core.symlinks=true` where symbolic links are "
    "allowed"
)


def _check_links(package: Path) -> None:
    """Ends a command with one sentence, and an import with an ImportError of it, where a link of
    `package` to a code folder is a text file, as git writes them on a file system without links."""
    broken = next((package / name for name in _LINKS if (package / name).is_file()), None)
    if broken is None:
        return
    sentence = _SENTENCE.format(path=broken)
    # The command's own module is imported after this package and could not print it.
    if Path(sys.argv[0] if sys.argv else "").stem in ("draftsmith", "-m"):
        raise SystemExit(f"draftsmith: error: {sentence}")
    raise ImportError(sentence)


_check_links(Path(__file__).parent)


class _Function(ModuleType):
    """A folder of code that is called as the command of its name: `draftsmith.train(...)`."""

    def __call__(self, *given: Any, **options: Any) -> Any:
        """As the function of the same name in `draftsmith.commands.python`."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module("draftsmith.commands.python"), name)(*given, **options)


# The import of a folder would take the place of a function of that name.
for _name in ("distill", "train"):
    import_module(f"draftsmith.{_name}").__class__ = _Function

if TYPE_CHECKING:
    from draftsmith.commands.python import distill, train
    from draftsmith.serve.api import Engine
    from draftsmith.serve.sampling.params import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__", "distill", "train"]

_HOMES = {"Engine": "draftsmith.serve.api", "SamplingParams": "draftsmith.serve.sampling.params"}


def __getattr__(name: str) -> Any:
    """Load a name on first use: the command line must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    if name == "Engine":
        # Joined here to the buffer, which `serve` may not import.
        found.make_sink = import_module("draftsmith.commands.serve").make_sink
    return found
