"""Loading of configurations, tokenizers and models by transformers, from a folder or Hub id;
nothing else loads them.

Such a folder may bring Python code of its own (`auto_map` in its JSON files). transformers asks on
the terminal where a call leaves `trust_remote_code` out, so every loader here takes it and passes
it on. Off, that code is never run: a class that transformers itself has is loaded in its place, and
what has none is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from draftsmith.drafters.layouts.folder import register_mimo
from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.drafters.quirks.patches import implementation
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.causal_lm import end_ids
from draftsmith.drafters.target.offload import device_map, keep_needed_hooks
from draftsmith.drafters.target.probe import TOLERANCE
from draftsmith.drafters.target.quantised import check_quantisation, quantisation
from draftsmith.errors import UserError, first_line
from draftsmith.kernels.dispatch import use_device

register_mimo()

# Errors of libraries with words for a reader; others' say little, as a KeyError's, its key alone.
TOLD = (OSError, ValueError, ImportError, RuntimeError, SafetensorError)
Prepare = Callable[[PreTrainedModel], object]
# Of the text that a merged adapter is compared on; the first ids may be padding.
FIRST_TOKEN, NUM_TOKENS = 5, 12


def load_model(
    path: str | Path,
    *,
    trust_remote_code: bool,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    offload: str | None = None,
    prepare: Prepare | None = None,
) -> PreTrainedModel:
    """A causal LM in evaluation mode with our attention. `dtype` "auto" is the checkpoint's own.
    The folder of a LoRA adapter is its base with the adapter merged. `device` becomes the current
    one of this thread. With `offload` the weights of the decoder's layers stay in the host's memory
    ("cpu") or in the model's files ("disk"), from where each pass reads them. `prepare` changes the
    model before its weights are read, of a folder for which `can_prepare`. Raises `UserError`."""
    use_device(device)
    path = model_folder(path)
    if offload is not None:
        _check_offload(path, trust_remote_code=trust_remote_code)
    if (base := adapter_base(path)) is not None:
        model = load_model(base, trust_remote_code=trust_remote_code, dtype=dtype, device=device)
        return _merged(model, path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        check_quantisation(path, config)
        loader = _class_for(config) if prepare is None else _prepared_class(config, prepare)
        model, report = loader.from_pretrained(
            path,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            attn_implementation=implementation(config, register()),
            output_loading_info=True,
            **_placement(config, device, offload, trust_remote_code=trust_remote_code),
        )
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's own code raises what it likes
        raise _refusal(path, error) from error
    if prepare is not None:
        model.__class__ = loader.__base__
    _check_weights(path, without_towers(model), report["missing_keys"])
    if offload is None:
        return model.to(device).eval()
    return keep_needed_hooks(model).eval()


def _refusal(path: str | Path, error: Exception) -> UserError:
    """Sentence for the user of a model that transformers does not load."""
    _check_remote_code(path, error)
    _check_files(path, error)
    if isinstance(error, KeyError) and error.args == (register(),):
        # Families with attention classes of their own, by name (Falcon), have no entry for ours.
        return UserError(
            f"model {str(path)!r} cannot be served: it knows no attention named {error}; use "
            "another model"
        )
    mend = "the path or Hub id" if isinstance(error, TOLD) else "its config.json and its code"
    return UserError(f"model {str(path)!r} cannot be loaded ({_first_line(error)}); check {mend}")


def _check_weights(path: str | Path, model: PreTrainedModel, missing_keys: set[str]) -> None:
    """Refuses a model that would go on with random numbers in the place of missing weights."""
    if missing := sorted(missing_keys & model.state_dict().keys()):
        raise UserError(
            f"model {str(path)!r} lacks {len(missing)} of its weights, {missing[0]!r} for one; "
            "restore its files"
        )


def _check_offload(path: str | Path, *, trust_remote_code: bool) -> None:
    """Refuses models whose layers cannot be read one at a time."""
    kind = None
    if adapter_base(path) is not None:
        kind = "an adapter, which is merged into all of its base's weights"
    elif quantisation(load_config(path, trust_remote_code=trust_remote_code)):
        kind = "quantised, by a library that keeps its codes on the device"
    if kind is not None:
        raise UserError(f"target_offload is given and {str(path)!r} is {kind}; leave it out")


def _placement(
    config: PreTrainedConfig,
    device: torch.device | str,
    offload: str | None,
    *,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Options by which transformers places the weights."""
    if offload is not None:
        with torch.device("meta"):
            outline = build_model(config, trust_remote_code=trust_remote_code)
        return {"device_map": device_map(outline, str(device), offload)}
    if quantisation(config) and torch.device(device).type != "cpu":
        # Libraries choose their kernels by where the weights are loaded.
        return {"device_map": {"": device}}
    return {}


