from __future__ import annotations

import io
from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.diagnosis import logs
from verl_shard.diagnosis.explain import explain_stream
from verl_shard.diagnosis.logs import files_of, read_blocks, read_line


@pytest.mark.parametrize(
    ("raw", "process", "rank", "text"),
    [
        ("ValueError: plain", "", None, "ValueError: plain"),
        ("\x1b[36m(WorkerDict pid=12, ip=10.0.0.1)\x1b[0m x [repeated 7x across cluster]",
         "WorkerDict pid=12, ip=10.0.0.1", None, "x"),
        ("[36m(RayWorkerWrapper pid=4009)[0m [rank1]:[E ProcessGroupNCCL.cpp:563] x",
         "RayWorkerWrapper pid=4009", 1, "[E ProcessGroupNCCL.cpp:563] x"),
        ("(EngineCore_0 pid=6) (VllmWorker TP0 pid=7) ERROR 08-25 11:01:23 [core.py:712]   File \"a\"",
         "VllmWorker TP0 pid=7", None, '  File "a"'),
        ("vllm-1  | ERROR 11-18 18:07:28 engine.py:366] ValueError: x",
         "", None, "ERROR 11-18 18:07:28 engine.py:366] ValueError: x"),
        ("(raylet, ip=10.0.3.179) low", "raylet", None, "low"),
        ("(autoscaler +34s) Error: No", "autoscaler", None, "Error: No"),
        ("[rank3]: RuntimeError: x", "rank 3", 3, "RuntimeError: x"),
        ("[default2]:Traceback", "rank 2", 2, "Traceback"),
        ("[1,3]<stderr>:x", "rank 3", 3, "x"),
        ("2024-06-28T06:11:52.685300953Z (LLMRayActor pid=20770) x", "LLMRayActor pid=20770", None, "x"),
        ("50%|###  | 5/10\r100%|#####| 10/10", "", None, "100%|#####| 10/10"),
        ("score.weight   | MISSING    |", "", None, "score.weight   | MISSING    |"),
        ("[2059991.491542] Out of memory: Killed process 7 (python3)",
         "", None, "[2059991.491542] Out of memory: Killed process 7 (python3)"),
    ],
)  # fmt: skip
def test_prefixes_are_taken_off_and_say_whose_line_it_is(raw: str, process: str, rank: int | None, text: str) -> None:
    line = read_line(7, raw + "\n")
    assert (line.number, line.process, line.rank, line.text) == (7, process, rank, text)


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 18])
def test_blocks_hold_whole_lines_with_their_numbers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK_BYTES", size)
    text = "one\ntwo\n\nfour is long\nfünf\nno end"
    seen: list[str] = []
    for number, block in read_blocks(io.BytesIO(text.encode())):
        assert number == len(seen) + 1
        seen += block.split("\n")
    assert seen == text.split("\n")


def test_what_has_no_line_ends_is_read_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK_BYTES", 16)
    blocks = [block for _, block in read_blocks(io.BytesIO(b"x" * 10_000))]
    assert "".join(blocks) == "x" * 10_000
    assert max(map(len, blocks)) <= 17 * 16


def test_a_cause_is_found_in_a_large_log_at_its_line() -> None:
    fill = b"(TaskRunner pid=1) generating, all is well, 0 to go\n" * 20_000
    answer = explain_stream(io.BytesIO(fill + b"torch.OutOfMemoryError: CUDA out of memory.\n" + fill))
    assert answer.cause is not None
    assert answer.cause.line.number == 20_001
    assert answer.lines == 40_001


def test_bytes_that_are_no_text_do_not_stop_it() -> None:
    answer = explain_stream(io.BytesIO(b"\xff\xfe garbage \x80\nRuntimeError: CUDA error: invalid device ordinal\n"))
    assert answer.cause is not None
    assert answer.cause.fault.id == "invalid-device-ordinal"


def test_logs_of_launches_come_before_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no launches/\*\.log"):
        files_of(tmp_path)
    (tmp_path / "job.out").touch()
    assert files_of(tmp_path) == [tmp_path / "job.out"]
    (tmp_path / "a.log").touch()
    assert files_of(tmp_path) == [tmp_path / "a.log"]
    (tmp_path / "launches").mkdir()
    (tmp_path / "launches" / "1.log").touch()
    assert files_of(tmp_path) == [tmp_path / "launches" / "1.log"]
