"""The files that a command writes in the end, looked at in the beginning: a fault there would cost all the work."""

from __future__ import annotations

from pathlib import Path

from verl_shard.common.errors import Faults, config_error
from verl_shard.common.files import check_output
from verl_shard.common.pictures import check_can_draw, check_png


def check_outputs(**paths: Path | None) -> None:
    """Raises ConfigError with every path that nothing could be written to, before there is anything to write.

    paths: by the name of their option, check_outputs(out=out, picture=picture); None was not given. `picture` is a PNG, for
    which there has to be a matplotlib: raises MissingExtraError.
    """
    faults = Faults()
    taken: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        with faults.gathering():
            flag = f"--{name.replace('_', '-')}"
            check_png(path, flag) if name == "picture" else check_output(path, flag)
            other = taken.setdefault(path.resolve(), flag)
            if other != flag:
                why = f"{other} names the same file, which would be written twice"
                raise config_error("same-file", flag, path, why, "Name two files")
    faults.check()
    if paths.get("picture") is not None:
        check_can_draw()
