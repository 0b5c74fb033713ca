"""Parts of scripts/bench_rl: the reward, a step of the policy, and means of the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.bench.rl.policy import Policy, Rollout, reward
from scripts.bench.rl.run import DRAFTS, table


def test_the_reward_is_the_share_of_capital_letters() -> None:
    assert reward("ABc d_1") == 0.5
    assert reward("12 _") == 0.0


def test_a_step_makes_answers_above_their_groups_mean_likelier(
    tiny_target: Callable[..., str],
) -> None:
    policy = Policy(Path(tiny_target("llama")), lr=1e-3)
    rollouts = [Rollout([5, 6, 7], answer) for answer in ([8, 9], [10, 11], [12, 13], [14, 15])]

    @torch.no_grad()
    def logprobs() -> list[float]:
        found = []
        for one in rollouts:
            ids = torch.tensor([one.prompt + one.answer])
            values = policy.model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
            found.append(float(values.gather(-1, ids[0, 3:, None]).sum()))
        return found

    before = logprobs()
    entropy = policy.update(rollouts, [1.0, 0.0, 0.0, 1.0], group=2)
    rises = [after > earlier for after, earlier in zip(logprobs(), before, strict=True)]
    assert rises == [True, False, False, True]
    assert 0 < entropy < torch.log(torch.tensor(288.0))


def test_a_line_of_the_table_is_the_mean_of_its_updates() -> None:
    rows = [
        {
            "update": at, "version": 1 + at, "reward": at / 10, "entropy": 2.0,
            "drafts": {name: {"alpha_1": 0.1 * at, "tau": 1.0 + at} for name in DRAFTS},
        }
        for at in range(4)
    ]  # fmt: skip
    *_, last = table(rows, parts=2)
    cells = [cell.strip() for cell in last.split("|")[1:-1]]
    assert cells == ["2 to 3", "0.250", "2.00", *["0.250, 3.500"] * 3, "3 to 4"]


def test_no_answer_is_longer_than_the_learner_reads() -> None:
    from scripts.bench.rl import followed, policy, run

    chosen = run.options([])
    assert policy.PROMPT_TOKENS + chosen.tokens <= followed.MAX_LENGTH
    with pytest.raises(SystemExit):
        run.options(["--updates", "many"])


def test_an_update_holds_out_as_many_answers_as_the_gate_takes() -> None:
    from scripts.bench.rl import followed, run

    chosen = run.options([])
    assert chosen.prompts * chosen.group * followed.GATE.held_out >= followed.GATE.requests
