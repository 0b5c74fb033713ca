"""Place of every part of a model whose layers are offloaded."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from draftsmith.drafters.target.taps import body_name, decoder_layers


def device_map(model: PreTrainedModel, device: str, layers_on: str) -> dict[str, str]:
    """Places by name, as transformers takes them: `layers_on` ("cpu" or "disk") of the decoder's
    layers, else `device`. The model may be on the meta device."""
    # accelerate warns of what was asked for.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    body = getattr(model, body_name(model))
    layers = decoder_layers(body, model.config.get_text_config().num_hidden_layers)
    name = next(name for name, module in model.named_modules() if module is layers)
    places, prefix, module = {name: layers_on}, "", model
    for part in name.split("."):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        beside = (other for other, _ in (*module.named_children(), *own) if other != part)
        places |= {f"{prefix}{other}": device for other in beside}
        module, prefix = getattr(module, part), f"{prefix}{part}."
    return places
