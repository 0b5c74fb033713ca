"""Lines of `draftsmith top` from an answer's data, without a terminal."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from draftsmith.serve.dashboard.top_screen import (
    ASCII_BLOCKS,
    BLOCKS,
    RED,
    one_line,
    render,
    screen,
    sparkline,
)

RATES = {"rounds": 40, "tau": 1.75, "alpha": [0.5, None]}
DATA: dict[str, Any] = {
    "server": {
        "model": "tiny", "version": "0.1", "time_s": 2000.0, "started_s": 1000.0, "lossless": True,
        "drafter": (
            "eagle3"
        ),
        "draft_version": "2", "running": 3, "waiting": 1, "kv_usage": 0.25, "records": 7,
        "swaps": 1, "shows_text": False,
        "seeded_requests": 3, "seeded_share": 0.425,
    },
    "now": {
        "seconds": 60.0, "tokens_per_s": 100.0, "busy_tokens_per_s": 120.0,
        "plain_tokens_per_s": 80.0, "speedup": 1.5, **RATES,
    },
    "classes": {"": RATES, "code": RATES},
    "served": {"2": RATES},
    "drafts": [
        {"draft": "live", "version": "2", "requests": 60, "share": 0.75, "note": "", **RATES},
        {"draft": "pool/code", "version": "code/1", "requests": 20, "share": 0.25, "note": "gain +0.0300", **RATES},
        {"draft": "pool/prose", "version": "", "requests": 0, "share": 0.0, "note": "learns: 9 requests", **RATES, "alpha": []},
    ],
    "points": [],
    "versions": [
        {"version": 1, "parent": None, "family": "eagle3", "created_s": 1.0, "live": False,
         "gate": {"reason": "the starting draft"}},
        {"version": 2, "parent": 1, "family": "eagle3", "created_s": 2.0, "live": True,
         "gate": {"alpha_live": 0.5, "alpha_candidate": 0.52, "gain": 0.02, "p_value": 0.001, "requests": 48}},
    ],
    "decisions": [
        {"time_s": 1.0, "decision": "accept", "reason": "a gain with evidence", "gain": 0.02, "version": 2, "class": "code"},
        {"time_s": 2.0, "decision": "refuse", "reason": "weights that are not finite", "version": None},
    ],
    "alarms": [{"time_s": 2.0, "decision": "refuse", "reason": "weights that are not finite", "version": None}],
    "learner": {"age_s": 5.0, "updates": 4, "texts": 9, "fresh": 1, "held_out": 2, "loss": 1.25},
    "buffer": {"shards": 2, "bytes": 2**20},
}  # fmt: skip


def texts(data: dict[str, Any], width: int = 120) -> str:
    return "\n".join(line.text for line in screen(data, data["points"], width=width))


def test_everything_that_matters_is_on_the_screen() -> None:
    shown = texts(DATA)
    for wanted in (
        "tiny", "eagle3 version 2", "up 17 min", "3 running, 1 waiting, cache 25 % full",
        "120.0 while there is work",
        "x1.50 against 80.0 without drafts", "1.75", "0.50 -", "(no class)", "code", "2 live",
        "0.5000 -> 0.5200", "0.0200",
        "running: 4 updates, 9 texts", "1.0 MiB in 2 shards", "refuse: weights that are not finite",
        "accept version 2 of code",
        "42.5 % of the tokens (3 requests) are sampled with a seed, neither learned from",
        "live                                2       60   75 %   1.75  0.50 -",
        "code/1       20   25 %", "-  learns: 9 requests",
    ):  # fmt: skip
        assert wanted in shown, wanted
    assert next(line.text for line in screen(DATA, [], width=80) if line.style == RED).endswith(
        "weights that are not finite"
    )


def test_losslessness_is_shown_by_engine_with_alarms_first() -> None:
    data = copy.deepcopy(DATA)
    stream = {"positions": 900, "z_accepted": 0.4, "z_emitted": -1.1, "log10_evidence": -0.5}
    streams = {"all": stream, "version 2 on b:8001": {**stream, "z_accepted": 9.1, "alarm": 1.0}}
    streams |= {f"version {version} on a:8000": stream for version in range(3, 9)}
    data["learner"] |= {"losslessness": streams, "lossless_alarms": 1}
    shown = texts(data)
    assert "version 8 on a:8000" in shown and "0.4 - - - -1.1" in shown
    assert "version 3 on a:8000" not in shown, "the latest ones"
    (red,) = [one.text for one in screen(data, [], width=80) if "NOT LOSSLESS" in one.text]
    assert red.startswith("version 2 on b:8001") and "9.1" in red
    assert "2 alarms" in one_line(data) and "1 alarms" in one_line(DATA)


def test_little_is_known_at_first() -> None:
    data = copy.deepcopy(DATA)
    nothing = {"rounds": 0, "tau": None, "alpha": []}
    data["server"]["seeded_share"] = None
    data["now"] = dict.fromkeys(data["now"], None) | {"seconds": 0} | nothing
    data |= {
        "classes": {},
        "served": {},
        "drafts": data["drafts"][:1],
        "versions": [],
        "decisions": [],
        "alarms": [],
        "learner": None,
        "buffer": None,
    }
    data["server"] |= {"drafter": None, "draft_version": "", "lossless": False}
    shown = texts(data)
    assert "pool/" not in shown and "75 %" not in shown, "one draft needs no table"
    assert "no drafter" in shown and "LOSSY" in shown and "not measured (--k auto does)" in shown
    assert "tau -" in one_line(data) and "alpha -" in one_line(data)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (1, 1), (300, 200)])
def test_a_screen_is_never_larger_than_the_window(width: int, height: int) -> None:
    drawn = render(screen(DATA, [], width=width), width=width, height=height)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    lines = plain.split("\r\n")
    assert len(lines) <= height and all(len(line) <= width for line in lines)


def test_names_from_clients_cannot_steer_the_terminal() -> None:
    data = copy.deepcopy(DATA)
    data["classes"] = {"\x1b[2J\x07evil\r\n": RATES}
    data["decisions"][0]["reason"] = "\x1b]0;title\x07"
    data["server"]["model"] = "\x1b[31mred\nline"
    drawn = render(screen(data, [], width=200), width=200, height=80)
    assert "\x07" not in drawn and "\x1b[2J" not in drawn and "\x1b]" not in drawn
    assert one_line(data).isprintable()


def test_a_sparkline_is_as_wide_as_it_may_be() -> None:
    assert sparkline([1.0, 2.0, None, 3.0], 10, BLOCKS) == f"{BLOCKS[0]}{BLOCKS[4]} {BLOCKS[7]}"
    assert sparkline([9.0, 1.0, 2.0], 2, ASCII_BLOCKS) == "_@"
    assert sparkline([2.0, 2.0], 5, ASCII_BLOCKS) == "__"
    assert (
        sparkline([None], 5, BLOCKS)
        == sparkline([], 5, BLOCKS)
        == sparkline([1.0], 0, BLOCKS)
        == ""
    )
