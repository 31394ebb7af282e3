"""The demo as a Space: on a CPU with the small demo target, on ZeroGPU with the target that the variables name."""

import os
from pathlib import Path


try:
    import spaces  # before anything that touches CUDA
except ImportError:
    spaces = None

from hf_drelay.demo.app import build_app, launch, load_engine


# Every Gradio Space has the package; ZeroGPU alone sets the variable.
IS_ZERO_GPU = spaces is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true")
LIMITS = {"max_prompt_tokens": 1024, "max_new_tokens": 256}


def on_device(function, duration_s):
    """Ask ZeroGPU for its device during a call of at most `duration_s`; elsewhere the function as it is."""
    return spaces.GPU(duration=duration_s)(function) if IS_ZERO_GPU else function


def make_app():
    """The application with the target and drafter of this Space."""
    folder = Path(__file__).with_name("drafter")
    drafter = os.environ.get("DRELAY_DRAFTER") or (str(folder) if folder.is_dir() else None)
    # ZeroGPU wants models on CUDA at start, where its emulation keeps them until a call brings a device.
    engine = load_engine(os.environ.get("DRELAY_TARGET"), drafter, device="cuda" if IS_ZERO_GPU else None, **LIMITS)
    if not IS_ZERO_GPU:  # there every call has a device of its own, and warms up on it
        engine.warm_up()
    return build_app(engine, on_device)


if __name__ == "__main__":
    launch(make_app())
