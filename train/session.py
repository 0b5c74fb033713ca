"""One training session: target, data and draft put together, trained, evaluated, saved; and the
Trainer's arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.device import Placement, load_target, placement_of
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import atomic_path
from draftsmith.kernels.dispatch import pins, reads_freely
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train import resolve
from draftsmith.train.checkpoints import (
    BestDraft,
    Checkpoint,
    KeptCheckpoint,
    RunFolder,
    is_evaluated,
)
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.batches import BatchPlan
from draftsmith.train.data.mixture import Mixture, describe, read_mixture
from draftsmith.train.evaluate.measured import Figures, HeldOut
from draftsmith.train.evaluate.picture import draw_curves
from draftsmith.train.objective.outline import load_outline
from draftsmith.train.objective.prompt_logprobs import PatientServer, PromptLogprobs
from draftsmith.train.objective.stored_teacher import DistributionSource, stored_source
from draftsmith.train.objective.teacher import LiveSource, TargetSource
from draftsmith.train.optim import BETAS, Clock
from draftsmith.train.reporting import Reporter, rank_0_s
from draftsmith.train.trainer import DraftTrainer, Trainee
from draftsmith.version import __version__

WEAK_TAU = 1.2  # the draft's own passes cost more than this brings


class Material(NamedTuple):
    """Place, target and data of a session, the same for every draft that it trains."""

    placement: Placement
    target: Target
    corpus: Mixture


def train(config: TrainConfig, callbacks: Sequence[TrainerCallback] = ()) -> None:
    if any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks):
        raise UserError(
            "callbacks holds an EarlyStoppingCallback, which reads another evaluation than that of "
            "drafts; leave it out, the best draft is kept, or stop the run in a callback's "
            "on_evaluate"
        )
    material = prepare(config)
    drafter = new_drafter(config, *material)
    trainer = new_trainer(config, material, drafter, new_source(config, material, drafter))
    for callback in callbacks:
        trainer.add_callback(callback)
    newest = open_folder(config, material, trainer)
    keep_time(trainer, newest)
    if newest is not None and is_finished(config, trainer, newest):
        if trainer.is_world_process_zero():
            print(
                f"{config.out} holds this training, finished after {newest.step} steps; its "
                "figures are in metrics.jsonl and curves.png there; eval measures it again"
            )
        return
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest.path))
    finish(config, trainer, material)


def prepare(config: TrainConfig) -> Material:
    placement = placement_of(config.dtype)
    # Before DeepSpeed's config exists: under ZeRO-3 loading would partition the target's weights.
    target = open_target(config, placement)
    corpus = load_corpus(config, target)
    if placement.rank == 0:
        warn_of_cut_texts(config, corpus)
        describe(corpus)
    return Material(placement, target, corpus)


def open_target(config: TrainConfig, placement: Placement) -> Target:
    """The outline where a server gives likeliest tokens."""
    device, trust, length = str(placement.device), config.trust_remote_code, config.max_length
    if config.target_server is not None:
        return load_outline(
            config.target, device=device, max_length=length, trust_remote_code=trust
        )
    return load_target(
        config.target,
        dtype=placement.target_dtype,
        device=device,
        max_length=length,
        shares=config.target_shares,
        offload=config.target_offload,
        use="step",
        trust_remote_code=trust,
    )


def load_corpus(config: TrainConfig, target: Target) -> Mixture:
    target.check_length(config.max_length, "option 'max_length'")
    mixture = read_mixture(
        config.data,
        target,
        max_length=config.max_length,
        held_out_share=config.held_out,
        split_long=config.long == "split",
    )
    for corpus in mixture.corpora:
        corpus.train.with_prompts = config.with_prompts
    return mixture


def warn_of_cut_texts(config: TrainConfig, mixture: Mixture) -> None:
    done = "cut to" if config.long == "cut" else "split at"
    for folder, corpus in zip(mixture.folders, mixture.corpora):
        for count, what in (
            (corpus.long, f"{done} {config.max_length} tokens"),
            (corpus.empty, "left out, nothing in them is the target's"),
        ):
            if count:
                print(f"{count} sequences of {folder.path!r} are {what}", file=sys.stderr)


def new_drafter(
    config: TrainConfig, placement: Placement, target: Target, corpus: Mixture
) -> torch.nn.Module:
    # Adam needs more digits than bfloat16 has, whatever the target is kept in.
    if config.init is not None:
        return older_drafter(config.init, config.family, target)
    counts = corpus.token_counts(target.vocab_size)
    drafter = FAMILIES[config.family].create(
        resolve.drafter_options(config), target, seed=config.seed, token_counts=counts
    )
    return drafter.to(device=placement.device, dtype=torch.float32)


def older_drafter(init: str, family: str, target: Target) -> TrainedDrafter:
    drafter = checkpoint.load(init, target, dtype=torch.float32)
    if drafter.family != family:
        raise UserError(
            f"option 'init' is {init!r}, a draft of family {drafter.family!r}; train "
            f"{drafter.family} with it"
        )
    return drafter


def new_source(config: TrainConfig, material: Material, drafter: torch.nn.Module) -> TargetSource:
    target, corpus = material.target, material.corpus
    if config.target_server is not None:
        server = PatientServer(config.target_server, "target_server")
        return PromptLogprobs(server, target.vocab_size, config.target_logprobs)
    if config.teacher == "live":
        return LiveSource(target)
    records = {folder.path: one.provenance for folder, one in zip(corpus.folders, corpus.corpora)}
    kept = RunFolder(config.out).training / "rest_logits.f32"
    source = stored_source(target, records, drafter.taps, drafter.vocab_map, kept)
    if isinstance(source, DistributionSource):
        resolve.check_stored_sparse(config)
    return source


def new_trainer(
    config: TrainConfig, material: Material, drafter: torch.nn.Module, source: TargetSource
) -> DraftTrainer:
    placement, target, corpus = material
    spare = new_drafter(config, *material) if resolve.zero_stage(config.deepspeed) == 3 else None
    kind = kind_of(config.divergence)
    trainee = Trainee(drafter, source, config.unroll, kind=kind)
    folder = RunFolder(config.out)
    folder.training.mkdir(parents=True, exist_ok=True)
    plan = BatchPlan(
        corpus.train.lengths,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=placement.rank,
        world_size=placement.world_size,
        row_length=config.max_length if config.packing else None,
        parts=corpus.train.parts,
    )
    per_epoch = len(plan.epoch(0))
    steps = resolve.total_steps(config, per_epoch, placement.world_size)
    args = training_arguments(config, placement, folder=folder.training, max_steps=steps)
    held_out = HeldOut(
        config, target, corpus.held_out.first(config.eval_prompts), partial(rank_0_s, args)
    )
    eval_every = resolve.eval_interval(config, steps)
    if placement.rank == 0 and held_out.sequences and 0 < eval_every < steps:
        print(
            f"held-out tau every {eval_every} steps, of {len(held_out.sequences)} prompts "
            "(eval_every, eval_prompts)",
            file=sys.stderr,
        )
    clock = Clock(total_steps=steps, budget_s=config.minutes and config.minutes * 60)
    trainer = DraftTrainer(
        trainee,
        args,
        sequences=corpus.train,
        plan=plan,
        optim=config.optim,
        clock=clock,
        held_out=held_out,
        spare=spare,
    )
    trainer.add_callback(
        Reporter(
            folder,
            clock,
            steps_per_epoch=per_epoch / (config.accumulate * placement.world_size),
            label=f"train {config.family}",
            eval_every=eval_every,
            window=trainer.window if reads_freely(placement.device) else None,
        )
    )
    return trainer


def open_folder(
    config: TrainConfig, material: Material, trainer: DraftTrainer
) -> Checkpoint | None:
    """The checkpoint to go on from. Rank 0 prepares the folder before the others look."""
    folder, placement = RunFolder(config.out), material.placement
    if placement.rank == 0:
        folder.open(config)
        folder.keep_data(trainer.sequences.lengths)
        folder.keep_target(material.target.revision)
    trainer.accelerator.wait_for_everyone()
    newest = folder.newest()
    if newest is None:
        return None
    trainer.clock.elapsed_s = newest.elapsed_s
    return newest


def keep_time(trainer: DraftTrainer, newest: Checkpoint | None) -> None:
    """Keeps the time of the last evaluation back, as much as before a kill. A run that was killed
    behind its last step goes on with that evaluation, without another step."""
    kept_s = 0.0 if newest is None else newest.kept_s
    trainer.clock.keep(kept_s or trainer.held_out.expected_s(trainer.model.drafter))
    if newest is not None and trainer.clock.out_of_time():
        trainer.args.max_steps = newest.step


def is_finished(config: TrainConfig, trainer: DraftTrainer, newest: Checkpoint) -> bool:
    """True where the same options have left nothing to train, to measure and to save."""
    before = checkpoint.training_of(config.out).get("config", {})
    is_same = resolve.flat(before) == resolve.flat(asdict(config))
    metrics, step = RunFolder(config.out).metrics, newest.step
    is_measured = not trainer.held_out.sequences or is_evaluated(metrics, step)
    return is_same and is_measured and step >= trainer.args.max_steps


def finish(config: TrainConfig, trainer: DraftTrainer, material: Material) -> None:
    """Saves the best draft of the run, which is the last where none was measured, with the record
    of its making."""
    target, corpus = material.target, material.corpus
    drafter, steps = trainer.whole_drafter(), trainer.state.global_step
    figures = trainer.held_out_figures(drafter)
    if not trainer.is_world_process_zero():
        return
    folder = RunFolder(config.out)
    # A run that was killed in its last evaluation goes on here, behind the training.
    if figures is not None and not is_evaluated(folder.metrics, steps):
        trainer.log_figures(figures)
    best = BestDraft(folder.training).read()
    record: dict[str, Any] = {
        "version": __version__,
        "config": asdict(config),
        "data": corpus.provenance(),
        "folders": by_folder(corpus, figures),
        "seed": config.seed,
        "sequences": len(corpus.train),
        "held_out_sequences": len(corpus.held_out),
        "long_sequences": corpus.long,
        "steps": steps,
        "kept_step": steps if best is None else best.step,
        "elapsed_s": round(trainer.clock.elapsed_s, 1),
        "world_size": trainer.args.world_size,
        "metrics": trainer.last_metrics(),
    }
    if best is None:
        checkpoint.save(drafter, config.out, target, training=record)
    else:
        checkpoint.save(best, config.out, target, training=record, evaluation=best.evaluation)
    if folder.metrics.is_file():
        with atomic_path(folder.curves) as picture:
            draw_curves(folder.metrics, picture)
    print(summary(config, steps, best, figures))
    for entry in record["folders"]:
        if "tau" in entry:
            print(f"  tau of {entry['folder']}: {entry['tau']['value']:.2f}")
    tau = record["metrics"].get("tau") if best is None else best.tau
    if tau is not None and tau < WEAK_TAU:
        print(
            f"tau {tau:.2f} is near 1, so few drafted tokens are accepted and serving with it is "
            f"likely slower than without; train longer than {steps} steps or on more data, and "
            "check the data with draftsmith doctor"
        )


def by_folder(corpus: Mixture, figures: Figures | None) -> list[dict[str, Any]]:
    """Texts of each folder, and of several tau of its held-out prompts after the last step."""
    found = corpus.record()
    if figures is not None:
        for folder, tau in figures.tau_by_folder().items():
            found[folder]["tau"] = tau._asdict()
    return found


def summary(
    config: TrainConfig, steps: int, best: KeptCheckpoint | None, figures: Figures | None
) -> str:
    kept = (
        f", of step {best.step}, the best measured,"
        if best is not None and best.step != steps
        else ""
    )
    measured = "" if figures is None else f"; held out after the last step: {figures.summary()}"
    return f"{config.family} draft{kept} in {config.out} after {steps} steps{measured}"


class DraftArguments(TrainingArguments):
    """`TrainingArguments` of ranks that can go on from a checkpoint on a CPU too."""

    @property
    def device(self) -> torch.device:
        """Without an index on a CPU: accelerate calls a rank's device `cpu:0`, and transformers
        5.16 loads the optimizer to it, which torch refuses."""
        device = super().device
        return torch.device("cpu") if reads_freely(device) else device


def training_arguments(
    config: TrainConfig, placement: Placement, *, folder: Path, max_steps: int
) -> TrainingArguments:
    check_trackers(config.report_to)
    on_cpu = reads_freely(placement.device)
    arguments = DraftArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        adam_beta2=BETAS[1],
        max_grad_norm=config.optim.max_grad_norm,
        logging_steps=config.log_every,
        logging_first_step=True,
        # A lost run must be seen, not averaged over.
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=resolve.save_interval(config),
        # The one before the newest stays, in case a kill cuts the newest short.
        save_total_limit=2,
        bf16=placement.bf16,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and placement.world_size > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
        deepspeed=resolve.deepspeed_config(config.deepspeed),
        seed=config.seed,
        disable_tqdm=True,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        log_level="error",
    )
    # With several devices and no launcher the Trainer would reach for nn.DataParallel, which splits
    # batches of tensors only and would not move the target; one device it is. `device` first:
    # reading it sets the count.
    if pins(arguments.device):
        arguments._n_gpu = 1
    return arguments


def check_trackers(names: tuple[str, ...]) -> None:
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in installed:
            raise UserError(
                f"option 'report_to' names {name!r}, which is no tracker installed here "
                f"({', '.join(installed) or 'none'})"
            )
