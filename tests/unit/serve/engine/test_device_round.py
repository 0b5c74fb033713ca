"""What a round on a device copies and waits for, counted on a stand-in, and its tokens, which are
those of a round on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from transformers import TemperatureLogitsWarper

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.kernels import dispatch
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.verify import block_triton, chain_triton, tree_triton
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_logits
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.round import Round
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from tests import conftest, device_stand_in
from tests.device_stand_in import StandIn, kernel, move, on_device
from tests.round_records import each

PROMPTS = [[5, 60, 7, 200], [11, 12, 13], [9, 8, 7, 6, 5, 4]]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
TOP_P: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
GRAMMAR: dict[str, Any] = {
    **SAMPLED,
    "grammar": Grammar("regex", "[a-z ]{30,60}"),
    "ignore_eos": False,
}
COUNTED = 4  # round whose costs are counted, in which all requests draft

Change = Callable[[int, Proposal], Proposal]


class Answers(NamedTuple):
    tokens: list[list[int]]
    fallbacks: dict[str, int]
    rounds: list[tuple[list[int], int]]  # drafted tokens and the number of accepted ones


class Records(conftest.Records):
    """Makes everything of a record as soon as it gets it."""

    def put(self, record: RoundRecord) -> None:
        record.p, record.q = record.p.copied(), record.q.copied()
        super().put(record)


class Served:
    """A target and a draft, on the CPU until `move`."""

    def __init__(self, path: str, family: str | None):
        self.target, self.drafter = Target.load(path), None
        self.device: StandIn | None = None
        if family == "suffix":
            self.drafter: Any = Suffix()
        elif family is not None:
            self.drafter = FAMILIES[family].create(OPTIONS[family](), self.target, seed=1).eval()

    def move(self, device: StandIn) -> None:
        self.device = device
        move(self.target.model)
        self.target._unused_mask = on_device(self.target._unused_mask)
        if isinstance(self.drafter, torch.nn.Module):
            move(self.drafter)

    def answers(
        self,
        *values: dict[str, Any],
        change: Change | None = None,
        sink: Records | None = None,
        **options: Any,
    ) -> Answers:
        """Answers of the prompts; of the device, the costs of one round are left in its counts."""
        if change is not None:
            name = "propose_tree" if "tree" in options else "propose"
            propose, calls = getattr(type(self.drafter), name), iter(range(1000))
            changed = lambda *given: change(next(calls), propose(self.drafter, *given))  # noqa: E731
            setattr(self.drafter, name, changed)
        config = EngineConfig(k=3, max_length=64, num_blocks=40, compile="off", **options)
        engine = build_engine(self.target, self.drafter, config, sink=sink)
        engine.committer.overlaps = self.device is not None  # as on CUDA
        rounds: list[tuple[list[int], int]] = []
        commit = engine.committer.commit

        def noted(round: Round) -> None:
            rows = [row for row in round.read_rows() if row.samples]
            rounds.extend((row.drafted, row.accepted) for row in rows)
            commit(round)

        engine.committer.commit = noted
        requests = [
            engine.submit(
                prompt,
                SamplingParams(
                    **{"max_tokens": 9, "ignore_eos": True, "seed": seed}
                    | values[seed % len(values)]
                ),
            )
            for seed, prompt in enumerate(PROMPTS)
        ]
        number = 0
        while engine.busy:
            number += 1
            if self.device is not None and number <= COUNTED:
                self.device.clear()
            engine.step()
            if number == COUNTED and self.device is not None:
                self.counted = self.device.copy()
        return Answers(
            [request.output for request in requests], dict(engine.stats.fallbacks), rounds
        )


def tempered(
    logits: torch.Tensor, temperatures: torch.Tensor, *rest: Any, cuts: torch.Tensor | None = None
) -> torch.Tensor:
    """What is filtered lies in place of the cuts."""
    if cuts is not None:
        logits, temperatures = cuts, torch.ones_like(temperatures)
    rows = SamplingRows.of(temperatures.tolist())
    return verify_logits(logits, rows, *rest, impl="torch")


def _triton_elsewhere(impl: str, device: torch.device, dtype: torch.dtype) -> str:
    return "torch" if device.type == "cpu" else "triton"


@pytest.fixture
def both(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., StandIn]]:
    """`both(family, ...)` gives the costs of a round on the device, when the answers are the
    CPU's."""

    def run(
        family: str | None, *values: dict[str, Any], records: bool = False, **options: Any
    ) -> StandIn:
        sinks = [Records(), Records()] if records else [None, None]
        expected = Served(tiny_target("llama"), family).answers(*values, sink=sinks[0], **options)
        served = Served(tiny_target("llama"), family)
        with monkeypatch.context() as patch, device_stand_in.device(monkeypatch) as device:
            kept = {name: one for name, one in dispatch.BACKENDS.items() if "verify" in name}
            patch.setattr(dispatch, "BACKENDS", defaultdict(dispatch.Backend, kept))
            patch.setattr(dispatch, "choose", _triton_elsewhere)
            patch.setattr(
                chain_triton, "verify_tempered", kernel(device, "verify_logits", tempered)
            )
            patch.setattr(chain_triton, "filter_cuts", partial(process, impl="torch"))
            for module, name, reference in (
                (tree_triton, "verify_tree_triton", verify_tree),
                (block_triton, "verify_block_triton", verify_block),
            ):
                patch.setattr(module, name, kernel(device, name, reference))
            served.move(device)
            assert served.answers(*values, sink=sinks[1], **options) == expected
        run.expected, run.sinks = expected, sinks  # type: ignore[attr-defined]
        return served.counted

    return run


