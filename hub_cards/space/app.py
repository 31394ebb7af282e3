"""The demo as a Space: on a CPU with the small demo target, on ZeroGPU with the target that the variables name."""

import os
from pathlib import Path

from hf_drelay.demo.app import build_app, launch, load_engine


try:
    import spaces  # ZeroGPU; it must come before CUDA is touched
except ImportError:
    spaces = None

LIMITS = {"max_prompt_tokens": 1024, "max_new_tokens": 256}


def on_device(function):
    """Ask ZeroGPU for its device during a call; elsewhere the function as it is."""
    return function if spaces is None else spaces.GPU(duration=120)(function)


def make_app():
    """The application with the target and drafter of this Space."""
    folder = Path(__file__).with_name("drafter")
    drafter = os.environ.get("DRELAY_DRAFTER") or (str(folder) if folder.is_dir() else None)
    # ZeroGPU wants models on CUDA at start, where its emulation keeps them until a call brings a device.
    engine = load_engine(
        os.environ.get("DRELAY_TARGET"), drafter, device="cuda" if spaces is not None else None, **LIMITS
    )
    if spaces is None:
        engine.warm_up()
    return build_app(engine, on_device)


if __name__ == "__main__":
    launch(make_app())
