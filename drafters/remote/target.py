"""A target whose passes a server makes. Its embeddings, last norm and head are here, from the
server too; `--target` gives configuration and tokenizer, and needs no weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from draftsmith.drafters.patches.table import implementation
from draftsmith.drafters.remote.checks import (
    check_config,
    check_description,
    check_weights,
    other_model,
)
from draftsmith.drafters.remote.connection import Connection, in_background
from draftsmith.drafters.remote.messages import DTYPES, StatesOfTexts, Texts
from draftsmith.drafters.remote.parts import LayersThere, fill
from draftsmith.drafters.remote.rounds import token_pool, whole_texts, write_answers
from draftsmith.drafters.remote.service import stack_name
from draftsmith.drafters.target.attention import AttentionContext, register
from draftsmith.drafters.target.causal_lm import CausalLM, Probe
from draftsmith.drafters.target.generate import Sampling
from draftsmith.drafters.target.load import build_model, load_config
from draftsmith.drafters.target.taps import FINAL, check_taps
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.drafters.vocabulary import tokenizer_hash
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.sampling.top_tokens import TopProbs


class Place(NamedTuple):
    """Device and numbers of what is kept of a target."""

    device: torch.device
    dtype: torch.dtype


class RemoteTarget(Target):
    """`model` is the outline of the target but for what is outside its layers. A pass gives what
    the server's gives: `states` of whole texts, 0 at padding."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        connection: Connection,
        there: dict[str, Any],
        place: Place,
        *,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ):
        """`there`: the server's description of its target."""
        self.connection, self.there, self._place = connection, there, place
        probe = Probe(there["hidden_size"], there["vocab_size"], [])
        CausalLM.__init__(self, model, name, lambda lm: probe, max_length=max_length)
        if self.has_long_factors != there["has_long_factors"]:
            raise UserError(
                f"target server {connection.base} reads texts with other rotary factors than this "
                "run (LongRoPE: long or short texts); give both the same max_length"
            )
        self.trust_remote_code = trust_remote_code
        self.revision, self.loaded_revision = there["revision"], there["loaded_revision"]
        self.same_as, self._tokenizer = there["same_as"], None
        stack = f"{stack_name(self)}."
        fill(model, connection.weights(), **place._asdict(), outside=stack)
        self.layers = LayersThere(self.layers, connection, **place._asdict())
        self._ahead: tuple[Texts, Future[StatesOfTexts]] | None = None

    @property
    def device(self) -> torch.device:
        return self._place.device

    @property
    def dtype(self) -> torch.dtype:
        return self._place.dtype

    @property
    def max_positions(self) -> int:
        return min(super().max_positions, self.there["max_positions"])

    def pass_bytes(self) -> int:
        return self.there["pass_bytes"]

    @torch.no_grad()
    def states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: Sequence[int],
        segments: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        texts = self._texts(input_ids, attention_mask, taps, segments)
        found = self._found_ahead(texts) or self._found(texts)
        return self._laid_out(texts, found, taps)

    def likeliest(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        segments: torch.Tensor | None,
        top: int,
    ) -> TopProbs:
        """The `top` likeliest tokens after each of the N tokens that are no padding, row by row."""
        texts = self._texts(input_ids, attention_mask, (), segments, top)
        found = self._found_ahead(texts) or self._found(texts)
        assert found.top_ids is not None and found.top_logprobs is not None
        assert found.tail is not None
        parts = (found.top_ids.long(), found.top_logprobs, found.tail)
        return TopProbs(*(part.to(self.device) for part in parts))

    def expect(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: Sequence[int],
        segments: torch.Tensor | None = None,
        *,
        top: int = 0,
    ) -> None:
        """Asks for the states of texts that `states` will be called with, and does not wait.
        `top`: for `likeliest`."""
        texts = self._texts(input_ids, attention_mask, taps, segments, top)
        self._ahead = texts, in_background(partial(self._found, texts))

    def _found_ahead(self, texts: Texts) -> StatesOfTexts | None:
        if self._ahead is None or not is_same(self._ahead[0], texts):
            return None
        found, self._ahead = self._ahead[1], None
        return found.result()

    def _found(self, texts: Texts) -> StatesOfTexts:
        """In as many requests as the server needs."""
        found = [self.connection.states(part) for part in texts.in_parts(self.there["max_tokens"])]
        known = [[part for part in parts if part is not None] for parts in zip(*found, strict=True)]
        return StatesOfTexts(*(torch.cat(parts) if parts else None for parts in known))

    def _texts(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: Sequence[int],
        segments: torch.Tensor | None,
        top: int = 0,
    ) -> Texts:
        self.check_texts(input_ids, attention_mask, segments)
        check_taps(taps, self.num_layers)
        mask = attention_mask.bool()
        texts = Texts(
            ids=input_ids[mask].cpu(),
            lengths=mask.sum(dim=1).cpu(),
            width=input_ids.shape[1],
            segments=None if segments is None else segments[mask].cpu(),
            taps=tuple(tap for tap in taps if tap != FINAL),
            dtype=self.wire_dtype,
            top=top,
        )
        self._check_size(texts)
        return texts

    def _check_size(self, texts: Texts) -> None:
        if texts.width > (most := self.there["max_tokens"]):
            raise UserError(
                f"a row has {texts.width} positions, padding included, and target server "
                f"{self.connection.base} reads {most}; give a smaller max_length, or start it with "
                "more --states-max-tokens"
            )

    @property
    def wire_dtype(self) -> str:
        """Numbers in which states travel: the narrower ones of both sides."""
        theirs = self.there["states_dtype"]
        own = str(self.dtype).removeprefix("torch.")
        return own if self.dtype.itemsize < DTYPES[theirs].itemsize else theirs

    def _laid_out(
        self, texts: Texts, found: StatesOfTexts, taps: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        assert found.hidden is not None  # nothing else was asked for
        mask = texts.mask.to(self.device)

        def whole(rows: torch.Tensor) -> torch.Tensor:
            padded = torch.zeros(*mask.shape, rows.shape[-1], dtype=self.dtype, device=self.device)
            padded[mask] = rows.to(padded)
            return padded

        joined = joined_taps(found, taps, self.hidden_size)
        return None if joined is None else whole(joined), whole(found.hidden)

    def read_apart(
        self, texts: Sequence[torch.Tensor], taps: Sequence[int]
    ) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """(taps [n, w], final states [n, H]) of each text of token ids [n], which the server reads
        in a pass of its own; on the CPU."""
        found = []
        for part in self._parts(texts):
            asked = Texts(
                ids=torch.cat(part).cpu(),
                lengths=torch.tensor([len(ids) for ids in part]),
                width=max(len(ids) for ids in part),
                taps=tuple(tap for tap in taps if tap != FINAL),
                dtype=self.wire_dtype,
                apart=True,
            )
            self._check_size(asked)
            states, sizes = self.connection.states(asked), asked.lengths.tolist()
            assert states.hidden is not None
            joined = joined_taps(states, taps, self.hidden_size)
            hidden = states.hidden.to(self.dtype).split(sizes)
            tapped = [None] * len(part) if joined is None else joined.to(self.dtype).split(sizes)
            found += list(zip(tapped, hidden, strict=True))
        return found

    def _parts(self, texts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Texts in order, as many together as the server reads."""
        parts: list[list[torch.Tensor]] = []
        size = 0
        for ids in texts:
            if not parts or size + len(ids) > self.there["max_tokens"]:
                parts, size = [*parts, []], 0
            parts[-1].append(ids)
            size += len(ids)
        return parts

    def new_pool(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagedPool:
        return token_pool(num_blocks, block_size, self.device)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention_context: AttentionContext,
        logit_rows: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        texts = whole_texts(input_ids[0], positions[0], attention_context)
        tapped, hidden = self.states(texts.ids, texts.mask.long(), taps)
        logits = self.head(hidden[texts.row, texts.position][logit_rows]).float()
        return TargetOutput(logits, None if tapped is None else tapped[texts.row, texts.position])

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seeds: Sequence[int] | None = None,
        batch_size: int = 16,
        ignore_eos: bool = False,
    ) -> list[list[int]]:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        chosen = list(range(len(prompts)) if seeds is None else seeds)
        eos = () if ignore_eos else self.eos_token_ids
        answers: list[list[int]] = []
        for begin in range(0, len(prompts), batch_size):
            part = slice(begin, begin + batch_size)
            answers += write_answers(
                self, prompts[part], max_new_tokens, sampling, chosen[part], eos
            )
        return answers


def is_same(one: Texts, other: Texts) -> bool:
    """True where the answers are the same."""
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b
        for a, b in (
            (one.ids, other.ids),
            (one.lengths, other.lengths),
            (one.segments, other.segments),
        )
    ) and (one.width, one.taps, one.top) == (other.width, other.taps, other.top)


def joined_taps(found: StatesOfTexts, taps: Sequence[int], hidden_size: int) -> torch.Tensor | None:
    """[N, n * H] in the order of `taps`; final states, which come once, at `FINAL`."""
    if not taps:
        return None
    assert found.hidden is not None
    raw = iter(() if found.taps is None else found.taps.split(hidden_size, dim=-1))
    return torch.cat([found.hidden if tap == FINAL else next(raw) for tap in taps], dim=-1)


def load_remote(
    path: str,
    url: str,
    *,
    served_as: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device,
    max_length: int | None = None,
    trust_remote_code: bool,
) -> RemoteTarget:
    """The target of the server at `url`, which must be the model that the folder or Hub id `path`
    describes, in the precision `served_as` ("auto": any). What is kept here is in `dtype`; None is
    the server's, float32 on a CPU. Raises `UserError`."""
    connection = Connection(url)
    there = connection.description()
    check_description(connection, there, served_as)
    config = load_config(path, trust_remote_code=trust_remote_code)
    check_config(config, there, connection.base, path)
    with torch.device("meta"):
        model = build_model(
            config,
            trust_remote_code=trust_remote_code,
            attn_implementation=implementation(config, register()),
        ).eval()
    check_weights(path, model, there, connection.base)
    connection.revision, connection.hidden_size = there["revision"], there["hidden_size"]
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else DTYPES[there["states_dtype"]]
    target = RemoteTarget(
        model,
        str(path),
        connection,
        there,
        Place(device, dtype),
        max_length=max_length,
        trust_remote_code=trust_remote_code,
    )
    if tokenizer_hash(target.tokenizer()) != there["tokenizer_hash"]:
        raise other_model(connection.base, path, "its tokenizer has other ids")
    return target
