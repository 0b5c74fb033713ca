"""A draft language model: any Hugging Face causal LM over the target's token ids, on the same paged
machinery as the target."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from draftsmith.drafters.autoregressive.chain import ChainLoop
from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.draft_shape import check_heads, new_windows, windows_config
from draftsmith.drafters.init_from_target import NewDraft
from draftsmith.drafters.interface import ForwardCapturable, UnrollBatch, UnrolledStep
from draftsmith.drafters.layouts.folder import DraftFolder, is_causal_lm
from draftsmith.drafters.lm.lora import add_adapters, merged_state
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.quirks.patches import implementation
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.causal_lm import CausalLM, whole
from draftsmith.drafters.target.load import build_model, load_config, load_model, load_tokenizer
from draftsmith.drafters.target.probe import check_model
from draftsmith.drafters.target.quantised import numbers_of, quantisation
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import check_same_ids
from draftsmith.drafters.weights import (
    ReadBytes,
    check_finite,
    read_config,
    read_weights,
    weight_bytes,
)
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool


class DraftLm(NewDraft, ForwardCapturable, ChainLoop):
    """`model` has as many token ids as the target."""

    family = "draft-lm"
    taps: tuple[int, ...] = ()
    vocab_map = None
    ahead = 1  # the state at position t predicts the token at t + 1

    def __init__(self, model: PreTrainedModel, name: str, max_length: int | None = None):
        super().__init__()
        self.model = model
        self.lm = CausalLM(model, name, check_model, max_length=max_length)
        if self.lm.state_layers:
            raise UserError(
                f"draft {name!r} has layers with a recurrent state, which cannot be rolled back "
                "when a token is rejected; draft with a model that has attention alone"
            )
        self.vocab_size = self.lm.vocab_size
        self.linear_head = has_linear_head(self.lm)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return is_causal_lm(draft.config)

    @classmethod
    def new(
        cls, options: DraftLmOptions, target: Target, token_counts: torch.Tensor | None
    ) -> DraftLm:
        started = options.init or options.target_layers
        if started is not None and options.window is not None:
            raise UserError(
                f"option 'draft.window' is {options.window} for a draft that starts from "
                f"{started!r}, whose layers have their own; leave it out"
            )
        if options.init is None:
            if options.lora is not None:
                raise UserError("option 'draft.lora' adapts an existing model; give draft.init too")
            if options.target_layers is not None:
                pruned = pruned_target(target, options.target_layers)
                return cls(pruned, "pruned target", target.max_length)
            return cls(new_model(options, target), "new draft")
        if options.target_layers is not None:
            raise UserError(
                "options 'draft.init' and 'draft.target_layers' both say where to "
                "start; give one of them"
            )
        trust = target.trust_remote_code
        model = load_model(
            options.init, trust_remote_code=trust, dtype=torch.float32, device=target.device
        )
        check_tokenizer(options.init, target)
        match_vocabulary(model, target)
        if options.lora is not None:
            add_adapters(model, options.lora)
        return cls(model, options.init, target.max_length)

    @property
    def max_positions(self) -> int:
        return self.lm.max_positions

    @classmethod
    def load(cls, folder: Path, target: Target) -> DraftLm:
        read_config(folder)
        read_weights(folder)  # for what it refuses; transformers then does the mapping of names
        check_tokenizer(folder, target)
        model = load_model(folder, trust_remote_code=target.trust_remote_code, device=target.device)
        match_vocabulary(model, target)
        return cls(model, str(folder), target.max_length)

    def save(self, folder: Path) -> None:
        """A plain model folder, adapters merged; files appear whole, one by one."""
        folder.mkdir(parents=True, exist_ok=True)
        state = merged_state(self.model)
        check_finite(state, "the draft to be saved")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            self.model.save_pretrained(temporary, state_dict=state, max_shard_size="1000GB")
            for path in sorted(Path(temporary).iterdir(), reverse=True):
                os.replace(path, folder / path.name)

    def head_weight(self) -> torch.Tensor:
        if not self.linear_head:
            raise UserError(
                f"draft {self.lm.name!r} puts a soft cap, scale or bias on its logits and can be "
                "served but not trained; start "
                "from another model"
            )
        return self.model.get_output_embeddings().weight

    def read_bytes(self) -> ReadBytes:
        return ReadBytes(proposal=0, token=weight_bytes([self], self.lm.output_weight))

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        """One step stands for all: a language model's state depends on the text alone, not on where
        its round began."""
        self._check_length(batch)
        hidden = self.lm.full(batch.input_ids, segments=batch.segments).final
        yield UnrolledStep(hidden=hidden, valid=batch.attention_mask.bool(), offset=1)

    def _check_length(self, batch: UnrollBatch) -> None:
        length = batch.input_ids.shape[1]
        if length > self.max_positions and batch.segments is not None:
            length = int(batch.positions.max()) + 1
        if length > self.max_positions:
            raise UserError(
                f"a text of {length} tokens is longer than the {self.max_positions} positions of "
                f"draft {self.lm.name!r}; give --max-length {self.max_positions}"
            )

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool:
        return self.lm.new_pool(num_blocks, block_size, device, dtype)

    def capture_forward(self) -> None:
        # A copy of float16 weights takes 10 ns a weight to make: too long for a swap.
        capture_lm(self.lm)

    def refresh(self) -> None:
        self.lm.refresh()

    def read_committed(
        self, tokens: torch.Tensor, taps: torch.Tensor | None, context: PagedPass
    ) -> HeadStep:
        states = self.lm.paged(tokens[None], context.positions[None], context).final[0]
        return HeadStep(states, states)

    def read_drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, context: PagedPass
    ) -> HeadStep:
        """The model goes by its keys and values, not by a state handed on."""
        return self.read_committed(tokens, None, context)

    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        return self.lm.head(head_input)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """All drafted tokens but the last were read; those that were kept stay right."""
        return last + 1 + min(accepted, max(drafted - 1, 0))


def new_model(options: DraftLmOptions, target: Target) -> PreTrainedModel:
    """A small Llama with tied embeddings: most of a small model's weights would be its two tables
    otherwise. With a window it is a Mistral, which is a Llama with one."""
    hidden = options.hidden_size or max(16, target.hidden_size // 2)
    heads = options.num_attention_heads or max(1, hidden // 64)
    groups = options.num_key_value_heads or heads
    if hidden % heads:
        raise UserError(
            f"option 'draft.hidden_size' is {hidden}; it must be a multiple of the {heads} "
            "attention heads"
        )
    shape = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": hidden}
    check_heads(shape)
    eos = target.eos_token_ids
    windows = new_windows(options.window, options.num_layers)
    kind, model = (
        (MistralConfig, MistralForCausalLM) if windows else (LlamaConfig, LlamaForCausalLM)
    )
    config = kind(
        vocab_size=target.vocab_size,
        **shape,
        intermediate_size=options.intermediate_size or 3 * hidden,
        num_hidden_layers=options.num_layers,
        max_position_embeddings=target.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(eos) if len(eos) > 1 else (eos[0] if eos else None),
        **windows_config(windows),  # vLLM goes by the kinds of the layers here too
    )
    config._attn_implementation = register()
    return model(config).to(target.device).eval()


def match_vocabulary(model: PreTrainedModel, target: Target) -> None:
    """Equal tokenizers often come with tables padded to different sizes; the surplus ids are never
    used."""
    if model.get_output_embeddings().weight.shape[0] != target.vocab_size:
        model.resize_token_embeddings(target.vocab_size, mean_resizing=False)


def check_tokenizer(name: str | Path, target: Target) -> None:
    """Compare the tokenizer of a folder or Hub id with the target's. A folder without one, as a
    draft is saved, must at least have as many ids."""
    folder = Path(name)
    has_files = (folder / "tokenizer.json").is_file() or (
        folder / "tokenizer_config.json"
    ).is_file()
    if has_files or not folder.is_dir():
        check_same_ids(
            load_tokenizer(name, trust_remote_code=target.trust_remote_code), target.tokenizer()
        )
        return
    size = (
        load_config(folder, trust_remote_code=target.trust_remote_code).get_text_config().vocab_size
    )
    if size != target.vocab_size:
        raise UserError(
            f"draft {str(name)!r} has {size} token ids and {target.name!r} has "
            f"{target.vocab_size}; "
            "use a draft with its vocabulary"
        )


@torch.no_grad()
def has_linear_head(lm: CausalLM) -> bool:
    """True where logits are the state times one table, which is what the training loss multiplies
    by."""
    weight = lm.model.get_output_embeddings().weight
    states = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    plain, own = states @ weight.T, lm.head(states)
    return bool(
        torch.allclose(
            own.float(), plain.float(), rtol=0.05, atol=0.01 * float(plain.float().abs().max())
        )
    )


def pruned_target(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 model of the target's class with copies of `layers`, ascending. It predicts badly
    until it is trained, but its tables are the target's, which a new draft spends most of a short
    training on."""
    chosen = list(layers)
    if (
        not chosen
        or chosen != sorted(set(chosen))
        or not 0 <= chosen[0] <= chosen[-1] < target.num_layers
    ):
        raise UserError(
            f"option 'draft.target_layers' is {chosen}; give ascending layers between 0 and "
            f"{target.num_layers - 1}"
        )
    config = pruned_config(target, chosen)
    model = build_model(
        config,
        trust_remote_code=target.trust_remote_code,
        attn_implementation=implementation(config, register()),
        dtype=torch.float32,
    )
    state = pruned_state(target, chosen)
    if missing := sorted(model.state_dict().keys() - state.keys()):
        raise UserError(
            f"option 'draft.target_layers' is {chosen}, but {missing[0]!r} of {target.name!r} "
            "is quantised in a way that cannot be read; give draft.init or draft.hidden_size"
        )
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return model.to(target.device).eval()


def pruned_config(target: Target, layers: Sequence[int]) -> PreTrainedConfig:
    config = copy.deepcopy(target.model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the copies are numbers
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        # Sliding and full attention alternate in some families: every layer keeps its kind.
        text.layer_types = [text.layer_types[layer] for layer in layers]
    return config


def pruned_state(target: Target, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    stack = (
        next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    )
    model, state = target.model, {}
    # Of quantised weights the numbers that they stand for.
    plain = numbers_of(model) if quantisation(model.config) else model.state_dict()
    for name, tensor in plain.items():
        if name.startswith(stack):
            number, _, rest = name.removeprefix(stack).partition(".")
            if int(number) not in layers:
                continue
            name = f"{stack}{layers.index(int(number))}.{rest}"
        state[name] = whole(tensor).float()
    return state
