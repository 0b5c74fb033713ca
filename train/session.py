"""One training session: target, data and draft put together, trained, saved."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from draftsmith.config import to_dict
from draftsmith.drafters import checkpoint
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target import Target
from draftsmith.drafters.vocabulary import tokenizer_hash
from draftsmith.kernels.divergence_kind import kind_of
from draftsmith.train import arguments, resolve
from draftsmith.train.batches import batches_per_epoch
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import Corpus, check_tokenizer, read_corpus
from draftsmith.train.evaluation import Evaluation, evaluate_draft, temperature_of
from draftsmith.train.place import Place, find_place
from draftsmith.train.reporting import Reporter
from draftsmith.train.schedule import Clock
from draftsmith.train.teacher import LiveTeacher
from draftsmith.train.trainer import DraftTrainer, Trainee
from draftsmith.version import __version__


def train(config: TrainConfig) -> None:
    place = find_place(config.dtype)
    # Before DeepSpeed's config exists: under ZeRO-3 loading would partition the target's weights.
    target = Target.load(config.target, dtype=place.target_dtype, device=place.device)
    corpus = load_corpus(config, target)
    if place.rank == 0:
        tell_what_is_missing(config, corpus)
    drafter = new_drafter(config, place, target, corpus)
    spare = new_drafter(config, place, target, corpus) if resolve.zero_stage(config.deepspeed) == 3 else None
    trainee = Trainee(drafter, LiveTeacher(target), config.unroll, kind=kind_of(config.divergence), mean=config.mean)
    trainer = make_trainer(config, place, trainee, target, corpus, spare)
    trainer.train(resume_from_checkpoint=open_folder(config, place, trainer))
    finish(config, trainer, target, corpus)


def new_drafter(config: TrainConfig, place: Place, target: Target, corpus: Corpus) -> torch.nn.Module:
    counts = corpus.token_counts(target.vocab_size)
    drafter = FAMILIES[config.family].create(resolve.drafter_options(config), target, seed=config.seed, token_counts=counts)
    # Adam needs more digits than bfloat16 has, whatever the target is kept in.
    return drafter.to(device=place.device, dtype=torch.float32)


def load_corpus(config: TrainConfig, target: Target) -> Corpus:
    corpus = read_corpus(config.data, max_length=config.max_length, vocab_size=target.vocab_size, held_out_share=config.held_out)
    check_tokenizer(corpus.provenance, tokenizer_hash(target.tokenizer()), config.data)
    return corpus


def tell_what_is_missing(config: TrainConfig, corpus: Corpus) -> None:
    for count, what in (
        (corpus.cut, f"cut to {config.max_length} tokens"),
        (corpus.empty, "left out, nothing in them is the target's"),
    ):
        if count:
            print(f"{count} sequences of {config.data!r} are {what}", file=sys.stderr)


def make_trainer(
    config: TrainConfig, place: Place, trainee: Trainee, target: Target, corpus: Corpus, spare: torch.nn.Module | None
) -> DraftTrainer:
    folder = RunFolder(config.out)
    per_epoch = batches_per_epoch(len(corpus.train), config.batch_size)
    steps = resolve.total_steps(config, per_epoch, place.world_size)
    clock = Clock(total_steps=steps, budget_s=config.minutes and config.minutes * 60)
    trainer = DraftTrainer(
        trainee,
        arguments.training_arguments(config, place, folder=folder.training, max_steps=steps),
        sequences=corpus.train,
        optim=config.optim,
        clock=clock,
        evaluate_held_out=partial(evaluate_held_out, config, target, corpus),
        spare=spare,
    )
    trainer.add_callback(
        Reporter(
            folder,
            clock,
            steps_per_epoch=per_epoch / (config.accumulate * place.world_size),
            label=f"train {config.family}",
        )
    )
    return trainer


def open_folder(config: TrainConfig, place: Place, trainer: DraftTrainer) -> str | None:
    """The checkpoint to go on from. Rank 0 prepares the folder before the others look."""
    folder = RunFolder(config.out)
    if place.rank == 0:
        folder.open(config)
    trainer.accelerator.wait_for_everyone()
    newest = folder.newest()
    if newest is None:
        return None
    trainer.clock.elapsed_s = newest.elapsed_s
    return str(newest.path)


def evaluate_held_out(config: TrainConfig, target: Target, corpus: Corpus, drafter: torch.nn.Module) -> Evaluation | None:
    """On held-out text at the temperature it was written at; None without any."""
    sequences = corpus.held_out.first(config.eval_prompts)
    if not sequences:
        return None
    written_at = temperature_of(corpus.provenance, target)
    return evaluate_draft(
        drafter,
        target,
        sequences,
        temperature=1.0 if written_at is None else written_at,
        k=config.unroll.steps,
        batch_size=config.batch_size,
    )


def finish(config: TrainConfig, trainer: DraftTrainer, target: Target, corpus: Corpus) -> None:
    """Saves the trained draft with the record of its making."""
    drafter = trainer.whole_drafter()
    if not trainer.is_world_process_zero():
        return
    evaluation = evaluate_held_out(config, target, corpus, drafter)
    record: dict[str, Any] = {
        "version": __version__,
        "config": to_dict(config),
        "data": corpus.provenance,
        "seed": config.seed,
        "sequences": len(corpus.train),
        "held_out_sequences": len(corpus.held_out),
        "cut_sequences": corpus.cut,
        "steps": trainer.state.global_step,
        "elapsed_s": round(trainer.clock.elapsed_s, 1),
        "world_size": trainer.args.world_size,
        "metrics": trainer.last_metrics(),
    }
    # Text that does not follow the law it is scored with says how training went, but is no measurement of the draft.
    measured = evaluation is not None and temperature_of(corpus.provenance, target) is not None
    checkpoint.save(drafter, config.out, target, training=record, evaluation=[evaluation.to_dict()] if measured else None)
    figures = "" if evaluation is None else f"; held out at T={evaluation.temperature:g}: {evaluation.summary()}"
    print(f"{config.family} draft in {config.out} after {trainer.state.global_step} steps{figures}")
