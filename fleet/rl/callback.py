"""`FollowPolicy`: callback of transformers' `Trainer`, and so of TRL's GRPO; a draft follows the
policy."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.learn.target_source import FILES, WEIGHT_VERSION
from draftsmith.errors import UserError
from draftsmith.files import atomic_folder, sweep, write_text
from draftsmith.fleet.engine import logger
from draftsmith.fleet.rl.handover import Handover, VllmServer
from draftsmith.fleet.rl.rollouts import Reward, Rollouts

# A batch of rollouts comes at once, with a record per token.
QUEUE_RECORDS = 1 << 18
CURRENT = "current"
FOLDER = re.compile(r"step-\d{6,}")
# A learner may be reading the one before the newest.
FEWEST = 2


class FollowPolicy(TrainerCallback):
    """Writes the policy where `draftsmith distill --target FOLDER/current` follows it.

    Args:
        folder: of the revisions.
        every: optimizer steps between two revisions.
        keep: revisions on disk.
        save: writes the policy into a folder; called on every process. Needed for sharded models,
            of which `trainer.save_model` writes the whole. Without it `model.save_pretrained`.
        buffer: folder or fsspec URL for rollouts, where the engine records nothing itself; wrap a
            reward function with `records`.
        server: URL of the vLLM that rolls out, whose records name the weights by optimizer step.
        template: `tools` or `chat_template` of the trainer, where rollouts are recorded.
        drafts: gives the newest draft version to the engine after each step.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 1,
        keep: int = 3,
        save: Callable[[str], object] | None = None,
        buffer: str = "",
        server: str = "",
        template: Mapping[str, Any] | None = None,
        drafts: Handover | None = None,
    ):
        if every < 1:
            raise UserError(f"every is {every}; give 1 optimizer step or more")
        self.revisions = PolicyRevisions(folder, keep=keep)
        self.every, self.save, self.drafts = every, save, drafts
        self.server = VllmServer(server) if server else None
        self.rollouts = (
            Rollouts(BufferWriter(buffer, queue_records=QUEUE_RECORDS), template=template)
            if buffer
            else None
        )
        self.saved: int | None = None  # step of the newest revision
        self.save_s = 0.0  # spent on revisions

    def records(self, reward: Reward) -> Reward:
        """The reward function, whose completions are recorded.

        Raises:
            UserError: there is no buffer to record into.
        """
        if self.rollouts is None:
            raise UserError("rollouts are recorded into a buffer; give FollowPolicy buffer=FOLDER")
        return self.rollouts.records(reward)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the first revision, with which a learner can begin."""
        if self.save is None and is_sharded(kwargs["model"]):
            raise UserError(
                "the policy is sharded over processes, so that model.save_pretrained would write a "
                "part of it; give FollowPolicy save=trainer.save_model"
            )
        if self.rollouts is not None:
            self.rollouts.begin(kwargs.get("processing_class"), args)
        self._write(state, kwargs)
        self._step(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._write(state, kwargs)
        self._step(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the last revision and flushes the buffer."""
        if state.global_step != self.saved:
            self._write(state, kwargs)
        if self.rollouts is not None:
            self.rollouts.sink.close()

    def _step(self, state: Any) -> None:
        """No rollout runs now; the next ones are of the weights of this step."""
        if self.rollouts is not None:
            self.rollouts.step = state.global_step
        if not state.is_world_process_zero:
            return
        if self.server is not None:
            self.server.name_weights(str(state.global_step))
        if self.drafts is not None:
            self.drafts.look()

    def _write(self, state: Any, kwargs: dict[str, Any]) -> None:
        """A disk that refuses costs a revision and not the training."""
        begun_s = time.monotonic()
        if not state.is_world_process_zero:
            if self.save is not None:
                # The gathering of shards needs every process; only the first one writes.
                self.save(str(self.revisions.root))
            return
        try:
            self.revisions.write(state.global_step, lambda folder: self._save(folder, kwargs))
        except OSError as error:
            logger.warning("draftsmith: no revision of step %d (%s)", state.global_step, error)
            return
        self.saved = state.global_step
        self.save_s += time.monotonic() - begun_s

    def _save(self, folder: Path, kwargs: dict[str, Any]) -> None:
        if self.save is not None:
            self.save(str(folder))
        else:
            kwargs["model"].save_pretrained(folder)
        if (tokenizer := kwargs.get("processing_class")) is not None:
            tokenizer.save_pretrained(folder)


def is_sharded(model: torch.nn.Module) -> bool:
    """True where this process holds parts of the parameters: FSDP of either kind, or ZeRO-3."""
    return any(
        hasattr(one, "ds_id") or type(one).__name__ in ("DTensor", "FlatParameter")
        for one in model.parameters()
    )


class PolicyRevisions:
    """Writer of the revisions below `root`, of which the newest `keep` stay."""

    def __init__(self, root: str | Path, *, keep: int = 3):
        if keep < FEWEST:
            raise UserError(f"keep is {keep}; give {FEWEST} revisions or more")
        self.root, self.keep = Path(root), keep

    @property
    def target(self) -> Path:
        """The file for `--target` of the learner."""
        return self.root / CURRENT

    def write(self, step: int, save: Callable[[Path], object]) -> Path:
        """`save` writes the model into the folder that it is given. Returns the revision's folder,
        which the learner finds from now on.

        Raises:
            UserError: `save` wrote no weights in safetensors.
            OSError: the disk refuses; the revision before stays the newest.
        """
        folder = self.root / f"step-{step:06d}"
        sweep(self.root)
        with atomic_folder(folder) as temporary:
            save(temporary)
            if not any(temporary.glob(FILES)):
                raise UserError(
                    f"the policy of step {step} was saved without a {FILES} file; give a `save` "
                    "that writes safetensors"
                )
            write_text(temporary / WEIGHT_VERSION, f"{step}\n")
        write_text(self.target, f"{folder.name}\n")
        self._prune()
        return folder

    def _prune(self) -> None:
        """Keeps the latest by time of writing, since a training may resume at an earlier step."""
        found = [path for path in self.root.iterdir() if FOLDER.fullmatch(path.name)]
        found.sort(key=lambda path: (path / WEIGHT_VERSION).stat().st_mtime_ns)
        for path in found[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)
