"""The folder of a reward model, looked at before anything is made or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import format_bytes
from verl_shard.quickstart.checks import folder_faults
from verl_shard.quickstart.options import DEMO
from verl_shard.resources.limits import host_memory

if TYPE_CHECKING:
    from verl_shard.models.spec import ModelSpec

_WHERE = "--reward-model"
_HALF = 0.5
"""The part of the free memory that float32 weights may take; the rest is for what trains beside them."""


def check_reward_model(path: str | Path) -> None:
    """Raises ConfigError, with all faults, unless `path` is the folder of a sequence classifier with one label, its head
    among its weights, and with a tokenizer, and its weights go into the memory that is free. No weight is read."""
    folder = Path(path).expanduser()
    if not str(path) or not folder.is_dir():
        why = "it is a file" if folder.is_file() else "there is no such folder"
        fix = f"Name the folder of a sequence classifier, or write {DEMO} to have a small one trained"
        raise ConfigError(_fault("no-reward-model", path, why, fix))
    # Scores are of plain text where the tokenizer has no template.
    faults = folder_faults(folder, _WHERE, needs_template=False)
    if not {"empty-model-folder", "no-model-config", "bad-model-config"} & {fault.code for fault in faults}:
        faults += _classifier_faults(folder)
    if faults:
        raise ConfigError(faults)


def choose_dtype(path: str | Path) -> str:
    """The dtype that a reward model is loaded in, unless it is streamed: "float32", the quicker on the CPU, or "bfloat16" where
    its weights would take more than half of the memory that is free."""
    size = _spec(Path(path)).n_params * 4
    return "float32" if size <= _HALF * host_memory().available else "bfloat16"


def _classifier_faults(folder: Path) -> list[Finding]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        why = f"transformers cannot read its config.json ({' '.join(str(error).split())[:200].rstrip('. ')})"
        return [_fault("bad-model-config", folder, why, "Save the model there with save_pretrained")]
    faults = []
    names = list(config.architectures or [])
    if not any(name.endswith("ForSequenceClassification") for name in names):
        why = f"it is no sequence classifier, but {', '.join(names) or 'of no named architecture'}"
        faults.append(_fault("no-classifier", folder, why, "Name a model that was trained to score"))
    elif config.num_labels != 1:
        why = f"it has {config.num_labels} labels, and a reward is one number"
        faults.append(_fault("not-one-label", folder, why, "Name a classifier with num_labels=1"))
    if faults:
        return faults
    try:
        spec = _spec(folder)
    except ConfigError as error:
        return [_fault(finding.code, folder, finding.why, finding.fix) for finding in error.findings]
    if lacking := _missing_head(folder, spec):
        why = f"its weights lack the head that scores ({', '.join(lacking)})"
        faults.append(_fault("no-head", folder, why, "Name a model that was trained to score; a new head says nothing"))
    free = host_memory().available
    if (size := spec.n_params * 2) > free:
        why = f"its weights take {format_bytes(size)} in bfloat16, and {format_bytes(free)} are free"
        faults.append(_fault("reward-model-too-large", folder, why, "Name a smaller one"))
    return faults


def _spec(folder: Path) -> ModelSpec:
    from verl_shard.models.read import read_spec

    return read_spec(folder.expanduser(), task="reward")


def _missing_head(folder: Path, spec: ModelSpec) -> list[str]:
    """The tensors of the score head that no safetensors file of the folder has. Older formats are not opened."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    there: set[str] = set()
    for file in files:
        opened: Any
        with safe_open(file, "pt") as opened:
            there.update(opened.keys())
    wanted = [tensor.name for tensor in spec.tensors if spec.piece_of(tensor.name) == spec.head]
    return [name for name in wanted if name not in there] if files else []


def _fault(code: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, _WHERE, str(given), why, fix)
