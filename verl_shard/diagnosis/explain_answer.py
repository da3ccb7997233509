"""What a log says: faults that were seen, errors that no entry knows, and which of them counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from verl_shard.diagnosis.catalogue import Advice, Case, Fault
from verl_shard.diagnosis.explain_memory import MemoryShort, read_memory
from verl_shard.diagnosis.explain_place import Frame, Place
from verl_shard.diagnosis.logs import Line


@dataclass
class Sighting:
    """A fault that was seen: where first, and how often."""

    fault: Fault
    line: Line
    place: Place
    groups: dict[str, str]
    said: list[str]
    frames: tuple[Frame, ...] = ()
    count: int = 1
    processes: set[str] = field(default_factory=set)
    last_line: int = 0

    @property
    def memory(self) -> MemoryShort | None:
        """The numbers in what was said."""
        return read_memory(" ".join(self.said))

    @property
    def case(self) -> Case | None:
        """The first of the fault's cases that fits."""
        said = "\n".join(self.said)
        return next((case for case in self.fault.cases if case.fits(self.place.phase, self.place.role, said)), None)

    @property
    def title(self) -> str:
        """What happened, in a few words."""
        return self._filled((self.case and self.case.title) or self.fault.title)

    @property
    def cause(self) -> str:
        """Why it happens, with what is particular to the case."""
        text = self._filled((self.case and self.case.cause) or self.fault.cause)
        if self.memory is not None and self.memory.fragmented:
            text += (
                ". Here memory was reserved and unused in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
                "helps the trainer, where no engine that sleeps shares the process"
            )
        return text

    @property
    def remedies(self) -> tuple[Advice, ...]:
        """What to do, in order."""
        chosen = (self.case and self.case.remedies) or self.fault.remedies
        return tuple(replace(advice, do=self._filled(advice.do)) for advice in chosen)

    def _filled(self, text: str) -> str:
        """With the patterns' groups put in; a sentence or clause whose group has no value says so with "?"."""
        text = text.replace("{{", "\0").replace("}}", "\1")
        filled = re.sub(r"\{(\w+)\}", lambda match: self.groups.get(match[1]) or "?", text)
        return filled.replace("\0", "{").replace("\1", "}")


@dataclass
class Unknown:
    """An exception that no entry knows."""

    type: str
    message: str
    line: Line
    place: Place
    frames: tuple[Frame, ...]
    first_line: int
    count: int = 1


@dataclass(frozen=True)
class Answer:
    """What a log says.

    cause: the fault that counts, if one of the catalogue was seen. unknown: an exception that it does not know, when
    that counts instead or nothing else was seen. also: what else was seen, weightiest first. lines: how many were read.
    """

    cause: Sighting | None
    unknown: Unknown | None
    also: tuple[Sighting, ...]
    lines: int
    steps: int

    @property
    def verdict(self) -> str:
        """ "fault", "unknown", "notice" (worth knowing, and no fault) or "nothing"."""
        if self.cause is not None:
            return "notice" if self.cause.fault.rank == "notice" else "fault"
        return "unknown" if self.unknown is not None else "nothing"

    @property
    def exit_code(self) -> int:
        """0 when there is no fault in it, else 1."""
        return int(self.verdict in ("fault", "unknown"))
