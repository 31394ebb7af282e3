"""DRelay: lossless speculative decoding through `model.generate(assistant_model=drelay)`.

The public names load on first use, so that `import hf_drelay` costs nothing.
"""

import importlib


__version__ = "0.1.0"

_MODULE_OF = {
    "DRelayConfig": "hf_drelay.modeling.configuration_drelay",
    "DRelayDrafterModel": "hf_drelay.modeling.modeling_drafter",
    "DRelayModel": "hf_drelay.modeling.modeling_drelay",
    "DRelaySelectorModel": "hf_drelay.modeling.modeling_selector",
    "load_demo_target": "hf_drelay.targets",
    "push_model": "hf_drelay.hub.push",  # what `DRelayModel.push_to_hub` calls
}

__all__ = ["DRelayConfig", "DRelayDrafterModel", "DRelayModel", "DRelaySelectorModel", "load_demo_target"]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
