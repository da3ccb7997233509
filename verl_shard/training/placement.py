"""Which devices each role of a PPOTrainer is on, and in what precision; written as the plan that the engine reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.notices import notice
from verl_shard.config.resource_config import load_resource_config
from verl_shard.config.resource_rules import role_faults
from verl_shard.config.roles import RoleConfig
from verl_shard.mapping.build import build_device_map
from verl_shard.mapping.check import check_device_map
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.mapping.devices import DeviceId, choose_devices, device_label, parse_device
from verl_shard.models.dtypes import dtype_name, parse_dtype
from verl_shard.planning.plan_file import read_role, write_plan
from verl_shard.runtime.offload_choice import check_stream_options
from verl_shard.training.article_keys import ROLES, read_section

TRAINED = ("actor", "critic")
_WAYS = ("device", "devices", "device_map", "copies_on")
_OFFLOADING = ("embeddings_on_host", "pin_limit")
_SCORING = (
    "task", "tokenizer", "chat_template", "label", "aggregate", "separator", "step_mark", "batch_size", "too_long",
    "empty_response",
)  # fmt: skip
"""Keys that only a reward model has: ScoringModel's arguments, by the same names."""
_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"


@dataclass(frozen=True)
class RolePlace:
    """devices: in the order of the model's blocks; device_map: only where one was given. precision: None for a reward model.

    offloading: more arguments of offload_model. copies: each of a ref's or a reward model's devices has a whole copy. scoring:
    a reward model's other arguments of ScoringModel.
    """

    devices: tuple[DeviceId, ...]
    device_map: Mapping[str, Any] | None
    dtype: torch.dtype | None
    precision: str | None
    attn_implementation: str
    offload: str = "none"
    offloading: Mapping[str, Any] = field(default_factory=dict)
    copies: bool = False
    scoring: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """All roles. cpu: everything is on the CPU; share: the GPUs of this process. asked: the roles as model_config has them,
    whatever moved since."""

    cpu: bool
    share: tuple[DeviceId, ...]
    roles: Mapping[str, RolePlace]
    asked: Mapping[str, RolePlace] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Those that a role is on."""
        return tuple(sorted({d for place in self.roles.values() for d in place.devices if isinstance(d, int)}))


def given_by_role(model_config: Any) -> Mapping[str, Any]:
    """What model_config says by role, yet to be checked. Raises ConfigError for a resource config with faults, with all."""
    if isinstance(model_config, str | os.PathLike):
        model_config = load_resource_config(model_config)
    given: Any = getattr(model_config, "model_config", model_config) or {}
    if not isinstance(given, Mapping):
        fix = 'Write {"actor": {"device": ...}, ...}'
        raise config_error("not-a-dict", "model_config", type(given).__name__, "not a dict by role", fix)
    return given


def read_places(model_config: Any, roles: tuple[str, ...], *, lora: bool) -> Places:
    """From PPOTrainer's model_config. roles: those that the run has. Raises ConfigError with every fault.

    model_config: a dict by role, or what has one as its `model_config` (a Plan, a ResourceConfig); or a resource config's
    file. Each process has its own GPUs under a launcher; what a role names must be among them. Roles may share GPUs.
    """
    given, faults = given_by_role(model_config), Faults()
    values: dict[str, dict[str, Any]] = {}
    for role, section in given.items():
        where = f"model_config[{role!r}]"
        with faults.gathering():
            if role not in ROLES:
                raise config_error("unknown-role", where, None, "no such role", f"Use some of {', '.join(ROLES)}")
            values[role] = read_section("model_config", section, where, role)
            if role not in (*roles, "rollout") and section:
                why = f"this run has no {role} model"
                raise config_error("no-effect", where, section, why, f"Leave it out, or give {role}_model")
    faults.check()
    cpu = _on_cpu(values, faults)
    faults.check()
    share: tuple[DeviceId, ...] = ("cpu",) if cpu else choose_devices(None, "process")
    made: dict[str, RolePlace] = {}
    for role in roles:
        with faults.gathering():
            made[role] = _place(role, values.get(role, {}), share, cpu=cpu)
    faults.findings += _conflicts(values, lora=lora)
    faults.check()
    return Places(cpu, share, made, made)


def section_of(place: RolePlace) -> dict[str, Any]:
    """Where a role is, as model_config would say it; JSON-ready."""
    if place.device_map is not None:
        return {"device_map": {name: parse_device(device) for name, device in place.device_map.items()}}
    return {"copies_on" if place.copies else "devices": list(place.devices)}


def place_again(places: Places, role: str, section: Mapping[str, Any]) -> Places:
    """The same with one role elsewhere. section: one of model_config's devices, device_map and copies_on.

    Raises ConfigError for devices that the role cannot have in this process.
    """
    devices = tuple(dict.fromkeys(parse_device(device) for device in _named(section)))
    shown = ", ".join(map(device_label, devices))
    on_gpu = [device for device in devices if isinstance(device, int)]
    if places.cpu and on_gpu:
        why, fix = "the run is on the CPU", "Start it on GPUs: verl works on one of both"
        raise config_error("cpu-and-gpu", "device_ids", shown, why, fix)
    if not places.cpu and role != "reward" and "cpu" in devices:
        why = f"the run is on GPUs, and the {role} is on verl's engine, which works on one of both"
        raise config_error("cpu-and-gpu", "device_ids", shown, why, "Name GPUs; a reward model may be on the CPU")
    if other := [gpu for gpu in on_gpu if gpu not in places.share]:
        why = f"this process has GPU {', '.join(map(str, places.share))}; {', '.join(map(str, other))} is of another, or of none"
        raise config_error("gpu-of-another-process", "device_ids", shown, why, "Name GPUs of this process")
    before = places.roles[role]
    if before.offload != "none" and role != "reward":
        why = f"its weights wait on the host (offload={before.offload}), and are laid out when they are loaded"
        fix = f"Stop, and resume with this in model_config[{role!r}]"
        raise config_error("offloaded", role, before.offload, why, fix)
    place = replace(before, devices=devices, device_map=section.get("device_map"), copies="copies_on" in section)
    return replace(places, roles={**places.roles, role: place})


def _on_cpu(values: Mapping[str, Mapping[str, Any]], faults: Faults) -> bool:
    """Whether the run is on the CPU: as the roles name it, else as accelerate or the machine has it."""
    named = {role: [parse_device(d) for d in _named(section)] for role, section in values.items()}
    named = {role: devices for role, devices in named.items() if devices}
    on_cpu = [role for role, devices in named.items() if "cpu" in devices]
    on_gpu = [role for role, devices in named.items() if any(isinstance(d, int) for d in devices)]
    there = torch.cuda.is_available() and torch.cuda.device_count() > 0
    trained_on_cpu = [role for role in on_cpu if role != "reward"]
    if trained_on_cpu and on_gpu:
        why = f"{', '.join(trained_on_cpu)} would be on the CPU and {', '.join(on_gpu)} on GPUs, and verl works on one of both"
        faults.findings.append(_fault("cpu-and-gpu", "model_config", "", why, "Put all on GPUs, or all on the CPU"))
    if on_gpu and not there:
        role = on_gpu[0]
        why = "torch sees no GPU on this machine"
        fix = 'Run where they are; to try the run here, write "cpu", or leave the devices out'
        shown = _shown(named[role])
        faults.findings.append(_fault("no-gpu", f"model_config[{role!r}]", shown, why, fix))
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return not on_gpu and (bool(trained_on_cpu) or asked or not there)


def _shown(devices: Iterable[DeviceId]) -> str:
    """Each device once, and GPUs in a row as one: a map names one for every module."""
    labels: list[str] = []
    first = last = -2
    for device in dict.fromkeys(devices):
        if isinstance(device, int) and device == last + 1:
            last = device
            labels[-1] = f"GPU {first}-{last}"
            continue
        first = last = device if isinstance(device, int) else -2
        labels.append(device_label(device))
    return ", ".join(labels)


def _named(section: Mapping[str, Any]) -> list[Any]:
    """The devices that a role names, in any of the ways."""
    listed = [section["device"]] if "device" in section else list(section.get("devices", ()))
    listed += section.get("copies_on", ())
    return listed + list(section.get("device_map", {}).values())


def _place(role: str, section: Mapping[str, Any], share: tuple[DeviceId, ...], *, cpu: bool) -> RolePlace:
    where = f"model_config[{role!r}]"
    faults: list[Finding] = []
    ways = [name for name in _WAYS if name in section]
    if len(ways) > 1:
        why = f"{' and '.join(ways)} both say where it is"
        faults.append(_fault("device-conflict", where, "", why, f"Leave out {ways[0]}"))
    strategy = section.get("strategy")
    everything = share[:1] if strategy == "none" else share
    devices = tuple(dict.fromkeys(parse_device(device) for device in _named(section))) or everything
    faults += _of_strategy(role, section, devices, where)
    if other := [d for d in devices if isinstance(d, int) and d not in share]:
        mine = ", ".join(map(str, share))
        why = f"this process has GPU {mine}; {', '.join(map(str, other))} belongs to another process, or to none"
        fix = 'Leave the devices out: each process takes its own; or name those of devices="process"'
        faults.append(_fault("gpu-of-another-process", where, ", ".join(map(str, devices)), why, fix))
    dtype = parse_dtype(section["dtype"]) if "dtype" in section else None
    try:
        precision = (
            None if role == "reward" else _precision(role, dtype, section.get("precision"), cpu=cpu, where=where)
        )
    except ConfigError as error:
        faults += error.findings
        precision = None
    offload = section.get("offload", "none")
    if offload != "none" and role in TRAINED:
        why = f"the {role} is trained, and weights kept in host memory are copied in for a forward only"
        fix = "Leave it out: use_gradient_checkpointing, a smaller micro_batch_size, lora_rank or more GPUs lower its memory"
        faults.append(_fault("offloaded-and-trainable", f"{where}['offload']", offload, why, fix))
    offloading = {name: section[name] for name in _OFFLOADING if name in section}
    scoring: dict[str, Any] = {}
    try:
        check_stream_options(offload, offloading.get("embeddings_on_host", False), offloading.get("pin_limit"))
    except ConfigError as error:
        faults += [replace(finding, where=f"{where}[{finding.where!r}]") for finding in error.findings]
    try:
        scoring = _scoring(section, where)
    except ConfigError as error:
        faults += error.findings
    if faults:
        raise ConfigError(faults)
    attention = section.get("attn_implementation", "sdpa")
    copies = "copies_on" in section or strategy == "data_parallel"
    device_map = section.get("device_map")
    return RolePlace(devices, device_map, dtype, precision, attention, offload, offloading, copies, scoring)


def _of_strategy(role: str, section: Mapping[str, Any], devices: tuple[DeviceId, ...], where: str) -> Iterator[Finding]:
    """What is wrong with a strategy for these devices, as resource configs have it."""
    strategy = section.get("strategy")
    if strategy is None:
        return
    ids = tuple(device for device in devices if isinstance(device, int))
    on_gpus = RoleConfig(strategy=strategy, devices=ids) if ids else RoleConfig(strategy=strategy, device_type="cpu")
    yield from (replace(fault, where=f"{where}['strategy']") for fault in role_faults(role, on_gpus))  # type: ignore[arg-type]
    other = "device_map" if strategy == "data_parallel" else "copies_on"
    if other in section:
        why = f"{other} says it otherwise"
        yield _fault("device-conflict", f"{where}['strategy']", strategy, why, "Leave out one of them")


def _scoring(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A reward model's own keys, such that a process with another working folder, or on another node, can use them."""
    found = {name: section[name] for name in _SCORING if name in section}
    if "tokenizer" in found:
        folder = Path(found["tokenizer"]).expanduser()
        found["tokenizer"] = str(folder.resolve()) if folder.is_dir() else str(found["tokenizer"])
    if "{" not in (template := str(found.get("chat_template", "{"))):
        file = Path(template).expanduser()
        if not file.is_file():
            fix = "Give a Jinja text or the file that holds one"
            raise config_error("no-chat-template", f"{where}['chat_template']", template, "no such file", fix)
        found["chat_template"] = file.read_text(encoding="utf-8")
    return found


