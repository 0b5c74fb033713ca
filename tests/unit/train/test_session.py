"""Whole training runs in this process, on a tiny target."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from draftsmith import cli
from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import DraftOptions, Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.lock import folder_lock
from draftsmith.train import optim, reporting, session, trainer
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.command import run
from draftsmith.train.config import OptimConfig, TrainConfig
from draftsmith.train.evaluate import measured as evaluations
from draftsmith.train.evaluate.measured import Figures, measure
from draftsmith.train.objective.prompt_logprobs import PatientServer
from tests.conftest import small_files
from tests.vllm_stand_in import StandIn

RECIPES = Path(__file__).parents[3] / "recipes"
SERVED = ("--target-server", "http://h", "--target-logprobs", "4")
DECODED = {"eval_prompts": 8, "eval_tokens": 12}


def metrics(config: TrainConfig) -> list[dict]:
    return [
        json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {"draft": DraftOptions(draft_vocab_size=200)}),
        ("draft-lm", {}),
        ("medusa", {}),
        *(
            pytest.param(family, {}, marks=pytest.mark.long)
            for family in ("p-eagle", "mtp", "eagle1", "mlp", "dflash", "dspark")
        ),
    ],
)
def test_training_lowers_the_loss_and_raises_alpha(family, options, configure):
    run(config := configure(family, **options))
    first, *_, last = (line for line in metrics(config) if "loss" in line)
    assert last["loss"] < 0.8 * first["loss"]
    assert last["alpha_1"] > first["alpha_1"] + 0.05
    assert 1.0 < last["tau"] < 1 + config.unroll.steps
    record = checkpoint.read_metadata(config.out)
    assert record["family"] == family and record["training"]["steps"] == 40
    assert (Path(config.out) / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_short_run_ends_with_the_figures_of_its_last_steps(configure, capsys):
    run(config := configure(steps=3, log_every=20))
    first, last = metrics(config)
    assert (first["step"], last["step"]) == (1, 3)
    assert f"3 steps, loss {last['loss']:.3f}, alpha " in capsys.readouterr().err
    record = checkpoint.read_metadata(config.out)  # without held-out prompts the last is kept
    assert record["evaluation"] == [] and record["training"]["kept_step"] == 3


def test_a_finished_run_says_so_and_is_measured_again_for_other_figures_alone(configure, capsys):
    run(config := configure(steps=2, eval_prompts=2, eval_tokens=4))
    for tokens, told in ((4, "holds this training, finished after 2 steps"), (5, "held out after")):
        capsys.readouterr()
        run(replace(config, eval_tokens=tokens))
        shown = capsys.readouterr()
        assert told in shown.out and ("evaluate:" in shown.err) == (tokens == 5)


def test_a_run_killed_in_its_last_evaluation_has_its_figures_once_resumed(configure):
    config = configure(steps=2, eval_prompts=2, eval_tokens=4)
    run(config)
    whole = metrics(config)
    assert sum("eval_tau" in line for line in whole) == 1
    cut = [json.dumps(line) + "\n" for line in whole if "eval_tau" not in line]
    (Path(config.out) / "metrics.jsonl").write_text("".join(cut), encoding="utf-8")
    for _ in range(2):  # and is not logged twice
        run(config)
        resumed = metrics(config)
        assert [set(line) for line in resumed] == [set(line) for line in whole]
        assert resumed[-1]["eval_tau"] == whole[-1]["eval_tau"]


class KilledBehindTheLastStep(TrainerCallback):
    def on_epoch_end(self, *unused, **also_unused):
        raise KeyboardInterrupt


def test_a_timed_run_killed_before_its_last_evaluation_trains_no_more(configure):
    config = configure(steps=None, minutes=0.01, eval_prompts=2, eval_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        run(config, [KilledBehindTheLastStep()])
    newest = RunFolder(config.out).newest()
    run(config)
    assert checkpoint.read_metadata(config.out)["training"]["steps"] == newest.step
    assert "eval_tau" in metrics(config)[-1]
    run(more := replace(config, minutes=10.0, steps=newest.step + 1))
    assert checkpoint.read_metadata(more.out)["training"]["steps"] == newest.step + 1


def test_mass_outside_the_draft_vocabulary_is_told(configure):
    config = configure(draft=DraftOptions(draft_vocab_size=30), steps=1)
    run(config)
    assert metrics(config)[-1]["outside"] > 0.02
    full = configure(out=config.out + "-full", steps=1)
    run(full)
    assert metrics(full)[-1]["outside"] == 0.0


def test_a_lost_run_stops_with_one_sentence_and_keeps_its_checkpoint(configure, monkeypatch):
    config = configure(steps=20, save_every=5)
    calls = 0
    honest = trainer.unrolled_loss

    def lost_after_12(*arguments, **options):
        nonlocal calls
        calls += 1
        unrolled = honest(*arguments, **options)
        return unrolled._replace(total=unrolled.total * float("nan")) if calls > 12 else unrolled

    monkeypatch.setattr(trainer, "unrolled_loss", lost_after_12)
    with pytest.raises(UserError, match=r"diverged by step 15 .*checkpoint-10; lower optim.lr"):
        run(config)
    monkeypatch.setattr(trainer, "unrolled_loss", honest)
    run(config)
    lines = metrics(config)
    assert [line["step"] for line in lines] == [1, *range(5, 21, 5)] and lines[-1]["loss"] < lines[
        0
    ]["loss"]


def test_the_clock_ends_the_run_and_the_schedule(configure):
    config = configure(steps=None, minutes=0.03)
    begun_s = time.monotonic()
    run(config)
    assert time.monotonic() - begun_s < 30
    last = metrics(config)[-1]
    assert last["elapsed_s"] >= 1.8
    assert last["learning_rate"] < 0.2 * config.optim.lr


@pytest.mark.parametrize(
    ("slow", "steps", "elapsed_s"),
    # What is slow takes a hundred seconds, of which no more than a tenth of the minute was expected
    # of an evaluation, beforehand.
    [("evaluation", 10, 210), ("checkpoint", 10, 110)],
)
def test_a_run_ends_with_what_passes_its_minutes(slow, steps, elapsed_s, configure, monkeypatch):
    """A step takes a second of this clock."""
    config = configure(
        steps=None, minutes=1.0, save_every=10, log_every=10, **DECODED,
        eval_every=10 if slow == "evaluation" else None,
    )  # fmt: skip
    now_s, evaluated, saved = [0.0], [], []
    for module in (optim, reporting):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def taking(call, seconds, calls):
        def inner(*arguments, **options):
            now_s[0] += seconds
            calls.append(now_s[0])
            return call(*arguments, **options)

        return inner

    seconds = {name: 100.0 * (slow == name) for name in ("evaluation", "checkpoint")}
    monkeypatch.setattr(trainer, "unrolled_loss", taking(trainer.unrolled_loss, 1.0, []))
    measure_slowly = taking(evaluations.measure, seconds["evaluation"], evaluated)
    monkeypatch.setattr(evaluations, "measure", measure_slowly)
    save = trainer.Trainer._save_checkpoint
    save_slowly = taking(save, seconds["checkpoint"], saved)
    monkeypatch.setattr(trainer.Trainer, "_save_checkpoint", save_slowly)
    run(config)
    assert checkpoint.read_metadata(config.out)["training"]["steps"] == steps
    assert now_s[0] == elapsed_s and len(evaluated) == 2 and len(saved) == steps // 10


def test_held_out_prompts_are_decoded_while_training_and_the_best_draft_is_kept(
    configure, monkeypatch
):
    """Weights that are spoiled late in the run must not be what it leaves."""
    config = configure(steps=15, eval_every=5, **DECODED)
    measured = evaluations.measure

    def spoiling(drafter, *rest, **options):
        if len(seen) == 2:
            with torch.no_grad():
                for parameter in drafter.parameters():
                    parameter.neg_()
        seen.append(measured(drafter, *rest, **options))
        return seen[-1]

    seen: list[Figures] = []
    monkeypatch.setattr(evaluations, "measure", spoiling)
    run(config)
    evaluated = [line for line in metrics(config) if "eval_tau" in line]
    assert [line["step"] for line in evaluated] == [5, 10, 15]
    taus = [line["eval_tau"] for line in evaluated]
    assert taus[2] < taus[1], "the control: the last draft is a bad one"
    for line in evaluated:
        assert line["eval_tau_low"] <= line["eval_tau"] <= line["eval_tau_high"]
        assert {
            "eval_tau_t0",
            "eval_tau_t1",
            "eval_predicted_tau_t0",
            "eval_alpha_1_t1",
            "eval_offered_1_t1",
        } <= line.keys()
    record = checkpoint.read_metadata(config.out)
    best = max(evaluated, key=lambda line: (line["eval_tau"], line["step"]))
    assert record["training"]["steps"] == 15
    assert record["training"]["kept_step"] == best["step"] != 15
    assert record["evaluation"][0]["measured"]["tau"]["value"] == pytest.approx(best["eval_tau_t0"])
    assert not list((Path(config.out) / "training").glob("best-15*"))
    target = Target.load(config.target)
    corpus = session.load_corpus(config, target)
    draft = checkpoint.load(config.out, target)
    kept = measure(
        draft,
        target,
        corpus.held_out.first(8),
        k=config.unroll.steps,
        max_new_tokens=12,
        batch_size=8,
    )
    assert kept.tau.value == pytest.approx(best["eval_tau"])


class Tracker(TrainerCallback):
    """What trackers are told, and that they are told nothing after the end."""

    def __init__(self):
        self.steps, self.is_over = [], False

    def on_log(self, args, state, control, logs=None, **unused):
        assert not self.is_over
        self.steps += [state.global_step] * ("eval_tau_t0_low" in logs)

    def on_train_end(self, *unused, **also_unused):
        self.is_over = True


def test_the_last_draft_is_evaluated_once_behind_its_checkpoint_and_trackers_are_told(
    configure, monkeypatch, capsys
):
    config, tracker, saved = configure(steps=5, save_every=5, **DECODED), Tracker(), []
    measured, new_trainer = evaluations.measure, session.new_trainer

    def looking(*told, **options):
        saved.append((Path(config.out) / "training" / "checkpoint-5").is_dir())
        return measured(*told, **options)

    def tracked(*told):
        trainer = new_trainer(*told)
        trainer.add_callback(tracker)
        return trainer

    monkeypatch.setattr(evaluations, "measure", looking)
    monkeypatch.setattr(session, "new_trainer", tracked)
    run(config)
    assert saved == [True] and tracker.steps == [5] and tracker.is_over
    (line,) = (line for line in metrics(config) if "eval_tau" in line)
    assert line["step"] == 5
    assert checkpoint.read_metadata(config.out)["training"]["kept_step"] == 5
    last = capsys.readouterr().out.strip().split("\n")[-1]
    assert (line["eval_tau"] < session.WEAK_TAU) is ("is near 1" in last)


class StopAtOnce(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **unused):
        self.tau = metrics["eval_tau"]
        control.should_training_stop = True


def test_a_callback_sees_the_figures_and_may_stop_the_run(configure):
    config, callback = configure(steps=9, eval_every=2, eval_prompts=2, eval_tokens=4), StopAtOnce()
    with pytest.raises(UserError, match=r"an EarlyStoppingCallback, .*; leave it out"):
        run(config, [EarlyStoppingCallback()])
    run(config, [callback])
    assert checkpoint.read_metadata(config.out)["training"]["steps"] == 2
    assert [line["eval_tau"] for line in metrics(config) if "eval_tau" in line] == [callback.tau]


def test_a_draft_of_which_nothing_is_accepted_is_told_of_at_the_end(configure, capsys):
    few = DraftOptions(draft_vocab_size=2)  # tokens, which the target seldom writes
    run(configure(steps=1, draft=few, eval_prompts=4, eval_tokens=8))
    last = capsys.readouterr().out.strip().split("\n")[-1]
    assert re.fullmatch(r"tau 1\.0\d .* slower than without; train longer than 1 steps .*", last)


def test_a_tracker_that_is_not_installed_is_one_sentence(configure):
    with pytest.raises(
        UserError, match="'report_to' names 'abacus', which is no tracker installed here"
    ):
        run(configure(report_to=("abacus",)))


def test_a_head_that_is_not_trained_stays_the_targets(configure):
    config = configure(
        steps=2, draft=DraftOptions(train_head=False), optim=OptimConfig(lr=1e-2, optimizer="muon")
    )
    run(config)
    target = Target.load(config.target)
    trained, new = (
        checkpoint.load(config.out, target),
        Eagle3.create(Eagle3Options(), target, seed=config.seed),
    )
    assert torch.equal(trained.lm_head.weight, target.output_weight)
    assert not torch.equal(trained.midlayer.mlp.down_proj.weight, new.midlayer.mlp.down_proj.weight)
    assert not torch.equal(trained.norm.weight, new.norm.weight)


@pytest.mark.parametrize(("family", "optimizer"), [("draft-lm", "muon")])
def test_more_steps_go_on_where_fewer_ended(family, optimizer, configure):
    """Also with tied weights, which a checkpoint holds once, and with two optimizers."""
    constant = {"optim": OptimConfig(optimizer=optimizer, lr=1e-2, schedule="constant", warmup=0.0)}
    whole = configure(family, steps=6, log_every=3, **constant)
    run(whole)
    for steps in (3, 6):
        run(replace(whole, steps=steps, out=whole.out + "-parts"))
    parts = metrics(replace(whole, out=whole.out + "-parts"))
    for one, other in zip(metrics(whole), parts, strict=True):
        assert {**one, "elapsed_s": 0} == {**other, "elapsed_s": 0}


@pytest.mark.parametrize("family", [pytest.param("eagle3", marks=pytest.mark.long), "dspark"])
def test_a_trained_draft_is_trained_further(family, configure):
    run(first := configure(family, steps=20))
    run(
        further := configure(
            family, init=first.out, out=first.out + "-further", steps=5, divergence="tvd++"
        )
    )
    assert metrics(further)[0]["alpha_1"] > metrics(first)[0]["alpha_1"] + 0.01
    before, after = (
        load_file(Path(config.out) / "model.safetensors") for config in (first, further)
    )
    assert before.keys() == after.keys() and any(
        not torch.equal(before[name], after[name]) for name in before
    )
    with pytest.raises(UserError, match=f"a draft of family '{family}'; train {family} with it"):
        run(configure("mlp", init=first.out, out=first.out + "-other"))


def test_going_on_with_other_options_is_refused(configure):
    run(configure(steps=1))
    with pytest.raises(UserError, match=r"optim.lr: 0.01 -> 0.5"):
        run(configure(steps=2, optim=OptimConfig(lr=0.5)))
    run(configure(steps=1, optim=OptimConfig(lr=0.02), resume=False))


def error_of(capsys, *arguments: str) -> str:
    assert cli.main(["train", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert all(line.startswith("draftsmith: loading ") for line in said[:-1]), said
    return said[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("eagle9",), "eagle9"),
        (("mtp", "--target", "no/such/target"), "no/such/target"),
        (("mtp", "--data", "no/such"), "is not a folder"),
        (("mtp", "--out", __file__), "is a file"),
        (("eagle3", "optim.lrr=1"), "unknown option 'optim.lrr'; did you mean 'optim.lr'?"),
        (("eagle3", "--steps", "0"), "'steps' is 0"),
        (
            ("eagle3", "draft.modules=4"),
            "option 'draft.modules' is none of family 'eagle3', which has taps, ",
        ),
        (
            ("eagle3", "--init", "D", "draft.train_head=false"),
            "options under 'draft' are of a new draft",
        ),
        (("draft-lm", "--init", "D"), "give it as draft.init"),
        (("eagle3", "optim.schedule=staircase"), "must be one of cosine, linear, constant"),
        (
            ("eagle3", "--deepspeed", "no/such.json"),
            "DeepSpeed config 'no/such.json' does not exist",
        ),
        (("draft-lm", "--target-logprobs", "4"), "give target_server too"),
        (("draft-lm", "--target-server", "http://h"), "give target_logprobs=64 too"),
        (("eagle3", *SERVED), "family 'eagle3' reads states of the target, which no server gives"),
        (("draft-lm", *SERVED, "--divergence", "ce"), "'divergence' needs whole distributions"),
        (("draft-lm", *SERVED), "'eval_prompts' needs the target here"),
        (("draft-lm", *SERVED, "--target-offload", "disk"), "'target_offload' needs the target"),
        (("draft-lm", *SERVED, "draft.target_layers=[0]"), "'draft.target_layers' needs"),
        (("eagle3", "--deepspeed", str(RECIPES / "zero2.json")), "use torchrun"),
        (
            ("eagle3", "--deepspeed", str(RECIPES / "zero2.json"), "optim.optimizer=muon"),
            "leave one of the two out",
        ),
    ],
)
def test_bad_options_are_one_sentence(arguments, said, configure, capsys):
    config = configure()
    common = ("--target", config.target, "--data", config.data, "--out", config.out)
    assert said in error_of(capsys, arguments[0], *common, *arguments[1:])


def test_prompt_logprobs_of_a_server_teach_what_the_target_here_does(configure, monkeypatch):
    """With all tokens of the vocabulary they are whole distributions, but for rounding."""
    here = configure("draft-lm", steps=2, log_every=1, packing=True, eval_prompts=0)
    run(here)
    transport = httpx.MockTransport(StandIn(Target.load(here.target)))
    monkeypatch.setattr(session, "PatientServer", partial(PatientServer, transport=transport))
    losses = [[row["loss"] for row in metrics(here) if "loss" in row]]
    for top, steps in ((288, 2), (4, 1)):
        served = {"target_server": "http://vllm", "target_logprobs": top, "steps": steps}
        there = replace(here, out=f"{here.out}-{top}", **served)
        run(there)
        losses.append([row["loss"] for row in metrics(there) if "loss" in row])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2][0] != pytest.approx(losses[0][0], rel=1e-4)


def test_a_second_training_in_the_folder_is_refused(configure, tmp_path):
    config, held = configure(steps=1), tmp_path / "draft"
    with (
        folder_lock(held, "train"),
        pytest.raises(UserError, match=f"is in use by another train .process {os.getpid()} "),
    ):
        run(config)
    assert not list(held.glob("*"))
    run(config)
    assert not list(tmp_path.rglob("*.lock"))


def test_what_is_damaged_or_cannot_be_written_is_one_sentence(configure, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/draft' cannot be written to"):
        run(configure(out=str(tmp_path / "file" / "draft")))
    config = configure(steps=2, save_every=1, log_every=1)
    run(config)
    newest = tmp_path / "draft" / "training" / "checkpoint-2"
    says = r"checkpoint-2' cannot be read .* delete this folder and start again"
    for file in sorted(newest.iterdir()):
        if file.name == "training_args.bin":  # nothing reads it
            continue
        content = file.read_bytes()
        # A full disk, and a power failure, leave these.
        for torn in (None, content[: len(content) // 2], bytes(len(content))):
            if torn is not None:
                file.write_bytes(torn)
            elif file.name != "complete.json":  # without it there is no checkpoint
                file.unlink()
            else:
                continue
            with pytest.raises(UserError, match=says) as caught:
                run(replace(config, steps=3))
            assert "\n" not in str(caught.value)
            file.write_bytes(content)
    shutil.rmtree(newest)
    run(replace(config, steps=3))


def test_a_full_disk_is_one_sentence_that_names_the_file(configure, capsys):
    config = configure(steps=1)
    run(config)  # `datasets` copies the answers the first time
    capsys.readouterr()
    words = ("mtp", "--target", config.target, "--data", config.data, "--out", config.out)
    with small_files(200):
        said = error_of(capsys, *words, "--no-resume")
    assert "run.json'); make some and start again: the run goes on from what it saved" in said


def test_a_run_over_weighted_folders_resumes_exactly_and_says_what_each_gave(
    configure, write_data, capsys
):
    generator = torch.Generator().manual_seed(1)
    other = torch.randint(3, 288, (8, 12), generator=generator).tolist()
    rows = [
        {"name": f"o{n}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * 8}
        for n, ids in enumerate(other)
    ]
    data = (f"{configure().data}:2", f"{write_data(rows, name='other')}:0.5")
    optim = OptimConfig(lr=1e-2, schedule="constant", warmup=0.0)
    settings = {"batch_size": 8, "log_every": 1, "save_every": 4, "optim": optim, "data": data}
    # An epoch has 5 batches.
    straight = configure(
        steps=7, out=f"{configure().out}-straight", eval_prompts=4, eval_tokens=2, **settings
    )
    run(straight)
    interrupted = replace(straight, out=f"{configure().out}-interrupted", eval_prompts=0)
    run(replace(interrupted, steps=4))
    run(interrupted)
    losses, again = (
        [line["loss"] for line in metrics(config) if "loss" in line]
        for config in (straight, interrupted)
    )
    assert len(losses) == 7 and again == losses
    first, second = checkpoint.read_metadata(straight.out)["training"]["folders"]
    assert (first["weight"], second["weight"]) == (2.0, 0.5)
    assert second["sequences"] + second["held_out_sequences"] == 8
    assert first["tau"]["value"] >= 1.0 and second["tau"]["value"] >= 1.0
    assert "tau of " in capsys.readouterr().out
