"""Probe of a causal LM at load: keys and values that a context can own, a head where it is
expected, states that depend on their own text alone."""

from __future__ import annotations

import itertools

import torch

from draftsmith.drafters.quirks.recurrent import state_layers
from draftsmith.drafters.quirks.recurrent_states import NotedStates, Split, StatePass, TextPiece
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.causal_lm import CausalLM, PassProbe
from draftsmith.drafters.target.packed_pass import PackedPass
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_torch import reference_attention
from draftsmith.kernels.attention.pool import Chunk, LayerShape, PagedPool, Scoring

# A prompt shorter than a convolution, a single token, several.
CHUNKS = (2, 1, 9)
NUM_TOKENS = sum(CHUNKS)
NO_ATTENTION = LayerShape(0, 0, 0)
NARROW = 2  # tokens of a window that a probe's text would not fit in
HIDDEN_WINDOW = "it hides its sliding window in a mask instead of telling its attention"
NARROW_CHUNK = 5
HIDDEN_CHUNKS = "its chunks of attention are others than its configuration says"
SHORT_TOKENS = 9  # of the text beside the long one
# Largest allowed difference of logits, as a share of their spread. Only a wrong computation comes
# near these.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@torch.no_grad()
def check_weights(model: torch.nn.Module, name: str) -> None:
    """Raises `UserError` for a weight that is not finite, by one look at each; those that are not
    here, and codes of 8 bits, are left out."""
    for key, own in model.named_parameters():
        if own.is_meta or not own.is_floating_point() or own.element_size() == 1:
            continue
        if bool(own.sum(dtype=torch.promote_types(own.dtype, torch.float32)).isfinite()):
            continue
        rows = (~own.isfinite()).flatten(1 if own.ndim > 1 else 0).nonzero()[:, 0]
        for row in rows[:1].tolist():  # none where a sum of large weights alone has no end
            raise UserError(
                f"target {name!r} has NaN or infinite weights, first in row {row} of {key!r}; "
                "restore its files"
            )


class AttentionShapes:
    """An `AttentionContext` that attends causally within the pass and notes the shapes every layer
    asks for."""

    split = None  # one text, from its beginning

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windowed = self.chunked = False

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.windowed |= isinstance(rule.window, int)
        self.chunked |= isinstance(rule.window, Chunk)
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
        out = reference_attention(query[0], key[0], value[0], mask, rule)
        return out.transpose(0, 1).unsqueeze(0)


# Kinds that pass the probe and fail a test of sampled text.
UNPROVEN = {"zamba": "its sampled text was not the target's in a test with drafts, cause unknown"}


@torch.no_grad()
def check_model(lm: CausalLM) -> PassProbe:
    """Compares three ways to the same logits (the model's own forward, body then head, and the
    paged pool in chunks), and two texts together with each alone."""
    upper = lm.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(upper, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0)).to(
        lm.device
    )
    try:
        return _probe(lm, ids)
    except UserError:
        raise
    except Exception as error:
        # Whatever a family's code raises here means that it cannot be run our way.
        told = f"({type(error).__name__}: {error})"
        if any(own.is_meta for own in lm.model.parameters()) and "meta" in str(error):
            raise UserError(
                f"{lm.name!r} ({type(lm.model).__name__}) cannot be run with target_offload: its "
                f"code reads weights of a layer from outside of it {told}; leave target_offload out"
            ) from error
        raise UserError(refusal(lm, f"its code fails in a probe pass {told}")) from error


