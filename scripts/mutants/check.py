"""Are wrong edits noticed? Applies each edit of tests/mutants to a copy of the tree and runs the
tests that must fail of it.

    scripts/test --mutants           # all of them
    scripts/test --mutants K1 S3     # some, by id

First every named test must pass without an edit. Then a mutant is `killed` when one of its tests
fails by what it asserts, `survived` when all pass, `crashed` when the edited code raises and no
test asserts anything false (a TypeError is no wrong token), and `invalid` when the tests say
nothing: the edit does not apply, a test cannot be imported or set up, or has no end and the entry
does not say `hang: true`. The exit status is 0 only when all are killed. On a CPU, Triton
interpreted.
"""

from __future__ import annotations

import compileall
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

from scripts.mutants.entries import Mutant, load, outdated
from scripts.mutants.runs import (
    CODE_FOLDERS,
    PRELOADED,
    Job,
    Outcome,
    copy_tree,
    preload,
    run_all,
    twin,
)
from scripts.paths import ROOT

CONTROL_LIMIT_S = 600.0
# A mutant's tests may take so much longer than they took without the edit: machines are shared, and
# failures print.
LEAST_LIMIT_S, SLOWER = 30.0, 5.0
# Seconds of starting a run, beyond those that pytest counts.
START_S = 5.0


@dataclass
class Verdict:
    mutant: Mutant
    result: str  # "killed", "survived", "crashed" or "invalid"
    why: str
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    if any(argument.startswith("-") for argument in arguments):
        print(__doc__)
        return 0 if set(arguments) <= {"-h", "--help"} else 2
    return check(ROOT, arguments)


def check(
    root: Path, names: Sequence[str] = (), *, workers: int | None = None,
    preloaded: tuple[str, ...] = PRELOADED,
    least_limit_s: float = LEAST_LIMIT_S,
) -> int:  # fmt: skip
    """0 when every mutant of `root` (only those in `names`, where given) is killed, 1 when not, 2
    for a name that is none's."""
    mutants = load(root)
    if unknown := sorted(set(names) - {mutant.id for mutant in mutants}):
        print(
            f"there is no mutant {', '.join(unknown)}; there are "
            f"{' '.join(mutant.id for mutant in mutants)}"
        )
        return 2
    chosen = [mutant for mutant in mutants if not names or mutant.id in names]
    verdicts = [
        Verdict(mutant, "invalid", why) for mutant in chosen if (why := outdated(mutant, root))
    ]
    sound = [
        mutant for mutant in chosen if all(mutant is not verdict.mutant for verdict in verdicts)
    ]
    preload(preloaded)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        num_trees = max(1, min(workers or os.cpu_count() or 1, len(sound)))
        trees = _trees(root, Path(folder), num_trees)
        seconds = _control(sound, trees)
        failing = {
            mutant.id: [test for test in mutant.tests if _seconds(test, seconds) is None]
            for mutant in sound
        }
        verdicts += [
            Verdict(mutant, "invalid", f"without the edit {', '.join(failing[mutant.id])} does not pass")
            for mutant in sound if failing[mutant.id]
        ]  # fmt: skip
        tried = [mutant for mutant in sound if not failing[mutant.id]]
        limits = {
            mutant.id: least_limit_s
            + SLOWER * sum(_seconds(test, seconds) or 0.0 for test in mutant.tests)
            for mutant in tried
        }
        verdicts += _try(tried, trees, limits)
    return _report(sorted(verdicts, key=lambda verdict: mutants.index(verdict.mutant)))


def _trees(root: Path, folder: Path, count: int) -> list[Path]:
    first = copy_tree(root, folder / "tree0")
    # Compiled once, held against the text of the source: an edit within the same second and size is
    # seen.
    for name in CODE_FOLDERS:
        if (first / name).is_dir():
            compileall.compile_dir(
                first / name, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH
            )
    return [first, *(twin(first, folder / f"tree{number}") for number in range(1, count))]


