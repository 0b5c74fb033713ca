"""A version on trial: who takes part, its two errors at any request, its power, and what fools
other tests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.canary import MOST_LEVELS, PATIENCE, CanaryTrial, Trial
from draftsmith.drafters.versions import in_canary
from draftsmith.files import restored
from tests.round_records import round_record, served_text

CONFIG = GateConfig()
# A rate of 0.05 seen over 300 trials is above this once in about 700 times.
TRIALS = 300
MOST_FALSE = 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)
REACHED = 30  # drafted tokens of a request


def served(
    request: str,
    accepted: int = 2,
    *,
    version: str = "1",
    request_class: str = "",
    drafted: int = 3,
) -> ServedText:
    record = round_record(
        request=request, request_class=request_class, draft_version=version,
        drafted=[9] * drafted, accepted=accepted, committed=[9] * accepted + [11],
    )  # fmt: skip
    return served_text([record])


def request(is_chosen: bool, number: int, share: float = 0.1) -> str:
    """The `number`-th id that is of the share, or is not."""
    found = (f"r{one}" for one in range(10**6) if in_canary(f"r{one}", share) == is_chosen)
    return next(name for place, name in enumerate(found) if place == number)


def test_only_the_share_and_the_rest_of_its_time_take_part() -> None:
    trial = Trial(2, 0.1)
    chosen, other = request(True, 0), request(False, 0)
    take = {"live": "1", "canary": "2", "drop": CONFIG.drop}
    for text in (
        served(other, version="code/1"),
        served(chosen, version="code/1"),
        served(chosen, version="0"),
        served(chosen, version=""),
    ):
        trial.observe(text, **take)
    assert trial == Trial(2, 0.1)
    trial.observe(served(chosen, 3, version="2"), **take)
    trial.observe(served(other, 0), **take)
    assert (trial.drafted, trial.missed) == (1, 0) and (trial.chosen.value, trial.others.value) == (
        1.0,
        0.0,
    )
    # A server that has not taken it up: of the share all the same, or the comparison were one of
    # servers.
    trial.observe(served(request(True, 1), 0), **take)
    assert (trial.drafted, trial.missed) == (1, 1) and trial.chosen.value == 0.5
    trial.observe(served(request(True, 2), 0, drafted=0), **take)
    assert trial.missed == 2 and trial.chosen.value == pytest.approx(1 / 3), (
        "nothing drafted is nothing accepted"
    )


def stream(
    generator: np.random.Generator, effect: float, *, share: float, taken_up: float = 1.0
) -> Iterator[tuple[float, str, bool, float]]:
    """Arguments of `bet`: two classes, a level that wanders, and servers without the version, whose
    traffic is easier."""
    drift = 0.0
    while True:
        drift += 0.01 * generator.standard_normal()
        is_code, is_chosen, has_it = (
            generator.random() < 0.4,
            generator.random() < share,
            generator.random() < taken_up,
        )
        level = (0.75 if is_code else 0.45) + 0.2 * math.sin(drift) + (0.0 if has_it else 0.15)
        drafts = is_chosen and has_it
        spread = 0.12 * generator.standard_normal()
        alpha = min(0.98, max(0.02, level + spread + (effect if drafts else 0.0)))
        x = generator.binomial(REACHED, alpha) / REACHED
        yield x, "code" if is_code else "", is_chosen, CONFIG.drop if drafts else 0.0


def ended(
    trial: Trial, requests: Iterator[tuple[float, str, bool, float]], most: int, config: GateConfig
) -> str:
    for _, (x, name, is_chosen, allowance) in zip(range(most), requests, strict=False):
        trial.drafted += allowance > 0
        trial.bet(x, name, is_chosen=is_chosen, allowance=allowance)
        if (verdict := trial.verdict(config)) is not None:
            return verdict.decision
    return ""


@pytest.mark.long
@pytest.mark.parametrize(("share", "taken_up"), [(0.1, 1.0), (0.25, 0.5)])
def test_both_errors_hold_at_any_request(share: float, taken_up: float) -> None:
    """At the edge of each question, looked at after every request."""
    generator, endless = np.random.default_rng(1), replace(CONFIG, canary_requests=10**6)
    most, outcomes = 300, {}
    for effect, wrong in ((0.0, "rolled back"), (-CONFIG.drop, "promoted")):
        streams = (stream(generator, effect, share=share, taken_up=taken_up) for _ in range(TRIALS))
        found = [ended(Trial(2, share), one, most, endless) for one in streams]
        outcomes[effect] = found.count(wrong) / TRIALS
    assert max(outcomes.values()) <= MOST_FALSE, outcomes


def test_two_means_looked_at_again_and_again_would_be_caught() -> None:
    """What the bets replace: a z-test of the share against the others, after every
    tenth request."""
    generator, alarms = np.random.default_rng(2), 0
    for _ in range(100):
        sides: dict[bool, list[float]] = {True: [], False: []}
        for number, (x, _, is_chosen, _) in zip(
            range(300), stream(generator, 0.0, share=0.25), strict=False
        ):
            sides[is_chosen].append(x)
            if number % 10 == 9 and min(len(one) for one in sides.values()) >= 5:
                chosen, others = np.array(sides[True]), np.array(sides[False])
                error = math.sqrt(chosen.var() / len(chosen) + others.var() / len(others))
                if chosen.mean() - others.mean() < -1.645 * error:
                    alarms += 1
                    break
    assert alarms / 100 > 2 * MOST_FALSE


def test_a_comparison_by_who_drafted_would_be_caught() -> None:
    """Servers without the version have easier traffic: to compare versions is to compare servers.
    Ids have no such trouble."""
    fooled, right = 0, 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        by_version, by_id = Trial(2, 0.5), Trial(2, 0.5)
        for _, (x, name, is_chosen, allowance) in zip(
            range(600), stream(generator, 0.0, share=0.5, taken_up=0.5), strict=False
        ):
            by_version.bet(x, name, is_chosen=allowance > 0, allowance=allowance)
            by_id.bet(x, name, is_chosen=is_chosen, allowance=allowance)
        fooled += by_version.worse.value * CONFIG.error >= 1
        right += by_id.worse.value * CONFIG.error >= 1
    assert fooled > 20 and right <= 6, (fooled, right)


@pytest.mark.parametrize(
    ("effect", "decision", "requests"), [(-0.4, "rolled back", 300), (0.15, "promoted", 600)]
)
def test_what_is_plain_is_decided_soon(effect: float, decision: str, requests: int) -> None:
    generator, endless = np.random.default_rng(3), replace(CONFIG, canary_requests=10**6)
    found = [
        ended(Trial(2, 0.1), stream(generator, effect, share=0.1), requests, endless)
        for _ in range(40)
    ]
    assert found.count(decision) >= 36, found


def test_what_stays_open_is_left_to_held_out_traffic_but_for_a_plain_loss() -> None:
    config = GateConfig(canary_requests=4)

    def after(accepted: int, count: int = 4) -> Trial:
        trial = Trial(2, 0.1)
        for number in range(count):
            trial.observe(
                served(request(True, number), accepted, version="2"),
                live="1",
                canary="2",
                drop=config.drop,
            )
            trial.observe(served(request(False, number), 2), live="1", canary="2", drop=config.drop)
        return trial

    assert after(2, 3).verdict(config) is None
    assert after(2).verdict(config).decision == "undecided"
    lost = after(1).verdict(config)
    assert (
        lost.decision == "rolled back"
        and "0.500 in its share" in lost.reason
        and "0.667 elsewhere" in lost.reason
    )


def test_a_trial_on_all_requests_has_no_mean_of_others() -> None:
    trial, config = Trial(2, 0.1), GateConfig(canary_requests=4)
    for number in range(4):
        text = served(request(True, number), 2, version="2")
        trial.observe(text, live="1", canary="2", drop=config.drop)
    assert "0.667 in its share, none yet elsewhere" in trial.verdict(config).reason


def test_a_version_that_fails_in_servers_is_given_up_soon() -> None:
    """Its requests draft nothing; everywhere else two tokens of three stand."""
    trial, take = Trial(2, 0.1), {"live": "1", "canary": "2", "drop": CONFIG.drop}
    for number in range(300):
        name = f"r{number}"
        trial.observe(
            served(name, 0, drafted=0) if in_canary(name, 0.1) else served(name, 2), **take
        )
    assert trial.verdict(CONFIG).decision == "rolled back" and trial.missed < 50


def test_a_version_that_no_server_drafts_with_is_given_up() -> None:
    config, trial = GateConfig(canary_requests=2), Trial(2, 0.1)
    for number in range(2 * PATIENCE):
        assert trial.verdict(config) is None
        trial.observe(served(request(True, number)), live="1", canary="2", drop=config.drop)
    assert "in 0 of 20 requests" in trial.verdict(config).reason


def test_a_trial_waits_while_servers_draft_for_nobody() -> None:
    """As at k = 0. Once they draft, and never with it, it is given up as any other."""
    config, share = GateConfig(canary_requests=4), 0.25
    canary = CanaryTrial(None, config)  # type: ignore[arg-type]
    canary.trial = trial = Trial(2, share)
    silences = []
    canary.observe(served(request(False, 0, share), 1), "1")  # one is next to nobody
    for number in range(1000):
        canary.observe(served(f"r{number}", 0, version="", drafted=0), "1")
        silences.append(canary.became_unseen())
        assert trial.verdict(config) is None
    assert trial.missed > PATIENCE * config.canary_requests and trial.elsewhere == 1
    assert silences.count(True) == 1 and silences.index(True) < 50
    for number in range(1000, 1400):
        canary.observe(served(f"r{number}", 2), "1")
        assert not canary.became_unseen()
    assert "in 0 of" in trial.verdict(config).reason


def test_classes_that_clients_invent_are_bounded() -> None:
    trial = Trial(2, 0.5)
    for number in range(3 * MOST_LEVELS):
        trial.bet(0.5, f"class {number}", is_chosen=False, allowance=0.0)
    assert len(trial.levels) <= MOST_LEVELS + 1 and trial.others.count == 3 * MOST_LEVELS


def test_a_trial_comes_back_from_json_and_goes_on_alike() -> None:
    one = Trial(2, 0.25)
    requests = stream(np.random.default_rng(4), 0.1, share=0.25)
    ended(one, requests, 20, CONFIG)
    other = restored(Trial, json.loads(json.dumps(asdict(one))))
    assert other == one
    for x, name, is_chosen, allowance in (next(requests) for _ in range(20)):
        for trial in (one, other):
            trial.bet(x, name, is_chosen=is_chosen, allowance=allowance)
    assert other == one and one.numbers()["requests"] == other.numbers()["requests"]
