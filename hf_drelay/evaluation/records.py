"""What every published measurement says about its circumstances, and how it gets to disk."""

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import hf_drelay


def environment() -> dict:
    """Versions and hardware of this run."""
    return {
        "hf_drelay": hf_drelay.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "cpu_threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """Model name of the processor; Linux keeps it in a file, and `platform` often knows the architecture only."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: str | Path, record: dict) -> None:
    """Write a record atomically."""
    replace_file(path, lambda part: part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8"))


def replace_file(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it into its place: nobody ever sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
