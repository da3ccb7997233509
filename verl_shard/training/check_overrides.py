"""More of verl's configuration that somebody typed, held against verl's own before anything is made or started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.verl_plugin.check import batches, ignored, keys, rewards, world
from verl_shard.verl_plugin.check.given import Given, Setting
from verl_shard.verl_plugin.check.tree import Composed, compose


def check_overrides(extra: Sequence[str], own: Sequence[str]) -> None:
    """Raises ConfigError with what `verl-shard check` finds wrong with `extra`: overrides that cannot be read, keys that verl
    does not have, values that do not go there, and then what does not go together.

    own: the overrides that the run has before them, some with a value that only stands for one. Of what is wrong with those
    nothing is said here. verl is not imported, so that this takes half a second.
    """
    if not extra:
        return
    if found := dict.fromkeys(_find(own, extra)):
        before = set(_find(own, ()))
        if faults := [fault for fault in found if fault not in before]:
            raise ConfigError(faults)


def _find(own: Sequence[str], extra: Sequence[str]) -> list[Finding]:
    given = Given()
    for text in own:
        given.add(text, "")
    ours = list(given.settings)
    for text in extra:
        given.add(text, "")
    theirs = given.settings[len(ours) :]
    made = compose(given)
    if given.left_out:
        return []  # a configuration of their own, whose keys are not known here
    # A group that cannot be chosen is said of every group that is, those of the run too.
    named = {(setting.key, str(setting.value)) for setting in theirs}
    found = [*given.findings]
    found += [f for f in made.findings if f.code != "no-such-group" or (f.where, f.given) in named]
    if not any(finding.code == "no-such-group" for finding in found):
        found += _other_engine(made, ours, theirs)
    # With another group the run's own settings have no place either.
    made.unplaced = [setting for setting in made.unplaced if setting in theirs]
    found += keys.find(made)
    found += _misplaced(made, theirs)
    faults = [fault for fault in found if fault.level == "error"]
    return faults or [fault for fault in _together(made) if fault.level == "error"]


def _other_engine(made: Composed, ours: Sequence[Setting], theirs: Sequence[Setting]) -> Iterator[Finding]:
    """A choice of a group that takes away what the run sets itself."""
    lost = [setting.key for setting in made.unplaced if setting in ours and not setting.sign]
    for setting in theirs:
        if lost and setting.key == "model_engine":
            why = f"the run is made for another, and its own {lost[0]} has no place there"
            yield Finding("error", "another-engine", setting.key, str(setting.value), why, "Leave it out")


def _misplaced(made: Composed, theirs: Sequence[Setting]) -> Iterator[Finding]:
    """Values that Hydra takes and nothing can read: one in the place of a whole section, and its mark for none."""
    known = keys.known_keys(made)
    for setting in theirs:
        inside = next((key for key in known if key.startswith(f"{setting.key}.")), None)
        if setting.sign != "~" and inside is not None and not isinstance(setting.value, dict | None):
            why, fix = "it is a section of verl's, and no value", f"Name a key in it, such as {inside}=VALUE"
            yield Finding("error", "wrong-value", setting.key, str(setting.value), why, fix)
        if setting.value == "???" and setting not in made.unplaced:
            why = "it is Hydra's mark for a value that is still to be given"
            yield Finding("error", "wrong-value", setting.key, "???", why, "Give one, or leave it out")


def _together(made: Composed) -> Iterator[Finding]:
    """What the values say of each other. Models and attention are the run's own, and looked at elsewhere."""
    for rules in (batches.find(made), ignored.find(made), rewards.find(made)):
        yield from rules
    yield from world.find(made, world.Machines())
    if made.strategy == "device_map" and made.text("actor_rollout_ref.rollout.name"):
        from verl_shard.verl_plugin.trainer_config import find_faults

        try:
            yield from find_faults(made.config)
        except (AttributeError, KeyError, TypeError, ValueError):
            return  # a key that was taken out, or a text for a number: verl says so itself
