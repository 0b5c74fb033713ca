"""Tiny targets for all tests: random weights, real model classes, a byte-level tokenizer. Made once
a session."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.record import RecordSink, SinkCounts

# Triton reads it when it is imported, as transformers does with torch 2.11, and any test may.
os.environ["TRITON_INTERPRET"] = (
    os.environ.get("TRITON_INTERPRET", "0") if torch.cuda.is_available() else "1"
)

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.closing_server import Closing
from tests.noise import spread

VOCAB_SIZE = 288
SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|mask|>"]
TEXT = [
    "def draft(self, tokens):\n    return [token for token in tokens if token is not None]\n",
    "The target verifies what the draft proposes, and the draft learns from what the target "
    "accepts.\n",
    "import os\nfor name in sorted(os.listdir(path)):\n    print(name, len(name))\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Like Qwen's: tools, calls and reasoning.
TOOL_TEMPLATE = """
{%- if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>
{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.unit }}]{% endfor %}
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% elif enable_thinking %}<think>{% endif %}
{%- endif %}"""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "mamba_d_state": 8,
    "num_key_value_heads": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}


# With layers that have a state, as ARCHITECTURES. Chunks are small enough to end within a short text.
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen2": {"model_type": "qwen2"},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "qwen3_next": dict(
        model_type="qwen3_next", shared_expert_intermediate_size=32, **DELTA_NET, **MOE
    ),
    "qwen3_5": dict(model_type="qwen3_5_text", **DELTA_NET),
    "qwen3_5_moe": dict(
        model_type="qwen3_5_moe_text", shared_expert_intermediate_size=32, **DELTA_NET, **MOE
    ),
    "olmo_hybrid": dict(
        model_type="olmo_hybrid", **{**DELTA_NET, "linear_num_key_heads": 4, "head_dim": None}
    ),
    "zamba2": {
        "model_type": "zamba2",
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
        **ZAMBA,
    },
    "recurrent_gemma": {
        "model_type": "recurrent_gemma",
        "lru_width": 32,
        "head_dim": 8,
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 8,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "jamba": {
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "minimax": {
        "model_type": "minimax",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
    },
}
# What each architecture changes of SHAPE. Windows are small enough to bite within a short text.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": 6},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 6},
    "olmo": {"model_type": "olmo"},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None},
    "qwen3_moe": dict(model_type="qwen3_moe", head_dim=16, **MOE),
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Every other layer has no rotation and scales its queries by position, the others chunks.
    "llama4": {
        "model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 64,
        "num_local_experts": 4, "attention_chunk_size": 16, "no_rope_layer_interval": 2,
        "floor_scale": 6, "attn_scale": 0.5,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_inner": 64, "n_layer": 4, "n_head": 4,
        "n_positions": 256,
        "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None,
        "num_key_value_heads": None,
        "intermediate_size": None, "max_position_embeddings": None,
    },
    **RECURRENT,
    # Shares nothing it should not: another vocabulary, another tokenizer.
    "other_vocab": {"model_type": "llama", "vocab_size": VOCAB_SIZE - 16},
}  # fmt: skip


# The files that take longest, the longest first. xdist hands out whole files in this order, so that
# no worker begins a long one when the others are done.
LONGEST = (
    "integration/test_train.py", "unit/test_install.py", "integration/test_served_distribution.py",
    "integration/test_served_text.py",
    "unit/train/test_session.py", "integration/test_faults.py", "integration/test_distill.py",
    "integration/test_generate.py", "integration/test_adapters.py", "integration/test_audit.py",
    "integration/test_target_change.py",
    "unit/train/check/test_doctor.py", "unit/train/export/test_proof.py",
    "unit/serve/audit/test_audit_server.py", "unit/serve/engine/test_device_round.py",
    "integration/test_serve_command.py",
    "unit/train/objective/test_stored_teacher.py", "unit/kernels/test_compile.py",
    "integration/test_fresh_noise.py", "integration/test_bench_drafters.py",
    "integration/test_bench_kernels.py", "integration/test_bench_online.py",
    "unit/serve/engine/test_engine.py", "unit/serve/control/test_control.py",
    "unit/distill/gate/test_gate.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # xdist's own order is by the number of tests, in which a file of one test of a minute is last.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def pytest_collection_finish() -> None:
    """Imported modules are left out of every later collection: transformers' Trainer makes one per
    run, of a third of a second."""
    gc.collect()
    gc.freeze()


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], pad_token=SPECIAL_TOKENS[1]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(arch: str, seed: int = 0) -> Any:
    shape = {
        key: value for key, value in {**SHAPE, **ARCHITECTURES[arch]}.items() if value is not None
    }
    config = AutoConfig.for_model(**copy.deepcopy(shape), bos_token_id=None)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    return spread(model).eval()


@pytest.fixture(scope="session", autouse=True)
def server_seed() -> Iterator[None]:
    """Requests without a seed draw the same in every run of the tests, as under `serve
    --seed 0`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "draftsmith.serve.requests.input_processor.secrets",
            SimpleNamespace(randbits=lambda bits: 0),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Syncing a file only protects it from a loss of power; what a killed process has written is in
    the kernel's hands already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is not open, too
        yield


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tiny_target("llama")` is the folder of a tiny random model with its tokenizer (vocabulary
    288, 4 layers, hidden 32).

    Architectures are the keys of `ARCHITECTURES`; another `seed` gives other weights.
    """
    made: dict[tuple[str, int], str] = {}

    def folder(arch: str, seed: int = 0) -> str:
        if (arch, seed) not in made:
            path: Path = tmp_path_factory.mktemp(f"{arch}-{seed}")
            model = make_model(arch, seed)
            model.save_pretrained(path)
            make_tokenizer(model.config.vocab_size).save_pretrained(path)
            made[arch, seed] = str(path)
        return made[arch, seed]

    return folder


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str], request: pytest.FixtureRequest) -> Any:
    """The tiny Llama, loaded once a module, in the module's `TARGET_DTYPE` if it has one."""
    from draftsmith.drafters.target.target import Target

    return Target.load(tiny_target("llama"), dtype=getattr(request.module, "TARGET_DTYPE", "auto"))


@pytest.fixture(scope="session")
def tool_template() -> str:
    """A chat template with tools, calls and reasoning."""
    return TOOL_TEMPLATE


NO_CONNECTION = "after connection broken by"  # pip, of an index that it cannot reach


@pytest.fixture(scope="session")
def install_tools() -> Callable[..., None]:
    """`install_tools(folder, environment, "uv", ...)` installs packages into a folder; where no
    connection to a registry is made, the test is skipped, and any other failure of pip is the
    test's."""

    def install(folder: Path, environment: Mapping[str, str], *packages: str) -> None:
        patience = ("--retries", "1", "--timeout", "30")
        command = [sys.executable, "-m", "pip", "install", "--quiet", *patience]
        whole = [*command, "--target", str(folder), *packages]
        try:
            done = subprocess.run(
                whole, env=environment, text=True, capture_output=True, timeout=280
            )
        except subprocess.TimeoutExpired:
            pytest.skip("no registry answers within 280 s")
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            if broken := [line for line in lines if NO_CONNECTION in line]:
                pytest.skip(f"no registry answers: {broken[-1]}")
            pytest.fail(f"pip could not install {', '.join(packages)}: {lines[-1]}")

    return install


EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
# Targets whose checkpoints hold an MTP module as one more layer.
NATIVE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **EXPERTS, **LATENT, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
        "scoring_func": (
            "sigmoid"
        ),
    },
    "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {**EXPERTS, **LATENT},
}  # fmt: skip


@pytest.fixture(scope="session")
def native_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`native_target("glm4_moe")` is the folder of a tiny random target of 2 layers with an MTP
    module, as published ones are; keywords change its shape, whose `num_hidden_layers` counts the
    module's.

    transformers itself has named and stored the module's layer: `whole` in it is the model of 3
    layers whose last it was.
    """
    made: dict[str, Path] = {}

    def folder(kind: str, **changes: int) -> Path:
        key = f"{kind} {changes}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            save_native_target(
                made[key], kind, {**SHAPE, **NATIVE[kind], "num_hidden_layers": 3, **changes}
            )
        return made[key]

    return folder


def save_native_target(folder: Path, kind: str, shape: dict[str, Any]) -> None:
    """`shape` counts the module's layer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **copy.deepcopy(shape)))
    for tensor in (*model.parameters(), *model.buffers()):
        noise = torch.randn(tensor.shape)
        tensor.data = (
            1.5 * tensor.shape[-1] ** -0.5 * noise if tensor.ndim > 1 else tensor.data + 0.1 * noise
        )
    model.save_pretrained(folder / "whole")
    for saved in (folder, folder / "whole"):
        make_tokenizer().save_pretrained(saved)
    tensors = load_file(folder / "whole" / "model.safetensors")
    layers, size = shape["num_hidden_layers"] - 1, shape["hidden_size"]
    module = {
        f"{name}.weight": 1 + 0.3 * torch.randn(size)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    module["eh_proj.weight"] = torch.randn(size, 2 * size) / size**0.5
    module["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    module["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= {f"model.layers.{layers}.{name}": tensor for name, tensor in module.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "whole" / "config.json").read_text())
    values |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in values:
        values["mlp_layer_types"] = values["mlp_layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(values))


class Records(list[Any], RecordSink):
    """A sink of rounds that keeps them."""

    share = 1.0
    counts = SinkCounts()

    def put(self, record: Any) -> None:
        self.append(record)

    def close(self) -> None:
        return


@pytest.fixture
def records() -> Records:
    return Records()


OWN_CLASSES = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({ran!r}).write_text(__name__)
{then}

class OwnConfig(LlamaConfig):
    model_type = {model_type!r}


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class OwnCode:
    """Model folders with Python code of their own, and a terminal with `y` typed ahead for a
    question about it."""

    def __init__(self, folder: Path, like: str):
        self.folder, self.like, self.terminal = folder, like, io.StringIO("y\n" * 8)

    @property
    def was_asked(self) -> bool:
        return self.terminal.tell() > 0

    @property
    def has_run(self) -> bool:
        """Whether the code of the folder made last was run."""
        return (self.folder / "ran").exists()

    def make(self, model_type: str = "own_lm", *, then: str = "") -> Path:
        """A copy of a Llama's folder whose model and tokenizer have classes of their own;
        `model_type` "llama", which transformers knows, makes them needless. `then` is what the code
        goes on with when it is run."""
        path = self.folder / "own"
        shutil.copytree(self.like, path)
        code = OWN_CLASSES.format(ran=str(self.folder / "ran"), then=then, model_type=model_type)
        (path / "own_code.py").write_text(code)
        models = {
            "AutoConfig": "own_code.OwnConfig",
            "AutoModelForCausalLM": "own_code.OwnForCausalLM",
        }
        merge_json(path / "config.json", {"model_type": model_type, "auto_map": models})
        known = "PreTrainedTokenizerFast" if model_type == "llama" else "OwnTokenizer"
        tokenizers = {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}
        merge_json(
            path / "tokenizer_config.json", {"tokenizer_class": known, "auto_map": tokenizers}
        )
        return path


def merge_json(file: Path, values: dict[str, Any]) -> None:
    """What is None is taken away."""
    kept = {key: one for key, one in json.loads(file.read_text()).items() if key not in values}
    more = {key: one for key, one in values.items() if one is not None}
    file.write_text(json.dumps(kept | more))


@pytest.fixture
def own_code(
    tmp_path: Path, tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> OwnCode:
    made = OwnCode(tmp_path, tiny_target("llama"))
    monkeypatch.setattr(sys, "stdin", made.terminal)
    # Code that is let in is copied into a cache of the test's own.
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    return made


def save_adapter(target: str, folder: str | Path, **settings: Any) -> str:
    """The folder of a LoRA adapter as peft saves it, with weights that change the text."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(target)
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    values |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(settings.pop("seed", 0))
    adapted = get_peft_model(model, LoraConfig(**(values | settings)))
    adapted.save_pretrained(str(folder))
    return str(folder)


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """A disk without room for longer files."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.fixture
def closing() -> Iterator[Callable[[int], Closing]]:
    """`closing(answers)`: a server that answers so many requests a connection."""
    servers: list[Closing] = []

    def started(answers: int) -> Closing:
        servers.append(Closing(answers))
        return servers[-1]

    yield started
    for server in servers:
        server.listening.close()
