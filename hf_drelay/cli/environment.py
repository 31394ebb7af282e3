"""`hf-drelay env`: versions and hardware."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import typer


def env() -> None:
    """Print versions and hardware, as a bug report needs them."""
    import torch

    import hf_drelay
    from hf_drelay.evaluation.records import cpu_name

    cuda = torch.cuda.is_available()
    rows = {
        "hf_drelay": hf_drelay.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in ("torch", "transformers", "huggingface-hub", "tokenizers", "gguf")},
        "cpu": cpu_name(),
        "cpu cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "device": "cuda" if cuda else "cpu",
        "gpu": torch.cuda.get_device_name() if cuda else "none",
    }
    for name, value in rows.items():
        typer.echo(f"{name}: {value}")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
