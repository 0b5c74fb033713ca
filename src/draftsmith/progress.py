"""Progress of long work with an ETA: tqdm's bar, in a notebook too, and a line now and then where
there is neither that nor a terminal. Torch-free."""

from __future__ import annotations

import os
import sys

from tqdm.auto import tqdm

LINE = "{desc}: {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"


def duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Lines:
    """Stream of a log, in which each state of a bar is a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)


class Progress:
    """`Progress("generate", 200, unit="answers")`; `update(done, note="812 tok/s")`; `close()`.
    The ETA is measured from the work done since construction, so a resumed job gives `start`."""

    def __init__(
        self, label: str, total: int, *, unit: str, start: int = 0, shows: bool = True
    ) -> None:
        self.total = total
        draws = "ipykernel" in sys.modules or (
            # Terminals of some runners say that they have no columns.
            sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
        )
        lines = {"file": Lines(), "bar_format": LINE, "mininterval": 10.0, "position": 0}
        self._bar = tqdm(
            desc=label, total=total, unit=f" {unit}", initial=start, disable=not (shows and total),
            smoothing=0, miniters=1, dynamic_ncols=True,
            **({} if draws else lines),
        )  # fmt: skip

    def update(self, done: int, note: str = "") -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self, note: str = "") -> None:
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.close()
