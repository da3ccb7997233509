"""Versions: what is installed against what the installed packages themselves say they need.

The rules are the metadata of verl_shard (setup.cfg), verl, its engines and Ray, read from the installed packages, so that they
are those of the versions that are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from verl_shard.diagnosis.doctor_facts import Check, Facts, Verdict, bad, ok

US = "verl-shard"
NAMED = ("torch", "transformers", "accelerate", "verl", "ray", "tensordict", "transferqueue")
"""Packages with a line of their own even when all is well, in this order."""
ENGINES = ("vllm", "sglang")
ASKING = (
    US,
    "verl",
    "ray",
    "tensordict",
    "transferqueue",
    "transformers",
    "accelerate",
    "peft",
    "flash-attn",
    *ENGINES,
)
"""Packages whose requirements are looked at."""
_VERL = 'pip install "verl_shard[verl]"'


@dataclass(frozen=True)
class Need:
    """`by` needs the versions `versions` of a package; pinned: as an extra of verl that nobody has to install."""

    by: str
    versions: SpecifierSet
    pinned: bool = False


def python(facts: Facts) -> Iterator[Check]:
    """Python itself against Requires-Python of verl_shard and verl."""
    needs = [(name, facts.packages[name].python) for name in (US, "verl") if name in facts.packages]
    wrong = [f"{name} needs {needed}" for name, needed in needs if not _holds(facts.python, needed)]
    if wrong:
        yield bad(
            "fault", "Python", "python-version", facts.python, why="; ".join(wrong),
            fix="Make a virtual environment with Python 3.11 or 3.12", source="Requires-Python of the installed packages",
        )  # fmt: skip
    else:
        yield ok("Python", facts.python)


def ourselves(facts: Facts) -> Iterator[Check]:
    """verl_shard is installed, and verl will load its plugin."""
    here = facts.packages.get(US)
    if here is None:
        yield bad(
            "warning", "verl_shard", "not-installed", "run without being installed",
            why="its requirements were not checked, and verl finds plugins of installed packages only",
            fix='pip install --editable ".[verl]" in the checkout', source="importlib.metadata; verl/__init__.py",
        )  # fmt: skip
        return
    policy = (facts.set_to("VERL_USE_EXTERNAL_PLUGINS") or "auto").strip().lower()
    allowed = policy == "auto" or "verl_shard" in (name.strip() for name in policy.split(","))
    if "verl" in facts.packages and not (allowed and "verl_shard" in facts.plugins):
        why = "verl will not load our plugin, and says so at debug level only: no engine device_map, no rollout hf"
        variable = f"VERL_USE_EXTERNAL_PLUGINS={policy}"
        yield bad(
            "fault", "verl_shard", "plugin-not-loaded",
            here.version + ("" if allowed else f", {variable}"), why=why,
            fix="Install verl_shard again: its entry point is missing" if allowed else f"Unset {variable.split('=')[0]}",
            source="verl/__init__.py: entry points of the group verl.plugins",
        )  # fmt: skip
    else:
        yield ok(
            "verl_shard", here.version + (", its plugin is registered with verl" if "verl" in facts.packages else "")
        )


def packages(facts: Facts) -> Iterator[Check]:
    """Each package that something installed here needs."""
    needs = needed(facts)
    for name in (name for name in NAMED if name in facts.packages or name in needs or name == "verl"):
        yield _package(facts, name, needs.get(name, []))
    others = sorted(set(needs) - set(NAMED))
    checks = [_package(facts, name, needs[name]) for name in others]
    yield from (check for check in checks if check.verdict != "ok")
    well = sum(check.verdict == "ok" for check in checks)
    if well:
        yield ok("others", f"{well} more packages, as those that need them ask")


def engines(facts: Facts) -> Iterator[Check]:
    """The engines that stock verl generates with, and a package that only gets in the way."""
    there = [f"{name} {facts.packages[name].version}" for name in ENGINES if name in facts.packages]
    yield ok(
        "rollout", ", ".join(there) if there else "neither vllm nor sglang: rollout hf with backend device_map only"
    )
    if "pynvml" in facts.packages:
        yield bad(
            "warning", "pynvml", "pynvml", f"{facts.packages['pynvml'].version} is installed",
            why="it is deprecated, and torch warns at each import", fix="pip uninstall pynvml; nvidia-ml-py takes its place",
            source="torch/cuda/__init__.py: FutureWarning",
        )  # fmt: skip


def needed(facts: Facts) -> dict[str, list[Need]]:
    """Who needs which versions, by package; of packages in ASKING that are installed."""
    needs: dict[str, list[Need]] = {}
    for by in (name for name in ASKING if name in facts.packages):
        package = facts.packages[by]
        for extra, pinned in _extras(facts, by):
            for line in package.requires:
                parsed = _requirement(line)
                if parsed is None or not _applies(parsed, facts, extra):
                    continue
                # With an extra, only what the extra adds.
                if extra and _applies(parsed, facts, ""):
                    continue
                name = canonicalize_name(parsed.name)
                if pinned and name not in facts.packages:
                    continue
                who = f"{'verl_shard' if by == US else by} {package.version}" + (f" [{extra}]" if extra else "")
                needs.setdefault(name, []).append(Need(who, parsed.specifier, pinned))
    return needs


def _extras(facts: Facts, by: str) -> list[tuple[str, bool]]:
    """Extras of a package that count here, and whether what they name is only what it was tested with."""
    extras = [("", False)]
    if by == US:
        extras += [("verl", False)] if "verl" in facts.packages else []
        extras += [("flash-attn", False)] if "flash-attn" in facts.packages else []
    if by == "verl":
        extras += [(name, True) for name in ENGINES if name in facts.packages]
    return extras


def _package(facts: Facts, name: str, needs: list[Need]) -> Check:
    shown = {"transferqueue": "TransferQueue"}.get(name, name)
    here = facts.packages.get(name)
    if here is None and name == "verl":
        return bad(
            "warning", "verl", "verl-not-installed", "not installed",
            why="maps, estimates and plans need no verl; quickstart and runs on verl's trainer do", fix=_VERL,
            source="setup.cfg: the extra [verl]",
        )  # fmt: skip
    if here is None:
        return bad(
            "fault", shown, "package-missing", "not installed", why=_list(needs), fix=_fix(facts, name, needs),
            source="metadata of the installed packages",
        )  # fmt: skip
    wrong = [need for need in needs if not _holds(here.version, str(need.versions))]
    if not wrong:
        return ok(shown, here.version)
    # What verl pins in an extra is what it was tested with; other versions may do.
    verdict: Verdict = "warning" if all(need.pinned for need in wrong) else "fault"
    return bad(
        verdict, shown, "package-version", here.version, why=_list(wrong), fix=_fix(facts, name, needs),
        source="metadata of the installed packages",
    )  # fmt: skip


def _list(needs: list[Need]) -> str:
    by_versions: dict[str, list[str]] = {}
    for need in needs:
        by_versions.setdefault(_sorted(need.versions) or "it", []).append(need.by)
    return "; ".join(
        f"{' and '.join(who)} need{'' if len(who) > 1 else 's'} {what}" for what, who in by_versions.items()
    )


def _fix(facts: Facts, name: str, needs: list[Need]) -> str:
    hard = [need for need in needs if not need.pinned] or needs
    if name in facts.packages and all(_holds(facts.packages[name].version, str(need.versions)) for need in hard):
        hard = needs
    together = SpecifierSet()
    for need in hard:
        together &= need.versions
    exact = [str(one) for one in together if one.operator == "=="]
    return f'pip install "{name}{exact[0] if exact else _sorted(together)}"'


def _sorted(versions: SpecifierSet) -> str:
    return ",".join(sorted((str(one) for one in versions), key=lambda one: (one[0] != ">", one[0] != "<", one)))


def _requirement(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _applies(requirement: Requirement, facts: Facts, extra: str) -> bool:
    if requirement.marker is None:
        return True
    full = facts.python
    return requirement.marker.evaluate(
        {"extra": extra, "python_full_version": full, "python_version": ".".join(full.split(".")[:2])}
    )


def _holds(version: str, versions: str) -> bool:
    """Whether a version is among some; what cannot be read counts as well, since nobody could say that it is not."""
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


CHECKS = (python, ourselves, packages, engines)
