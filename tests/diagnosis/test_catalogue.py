"""The catalogue: every entry is complete, has evidence, and writes keys that verl has."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from diagnosis.evidence import ALSO_SEEN, PROVOKED, QUOTES, REPORTS
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from verl_shard.diagnosis.catalogue import RANKS, Fault, catalogue, read_fault
from verl_shard.planning.remedies import REMEDIES


def advice(fault: Fault) -> list[Any]:
    return [*fault.remedies, *(one for case in fault.cases for one in case.remedies)]


@pytest.mark.parametrize("fault", catalogue(), ids=lambda fault: fault.id)
def test_an_entry_has_evidence_and_sources(fault: Fault) -> None:
    seen = {quote["fault"] for quote in QUOTES} | {report["fault"] for report in REPORTS} | set(PROVOKED.values())
    assert fault.id in seen | set(ALSO_SEEN)
    assert fault.rank in RANKS
    assert all(search for search in fault.searches + fault.detail_searches)
    assert re.fullmatch(r"[a-z0-9-]+", fault.id)


def test_planner_names_are_those_of_the_planner() -> None:
    named = {one.planner for fault in catalogue() for one in advice(fault) if one.planner}
    assert named <= {remedy.name for remedy in REMEDIES}
    assert {"smaller micro-batch", "fused logits", "offload_policy", "lower gpu_memory_utilization"} <= named


def test_groups_in_texts_are_groups_of_patterns() -> None:
    for fault in catalogue():
        groups = {
            re.sub(r"\d$", "", name)
            for search in (*fault.searches, *fault.detail_searches)
            for name in search.groupindex
        }
        texts = [
            fault.title,
            fault.cause,
            *(case.title + case.cause for case in fault.cases),
            *(one.do for one in advice(fault)),
        ]
        for text in texts:
            used = set(re.findall(r"(?<!\{)\{(\w+)\}(?!\})", text))
            assert used <= groups, f"{fault.id}: {used - groups}"


def test_every_key_that_is_written_is_one_of_verls() -> None:
    keys = sorted({
        part
        for fault in catalogue() for one in advice(fault) for part in one.write.split()
        if re.match(r"\+?(?:actor_rollout_ref|critic|data|trainer|algorithm|reward|ray_kwargs)\.[\w.]+=", part)
    })  # fmt: skip
    assert len(keys) > 60
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    # The folder, as naming the module would import all of verl.
    with initialize_config_dir(f"{spec.submodule_search_locations[0]}/trainer/config", version_base=None):
        wrong = [key for key in _one_of_each(keys) if not _composes([key])] if not _composes(_one_of_each(keys)) else []
    assert wrong == []


def _one_of_each(keys: list[str]) -> list[str]:
    """An override for each key, as one that is set twice is refused only sometimes."""
    return list({key.split("=")[0]: key for key in keys}.values())


def _composes(overrides: list[str]) -> bool:
    try:
        compose("ppo_trainer", overrides=overrides)
    except HydraException:
        return False
    return True


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rank": "dire"}, "'dire' is none of cause"),
        ({"hints": []}, "hints is empty"),
        ({"sources": []}, "sources is empty"),
        ({"check": "a > b"}, "is not of the form"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_name(change: dict[str, Any], why: str) -> None:
    entry = {
        "id": "a-fault", "title": "t", "rank": "cause", "hints": ["x"], "patterns": ["x"], "cause": "c", "remedies": ["r"],
        "sources": ["s"],
    }  # fmt: skip
    assert read_fault(entry).remedies[0].do == "r"
    with pytest.raises(ValueError, match="fault a-fault: ") as refused:
        read_fault({**entry, **change})
    assert why in str(refused.value)


def test_a_hint_is_in_every_line_that_a_pattern_is_for() -> None:
    """Quotes and reports match with hints as without: else a fault would be passed over."""
    for case in [*QUOTES, *REPORTS]:
        fault = next(fault for fault in catalogue() if fault.id == case["fault"])
        lines = case["log"].splitlines()
        without = [line for line in lines if any(search.search(line) for search in fault.searches)]
        assert [line for line in lines if fault.match(line)] == without != []
