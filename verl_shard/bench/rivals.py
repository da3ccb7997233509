"""Device maps as accelerate and transformers make them. Run as a script, it answers for whatever transformers it finds.

    python rivals.py < cells.json > maps.json

cells: [[model_type, auto class, config fields, [[GPUs, bytes a GPU or null], ...]], ...]; an answer for each cell is a
map, or the text of what was raised.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from typing import Any

Cells = Sequence[tuple[int, int | None]]


def quiet() -> None:
    """Both say of every GPU that it is not there."""
    import logging

    for name in ("accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def build(model_type: str, auto: str, fields: dict[str, Any]) -> Any:
    """A model on meta, of the fields of its configuration."""
    import transformers

    return build_from(transformers.AutoConfig.for_model(model_type, **copy.deepcopy(fields)), auto)


def build_from(config: Any, auto: str) -> Any:
    """The model on meta, as transformers and accelerate build one to map it."""
    import torch
    import transformers

    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config, dtype=torch.bfloat16)


def accelerate_map(model: Any, n_gpus: int, cap: int | None) -> dict[str, Any]:
    """What `infer_auto_device_map` gives for `device_map="balanced"`, tied weights and all."""
    from accelerate.utils.modeling import get_balanced_memory, infer_auto_device_map

    model.tie_weights()
    blocks = list(model._no_split_modules or [])
    limits = _limits(n_gpus, cap)
    balanced = get_balanced_memory(model, max_memory=limits, no_split_module_classes=blocks)
    return dict(infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=blocks))


def transformers_map(model: Any, n_gpus: int, cap: int | None) -> dict[str, Any]:
    """What `from_pretrained(device_map="auto")` gives."""
    from transformers.integrations.accelerate import _get_device_map

    model.tie_weights()
    return dict(_get_device_map(model, "auto", _limits(n_gpus, cap), None))


def _limits(n_gpus: int, cap: int | None) -> dict[int | str, int]:
    return {**dict.fromkeys(range(n_gpus), 2**50 if cap is None else cap), "cpu": 2**50}


def answer(cells: Sequence[tuple[str, str, dict[str, Any], Cells]]) -> list[list[Any]]:
    """For each model, for each cell, transformers' map."""
    answers = []
    for model_type, auto, fields, wanted in cells:
        made: list[Any] = []
        try:
            model = build(model_type, auto, fields)
        except Exception as error:  # noqa: BLE001 - what is raised is the answer
            answers.append([f"{type(error).__name__}: {error}"] * len(wanted))
            continue
        for n_gpus, cap in wanted:
            try:
                made.append(transformers_map(model, n_gpus, cap))
            except Exception as error:  # noqa: BLE001 - what is raised is the answer
                made.append(f"{type(error).__name__}: {error}")
        answers.append(made)
    return answers


if __name__ == "__main__":
    quiet()
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
