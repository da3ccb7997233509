"""Finds in a log what went wrong first, and what only followed from it.

Every process in a log has a traceback of its own, whose lines stand between those of others; so each is followed by
itself. A line that matches an entry of the catalogue is a sighting of that fault. Of all sightings the weightiest counts
(see catalogue.Rank), and of several as weighty the first. An exception that no entry knows is unknown, and is the answer
only where nothing weightier was seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from verl_shard.diagnosis.catalogue import RANKS, Fault, catalogue
from verl_shard.diagnosis.explain_answer import Answer, Sighting, Unknown
from verl_shard.diagnosis.explain_memory import read_memory
from verl_shard.diagnosis.explain_place import Frame, Task, place_of, read_frame, read_task
from verl_shard.diagnosis.logs import Line, Readable, read_blocks, read_line

DETAIL_LINES = 60
"""How many lines of a process after a sighting may hold its details."""
LINES_OF_AN_EXCEPTION = 15
MOST_FRAMES = 200

_EXCEPTION = re.compile(
    r"^(?:\| )?(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)|Exception"
    r"|RayTaskError\(\w+\)))(?::(?P<message> .*)?)?$"
)
_WRAPPER = re.compile(
    r"RayTaskError|ProcessRaisedException|^ray\.exceptions\.\w+|ActorDiedError|UserCodeException|hydra\.errors\.HydraException$"
)
# What ends a process and is no Python exception, or is one that Ray could not hand on.
_FATAL = re.compile(
    r"(?P<type>Check failed):(?P<message>.*)|User exception type <class '(?P<type2>[\w.]+)'> in RayTaskError(?P<message2>.*)"
)
_WRAPPED = re.compile(
    r"RayTaskError\((?P<type>\w+)\):(?P<message>.*)|(?P<type2>Unhandled error) \(.*\): (?P<message2>ray::.*)"
)
_STEP = re.compile(r"\bstep:\d+ - |timing_s/step")
_MARKS = (
    "Check failed",
    'File "',
    "Traceback (most",
    "ray::",
    "Error",
    "Exception",
    "Interrupt",
    "timing_s/step",
    "step:",
)
_ROOTS = (
    "rror", "xcept", "ailed", "illed", "CUDA", "uda ", "lash", "NCCL", "nccl", " not ", "annot", "out of", "must be", "meout",
    "imed out", "SIG", "ignal", "died", "dead", "issing", "nvalid", "undefined", "ivisible", "nknown", "device", "memory", "disk",
    "full", "offload", "ray::", "File ", "Traceback", "larger", "less than", "longer", "fault", "shared", "pending",
)  # fmt: skip
_SURVIVED_AFTER = 2
"""Steps after an exception that show that the run went on."""


@dataclass
class _Waiting:
    """A sighting whose details may come in the next lines of its process; each kind of detail once."""

    sighting: Sighting
    searches: list[re.Pattern[str]]
    lines: int = DETAIL_LINES


class _Process:
    """The traceback that a process is in the middle of, and sightings that wait for details."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.task: Task | None = None
        self.ended = True
        self.since = 0
        self.waiting: list[_Waiting] = []
        self.ignored = False
        self.source_next = False

    def begin(self, task: Task | None = None) -> None:
        self.frames, self.ended, self.since = [], False, 0
        self.task = task

    def has(self, pattern: str) -> bool:
        """Whether a frame of the traceback is of that kind."""
        return any(re.search(pattern, str(frame)) for frame in self.frames)

    def frame(self, frame: Frame) -> None:
        if self.ended:
            self.begin(self.task if not self.frames else None)
        if len(self.frames) < MOST_FRAMES:
            self.frames.append(frame)