def load_tokenizer(path: str | Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Raises `UserError` for a folder or Hub id without a tokenizer that can be read."""
    path = model_folder(path, weights=False)
    base = adapter_base(path)
    if base is not None and not (Path(path) / "tokenizer_config.json").is_file():
        path = base
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises that class itself
        _check_remote_code(path, error)
        raise UserError(
            f"no tokenizer can be loaded from {str(path)!r} ({_first_line(error)}); add its files"
        ) from error


def load_config(path: str | Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration without its weights. Raises `UserError`."""
    path = model_folder(adapter_base(path) or path, weights=False)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a model's own code raises what it likes
        _check_remote_code(path, error)
        raise UserError(
            f"model {str(path)!r} has no readable config.json ({_first_line(error)}); check the "
            "path or Hub id"
        ) from error


def load_end_ids(path: str | Path, *, trust_remote_code: bool) -> tuple[int, ...]:
    """Tokens at which the model's answers end, without its weights; none where no file names
    them."""
    path = model_folder(adapter_base(path) or path, weights=False)
    with suppress(Exception):  # as `load_config` meets
        if found := end_ids(GenerationConfig.from_pretrained(path), None):
            return found
    with suppress(UserError):
        return end_ids(None, load_config(path, trust_remote_code=trust_remote_code))
    return ()


def own_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The type of a checkpoint's weights, as its configuration names it."""
    return config.get_text_config().dtype or config.dtype or torch.float32


def adapter_base(path: str | Path) -> str | None:
    """The model that the adapter in a local folder changes; None for a folder of a model."""
    settings = Path(path) / "adapter_config.json"
    if not settings.is_file() or (Path(path) / "config.json").is_file():
        return None
    try:
        base = json.loads(settings.read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{str(settings)!r} is damaged ({error}); restore it") from error
    if not base:
        raise UserError(
            f"{str(settings)!r} names no base_model_name_or_path; write the base model there"
        )
    return str(base)


def _merged(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """The model with the adapter of a folder in its weights."""
    from peft import PeftModel

    if quantisation(model.config):
        raise UserError(
            f"adapter {str(folder)!r} cannot be merged into quantised weights; serve "
            f"--target {model.name_or_path} with --lora NAME={folder}"
        )
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
        ids = torch.arange(NUM_TOKENS, device=model.device)[None] + FIRST_TOKEN
        with torch.no_grad():
            expected = adapted.eval()(input_ids=ids, use_cache=False).logits
            untie_adapted(adapted.base_model.model)
            merged = adapted.merge_and_unload(safe_merge=True)
            logits = merged(input_ids=ids, use_cache=False).logits
        apart = (logits - expected).abs().max() / (expected.std() + 1e-6)
        if not apart <= TOLERANCE[logits.dtype]:
            raise ValueError(f"its logits are then {float(apart):.2g} of their spread from peft's")
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # readers of torn files raise classes of their own
        raise UserError(
            f"adapter {str(folder)!r} cannot be merged into {model.name_or_path!r} "
            f"({_first_line(error)}); check its files"
        ) from error
    return merged.eval()


@torch.no_grad()
def untie_adapted(model: torch.nn.Module) -> None:
    """Gives a parameter of its own to each module that shares one with a module of an adapter:
    merged into it, the adapter would change them all."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    wrappers = [module for module in model.modules() if isinstance(module, kinds)]
    changed = {id(one) for module in wrappers for one in module.parameters()}
    seen: set[int] = set()
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None and id(own) in seen & changed:
                module._parameters[name] = torch.nn.Parameter(own.clone(), requires_grad=False)
                for config in (model.config, model.config.get_text_config()):
                    config.tie_word_embeddings = False
            seen.add(id(own))


def build_model(
    config: PreTrainedConfig, *, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    """A causal LM of `config` whose weights are yet to be filled in; `options` as transformers'
    `from_config` takes them."""
    build = _class_for(config).from_config
    return without_towers(build(config, trust_remote_code=trust_remote_code, **options))


def _class_for(config: PreTrainedConfig) -> type[Any]:
    """The family of classes that has one for the model. Multimodal models are loaded as their own
    class, which alone has their language part as it is published."""
    if type(config) in AutoModelForImageTextToText._model_mapping:
        own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        if not own_code and type(config) not in AutoModelForCausalLM._model_mapping:
            return AutoModelForImageTextToText
    return AutoModelForCausalLM


def can_prepare(path: str | Path, *, trust_remote_code: bool) -> bool:
    """True for the model of a folder or Hub id whose weights go where its class has them, row by
    row: no adapter, no quantised one, none with towers or code of its own, and none of whose
    tensors transformers joins or splits along their rows."""
    if adapter_base(path) is not None:
        return False
    config = load_config(path, trust_remote_code=trust_remote_code)
    if (
        config.get_text_config() is not config
        or quantisation(config)
        or (trust_remote_code and getattr(config, "auto_map", None))
        or not isinstance(_class_for(config)._model_mapping.get(type(config), None), type)
    ):
        return False
    try:
        with torch.device("meta"):
            return _converts_within_rows(build_model(config, trust_remote_code=False))
    except Exception:
        return True  # `load_model` fails alike, with a sentence


def _converts_within_rows(model: PreTrainedModel) -> bool:
    """True where some rows (axis 0) of each parameter are made of the same rows of its sources.
    transformers takes a process's rows of each source before it converts them: joined along axis 0,
    those would be other rows of the right shape. The model may be on the meta device."""
    return all(
        _keeps_rows(operation)
        for transform in get_model_conversion_mapping(model)
        if isinstance(transform, WeightConverter)
        for operation in transform.operations
    )


def _keeps_rows(operation: ConversionOps) -> bool:
    match operation:
        case MergeModulelist(dim=0):  # each source is a row, and is taken for one
            return True
        case Concatenate(dim=axis) | Chunk(dim=axis):
            return axis >= 1
        case Transpose(dim0=one, dim1=other, check_dims=False):
            return min(one, other) >= 1
    return False


def _prepared_class(config: PreTrainedConfig, prepare: Prepare) -> type[Any]:
    """The model's class, whose new models are prepared: where `prepare` spreads parameters over
    processes, transformers reads this process's parts of them alone."""
    own = _class_for(config)._model_mapping[type(config)]

    def init(model: PreTrainedModel, *args: Any, **options: Any) -> None:
        own.__init__(model, *args, **options)
        if not _converts_within_rows(model):
            raise UserError(
                f"model {config.name_or_path!r} cannot be read in parts, as its tensors are joined "
                "along their rows; load it whole"
            )
        with torch.device("cpu"):  # in place of "meta", where transformers makes models
            prepare(model)

    return type(own.__name__, (own,), {"__init__": init, "__module__": own.__module__})


def without_towers(model: PreTrainedModel) -> PreTrainedModel:
    """The model without the modules beside its language part, which text never runs: towers of
    images and sounds, and their projections."""
    if model.config.get_text_config() is model.config:
        return model
    parts = dict(model.base_model.named_children())
    embeddings = model.get_input_embeddings()
    language = [name for name, part in parts.items() if embeddings in part.modules()]
    if language and all(isinstance(parts[name], PreTrainedModel) for name in language):
        for name in parts.keys() - set(language):
            setattr(model.base_model, name, None)
    return model


def _check_remote_code(path: str | Path, error: Exception) -> None:
    """A refusal of its own where transformers stops at code that may not run."""
    if "trust_remote_code=True" in str(error):
        raise UserError(
            f"{str(path)!r} needs Python code of its own (auto_map) to be run; read that code, "
            "then give "
            "--trust-remote-code (trust_remote_code=True in Python), or use another model"
        ) from error


def _check_files(path: str | Path, error: Exception) -> None:
    """A refusal of its own where transformers would write offloaded weights anew."""
    if "offload_folder" in str(error):
        raise UserError(
            f"target_offload is 'disk' and the files of {str(path)!r} are no safetensors, or hold "
            "layers that are made of other tensors (experts are joined); give cpu with CUDA, or "
            "leave it out"
        ) from error


def _first_line(error: Exception) -> str:
    name, line = type(error).__name__, first_line(error)
    return line if isinstance(error, TOLD) or line == name else f"{name}: {line}"