def _precision(role: str, dtype: torch.dtype | None, given: str | None, *, cpu: bool, where: str) -> str:
    """As model_config says it, else as accelerate does, else the engine's default."""
    if dtype is not None and dtype not in _PRECISIONS:
        why = f"the {role} has no loss scaling, without which float16 over- and underflows"
        raise config_error("float16", f"{where}['dtype']", dtype_name(dtype), why, "Use bfloat16 or float32")
    if dtype is not None and given is not None and _PRECISIONS[dtype] != given:
        why = f"dtype says {_PRECISIONS[dtype]}"
        raise config_error("dtype-and-precision", f"{where}['precision']", given, why, "Leave out one of them")
    if given is None and dtype is not None:
        given = _PRECISIONS[dtype]
        if given == "bf16" and role in TRAINED:
            why = (
                "bfloat16 weights lose small updates: at a learning rate of 1e-6 twenty AdamW steps changed 2 % of them"
            )
            notice("bf16-training", f"{where}['dtype']", "bfloat16", why, "it, as was asked, and not bf16-mixed")
    if given is not None:
        return given
    mixed = os.environ.get(_ACCELERATE)
    if mixed in ("fp16", "fp8"):
        why = "this engine has no loss scaling" if mixed == "fp16" else "this engine has no fp8"
        raise config_error("mixed-precision", "accelerate's mixed_precision", mixed, why, "Use bf16 or no")
    if mixed == "no" or (cpu and mixed is None):
        return "fp32"
    return "bf16-mixed" if role in TRAINED else "bf16"


