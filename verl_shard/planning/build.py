"""build_plan: which role goes where with which settings, whether it fits, and if not what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.config.cards import find_card
from verl_shard.config.inventory import Inventory
from verl_shard.config.resource_config import check_inventory, inventory_of
from verl_shard.config.roles import Backend, ResourceConfig, Role, RoleConfig
from verl_shard.config.validated import read
from verl_shard.config.workload import Algorithm, Workload, group_of_one
from verl_shard.planning.backends import Engine, engine_for
from verl_shard.planning.offload import advise
from verl_shard.planning.plan import Check, Plan, PlannedRole, RemedyRow
from verl_shard.planning.rates import Rates
from verl_shard.planning.search import Found, Taken, cheapest
from verl_shard.planning.settings import Settings, fill, read_roles

_MOST_GPUS = 1024
_MOST_COUNTS = 16


def build_plan(
    roles: ResourceConfig | Mapping[str, Any],
    *,
    gpus: Inventory | int | None = None,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    workload: Workload | Mapping[str, Any] | None = None,
    backend: Backend | None = None,
    rates: Rates | None = None,
    side_by_side: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """Where everything goes and what each phase of a PPO or GRPO step takes, before any of it is started.

    roles: by role (actor, critic, ref, reward, rollout) a model, as an id, folder, PretrainedConfig or module, or a dict
        of RoleConfig's fields. A critic that ppo needs and a reference that the KL needs are added with the actor's model.
    gpus: an Inventory, or a number of GPUs with `gpu`, a known card such as "a100-80g", or `gpu_memory`, such as "80GiB";
        by default what a ResourceConfig says under `nodes`.
    workload: of Workload's fields; by default ppo with 256 prompts of 512 + 1024 tokens.
    backend: "device_map", our engine, where one process lays each model over its GPUs; "fsdp" or "fsdp2", stock verl
        with vLLM.
    side_by_side: search which roles share GPUs and how many each set gets, such that the step is fastest when sets work
        at the same time; without, every role that names no GPUs is over all of them, and phases follow each other.
    rates: measured speeds of the card; by default its data sheet's, with the shares that were measured on an H200.
    trust_remote_code: let code that comes with a model run, as from_pretrained does.

    Fields that were left blank get defaults, and where these do not fit the cheapest remedies among them. A field that
    was set is kept: when the step then does not fit, `fits` is False and `remedies` says what to set instead.
    Models are traced without memory, a second or two for each pass; nothing is loaded and no GPU is asked.

    Raises ConfigError with every fault.
    """
    faults = Faults()
    config: ResourceConfig | None = None
    with faults.gathering():
        config = read_roles(roles, backend)
    with faults.gathering():
        given = _workload(workload)
    with faults.gathering():
        declared = None if config is None or (gpus, gpu, gpu_memory) != (None, None, None) else inventory_of(config)
        inventory = declared or _inventory(gpus, gpu, gpu_memory)
    with faults.gathering():
        fix = "Write rates=Rates.load(FILE), FILE from verl-shard bench rates --out"
        _check_kind(rates, Rates, "rates", "a Rates", fix)
    faults.check()
    assert config is not None, "its faults were raised"
    if config.nodes is not None:
        check_inventory(config, inventory)
    if side_by_side and config.backend != "device_map":
        why = "stock verl has all roles on all GPUs, one phase after the other"
        raise config_error("no-effect", "side_by_side", True, why, 'Leave it out, or plan with backend="device_map"')
    start = fill(config, given)
    _check_ids(start, inventory, side_by_side)
    engine = engine_for(start, given, inventory, rates, side_by_side=side_by_side, trust_remote_code=trust_remote_code)
    start = engine.completed(start)
    own = cheapest(start, given, engine.evaluate, lambda role, name: name in start.blank[role], engine.can_run)
    if own.evaluation.fits:
        return _plan(engine, own.settings, own.taken, taken=True)
    other = cheapest(start, given, engine.evaluate, lambda role, name: True, engine.can_run)
    if other.evaluation.fits:
        return _plan(engine, start, other.taken, taken=False, fits_with="")
    return _plan(
        engine,
        start,
        other.taken,
        taken=False,
        fits_with=_more_gpus(engine, other, one_node=config.backend == "device_map" and not side_by_side),
    )


def _workload(given: Any) -> Workload:
    if isinstance(given, Workload):
        return given
    algorithm = given if isinstance(given, str) and given in get_args(Algorithm) else "grpo"
    fix = f'Write {{"algorithm": "{algorithm}", "train_batch_size": 64, ...}}, or give a Workload'
    _check_kind(given, Mapping, "workload", "a mapping of Workload's fields", fix)
    return read(Workload, given or {})


def _check_kind(given: object, wanted: type, where: str, words: str, fix: str) -> None:
    """Raises ConfigError for what is neither None nor of the kind that is wanted: Python would take it, and fail inside."""
    if given is not None and not isinstance(given, wanted):
        raise config_error(f"not-{where}", where, repr(given), f"not {words}", fix)


def _inventory(gpus: Inventory | int | None, gpu: str | None, memory: int | str | None) -> Inventory:
    if isinstance(gpus, Inventory):
        if gpu is not None or memory is not None:
            raise config_error("gpus-twice", "gpu", gpu or memory, "the Inventory says which GPUs", "Leave it out")
        return gpus
    fix = 'Write gpu="a100-80g", or gpu_memory="80GiB" for a card that is not known'
    _check_kind(gpu, str, "gpu", "the name of a card", fix)
    if gpus is None:
        if gpu is None:
            fix = 'Give gpus=8 with gpu="a100-80g" or gpu_memory="80GiB", or an Inventory'
            raise config_error("no-gpus", "gpus", None, "a plan never looks for GPUs itself", fix)
        return Inventory.declared(1, card=find_card(gpu, "gpu"))
    return Inventory.declared(gpus, card=gpu, memory=memory)


def _check_ids(settings: Settings, inventory: Inventory, side_by_side: bool) -> None:
    """Raises ConfigError for GPUs that are not there, or not where one process drives them."""
    n = len(inventory)
    faults: list[Finding] = []
    if settings.backend == "device_map":
        faults += _over_nodes(settings, inventory, side_by_side)
    for role, own in settings.roles.items():
        asked = own.devices
        over = (
            [i for i in asked if i >= n]
            if isinstance(asked, tuple)
            else [asked]
            if asked is not None and asked > n
            else []
        )
        if over:
            given = str(list(asked)) if isinstance(asked, tuple) else str(asked)
            why = f"there are {n} GPUs" + (f", 0 to {n - 1}" if isinstance(asked, tuple) else "")
            faults.append(Finding("error", "no-such-gpu", f"{role}.devices", given, why, "Name GPUs that there are"))
        if own.strategy == "data_parallel" and asked is None and n == 1:
            why, fix = "there is one GPU, and so one copy", "Use none, or more GPUs"
            faults.append(Finding("error", "strategy-and-gpus", f"{role}.strategy", own.strategy, why, fix))
    if faults:
        raise ConfigError(faults)


def _over_nodes(settings: Settings, inventory: Inventory, side_by_side: bool) -> Iterator[Finding]:
    """Roles whose GPUs are on several nodes: a device_map is one process's, which has its node's GPUs."""
    first = len(inventory.nodes[0].cards)
    for role, own in settings.roles.items():
        if role == "rollout" or own.device_type == "cpu":
            continue
        if isinstance(own.devices, tuple):
            gpus = own.devices
        elif side_by_side and (own.devices is None or own.devices <= first):
            continue
        else:
            gpus = tuple(range(own.devices or len(inventory)))
        nodes = {inventory.gpus[gpu].node for gpu in gpus if gpu < len(inventory)}
        if len(nodes) > 1:
            why = f"{len(gpus)} GPUs on {len(nodes)} nodes, and a device_map's one process has the {first} of its node"
            fix = f'Name GPUs of one node, plan roles side by side or for {first} GPUs, or use backend="fsdp2"'
            yield Finding(
                "error", "several-nodes", f"{role}.devices", "" if own.devices is None else str(own.devices), why, fix
            )


def _more_gpus(engine: Engine, nearest: Found, one_node: bool) -> str:
    """In words, the smallest number of such GPUs on which the nearest settings fit."""
    inventory = engine.inventory
    card = inventory.gpus[0].card
    per_node = len(inventory.nodes[0].cards)
    lacking = "With all remedies it still does not fit"
    counts = _counts(len(inventory), per_node)
    for n in counts:
        nodes = n // per_node if n % per_node == 0 and not one_node else 1
        host = inventory.nodes[0].host_memory
        larger = engine.over(Inventory.declared(n, card=card, n_nodes=nodes, host_memory=host))
        if larger.can_run(nearest.settings) and larger.evaluate(nearest.settings).fits:
            where = " in one node" if one_node and n > per_node else ""
            return f"{lacking} on {len(inventory)}; with the settings above it fits on {n} x {card.name}{where}."
    return f"{lacking}, and neither on {counts[-1]} such GPUs: a smaller model, or a card with more memory, is needed."


def _counts(n: int, per_node: int) -> list[int]:
    """Larger numbers of GPUs: each up to twice the number, of whole nodes where there are several, and then doubled."""
    nodes = n // per_node
    counts = list(range(n + 1, 2 * n + 1)) if nodes == 1 else [k * per_node for k in range(nodes + 1, 2 * nodes + 1)]
    counts = counts[:: -(-len(counts) // _MOST_COUNTS)]
    while counts[-1] < _MOST_GPUS:
        counts.append(2 * counts[-1])
    return counts


def _plan(engine: Engine, settings: Settings, steps: tuple[Taken, ...], *, taken: bool, fits_with: str = "") -> Plan:
    evaluation = engine.evaluate(settings)
    rows = tuple(
        RemedyRow(
            name=step.remedy.name,
            role=step.role,
            setting=", ".join(f"{step.role}.{name}={_written(value)}" for name, value in step.change.items()),
            phase=step.phase,
            saved=step.saved,
            elsewhere=step.elsewhere and step.elsewhere[0],
            saved_elsewhere=step.elsewhere[1] if step.elsewhere else 0,
            seconds=step.seconds,
            price=step.remedy.price,
            same_result=step.remedy.same_result,
            taken=taken,
        )
        for step in steps
    )
    phases = engine.phases(settings)
    return Plan(
        backend=settings.backend,
        inventory=engine.inventory,
        workload=engine.workload,
        roles={role: _role(engine, settings, role, own) for role, own in settings.roles.items()},
        phases=phases,
        limits=dict(evaluation.limits),
        fits=evaluation.fits,
        step_seconds=evaluation.seconds,
        remedies=rows,
        advice=tuple(advise(engine, settings)),
        checks=(*_of_groups(engine.workload), *engine.checks(settings)),
        host=dict(evaluation.host),
        host_parts=engine.host_parts(settings),
        fits_with=fits_with,
        placements=engine.other_placements(settings),
    )


def _of_groups(workload: Workload) -> list[Check]:
    said = group_of_one(workload.algorithm, workload.n)
    return [] if said is None else [Check("warning", f"{workload.algorithm} with n=1", ". ".join(said))]


def _role(engine: Engine, settings: Settings, role: Role, own: RoleConfig) -> PlannedRole:
    name, n_params = engine.model_of(settings, role)
    said = {f.name: getattr(own, f.name) for f in fields(RoleConfig) if f.name not in ("model", "devices")}
    placed = engine.map_of(settings, role)
    assert own.precision is not None, "settings have no blanks"
    return PlannedRole(
        model=name,
        n_params=n_params,
        devices=engine.devices_of(settings, role),
        precision=own.precision,
        settings={name: value for name, value in said.items() if value is not None},
        chosen=tuple(
            sorted(name for name, value in said.items() if value is not None and name in settings.blank[role])
        ),
        device_map=None if placed is None else dict(placed),
        loads=None if placed is None else {int(gpu): size for gpu, size in placed.loads.items()},
    )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
