"""A complete Space folder: the application, this package as it is, a drafter, and what `pip` has to install."""

import re
import shutil
from importlib.metadata import requires
from pathlib import Path

import hf_drelay
from hf_drelay import modeling
from hf_drelay.targets import resolve_drafter


EXTRAS = ("demo", "demo-target")
_TEMPLATE = Path(__file__).resolve().parents[2] / "hub_cards" / "space"
_NO_CODE = shutil.ignore_patterns("__pycache__", "*.pyc")


def build_space(output: str | Path, drafter: str | None = None) -> Path:
    """
    Write everything that a Space needs into `output`, ready for `hf upload OWNER/NAME DIR --repo-type space`.

    The package travels along as a folder, because a Space can install only what is published.

    Args:
        output (`str` or `Path`): An empty or new folder.
        drafter (`str`, *optional*): Checkpoint folder to put in; default: the one of the demo target.

    Raises:
        OSError: If `output` is not empty, the drafter is no folder, or this is no source checkout.
    """
    output, checkpoint = Path(output), Path(resolve_drafter(drafter))
    if output.exists() and any(output.iterdir()):
        raise OSError(f"`output` {output} is not empty; name a new folder, so that nothing old is published.")
    if not _TEMPLATE.is_dir():
        raise OSError("The files of the Space are part of a source checkout only; run this from a clone.")
    if not checkpoint.is_dir():
        raise OSError(f"`drafter` {drafter!r} is no folder; download it first, or name it by `DRELAY_DRAFTER`.")
    weights = sorted(checkpoint.glob("*.safetensors*"))
    if not weights or not (checkpoint / "config.json").is_file():
        raise OSError(f"`drafter` {drafter!r} lacks `config.json` or `*.safetensors`; save it with `save_pretrained`.")
    shutil.copytree(_TEMPLATE, output, dirs_exist_ok=True, ignore=_NO_CODE)
    package = output / "hf_drelay"
    shutil.copytree(Path(hf_drelay.__file__).parent, package, ignore=_NO_CODE)
    # In a checkout that folder lies beside the package.
    shutil.copytree(Path(modeling.__file__).parent, package / "modeling", ignore=_NO_CODE, dirs_exist_ok=True)
    (output / "drafter").mkdir()
    for file in (checkpoint / "config.json", *weights):
        shutil.copyfile(file, output / "drafter" / file.name)
    (output / "requirements.txt").write_text("\n".join(requirements()) + "\n", encoding="utf-8")
    return output


def requirements() -> list[str]:
    """What the package needs for the page and the demo target, as lines of a `requirements.txt`."""
    lines = []
    for line in requires("hf-drelay") or []:
        name, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.fullmatch(r"extra == ['\"]([^'\"]+)['\"]", marker)
        if not marker or (extra and extra[1] in EXTRAS):
            lines.append(name)
    return lines