@pytest.mark.parametrize(
    "family, values",
    [(None, TOP_P), pytest.param("eagle3", GREEDY, marks=pytest.mark.long), ("eagle3", TOP_P)],
    ids=["none-top-p", "eagle3-greedy", "eagle3-top-p"],
)
def test_a_round_waits_for_its_result_alone(
    family: str | None, values: dict[str, Any], both: Callable[..., StandIn]
) -> None:
    """Uploads outside of the drafter, which sends its own plan."""
    counted = both(family, values)
    events = "\n".join(map(str, counted.events))
    assert (counted.count("wait"), counted.count("upload")) == (1, 1), events
    assert counted.launches["verify_logits"] == 1


def test_a_recorded_round_waits_no_more(both: Callable[..., StandIn]) -> None:
    """Distributions come to the host while the next round runs; the records are the CPU's."""
    counted = both("eagle3", {**TOP_P, "seed": None}, records=True, seed=3)
    assert (counted.count("wait"), counted.count("upload")) == (1, 6)
    assert_recorded_alike(*both.sinks)  # type: ignore[attr-defined]


def assert_recorded_alike(expected: Records, found: Records) -> None:
    assert len(found) == len(expected) > 12 and sum(record.last for record in found) == 3
    for one, other in zip(found, expected, strict=True):
        for name in ("round", "position", "context", "drafted", "accepted", "committed", "last"):
            assert getattr(one, name) == getattr(other, name)
        for kind in ("p", "q"):
            pairs = list(zip(each(getattr(one, kind)), each(getattr(other, kind)), strict=True))
            assert len(pairs) == len(one.drafted)
            for mine, its in pairs:
                assert mine.ids[:8] == its.ids[:8]
                assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-4, nan_ok=True)
                assert mine.tail == pytest.approx(its.tail, abs=1e-5, nan_ok=True)
                assert mine.log_norm == pytest.approx(its.log_norm, abs=1e-4, nan_ok=True)
                assert mine.drafted == pytest.approx(its.drafted, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("rule", ["chain", pytest.param("block", marks=pytest.mark.long)])
def test_requests_of_other_parameters_share_a_round(
    rule: str, both: Callable[..., StandIn]
) -> None:
    """Greedy, sampled and undrafted ones, of different k."""
    counted = both(
        "eagle3", {**SAMPLED, "k": 2}, {**GREEDY, "k": 3}, {**TOP_P, "k": 0}, verification=rule
    )
    assert counted.count("wait") == 1, counted.events


def outside(call: int, proposal: Proposal) -> Proposal:
    """A token that is none, in every third round."""
    tokens = proposal.tokens.clone()
    if call % 3 == 1:
        tokens[0, 1] = 288
    return replace(proposal, tokens=tokens)


def too_long(call: int, proposal: Proposal) -> Proposal:
    """A token more than was asked for, in every third round, for the first request."""
    if call % 3 != 1:
        return proposal
    lengths = torch.cat([proposal.lengths[:1] + 1, proposal.lengths[1:]])
    return replace(proposal, tokens=proposal.tokens.clamp(min=0), lengths=lengths)


def broken(call: int, proposal: Proposal) -> Proposal:
    """A distribution without mass behind the first token."""
    if proposal.logits is None:
        assert proposal.has_mass is not None
        has_mass = proposal.has_mass.clone()
        has_mass[-1, 1] = call % 2 == 0
        return replace(proposal, has_mass=has_mass)
    logits = proposal.logits.clone()
    logits[-1, 1] = float("nan") if call % 2 else logits[-1, 1]
    return replace(proposal, logits=logits)


def shorter(call: int, proposal: Proposal) -> Proposal:
    lengths = (proposal.lengths - call % 3).clamp(min=0)
    return replace(proposal, lengths=lengths)


def raising(call: int, proposal: Proposal) -> Proposal:
    """Nothing, in every third round, though a pass with drafts was laid out."""
    if call % 3 == 1:
        raise RuntimeError("no draft")
    return proposal


TREES = "dynamic:nodes=6,depth=3,width=2+sampled:2x2"


def under_later(call: int, proposal: Proposal) -> Proposal:
    """A node under one that comes after it, in every third round."""
    parents = proposal.parents.clone()
    if call % 3 == 1:
        parents[0, 1] = 2
    return replace(proposal, parents=parents)


def of_no_distribution(call: int, proposal: Proposal) -> Proposal:
    q_rows = proposal.q_rows.clone()
    if call % 3 == 1:
        q_rows[0, 0] = len(proposal.logits)
    return replace(proposal, q_rows=q_rows)


def without_mass(call: int, proposal: Proposal) -> Proposal:
    if proposal.logits is None:
        has_mass = proposal.has_mass.clone()
        has_mass[-1] = call % 2 == 0
        return replace(proposal, has_mass=has_mass)
    logits = proposal.logits.clone()
    logits[-1] = float("nan") if call % 2 else logits[-1]
    return replace(proposal, logits=logits)


BAD: dict[str, tuple[dict[str, Any], Change, str | None, dict[str, Any]]] = {
    "no token": (SAMPLED, outside, "invalid", {}),
    "too long": (GREEDY, too_long, "invalid", {}),
    "an exception": (SAMPLED, raising, "raised", {}),
    "no mass": (SAMPLED, broken, "nan", {}),
    "no mass in a greedy one": (GREEDY, broken, "nan", {}),
    "shorter": (GREEDY, shorter, None, {}),
    "a tree that is too long": (GREEDY, too_long, "invalid", {"tree": TREES}),
    "a node under a later one": (GREEDY, under_later, "invalid", {"tree": TREES}),
    "no distribution": (SAMPLED, of_no_distribution, "invalid", {"tree": TREES}),
    "a tree without mass": (SAMPLED, without_mass, "nan", {"tree": TREES}),
    "a shorter tree": (SAMPLED, shorter, None, {"tree": TREES}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BAD)
def test_a_bad_draft_slows_as_it_does_on_a_cpu(name: str, both: Callable[..., StandIn]) -> None:
    """Found when the round's result is read: the same tokens, records and counts."""
    values, change, cause, options = BAD[name]
    values = {**values, "max_tokens": 16}
    asked = (values,) if options else ({**values, "k": 2}, values)
    counted = both("eagle3", *asked, change=change, **options)
    fallbacks = both.expected.fallbacks  # type: ignore[attr-defined]
    assert counted.count("wait") == 1
    assert fallbacks.get(cause, 0) >= 2 if cause else not any(fallbacks.values())


@pytest.mark.long
@pytest.mark.parametrize("family, tree", [("eagle3", TREES), ("medusa", "choices:0,0.0,1,0.1,2")])
def test_trees_of_other_parameters_share_a_round(
    family: str, tree: str, both: Callable[..., StandIn]
) -> None:
    """Greedy, sampled and undrafted ones, with penalties and without, of different sizes."""
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    values = [{**SAMPLED, **penalties, "k": 4}, {**GREEDY, "k": 6}, {**TOP_P, "k": 0}]
    counted = both(family, *values, tree=tree)
    assert counted.count("wait") + counted.count("wait", drafting=True) == 1, counted.events


def test_a_round_of_recorded_trees_waits_no_more(both: Callable[..., StandIn]) -> None:
    counted = both("eagle3", {**TOP_P, "seed": None}, records=True, seed=3, tree=TREES)
    assert counted.count("wait") == 1, counted.events
    assert_recorded_alike(*both.sinks)  # type: ignore[attr-defined]


def test_logits_of_what_was_not_usable_are_left_out(both: Callable[..., StandIn]) -> None:
    both("eagle3", {**SAMPLED, "seed": None}, change=shorter, records=True, seed=3)
    assert_recorded_alike(*both.sinks)  # type: ignore[attr-defined]


# Kinds of rounds of a draft of 3 tokens, and how often the host waits in each, drafting included.
# Masks that it works out from the tokens need these there: one wait for each drafted token, the last
# of them while the target's pass runs.
ROUNDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "penalties": (
        {**SAMPLED, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2},
        {},
        1,
    ),
    "bans": ({**GREEDY, "bad_words": ((7,),), "min_tokens": 9, "stop_token_ids": (60,)}, {}, 1),
    "top-k": ({**SAMPLED, "top_k": 5, "min_p": 0.05}, {}, 1),
    "confidence": (SAMPLED, {"least_confidence": 0.02}, 1),
    "logprobs": ({**SAMPLED, "logprobs": 2}, {}, 2),
    "block": (SAMPLED, {"verification": "block"}, 1),
    "sampled dynamic tree": (SAMPLED, {"tree": "dynamic:nodes=6,depth=3,width=2"}, 1),
    "dynamic tree with penalties": (
        {**SAMPLED, "repetition_penalty": 1.2},
        {"tree": "dynamic:nodes=6,depth=3,width=2"},
        1,
    ),
    "bad words": ({**GREEDY, "bad_words": ((7, 8), (5, 60))}, {}, 4),
    "grammar": (GRAMMAR, {}, 4),
    "processor": ({**SAMPLED, "logits_processors": (TemperatureLogitsWarper(0.9),)}, {}, 5),
    "tree of a grammar": (GRAMMAR, {"tree": TREES}, 3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_of_each_kind_waits_so_often(name: str, both: Callable[..., StandIn]) -> None:
    values, options, waits = ROUNDS[name]
    counted = both("eagle3", values, **options)
    events = "\n".join(map(str, counted.events))
    assert counted.count("wait") + counted.count("wait", drafting=True) == waits, events
    if options.get("verification") == "block" and values is SAMPLED:
        assert counted.launches["verify_block_triton"] == 1
    elif waits == 1 and not options.keys() & {"tree", "verification"}:
        assert counted.launches["verify_logits"] == 1


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with device_stand_in.device(monkeypatch) as device:
        here = device_stand_in.DEVICE
        numbers = torch.tensor([3, 1, 2], device=here)
        assert (device.count("wait"), device.count("upload")) == (1, 1)
        device.clear()
        sent = torch.tensor([3, 1, 2]).pin_memory().to(here, non_blocking=True)
        table = torch.zeros(4, 5, device=here)
        table[sent, 1] = 2.0
        table.masked_fill_(table > 1, 3.0)
        assert (device.count("wait"), device.count("upload")) == (0, 1)
        torch.tensor([3, 1, 2]).to(here, non_blocking=True)  # not page-locked
        assert (device.count("wait"), device.count("upload")) == (1, 2)
        for look in (
            lambda: numbers.tolist(),
            lambda: int(numbers[0]),
            lambda: bool((numbers > 1).any()),
            lambda: numbers.cpu(),
            lambda: numbers[numbers > 1],
            lambda: numbers.nonzero(),
            lambda: torch.repeat_interleave(numbers),
            lambda: numbers[[0, 1]],
        ):
            device.clear()
            look()
            assert device.count("wait") == 1, device.events
        with pytest.raises(RuntimeError, match="on the host and on the device"):
            numbers + torch.tensor([1, 2, 3])
