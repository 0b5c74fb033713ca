"""`FollowPolicy`: callback of transformers' `Trainer`, and so of TRL's GRPO; a draft follows the
policy."""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.learn.text_states import FILES, WEIGHT_VERSION
from draftsmith.errors import UserError
from draftsmith.files import atomic_folder, sweep, write_text
from draftsmith.fleet.engine import logger, once
from draftsmith.fleet.observe.rounds import ObservedSampling, TokenCounter, records_of
from draftsmith.record import RecordHead, RecordSink, hashed

# A batch of rollouts comes at once, with a record per token.
QUEUE_RECORDS = 1 << 18
CURRENT = "current"
FOLDER = re.compile(r"step-\d{6,}")
# A learner may be reading the one before the newest.
FEWEST = 2


class FollowPolicy(TrainerCallback):
    """Writes the policy where `draftsmith distill FOLDER/current` follows it.

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
    ):
        if every < 1:
            raise UserError(f"every is {every}; give 1 optimizer step or more")
        self.revisions = PolicyRevisions(folder, keep=keep)
        self.every, self.save = every, save
        self.server = server
        self.rollouts = (
            Rollouts(BufferWriter(buffer, queue_records=QUEUE_RECORDS), template=template)
            if buffer
            else None
        )
        self.saved: int | None = None  # step of the newest revision

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
                "part of it; set save of FollowPolicy to trainer.save_model"
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
        if state.is_world_process_zero and self.server:
            name_weights(self.server, str(state.global_step))

    def _write(self, state: Any, kwargs: dict[str, Any]) -> None:
        """A disk that refuses costs a revision and not the training."""
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


TIMEOUT_S = 60.0
MOST_ROLLOUTS = 32


def name_weights(url: str, name: str) -> bool:
    """Name of the weights in the records of one vLLM from now on; nothing is raised, since training
    goes on without it.

    TRL sends weights and gives them no name. So the name is set where no request runs: after an
    optimizer step, before TRL sends the new weights with its next rollouts. vLLM has this route in
    its development mode alone, which TRL needs too.
    """
    import httpx

    route = f"{url.rstrip('/')}/update_weight_version"
    try:
        answer = httpx.post(route, json={"new_version": name}, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        once(f"{route} cannot be reached ({error})")
        return False
    if answer.status_code >= 300:
        once(f"{route} answers {answer.status_code}: {answer.text[:200]}")
        return False
    return True


Reward = Callable[..., Any]


def sampling_of(args: Any) -> ObservedSampling:
    """Sampling of the rollouts by a trainer's arguments, as TRL names them."""
    penalty = getattr(args, "repetition_penalty", None)
    more = getattr(args, "generation_kwargs", None)
    return ObservedSampling(
        temperature=float(getattr(args, "temperature", 1.0)),
        top_k=max(0, int(getattr(args, "top_k", None) or 0)),
        top_p=float(getattr(args, "top_p", None) or 1.0),
        min_p=float(getattr(args, "min_p", None) or 0.0),
        seeded=False,
        adjusts=penalty not in (None, 1.0) or bool(more),
    )


class Rollouts:
    """Records of the completions that a reward function is given, `MOST_ROLLOUTS` of each batch.

    `step` names the policy's weights in them. `template` is what prompts are templated with beside
    the `chat_template_kwargs` of the trainer's arguments. What cannot be recorded is left out, and
    training goes on.
    """

    def __init__(self, sink: RecordSink, *, template: Mapping[str, Any] | None = None):
        self.sink, self.template = sink, dict(template or {})
        self.step = 0
        self.recorded = 0
        self.tokenizer: Any = None
        self.sampling: ObservedSampling | None = None
        self._run, self._count = uuid.uuid4().hex[:12], 0

    def begin(self, tokenizer: Any, args: Any) -> None:
        """Tokenizer and arguments of the trainer, before the first rollout."""
        self.tokenizer, self.sampling = tokenizer, sampling_of(args)
        self.template |= getattr(args, "chat_template_kwargs", None) or {}

    def records(self, reward: Reward) -> Reward:
        """The reward function, whose completions are recorded first. One is enough: all functions
        of a trainer are given the same completions.

        Raises:
            UserError: `reward` is a model or the name of one.
        """
        if not callable(reward) or hasattr(reward, "forward"):
            raise UserError(
                f"reward {str(reward)[:40]!r} is no function; wrap a function, such as one that "
                "returns 0.0 for each completion"
            )
        if inspect.iscoroutinefunction(reward):

            @functools.wraps(reward)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                self.put(**kwargs)
                return await reward(*args, **kwargs)

            return awaited

        @functools.wraps(reward)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.put(**kwargs)
            return reward(*args, **kwargs)

        return called

    def put(
        self,
        *,
        prompts: Sequence[Any] = (),
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Sequence[int]] = (),
        **_: Any,
    ) -> None:
        """Records a batch as a reward function gets it."""
        try:
            self._put(prompts, completions, completion_ids)
        except Exception as error:
            # Prompts and templates are foreign; none of them may end the training.
            once(f"rollouts are not recorded ({error})")

    def _put(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
    ) -> None:
        if self.tokenizer is None or self.sampling is None:
            once("rollouts before the training begins are not recorded")
            return
        if not completion_ids:
            once("rollouts are not recorded: this trainer gives its reward functions no token ids")
            return
        own = [
            index
            for index, tokens in enumerate(completion_ids)
            if len(tokens) and not has_tools(completions[index])
        ]
        for index in own[:: -(-len(own) // MOST_ROLLOUTS) or 1]:
            tokens = TokenCounter(
                self._ids(prompts[index]), [int(one) for one in completion_ids[index]]
            )
            self._record(tokens, self.sampling)

    def _record(self, tokens: TokenCounter, sampling: ObservedSampling) -> None:
        head = RecordHead(
            request=hashed(f"rollout-{self._run}-{self._count}-0"),
            weight_version=str(self.step),
            **sampling.shared,
        )
        self._count += 1
        for record in records_of(tokens, None, head, adjusts=sampling.adjusts):
            self.sink.put(record)
        self.recorded += 1

    def _ids(self, prompt: Any) -> list[int]:
        """Tokens of a prompt as TRL makes them: a text, or messages for the chat template."""
        if isinstance(prompt, str):
            return list(self.tokenizer(text=[prompt])["input_ids"][0])
        found = self.tokenizer.apply_chat_template(
            conversation=[prompt],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.template,
        )
        return list(found["input_ids"][0])


def has_tools(completion: Any) -> bool:
    """True for a completion with answers of tools, which no policy wrote."""
    return not isinstance(completion, str) and any(
        message.get("role") == "tool" for message in completion
    )