def _control(mutants: list[Mutant], trees: list[Path]) -> dict[str, float]:
    """Seconds of each test that passes without an edit, by node id; a file's tests run together."""
    tests: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
        tests.setdefault(test.split("::")[0], []).append(test)
    jobs = [
        Job(file, named, CONTROL_LIMIT_S, first_failure_ends=False) for file, named in tests.items()
    ]
    seconds: dict[str, float] = {}
    progress = _Progress("control, no edit", len(jobs))

    def done(job: Job, outcome: Outcome) -> None:
        progress.step(job.name, outcome.seconds)
        wrong = {report["test"] for report in outcome.reports if report["outcome"] == "failed"}
        for report in outcome.called("passed"):
            if report["test"] not in wrong:
                seconds[report["test"]] = sum(
                    item["seconds"] for item in outcome.reports if item["test"] == report["test"]
                )
        if outcome.status != 0:
            print(
                f"\n{job.name} fails without an edit (status {outcome.status}):\n{outcome.output}"
            )

    run_all(jobs, trees, done)
    return seconds


def _seconds(test: str, seconds: dict[str, float]) -> float | None:
    """Seconds of a test or, named without brackets, of all its parameters; None when none passed."""
    found = [
        value for name, value in seconds.items() if name == test or name.startswith(f"{test}[")
    ]
    return sum(found) if found else None


def _try(mutants: list[Mutant], trees: list[Path], limits: dict[str, float]) -> list[Verdict]:
    by_id = {mutant.id: mutant for mutant in mutants}
    jobs = [
        Job(
            mutant.id,
            mutant.tests,
            limits[mutant.id],
            mutant.file,
            mutant.mutated((trees[0] / mutant.file).read_text("utf-8")),
        )
        # The longest first, so that no worker is left alone with one at the end.
        for mutant in sorted(mutants, key=lambda mutant: -limits[mutant.id])
    ]
    verdicts: list[Verdict] = []
    progress = _Progress("mutants", len(jobs))

    def done(job: Job, outcome: Outcome) -> None:
        verdicts.append(judge(by_id[job.name], outcome))
        progress.step(f"{job.name} {verdicts[-1].result}", outcome.seconds)

    run_all(jobs, trees, done)
    return verdicts


def judge(mutant: Mutant, outcome: Outcome) -> Verdict:
    """Verdict on an edit by the outcome of its tests."""
    seconds = outcome.seconds
    if outcome.timed_out:
        return Verdict(
            mutant, "killed" if mutant.hang else "invalid", f"no end after {seconds:.0f} s", seconds
        )
    if outcome.status is None:
        return Verdict(
            mutant, "invalid", f"the tests' process died: {_last_line(outcome.output)}", seconds
        )
    if outcome.status == 0:
        return Verdict(mutant, "survived", f"{len(outcome.called('passed'))} tests pass", seconds)
    failed = outcome.called("failed")
    if outcome.status != 1 or not failed:
        return Verdict(
            mutant,
            "invalid",
            f"pytest's status {outcome.status}: {_last_line(outcome.output)}",
            seconds,
        )
    if not (noticing := [report for report in failed if report["noticed"]]):
        return Verdict(mutant, "crashed", f"{failed[0]['raised']} in {failed[0]['test']}", seconds)
    return Verdict(mutant, "killed", noticing[0]["test"], seconds)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _report(verdicts: list[Verdict]) -> int:
    print(f"\n{'id':<6} {'file':<34} {'result':<9} {'s':>6}  by")
    for verdict in verdicts:
        print(
            f"{verdict.mutant.id:<6} {verdict.mutant.file:<34} {verdict.result:<9} "
            f"{verdict.seconds:>6.1f}  {verdict.why}"
        )
    for verdict in verdicts:
        if verdict.result == "survived":
            print(f"\n{verdict.mutant.id} survived: {verdict.mutant.why}")
            print(f"  {verdict.mutant.old.strip()}\n  -> {verdict.mutant.new.strip()}")
    results = ("killed", "survived", "crashed", "invalid")
    counts = {result: sum(verdict.result == result for verdict in verdicts) for result in results}
    print(f"\nmutants: {', '.join(f'{count} {result}' for result, count in counts.items())}")
    return int(not verdicts or counts["killed"] != len(verdicts))


class _Progress:
    """A line for each job that is done."""

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done = label, total, 0

    def step(self, note: str, seconds: float) -> None:
        self.done += 1
        print(f"{self.label}: {self.done} of {self.total}: {note} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
