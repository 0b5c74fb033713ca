"""No call loads a model, tokenizer or configuration but through `drafters/target/load.py`, which
says whether code may run."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THE_PLACE = ROOT / "drafters" / "target" / "load.py"
CODE = ("kernels", "drafters", "train", "serve", "distill", "fleet", "src/draftsmith")
# A file without a folder's code, of which no class is asked for it.
OF_FILES = ROOT / "drafters" / "layouts" / "gguf.py"
# Gives transformers a class of ours for a name; chooses none by a folder.
REGISTERS = ROOT / "drafters" / "layouts" / "folder.py"
# They read numbers and options from JSON; what they read can hold no code.
WITHOUT_CODE = (
    "GenerationConfig.from_pretrained",
    "PeftConfig.from_pretrained",
    "PeftModel.from_pretrained",
)
# What choose a class by a folder's files: transformers' Auto classes and pipelines, and torch's
# hub.
CHOOSE = ("Auto", "pipeline", "transformers.Auto", "transformers.pipeline", "torch.hub.load")


def trust_of(call: ast.Call) -> str | None:
    return next(
        (ast.unparse(word.value) for word in call.keywords if word.arg == "trust_remote_code"), None
    )


def read(path: Path) -> tuple[list[ast.Call], set[str]]:
    """Calls that load or say whether code may run, and names of what chooses a class."""
    text, calls, names = path.read_text(), [], set()
    if not any(
        one in text for one in ("from_pretrained", "from_config", "trust_remote_code", *CHOOSE)
    ):
        return [], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            loads = getattr(node.func, "attr", "") in ("from_pretrained", "from_config")
            calls += [node] if loads or trust_of(node) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return calls, {name for name in names if name.startswith(CHOOSE)}


def test_code_of_a_folder_runs_in_one_place_that_says_so() -> None:
    paths = [path for folder in (*CODE, "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert THE_PLACE in paths and len(paths) > 200
    for path in paths:
        calls, choosing = read(path)
        for call in calls:
            name, trust = ast.unparse(call.func), trust_of(call)
            # Left out or None, transformers asks on the terminal.
            assert name in WITHOUT_CODE or trust not in (None, "None"), (path, name)
            assert ROOT / "scripts" not in path.parents or trust in (None, "False"), (path, name)
        if path == THE_PLACE:
            assert choosing >= {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"}
        elif path == REGISTERS:
            used = {name for name in choosing if "." in name}
            assert used == {"AutoConfig.register", "AutoModelForCausalLM.register"}
        elif path != OF_FILES and ROOT / "scripts" not in path.parents:
            assert not choosing, (path, choosing)
