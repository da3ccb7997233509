"""What the doctor says of a machine: its lines, its table, JSON and findings, and the rules behind some of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from diagnosis.test_doctor_machines import GPUS, NO_GPU, PACKAGES, SOUND, bad, packages, torch

from verl_shard.common.tables import as_text
from verl_shard.diagnosis.doctor import FAMILIES, Report, examine
from verl_shard.diagnosis.doctor_facts import Ray, RayNode, Trouble
from verl_shard.diagnosis.doctor_network import gloo_interfaces, nccl_interfaces


def test_a_sound_machine_has_nothing_wrong() -> None:
    diagnosis = examine(SOUND)
    assert bad(SOUND) == []
    assert (diagnosis.verdict, diagnosis.exit_code, diagnosis.findings()) == ("ok", 0, [])
    found = {check.name: check.found for check in diagnosis.checks}
    assert found["GPU 0-7"] == "8 x NVIDIA H100 80GB HBM3, sm_90, 79.50 GiB of 80.00 GiB free"
    assert found["torch"] == "2.11.0+cu130, CUDA 13.0; the driver takes CUDA 13.0"
    assert found["NCCL"] == "2.28.9, GPUs reach each other directly"
    assert found["flash-attn"] == "2.8.3, ran on GPU 0-7"


def test_a_machine_without_gpu_verl_and_ray_says_so() -> None:
    without = {key: one for key, one in PACKAGES.items() if key not in ("verl", "ray", "tensordict", "transferqueue")}
    facts = replace(NO_GPU, packages=without, ray=Trouble("missing", "ray is not installed"))
    assert [check.code for check in bad(facts)] == ["verl-not-installed", "no-gpu"]
    found = {check.name: check.found for check in examine(facts).checks}
    assert found["torch"] == "2.11.0+cpu, built for CPUs"
    assert found["Ray"] == "not installed; it comes with the extra [verl]"
    assert found["flash-attn"] == "not installed, and not needed without a GPU"


def test_a_gpu_that_is_made_up_for_ray_on_a_cpu_machine_is_no_fault() -> None:
    ray = Ray("2.60.0", 0, 192.0, "10.0.0.1:6379", "RAY_ADDRESS", nodes=(RayNode("node1", 1, 16),), free_gpus=1)
    assert [check.code for check in bad(replace(NO_GPU, ray=ray))] == ["no-gpu"]


def test_no_torch_and_no_shared_memory() -> None:
    no_torch = replace(NO_GPU, torch=Trouble("missing", "torch is not installed"))
    assert [check.code for check in bad(no_torch)] == ["torch-missing", "no-gpu"]
    assert "no-shm" in [check.code for check in bad(replace(SOUND, shm=None, shm_free=None))]
    assert "no-shm" not in [check.code for check in bad(replace(SOUND, shm=None, shm_free=None, system="Darwin"))]
    hidden = replace(NO_GPU, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert [check.code for check in bad(hidden)] == ["visible-without-gpus", "no-gpu"]


def test_who_needs_what_is_said_with_all_that_must_hold_together() -> None:
    (check,) = bad(replace(SOUND, **packages(transformers="5.11.0")))
    assert check.why == "verl_shard 0.1.0 [verl] needs <5.11; verl 0.9.1 needs >=5.5.3,<5.11,!=5.6.0"
    assert bad(replace(SOUND, **packages(torch="2.14.0.dev20261101+cu130"))) == []


def test_gpus_that_are_well_share_a_line_and_one_that_is_not_has_its_own() -> None:
    facts = replace(SOUND, **torch(gpus=(*GPUS[:3], replace(GPUS[3], error="Xid"), *GPUS[4:])))
    found = {check.name: check.found for check in examine(facts).checks if check.name.startswith("GPU ")}
    assert found == {
        "GPU 3": "NVIDIA H100 80GB HBM3",
        "GPU 0,1,2,4,5,6,7": "7 x NVIDIA H100 80GB HBM3, sm_90, 79.50 GiB of 80.00 GiB free",
    }


@pytest.mark.parametrize(
    ("archs", "capability", "well"),
    [
        (("sm_80",), (8, 9), True),  # machine code of the same major version, not newer
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (12, 0), True),  # PTX is compiled for what is newer
        (("compute_90",), (8, 0), False),
        (("sm_90a", "sm_100"), (9, 0), True),
        ((), (9, 0), True),
    ],
)
def test_which_cards_a_build_is_for(archs: tuple[str, ...], capability: tuple[int, int], well: bool) -> None:
    facts = replace(SOUND, **torch(archs=archs, gpus=tuple(replace(gpu, capability=capability) for gpu in GPUS)))
    assert ("card-not-in-build" not in [check.code for check in bad(facts)]) is well


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("^eth", ["docker0", "lo"]),
        ("^=eth0", ["docker0", "eth1", "lo"]),
        ("ib,lo", ["lo"]),
    ],
)
def test_which_interfaces_nccl_takes(names: str, taken: list[str]) -> None:
    assert nccl_interfaces(names, ("docker0", "eth0", "eth1", "lo")) == taken


def test_gloo_wants_all_that_it_is_told() -> None:
    assert gloo_interfaces("eth0,lo", ("eth0", "lo")) == ["eth0", "lo"]
    assert gloo_interfaces("eth0,ib0", ("eth0", "lo")) == []


def test_disks_of_one_file_system_share_a_line() -> None:
    found = [check.found for check in examine(SOUND).families["host"] if check.name == "disk"]
    assert found == [
        "3.91 TiB of 7.81 TiB free: models, this folder",
        "900.00 GiB of 1000.00 GiB free: temporary files",
    ]


def test_json_has_every_check_with_its_source_and_the_facts() -> None:
    facts = replace(SOUND, shm=2**26, shm_free=2**26, env={"NCCL_P2P_DISABLE": "1"})
    made = json.loads(json.dumps(examine(facts).to_dict()))
    assert (made["schema"], made["verdict"]) == ("verl_shard/doctor/1", "fault")
    assert made["counts"] == {"ok": len(examine(facts).checks) - 2, "warning": 1, "fault": 1}
    assert {check["family"] for check in made["checks"]} == set(FAMILIES)
    wrong = {check["code"]: check for check in made["checks"] if check["verdict"] != "ok"}
    assert wrong["small-shm"]["source"].startswith("https://docs.nvidia.com/deeplearning/nccl/")
    assert wrong["nccl-p2p-disabled"]["found"] == "NCCL_P2P_DISABLE=1"
    assert (made["facts"]["shm"], made["facts"]["packages"]["verl"]) == (2**26, "0.9.1")


def test_findings_are_warnings_and_errors() -> None:
    found = examine(replace(SOUND, shm=2**26, shm_free=2**26, open_files=256)).findings()
    assert [(one.level, one.code, one.where) for one in found] == [
        ("error", "small-shm", "host: /dev/shm"),
        ("warning", "few-files", "host: files"),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_says_what_to_do(width: int) -> None:
    facts = replace(SOUND, **packages(tensordict="0.11.0"), env={"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "[bold]"})
    text = as_text(width, Report(examine(facts)))
    assert max(len(line) for line in text.splitlines()) <= width
    joined = " ".join(text.split())
    assert "fault tensordict 0.11.0 verl 0.9.1 needs >=0.8.0,<=0.10.0,!=0.9.0 -> pip install" in joined
    assert "NCCL_DEBUG=[bold]" in joined  # what looks like markup is not
    assert text.splitlines()[-1] == f"1 fault, 1 warning, {len(examine(facts).checks) - 2} ok"
    assert [line for line in text.splitlines() if line in FAMILIES] == list(FAMILIES)