def _conflicts(values: Mapping[str, Mapping[str, Any]], *, lora: bool) -> list[Finding]:
    """Roles that name devices though another role decides them."""
    why_of = {"rollout": "it generates on the actor's own module"}
    if lora:
        why_of["ref"] = "with lora_rank the reference is the actor without its adapters"
    actor = [parse_device(d) for d in _named(values.get("actor", {}))]
    found = []
    for role, why in why_of.items():
        mine = [parse_device(d) for d in _named(values.get(role, {}))]
        if mine and mine != actor:
            shown, theirs = _shown(mine), _shown(actor) or "no device by name"
            fix = "Leave out its devices"
            found.append(_fault("device-conflict", f"model_config[{role!r}]", shown, f"{why}, which has {theirs}", fix))
        if (offload := values.get(role, {}).get("offload", "none")) != "none":
            found.append(_fault("no-effect", f"model_config[{role!r}]['offload']", offload, why, "Leave it out"))
    return found


def lay_out(places: Places, models: Mapping[str, str], path: Path, **pass_fields: Any) -> None:
    """Writes the plan: on GPUs a role that trains is even in the peak of its training. pass_fields: of that training.

    Raises ConfigError for a device_map with faults, and DoesNotFitError.
    """
    engines = [role for role in places.roles if role != "reward"]
    write_plan(path, {role: entry_of(role, places, models, **pass_fields) for role in engines})


