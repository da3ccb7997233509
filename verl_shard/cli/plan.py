"""verl-shard plan"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_shard.cli import passes
from verl_shard.cli.options import default

if TYPE_CHECKING:
    from verl_shard.common.errors import Faults
    from verl_shard.config.roles import ResourceConfig
    from verl_shard.planning.plan import Plan

HELP = """Does a PPO or GRPO run fit, which role goes on which GPU, and if it does not fit, the cheapest way to make it.

Models are traced without weights and without a GPU, a second or two for each pass. Settings that are not given are chosen;
those that are given with --set are kept. Exit code 0 when it fits and can run, otherwise 2.
"""


def plan(
    actor: Annotated[str | None, typer.Option(help="Folder or hub id of the model that is trained.")] = None,
    critic: Annotated[
        str | None,
        typer.Option(help="The value model of ppo; by default the actor's. Trained too: as much memory again."),
    ] = None,
    ref: Annotated[str | None, typer.Option(help="The reference for the KL; by default the actor's.")] = None,
    reward: Annotated[str | None, typer.Option(help="A reward model; without, a reward function is meant.")] = None,
    gpus: Annotated[int | None, typer.Option(help="How many GPUs; by default those of this machine.")] = None,
    gpu: Annotated[str | None, typer.Option(help='A known card, such as "a100-80g" or "h200-141g".')] = None,
    gpu_memory: Annotated[str | None, typer.Option(help='Or the memory of each GPU, such as "80GiB".')] = None,
    nodes: Annotated[int, typer.Option(help="Machines that the GPUs are in.", min=1)] = 1,
    host_memory: Annotated[str | None, typer.Option(help='RAM of each machine, such as "512GiB".')] = None,
    config: Annotated[
        Path | None, typer.Option(help="A resource_config.yaml: who is where and how; what it leaves blank is planned.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="device_map (this package's engine), fsdp or fsdp2 (stock verl with vLLM)." + default("device_map")
        ),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="ppo, grpo, rloo ...: ppo has a critic." + default("ppo"))
    ] = None,
    train_batch_size: Annotated[int | None, typer.Option(help="Prompts in a step. [256]")] = None,
    n: Annotated[int | None, typer.Option(help="Responses to each prompt. [1]")] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Longest prompt, in tokens. [512]")] = None,
    shortest_prompt_length: Annotated[
        int | None,
        typer.Option(help="Shortest prompt, in tokens: of padded rows our engine makes no logits before it. [1]"),
    ] = None,
    response_length: Annotated[int | None, typer.Option(help="Longest response, in tokens. [1024]")] = None,
    mean_response_length: Annotated[
        int | None, typer.Option(help="Tokens of a response on average, for times; by default the longest.")
    ] = None,
    ppo_mini_batch_size: Annotated[
        int | None, typer.Option(help="Prompts in one optimizer step; by default the whole batch.")
    ] = None,
    kl: Annotated[
        str | None, typer.Option(help="loss, reward, or none, which needs no reference." + default("loss"))
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A role's setting that is to be kept, as actor.micro_batch_size=4 (repeat for several)."
        ),
    ] = None,
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side", help="Search which roles share GPUs: those on GPUs of their own work at the same time."
        ),
    ] = False,
    trust_remote_code: passes.TrustRemoteCode = False,
    save: Annotated[
        Path | None, typer.Option(help="Also write the plan as YAML, for Plan.load and the engine.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the memory of each phase, into this PNG.")] = None,
    rates: Annotated[Path | None, typer.Option(help='Speeds that "verl-shard bench rates" measured.')] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    emit: Annotated[
        str | None,
        typer.Option(help='"overrides": print the command that starts verl on the plan, and nothing else.'),
    ] = None,
) -> int:
    """Prints a plan."""
    from json import dumps

    from verl_shard.common.errors import Faults
    from verl_shard.common.outputs import check_outputs
    from verl_shard.common.tables import out
    from verl_shard.common.units import parse_bytes
    from verl_shard.config.workload import Workload
    from verl_shard.planning.build import build_plan
    from verl_shard.planning.rates import Rates
    from verl_shard.planning.settings import read_roles

    faults, declared, measured = Faults(), None, None
    with faults.gathering():
        check_outputs(save=save, picture=picture)
    with faults.gathering():
        measured = None if rates is None else Rates.load(rates)
    with faults.gathering():
        _check_emit(emit, json=json)
    with faults.gathering():
        declared = None if config is None else _declared(config)
    models = {"actor": actor, "critic": critic, "ref": ref, "reward": reward}
    given = _roles(models, setting or [], faults, declared)
    with faults.gathering():
        roles = read_roles(given, backend or ("device_map" if config is not None else None))  # type: ignore[arg-type]
    fields = passes.given(
        algorithm=algorithm,
        train_batch_size=train_batch_size,
        n=n,
        prompt_length=prompt_length,
        shortest_prompt_length=shortest_prompt_length,
        response_length=response_length,
        mean_response_length=mean_response_length,
        ppo_mini_batch_size=ppo_mini_batch_size,
        kl=kl,
    )
    with faults.gathering():
        workload = Workload(**fields)
    host = None
    with faults.gathering():
        host = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
    with faults.gathering():
        inventory = _inventory(gpus, gpu, gpu_memory, nodes, host, declared)
    faults.check()
    made = build_plan(
        roles,
        gpus=inventory,
        workload=workload,
        rates=measured,
        side_by_side=side_by_side,
        trust_remote_code=trust_remote_code,
    )
    if save is not None:
        made.save(save)
    if picture is not None:
        made.draw(picture)
    if emit:
        _emit(made, save)
    elif json:
        typer.echo(dumps(made.to_dict(), indent=2))
    else:
        if declared is not None:
            from verl_shard.config.resource_config import ownership

            out.print(ownership(roles, inventory))
        out.print(made.report(out.width), end="", markup=False)
    return 0 if made.fits and not made.faults else 2


def _check_emit(emit: str | None, *, json: bool) -> None:
    from verl_shard.common.errors import config_error

    if emit not in (None, "overrides"):
        raise config_error("unknown-emit", "--emit", emit, "there is no such thing to print", "Use --emit overrides")
    if emit and json:
        raise config_error("emit-and-json", "--emit", emit, "--json prints something else", "Give one of the two")


def _emit(made: Plan, saved: Path | None) -> None:
    """The command on stdout. Raises DoesNotFitError, and prints none, for a plan that does not fit."""
    from verl_shard.verl_plugin.overrides_plan import to_verl_overrides, verl_command

    check_fits(made)
    typer.echo(verl_command(to_verl_overrides(made, plan_file=saved), backend=made.backend))


def check_fits(made: Plan) -> None:
    """Raises DoesNotFitError with what would make the plan fit, ConfigError with every other reason not to run it."""
    from verl_shard.common.errors import ConfigError, DoesNotFitError, Finding

    if made.fits:
        fix = "Change what it names, and plan again"
        found = [Finding("error", "cannot-run", f"the plan's {one.what}", "", one.says, fix) for one in made.faults]
        if found:
            raise ConfigError(found)
        return
    remedies = "".join(f"\n  {row.setting} ({row.name}; its price: {row.price})" for row in made.remedies)
    listed = f" These settings would lower its memory:{remedies}" if remedies else ""
    raise DoesNotFitError(f"the plan does not fit, so that nothing is started on it. {made.fits_with}{listed}")


def _declared(path: Path) -> ResourceConfig:
    from verl_shard.config.resource_config import load_resource_config

    return load_resource_config(path)


def _inventory(
    gpus: int | None,
    gpu: str | None,
    memory: str | None,
    nodes: int,
    host_memory: int | None,
    declared: ResourceConfig | None,
) -> Any:
    from verl_shard.common.errors import config_error
    from verl_shard.config.inventory import Inventory
    from verl_shard.config.resource_config import inventory_of
    from verl_shard.resources.probe import probe

    if gpus is None and (gpu is not None or memory is not None or nodes > 1):
        raise config_error("how-many", "--gpus", None, "which GPUs, but not how many", "Add --gpus 4")
    if gpus is None:
        return (None if declared is None else inventory_of(declared)) or probe()
    return Inventory.declared(gpus, card=gpu, memory=memory, n_nodes=nodes, host_memory=host_memory)


def _roles(
    models: dict[str, str | None], settings: list[str], faults: Faults, declared: ResourceConfig | None
) -> dict[str, Any] | ResourceConfig:
    """Roles with models and `--set role.field=value`, its value read as YAML. What is wrong is added to `faults`.

    declared: roles of a file, of which what is given beside it is replaced.
    """
    import yaml

    from verl_shard.common.errors import Finding

    roles: dict[str, dict[str, Any]] = {role: {"model": model} for role, model in models.items() if model is not None}
    for text in settings:
        name, equals, value = text.partition("=")
        role, dot, field = name.partition(".")
        try:
            if not (equals and dot and field):
                raise ValueError("not role.field=value")
            roles.setdefault(role, {})[field] = yaml.safe_load(value)
        except (ValueError, yaml.YAMLError) as error:
            why, fix = " ".join(str(error).split()), "Write for example --set actor.gradient_checkpointing=true"
            faults.findings.append(Finding("error", "not-a-setting", "--set", text, why, fix))
    if declared is not None:
        with faults.gathering():
            declared = _with(declared, roles)
    of_file = declared is not None and declared.actor is not None and declared.actor.model is not None
    if models["actor"] is None and not of_file:
        why, fix = "the model that is trained is not named", "Add --actor FOLDER_OR_ID"
        faults.findings.append(Finding("error", "no-model", "--actor", "", why, fix))
        roles.setdefault("actor", {})
    return roles if declared is None else declared


def _with(declared: ResourceConfig, roles: dict[str, dict[str, Any]]) -> ResourceConfig:
    """The file's roles with some of their fields replaced. Raises ConfigError."""
    from dataclasses import replace

    from verl_shard.config.roles import RoleConfig
    from verl_shard.config.validated import read

    for role, section in roles.items():
        new = read(RoleConfig, section, role)
        own = getattr(declared, role, None) or RoleConfig()
        fields: dict[str, Any] = {role: replace(own, **{name: getattr(new, name) for name in section})}
        declared = replace(declared, **fields)
    return declared


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("plan", help=HELP)(plan)
