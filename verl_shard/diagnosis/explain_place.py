"""In which role and phase something happened, from the functions and processes that a log names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# (what a function or a class is called, role, phase); an empty one is left to another name.
_FUNCTIONS: tuple[tuple[str, str, str], ...] = (
    (r"update_actor|update_policy", "actor", "update_actor"),
    (r"update_critic|train_mini_batch_critic", "critic", "update_critic"),
    (r"compute_ref_log_prob", "ref", "ref_log_prob"),
    (r"compute_values", "critic", "values"),
    (r"compute_rm_score|compute_reward|compute_score|rm_score", "reward", "reward"),
    (r"compute_log_prob|compute_old_log_prob|_compute_old_log_prob", "actor", "old_log_prob"),
    (r"update_weights|sync_rollout_weights|wake_up|resume_kv_cache|_?broadcast_to_vllm", "rollout", "weight_sync"),
    (r"save_checkpoint", "", "save_checkpoint"),
    (r"load_checkpoint|_load_checkpoint", "", "load_checkpoint"),
    (
        r"init_model(?:_from_pretrained)?|_build_model_optimizer|launch_servers?|init_device|load_model|from_pretrained"
        r"|determine_available_memory|profile_run|initialize_from_config|_initialize_kv_caches|_init_executor|initialize_cache",
        "",
        "load",
    ),
    (r"generate_sequences|_run_agent_loop|generate|execute_model", "rollout", "generate"),
    (r"_validate", "", "validate"),
)  # fmt: skip
_PROCESSES: tuple[tuple[str, str], ...] = (
    (r"Reward|_rm\b|rm_", "reward"),
    (r"vLLM|Vllm|EngineCore|sglang|SGLang|TRTLLM|AgentLoop|LLMRayActor|LLMActor|LLMServer|RayWorkerWrapper", "rollout"),
    (r"Critic", "critic"),
    (r"Reference", "ref"),
    (r"PolicyActor|ActorModel", "actor"),
    (r"TaskRunner|main_task|Runner\b", "driver"),
)  # fmt: skip
_FILES: tuple[tuple[str, str], ...] = (
    (r"/(?:vllm|sglang|tensorrt_llm)/(?!.*verl)", "rollout"),
    (r"reward_loop|reward_manager|reward_score|reward_model", "reward"),
    (r"agent_loop|/workers/rollout/|vllm_async_server", "rollout"),
)  # fmt: skip
_STEPS = {
    "critic": {"train_mini_batch": "update_critic", "train_batch": "update_critic", "infer_batch": "values"},
    "": {"train_mini_batch": "update", "train_batch": "update", "infer_batch": "forward"},
}
_TASK = re.compile(r"ray::(?P<name>[\w.<>]+?)\(\) \(pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^,)\s]+))?")
_FRAME = re.compile(r'^\s*(?:\|\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_ROLE_OF_GROUP = re.compile(
    r"\b(?P<role>actor_rollout_ref|actor_rollout|actor|critic|ref|rollout|reward|rm)_(?P<method>[a-z]\w*)$"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a traceback."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True)
class Task:
    """The task of Ray's that an error came out of. name: Class.method; process: as a line's prefix would name it."""

    name: str
    process: str


@dataclass(frozen=True)
class Place:
    """Where in a run something happened; "" for what is not known."""

    role: str = ""
    phase: str = ""
    process: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.phase:
            parts.append(f"in {self.phase}")
        if self.role:
            parts.append(f"of the {self.role}" if self.phase else f"in the {self.role}")
        if self.process:
            parts.append(f"process {self.process}")
        if self.rank is not None and f"rank {self.rank}" != self.process:
            parts.append(f"rank {self.rank}")
        return ", ".join(parts).replace(", of the", " of the")


def read_frame(text: str) -> Frame | None:
    """A line of a traceback that names a file."""
    match = _FRAME.match(text)
    return Frame(match["file"], int(match["line"]), match["name"]) if match else None


def read_task(text: str) -> Task | None:
    """The task that a line of Ray's names."""
    match = _TASK.search(text)
    if match is None:
        return None
    at = f", ip={match['ip']}" if match["ip"] else ""
    return Task(match["name"], f"{match['name'].split('.')[0]} pid={match['pid']}{at}")


def place_of(process: str, rank: int | None, task: Task | None, frames: Sequence[Frame]) -> Place:
    """Where it was: the innermost function that says so, then the task, then what the process is called.

    A phase that a worker ran is told by its outermost function: update_actor calls forward, which calls others.
    """
    role, phase = "", ""
    names = [frame.name for frame in frames]
    if task is not None:
        method = task.name.rsplit(".", 1)[-1]
        if group := _ROLE_OF_GROUP.search(method):
            names.insert(0, group["method"])
            role = _group_role(group["role"])
        names.insert(0, method)
    for pattern, its_role, its_phase in _FUNCTIONS:
        if any(re.fullmatch(rf"(?:\w+_)?(?:{pattern})", name) for name in names):
            phase, role = its_phase, its_role or role
            break
    if not role or role == "driver":
        said = " ".join([process, task.name if task else ""])
        role = next((its_role for pattern, its_role in _PROCESSES if re.search(pattern, said)), role)
    if not role or role == "driver":
        files = [frame.file for frame in frames]
        role = next((its for pattern, its in _FILES if any(re.search(pattern, file) for file in files)), role)
    if not phase:
        # A worker of one model, the critic of verl's V1 trainer for one, has no methods named after phases.
        steps = _STEPS["critic" if role == "critic" else ""]
        phase = next((steps[name] for name in names if name in steps), "")
    return Place("" if role == "driver" else role, phase, process, rank)


def _group_role(group: str) -> str:
    return {"actor_rollout_ref": "", "actor_rollout": "", "rm": "reward"}.get(group, group)
