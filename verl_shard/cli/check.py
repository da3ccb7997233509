"""verl-shard check"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from verl_shard.config.inventory import Inventory
    from verl_shard.verl_plugin.check.run import Report
    from verl_shard.verl_plugin.check.world import Machines

HELP = """What is wrong with a configuration of verl, before Ray is started: all of it at once, each with the line to write.

verl-shard check --script run.sh --gpus 8 --gpu-memory 80GiB

Reads overrides (key=value), a launch script or a YAML file; needs no GPU and no weights, and starts nothing. With GPUs and
a model's configuration it also says whether it fits. Exit code 0 for nothing found, 1 for warnings, 2 for faults.
"""


def check(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help='As for verl; with a script, what its "$@" stands for.'),
    ] = None,
    script: Annotated[Path | None, typer.Option(help="The launch script (bash), which is read and not run.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with verl's keys.")] = None,
    gpus: Annotated[str | None, typer.Option(help='How many GPUs, in all or by node: "8", "2x8", "8,8,4".')] = None,
    gpu: Annotated[str | None, typer.Option(help='A known card, such as "a100-80g" or "v100-32g".')] = None,
    gpu_memory: Annotated[str | None, typer.Option(help='Or the memory of each GPU, such as "80GiB".')] = None,
    cpus: Annotated[int | None, typer.Option(help="CPUs of each machine.", min=1)] = None,
    host_memory: Annotated[str | None, typer.Option(help='RAM of each machine, such as "512GiB".')] = None,
    plan: Annotated[bool, typer.Option(help="Ask the planner whether it fits.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Prints all findings."""
    from json import dumps

    from verl_shard.common.errors import config_error

    given = [str(text) for text in overrides or []]
    if not given and script is None and config is None:
        fix = "Give key=value, --script run.sh or --config file.yaml"
        raise config_error("nothing-to-check", "check", None, "nothing was given", fix)
    inventory, machines = _machines(gpus, gpu, gpu_memory, cpus, host_memory)
    from verl_shard.verl_plugin.check.run import check as run

    report = run(given, script=script, config=config, inventory=inventory, machines=machines, plan=plan)
    if json:
        typer.echo(dumps(report.to_dict(), indent=2))
    else:
        _show(report)
    return report.exit_code


def _machines(
    gpus: str | None, gpu: str | None, gpu_memory: str | None, cpus: int | None, host_memory: str | None
) -> tuple[Inventory | None, Machines]:
    """The GPUs as they were said; of one machine's own nothing is asked. Raises ConfigError with every fault."""
    from verl_shard.common.errors import Faults, config_error
    from verl_shard.common.units import parse_bytes
    from verl_shard.config.cards import card_of_memory, find_card
    from verl_shard.config.inventory import Inventory, Node
    from verl_shard.verl_plugin.check.world import Machines

    faults = Faults()
    by_node: tuple[int, ...] = ()
    card: Any = None
    host = None
    with faults.gathering():
        by_node = () if gpus is None else _by_node(gpus)
    with faults.gathering():
        if gpu is not None and gpu_memory is not None:
            why = "the card says how much memory it has"
            raise config_error("gpu-and-memory", "--gpu-memory", gpu_memory, why, "Give one of the two")
        card = find_card(gpu) if gpu else card_of_memory(gpu_memory) if gpu_memory else None
    with faults.gathering():
        if gpus is None and (gpu is not None or gpu_memory is not None):
            raise config_error("how-many", "--gpus", None, "which GPUs, but not how many", "Add --gpus 8")
    with faults.gathering():
        host = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
    faults.check()
    inventory = Inventory(tuple(Node((card,) * n, host) for n in by_node)) if by_node and card is not None else None
    return inventory, Machines(by_node, cpus, host)


def _by_node(text: str) -> tuple[int, ...]:
    """GPUs of each node of "8", "2x8" or "8,8,4"."""
    import re

    from verl_shard.common.errors import config_error

    if (match := re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\d+)\s*", text)) is not None:
        found = (int(match[2]),) * int(match[1])
    elif re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        found = tuple(int(part) for part in text.split(","))
    else:
        raise config_error("not-a-count", "--gpus", text, "not a number of GPUs", 'Write 8, 2x8 or "8,8,4"')
    if not found or min(found) < 1:
        raise config_error("no-gpus", "--gpus", text, "a node without a GPU is none", 'Write 8, 2x8 or "8,8,4"')
    return found


def _show(report: Report) -> None:
    from rich.text import Text

    from verl_shard.common.tables import out

    styles = {"error": "bold red", "warning": "bold yellow", "notice": "bold blue"}
    names = {"error": "fault", "warning": "warning", "notice": "notice"}
    for finding in report.findings:
        given = f" = {finding.given}" if finding.given else ""
        head = Text(f"{names[finding.level]}: ", style=styles[finding.level])
        out.print(head.append(f"{finding.where}{given}", style="bold"), soft_wrap=True)
        out.print(Text(f"  {finding.why}"), soft_wrap=True)
        out.print(Text(f"  -> {finding.fix}"), soft_wrap=True)
    for text in report.left_out:
        out.print(Text(f"not looked at: {text}"), soft_wrap=True)
    if report.verdict:
        out.print(Text(report.verdict), soft_wrap=True)
    faults = sum(1 for finding in report.findings if finding.level == "error")
    warned = sum(1 for finding in report.findings if finding.level == "warning")
    out.print(f"{report.n_settings} settings: {_count(faults, 'fault')}, {_count(warned, 'warning')}")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    # What verl would be given may be a flag that it does not have, and is then a finding.
    app.command("check", help=HELP, context_settings={"ignore_unknown_options": True})(check)
