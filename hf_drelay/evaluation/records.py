"""What every published measurement says about its circumstances, and how it gets to disk."""

import gzip
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

import hf_drelay
from hf_drelay.targets import describe_demo_target


ROW_START = b'{"task": '  # of every row that is written here
ROW_FIELDS = {"task", "prompt", "way"}  # of every result row


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


def describe_target(target) -> dict:
    """Name, origin, revision and weight hash of a target, for result rows."""
    if getattr(target, "demo_target_source", None) is not None:
        return describe_demo_target(target)
    origin = _origin(target.name_or_path)
    name = target.name_or_path or type(target).__name__
    return {
        "target": Path(name).resolve().name if origin == "path" else name,  # where it lies is nobody else's business
        "target_origin": origin,
        "target_revision": getattr(target.config, "_commit_hash", None),
        "target_weights_sha256": weights_sha256(target),
    }


def _origin(name_or_path: str | None) -> str:
    if not name_or_path:
        return "memory"
    return "path" if Path(name_or_path).is_dir() else "hub"


def describe_drafter(drelay) -> dict:
    """Name, revision, shape and weight hash of a drafter, for result rows."""
    config = drelay.config
    return {
        "drafter": Path(drelay.name_or_path).name if drelay.name_or_path else type(drelay).__name__,
        "drafter_origin": _origin(drelay.name_or_path),
        "drafter_revision": getattr(config, "_commit_hash", None),
        "drafter_weights_sha256": weights_sha256(drelay),
        "drafter_config_sha256": config_sha256(config),
        "drafter_num_parameters": sum(p.numel() for p in drelay.parameters()),
        "drafter_dtype": str(drelay.dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "layout": config.layout,
    }


def weights_sha256(model: torch.nn.Module) -> str:
    """Hash of names, types, shapes and values of all weights, wherever the model came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def config_sha256(config) -> str:
    """Hash of a configuration, but for where it came from and which version saved it."""
    fields = config.to_dict()
    content = {name: value for name, value in fields.items() if name not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """Rows of a JSON-lines file, plain or `.gz`; a broken line raises a `ValueError` that names it."""
    return (row for _, row in numbered_rows(path))


def numbered_rows(path: str | Path) -> Iterator[tuple[int, dict]]:
    """The same with the line of each row, counted from 1; blank lines are none."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield number, json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 behind line {number} ({error.reason}); save it as UTF-8.") from error
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise ValueError(f"{path}, line {number}: not valid JSON ({reason}). Fix or remove the line.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); make or fetch the file again.") from error


def append_rows(path: str | Path, rows: Iterable[dict]) -> None:
    """
    Append rows to a JSON-lines file with one write, and wait for the disk.

    A process that is killed in between leaves at most a torn end, which `recover_rows` takes away.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    with path.open("ab") as file:  # buffered: a raw file may take a part of the data and say nothing
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def recover_rows(path: str | Path) -> list[dict]:
    """
    Whole rows of a file that `append_rows` wrote; a torn last line is not one.

    Raises:
        ValueError: If the file holds something else than result rows.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *lines, end = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate([*lines, end], start=1):
        is_torn = number > len(lines) and ROW_START.startswith(line[: len(ROW_START)])
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            if is_torn:
                break
            raise ValueError(
                f"{path} is no file of result rows: line {number} ({error}). Name another one."
            ) from error
        if row is not None and not (isinstance(row, dict) and set(row) >= ROW_FIELDS):
            raise ValueError(
                f"{path} is no file of result rows, which have {', '.join(sorted(ROW_FIELDS))}: line {number} is "
                f"{line[:80]!r}. Name another one."
            )
        rows += [] if row is None else [row]
    return rows


def check_output(path: str | Path) -> None:
    """Raise an `OSError` where no file can be written, before long work is done for it."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"`output` {path} is a folder; give the name of a file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"`output` {path} cannot be written; give another name.")


@contextmanager
def sole_writer(path: str | Path):
    """
    Keep other processes from appending rows to the same file, by a lock beside it; a `ValueError` if one does so now.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"`output` {path} is being written by another process; wait, or give another name.") from None
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


@contextmanager
def new_folder(output: str | Path, argument: str = "output"):
    """
    A folder beside `output` to fill, which takes its place at the end; after an error nothing is left.

    Raises:
        OSError: If `output`, the value of `argument`, is there and not an empty folder.
    """
    output = Path(output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OSError(f"`{argument}` {output} is not empty; name a new folder, so that nothing old stays in it.")
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        if output.exists():
            output.rmdir()
        part.replace(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def replace_rows(path: str | Path, rows: Iterable[dict]) -> None:
    """Write a JSON-lines file anew, atomically."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def command_line(program: str | None = None) -> str:
    """
    How this script, or the command `program`, was called; of files that lie elsewhere it tells the name alone.
    """
    script, *arguments = sys.argv
    program = program or f"{Path(script).parent.name}/{Path(script).name}"
    return shlex.join([program, *map(_argument_without_folder, arguments)])


def _argument_without_folder(argument: str) -> str:
    flag, separator, value = argument.partition("=")
    if flag.startswith("-") and separator:
        return flag + separator + without_folders(value)
    return without_folders(argument)


def cut_prompts(num_cut: int) -> str:
    """The end of a sentence about prompts, where some had to be cut to leave room for the answer; else nothing."""
    if not num_cut:
        return ""
    who = "1 prompt lost its" if num_cut == 1 else f"{num_cut} prompts lost their"
    return f"; {who} beginning to leave room for the answer"


def target_name(row: dict) -> str:
    """Name of a row's target; of a path, which rows of older versions hold, the last part."""
    return Path(row["target"]).name if row["target_origin"] == "path" else row["target"]


def without_folders(value):
    """
    A record as it may be published: absolute paths in it, which tell of someone's machine, are cut to their last part.
    """
    if isinstance(value, dict):
        return {without_folders(name): without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


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
