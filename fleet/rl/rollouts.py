"""Completions of a trainer as records: texts to learn from, without rounds.

A reward function of TRL gets prompts and completions with their tokens, whatever generated them. It
is wrapped, and its rewards stay what they are.
"""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.errors import UserError
from draftsmith.fleet.engine import once
from draftsmith.fleet.observe.rounds import ObservedSampling, TokenCounter, records_of
from draftsmith.record import RecordHead, RecordSink, hashed

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
    """Records of the completions that a reward function is given, `most` of each batch.

    `step` names the policy's weights in them. `template` is what prompts are templated with beside
    the `chat_template_kwargs` of the trainer's arguments. What cannot be recorded is left out, and
    training goes on.
    """

    def __init__(
        self, sink: RecordSink, *, most: int = 32, template: Mapping[str, Any] | None = None
    ):
        self.sink, self.most, self.template = sink, most, dict(template or {})
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
        for index in own[:: -(-len(own) // self.most) or 1]:
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
        for record in records_of(tokens, None, (), head, adjusts=sampling.adjusts):
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