def made_map(role: str, places: Places, models: Mapping[str, str], **pass_fields: Any) -> DeviceMap:
    """The map of a role for which none is given. Raises DoesNotFitError."""
    place = places.roles[role]
    fields: dict[str, Any] = {}
    if places.cpu:
        fields = {"dtype": "float32"}
    elif role in TRAINED:
        fields = {
            "purpose": "training", "loss": "value" if role == "critic" else "verl-ppo", **pass_fields,
            "precision": place.precision, "attn_implementation": place.attn_implementation,
        }  # fmt: skip
        if (n := len(place.devices)) > 1:  # so many keep all of them at work
            fields |= {"in_flight": n, "accumulating": True}
    return build_device_map(models[role], devices=place.devices, task=_task(role), **fields)


def _task(role: str) -> str:
    return "value" if role == "critic" else "causal-lm"


def lay_out_again(role: str, entry: Mapping[str, Any], places: Places, path: Path) -> None:
    """Writes the plan with another entry for one role."""
    engines = [other for other in places.roles if other != "reward"]
    write_plan(path, {other: entry if other == role else read_role(path, other) for other in engines})


def entry_of(role: str, places: Places, models: Mapping[str, str], **pass_fields: Any) -> dict[str, Any]:
    """A role's entry in the plan. Raises as lay_out."""
    place = places.roles[role]
    device_map: dict[str, Any]
    loads: dict[Any, int] = {}
    if place.copies:
        first = replace(places, roles={**places.roles, role: replace(place, copies=False, devices=place.devices[:1])})
        one = entry_of(role, first, models, **pass_fields)
        size = sum(one["loads"].values())
        loads = dict.fromkeys(place.devices, size) if size else {}
        return {
            "copies_on": list(place.devices),
            **{name: one[name] for name in one if name != "device_map"},
            "loads": loads,
        }
    if place.device_map is not None:
        found = check_device_map(models[role], place.device_map, trainable=role in TRAINED, task=_task(role))
        if faults := [finding for finding in found if finding.level == "error"]:
            raise ConfigError(faults)
        device_map = dict(place.device_map)
    elif places.cpu:
        device_map = {"": "cpu"}
    else:
        made = made_map(role, places, models, **pass_fields)
        device_map, loads = dict(made), dict(made.loads)
    return {
        "device_map": device_map,
        "precision": place.precision,
        "attn_implementation": place.attn_implementation,
        "loads": loads,
        **({"settings": {"offload": place.offload, **place.offloading}} if place.offload != "none" else {}),
        # The one model that verl's configuration has no place for.
        **({"model": models["ref"]} if role == "ref" and models["ref"] != models["actor"] else {}),
    }


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(given), why, fix)