def _probe(lm: CausalLM, ids: torch.Tensor) -> PassProbe:
    if lm.model.config.model_type in UNPROVEN:
        raise UserError(refusal(lm, UNPROVEN[lm.model.config.model_type]))
    lm.state_layers = state_layers(lm.model, lm.body)
    expected = lm.model(input_ids=ids, use_cache=False).logits
    positions = torch.arange(NUM_TOKENS, device=lm.device)
    final = lm.full(ids).final
    _compare(
        lm, lm.head(final), expected, "its logits are not its head times its last hidden state"
    )
    attention = AttentionShapes()
    lm.paged(ids, positions[None], attention)
    check_layers(lm, attention)
    _check_window(lm, attention, ids)
    layers = [attention.shapes.get(layer, NO_ATTENTION) for layer in range(lm.num_layers)]
    _check_paged(lm, layers, ids, positions, expected)
    if attention.chunked:
        _check_chunks(lm, layers, ids, positions)
    _check_neighbours(lm, ids, positions)
    _check_padding(lm, ids)
    return PassProbe(final.shape[-1], expected.shape[-1], layers)


def _check_paged(
    lm: CausalLM,
    layers: list[LayerShape],
    ids: torch.Tensor,
    positions: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """Compares the paged pass in chunks. A model with states that are lost between chunks
    reads the tokens that follow one of them singly."""
    reason = (
        "its paged forward differs from its own: some attention escapes the interface, or tokens "
        "are counted where positions should be read"
    )
    if lm.state_layers:
        reason = (
            "its layers with a state give other numbers when a text is read in pieces, so drafts "
            "would change its text"
        )
    for singly in (False, True) if lm.state_layers else (False,):
        lm.state_layers.one_by_one = singly
        paged = torch.cat(
            [lm.head(chunk) for chunk in _paged_chunks(lm, layers, ids, positions)], dim=1
        )
        try:
            _compare(lm, paged, expected, reason)
        except UserError:
            if singly or not lm.state_layers:
                raise
        else:
            return


def _check_neighbours(lm: CausalLM, ids: torch.Tensor, positions: torch.Tensor) -> None:
    """A short text at the first positions and a longer one at the last that are served, [1, T] in
    one pass and each alone.

    The short one runs again afterwards, for what a module keeps of the passes before.
    """
    far = positions + max(lm.max_positions - NUM_TOKENS, 0)
    short, long = (ids[:, :SHORT_TOKENS], positions[:SHORT_TOKENS]), (ids.flip(1), far)
    alone = [packed_logits(lm, short), packed_logits(lm, long)]
    together = packed_logits(lm, short, long).split([SHORT_TOKENS, NUM_TOKENS], dim=1)
    reason = (
        "a text's logits depend on which others share its pass, so no batch gives what it gives "
        "alone"
    )
    for actual, expected in zip(
        (*together, packed_logits(lm, short)), (*alone, alone[0]), strict=True
    ):
        _compare(lm, actual, expected, reason)


def packed_logits(lm: CausalLM, *texts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[1, T, V] of one pass over (ids [1, n], positions [n]) of several texts in a row."""
    ids = torch.cat([text for text, _ in texts], dim=1)
    positions = torch.cat([places for _, places in texts])[None]
    numbers = [number for number, (text, _) in enumerate(texts) for _ in range(text.shape[1])]
    context = PackedPass(torch.tensor([numbers]))
    return lm.head(lm.paged(ids, positions, context).final)


def _check_padding(lm: CausalLM, ids: torch.Tensor) -> None:
    """The same of rows [2, L], the first padded on the right, as training has them."""
    rows = torch.cat([ids, ids.flip(1)])
    padded = lm.head(lm.full(rows).final[:1, :SHORT_TOKENS])
    alone = lm.head(lm.full(ids[:, :SHORT_TOKENS]).final)
    _compare(lm, padded, alone, "a text's logits depend on the other rows of its batch")


def _paged_chunks(
    lm: CausalLM, layers: list[LayerShape], ids: torch.Tensor, positions: torch.Tensor
) -> list[torch.Tensor]:
    pool = PagedPool.of_layers(layers, 1, NUM_TOKENS, lm.device, lm.dtype)
    table = torch.zeros(1, 1, dtype=torch.int64, device=lm.device)
    states = NotedStates()
    chunks = []
    sizes = [CHUNKS[0], NUM_TOKENS - CHUNKS[0]] if lm.state_layers.no_single else CHUNKS
    ends = list(itertools.accumulate(sizes))
    for part in (slice(end - size, end) for size, end in zip(sizes, ends)):
        lengths = torch.tensor([part.stop - part.start], device=lm.device)
        context: AttentionContext = PagedPass(pool, table, positions[part], lengths)
        if lm.state_layers:
            piece = TextPiece(0, 0, len(positions[part]), 0 if part.start else None, 0)
            context = StatePass(context, Split([[piece]], states, lm.device))
        chunks.append(lm.paged(ids[:, part], positions[None, part], context).final)
    lm.state_layers.shapes = states.shapes()
    return chunks


def check_layers(lm: CausalLM, attention: AttentionShapes) -> None:
    missing = [layer for layer in range(lm.num_layers) if layer not in attention.shapes]
    # In a model that has layers with a state, others read each token alone; whether they do shows
    # in the paged pass.
    if missing and not lm.state_layers:
        raise UserError(
            refusal(
                lm,
                f"layer {missing[0]} has no attention that honours transformers' "
                "AttentionInterface",
            )
        )
    kinds = set(lm.config.to_dict().get("layer_types") or ())
    known = {"full_attention", "sliding_attention"}
    if attention.chunked:
        known.add("chunked_attention")
    if lm.state_layers:
        # The paged pass shows whether the others keep everything in states.
        kinds &= known | {"chunked_attention"}
    if unknown := kinds - known:
        raise UserError(refusal(lm, f"attention of type {sorted(unknown)[0]!r} is not supported"))
    if "sliding_attention" in kinds and not attention.windowed:
        raise UserError(refusal(lm, HIDDEN_WINDOW))


def _check_window(lm: CausalLM, attention: AttentionShapes, ids: torch.Tensor) -> None:
    """Narrows a window that no layer asked for, which then must not change anything: one in a mask
    would not be seen by texts as short as a probe's."""
    window = getattr(lm.config, "sliding_window", None)
    if attention.windowed or not window or window >= lm.num_positions:
        return
    expected = lm.model(input_ids=ids, use_cache=False).logits
    lm.config.sliding_window = NARROW
    try:
        narrow = lm.model(input_ids=ids, use_cache=False).logits
    finally:
        lm.config.sliding_window = window
    _compare(lm, narrow, expected, HIDDEN_WINDOW)


def _check_chunks(
    lm: CausalLM, layers: list[LayerShape], ids: torch.Tensor, positions: torch.Tensor
) -> None:
    """Compares the paged pass with the model's own over several chunks, narrowed, as a probe's text
    is shorter than one."""
    size, lm.config.attention_chunk_size = lm.config.attention_chunk_size, NARROW_CHUNK
    try:
        expected = lm.model(input_ids=ids, use_cache=False).logits
        found = [lm.head(final) for final in _paged_chunks(lm, layers, ids, positions)]
    finally:
        lm.config.attention_chunk_size = size
    _compare(lm, torch.cat(found, dim=1), expected, HIDDEN_CHUNKS)


def _compare(lm: CausalLM, actual: torch.Tensor, expected: torch.Tensor, reason: str) -> None:
    if not torch.isfinite(expected).all():
        check_weights(lm.model, lm.name)
        raise UserError(
            f"{lm.name!r} gives logits that are not finite; its weights are corrupt, or "
            f"{lm.dtype} is too narrow for it"
        )
    spread = expected.float().std() + 1e-6
    errors = (actual - expected).abs().amax(dim=-1)
    # By token, and the median of them in half precision: there a router near a tie may send a few
    # tokens to other experts.
    wide = lm.dtype in (torch.float32, torch.float64)
    error = (errors.amax() if wide else errors.median()) / spread
    if error.item() > TOLERANCE[lm.dtype]:
        raise UserError(refusal(lm, reason))


def refusal(lm: CausalLM, reason: str) -> str:
    return f"{lm.name!r} ({type(lm.model).__name__}) cannot be served: {reason}; use another model"