class Explainer:
    """Takes a log line by line; `answer` may be asked at any time."""

    def __init__(self, faults: Sequence[Fault] | None = None) -> None:
        self._faults = catalogue() if faults is None else tuple(faults)
        self._hints = sorted({hint for fault in self._faults for hint in fault.hints} | set(_MARKS))
        # "rror" is in every "MemoryError": few texts to look for in each block, and the hints only where one is found.
        self._roots = [*_ROOTS, *(hint for hint in self._hints if not any(root in hint for root in _ROOTS))]
        self._sightings: dict[str, Sighting] = {}
        self._unknown: list[Unknown] = []
        self._by_text: dict[tuple[str, str], Unknown] = {}
        self._wrapped: Unknown | None = None
        self._processes: dict[str, _Process] = {}
        self._steps: list[int] = []
        self._lines = 0

    def read_block(self, number: int, block: str) -> None:
        """Lines of a log, `number` that of the first. Most blocks of a long run hold nothing that is looked for."""
        self._lines = number + block.count("\n")
        waiting = any(process.waiting for process in self._processes.values())
        hints = [hint for hint in self._hints if hint in block] if any(root in block for root in self._roots) else []
        if not hints and not waiting:
            return
        found = set(hints)
        faults = [fault for fault in self._faults if not found.isdisjoint(fault.hints)]
        for at, raw in enumerate(block.split("\n"), number):
            if waiting or any(hint in raw for hint in hints):
                self._read(read_line(at, raw), faults)
                waiting = any(process.waiting for process in self._processes.values())

    def read(self, lines: Iterable[str]) -> None:
        """All lines at once, for what is in memory."""
        self.read_block(self._lines + 1, "\n".join(line.rstrip("\n") for line in lines))

    def _read(self, line: Line, faults: Sequence[Fault]) -> None:
        text = line.text
        if not text:
            return
        process = self._processes.setdefault(line.process, _Process())
        if _STEP.search(text):
            self._steps.append(line.number)
        source = process.source_next and text.startswith(" ")
        self._follow(process, text)
        if source and not text.lstrip().startswith("assert "):
            return  # code that a traceback shows: what would be raised, with the names of variables instead of values
        self._take_details(process, text)
        fault, match = self._look_up(text, faults, process)
        exception = _EXCEPTION.match(text)
        if fault is not None and match is not None:
            self._saw(fault, match, line, process)
        elif exception and not _WRAPPER.search(text) and not process.ignored:
            self._saw_unknown(exception["type"], exception["message"] or "", line, process)
        elif "Check failed" in text or "RayTaskError" in text or "Unhandled error" in text:
            self._saw_ending(text, line, process)
        if exception and not read_task(text):
            process.ended, process.ignored = True, False

    def _follow(self, process: _Process, text: str) -> None:
        """The process' traceback; what an exception says in lines of its own still belongs to it."""
        if process.ended:
            process.since += 1
            if process.since > LINES_OF_AN_EXCEPTION:
                process.frames, process.task = [], None
        if "Exception ignored in" in text or "Exception ignored while" in text:
            process.ignored = True
        if "Traceback (most recent call" in text:
            process.begin(process.task if not process.ended and not process.frames else None)
        if "ray::" in text and (task := read_task(text)):
            process.begin(task)
        elif 'File "' in text and (frame := read_frame(text)):
            process.frame(frame)
            process.source_next = True
            return
        process.source_next = False

    def _look_up(
        self, text: str, faults: Sequence[Fault], process: _Process
    ) -> tuple[Fault | None, re.Match[str] | None]:
        """The weightiest fault that the line shows, of several the first in the catalogue."""
        found: tuple[Fault | None, re.Match[str] | None] = (None, None)
        for fault in faults:
            if found[0] is not None and _weight(fault) >= _weight(found[0]):
                continue
            if (match := fault.match(text)) and (not fault.frames or process.has(fault.frames)):
                found = fault, match
        return found

    def _saw(self, fault: Fault, match: re.Match[str], line: Line, process: _Process) -> None:
        place = place_of(line.process, line.rank, process.task, process.frames)
        if process.task is not None:
            place = replace(place, process=process.task.process)
        groups = _groups(match)
        seen = self._sightings.get(fault.id)
        if seen is None:
            seen = Sighting(fault, line, place, groups, [line.text], tuple(process.frames))
            self._sightings[fault.id] = seen
            if fault.detail_searches:
                process.waiting.append(_Waiting(seen, list(fault.detail_searches)))
        else:
            seen.count += 1
            seen.groups = {**groups, **seen.groups}
            # A worker's own words name its process; what Ray tells the driver later names the phase too.
            if (place.phase and not seen.place.phase) or (place.role and not seen.place.role):
                seen.place = replace(
                    seen.place, phase=seen.place.phase or place.phase, role=seen.place.role or place.role,
                    process=seen.place.process or place.process,
                )  # fmt: skip
                seen.frames = seen.frames or tuple(process.frames)
            if seen.memory is None and read_memory(line.text) is not None:
                seen.said.append(line.text)
        seen.last_line = line.number
        seen.processes.add(place.process)

    def _take_details(self, process: _Process, text: str) -> None:
        for waiting in process.waiting:
            waiting.lines -= 1
            for search in waiting.searches:
                if match := search.search(text):
                    sighting = waiting.sighting
                    sighting.groups = {**_groups(match), **sighting.groups}
                    if text not in sighting.said:
                        sighting.said.append(text)
                    waiting.searches.remove(search)
                    break
        process.waiting = [waiting for waiting in process.waiting if waiting.lines and waiting.searches]

    def _saw_ending(self, text: str, line: Line, process: _Process) -> None:
        """Words that tell of an error by its type at most; what Ray wraps counts only if nothing else does."""
        if match := _FATAL.search(text):
            groups = _groups(match)
            self._saw_unknown(groups["type"], groups.get("message", ""), line, process, bare=True)
        elif (match := _WRAPPED.search(text)) and self._wrapped is None:
            place = place_of(line.process, line.rank, process.task, process.frames)
            frames = tuple(process.frames)
            groups = _groups(match)
            self._wrapped = Unknown(groups["type"], groups.get("message", ""), line, place, frames, line.number)

    def _saw_unknown(self, kind: str, message: str, line: Line, process: _Process, *, bare: bool = False) -> None:
        message = message.strip()
        if kind.endswith("Warning") or not (bare or process.frames or line.process == ""):
            return
        seen = self._by_text.get((kind, message))
        if seen is not None:
            seen.count += 1
            seen.line = line if line.process == "" else seen.line
            if not seen.place.phase:
                seen.place = place_of(line.process, line.rank, process.task, process.frames)
            return
        place = place_of(line.process, line.rank, process.task, process.frames)
        if process.task is not None:
            place = replace(place, process=process.task.process)
        seen = Unknown(kind, message, line, place, tuple(process.frames), line.number)
        self._by_text[kind, message] = seen
        self._unknown.append(seen)

    def answer(self) -> Answer:
        """What counts of all that was seen."""
        seen = sorted(self._sightings.values(), key=lambda one: (_weight(one.fault), one.line.number))
        seen = [one for one in seen if one.fault.rank not in ("likely", "symptom") or not self._survived(one.last_line)]
        best = seen[0] if seen else None
        unknown = self._chosen_unknown()
        if unknown is None and (best is None or best.fault.rank in ("warning", "notice")):
            unknown = self._wrapped
        if best is not None and unknown is not None and not self._outranks(best, unknown):
            best = None
        elif best is not None:
            unknown = None
        return Answer(best, unknown, tuple(one for one in seen if one is not best), self._lines, len(self._steps))

    def _survived(self, line: int) -> bool:
        """Whether the run made steps after this line."""
        return sum(step > line for step in self._steps) >= _SURVIVED_AFTER

    def _chosen_unknown(self) -> Unknown | None:
        """The driver's last exception that is unknown, for it ended the run; else the last of all."""
        left = [one for one in self._unknown if not self._survived(one.line.number)]
        ends = [one for one in left if one.line.process == ""] or left
        return max(ends, key=lambda one: one.line.number, default=None)

    @staticmethod
    def _outranks(best: Sighting, unknown: Unknown) -> bool:
        rank = best.fault.rank
        if rank in ("cause", "likely"):
            return True
        return rank == "symptom" and best.line.number < unknown.first_line


def _groups(match: re.Match[str]) -> dict[str, str]:
    """The named groups that have a value; a digit at a name's end tells apart what patterns cannot name twice."""
    return {re.sub(r"\d$", "", name): value.strip() for name, value in match.groupdict().items() if value}


def _weight(fault: Fault) -> int:
    return RANKS.index(fault.rank)


def explain_lines(lines: Iterable[str]) -> Answer:
    """What a log says, given as its lines."""
    explainer = Explainer()
    explainer.read(lines)
    return explainer.answer()


def explain_stream(stream: Readable, start: bytes = b"") -> Answer:
    """Explains a log as it is read, however large. start: what of it was read before."""
    explainer = Explainer()
    for number, block in _blocks(stream, start):
        explainer.read_block(number, block)
    return explainer.answer()


def _blocks(stream: Readable, start: bytes) -> Iterator[tuple[int, str]]:
    return read_blocks(_Joined(start, stream) if start else stream)


class _Joined:
    """A stream that begins with bytes that were read from it already."""

    def __init__(self, start: bytes, stream: Readable) -> None:
        self._start, self._stream = start, stream

    def read(self, size: int, /) -> bytes:
        start, self._start = self._start, b""
        return start + self._stream.read(size)
