"""
Same random weights, same block logits: ours against the published implementations, in fp32.

    python scripts/check_parity.py --reference-python PATH/TO/VENV/bin/python

The other environment holds `dflash==0.1.0` with the transformers that it pins (5.15.0), and `speculators==0.9.0`
installed with `--no-deps`, of which modules are imported only. The script runs itself there (`--write FOLDER`): it
builds small random models, saves their checkpoints as these packages write them, and the logits of one block. Here the
checkpoints are loaded by `DRelayModel.from_pretrained` and compared. Result: docs/results/parity.json. A case that
cannot run is an error; nothing is skipped.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


H, V, TAPS, ANCHOR, TOLERANCE = 64, 120, [1, 2, 4], 9, 1e-4
LAYERS = {
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def randomise(model, seed: int) -> None:
    """Weights far from their start, so that every part shows in the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) / max(8, weight.shape[-1]) ** 0.5)


def inputs(seed: int = 1) -> dict[str, torch.Tensor]:
    """A context longer than the window, its tapped states, and the target's tables."""
    generator = torch.Generator().manual_seed(seed)
    length = ANCHOR + 12
    return {
        "states": torch.randn(1, length, len(TAPS) * H, generator=generator),
        "input_ids": torch.randint(0, V, (1, length), generator=generator),
        "embed": torch.randn(V, H, generator=generator),
        "head": torch.randn(V, H, generator=generator) / H**0.5,
    }


# In the environment of the references.

_DATA_PIPELINE = (
    "openai",
    "openai.types",
    "openai.types.chat",
    "openai.types.completion",
    "datasets",
    "hs_connectors",
)


def save(folder: Path, config: dict, tensors: dict, expected: dict) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in expected.items()}, folder / "expected.bin"
    )


@torch.no_grad()
def write_dflash(root: Path, kind: str, block_size: int = 6) -> None:
    from dflash import model as reference
    from transformers import Qwen3Config

    method = {"mask_token_id": 5, "target_layer_ids": TAPS, "block_size": block_size}
    layers = LAYERS
    if kind == "DFlash2":
        method |= {"selector_rank": 12, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
        layers = LAYERS | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "use_sliding_window": True,
        }
    config = Qwen3Config(**layers, num_target_layers=8, dflash_config=method, rope_theta=1e6)
    model = getattr(reference, f"{kind}DraftModel")(config).eval()
    randomise(model, 0)
    data = inputs()
    block = torch.full((1, block_size), 5)
    block[0, 0] = data["input_ids"][0, ANCHOR]
    hidden = model(
        target_hidden=data["states"][:, :ANCHOR],
        noise_embedding=data["embed"][block],
        position_ids=torch.arange(ANCHOR + block_size)[None],
    )[:, 1:]
    expected = {"logits": hidden @ data["head"].T}
    if kind == "DFlash2":
        head = torch.nn.Linear(H, V, bias=False)
        head.weight.copy_(data["head"])
        torch.manual_seed(0)
        path, candidates, q = model.propose(hidden, block[:, 0], head, 1.0)
        greedy, _, _ = model.propose(hidden, block[:, 0], head, 0.0)
        expected |= {"path": path, "candidates": candidates, "q": q, "greedy": greedy}
    tensors = dict(model.state_dict())
    for name in ("predecessor_codebook", "successor_codebook"):  # the public names have no suffix
        key = f"candidate_selector.{name}"
        if key + ".weight" in tensors:
            tensors[key] = tensors.pop(key + ".weight")
    written = config.to_dict() | {"architectures": [f"{kind}DraftModel"]}
    save(root / f"dflash-{kind}", written, tensors, expected)


@torch.no_grad()
def write_speculators(root: Path, kind: str, shifted: bool, block_size: int = 6, **fields) -> None:
    from importlib import import_module
    from unittest.mock import MagicMock

    for name in _DATA_PIPELINE:  # imported by the package for its data pipeline, which is not used
        sys.modules.setdefault(name, MagicMock(__spec__=None, __path__=[]))
    from transformers import Qwen3Config

    classes = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
    config_module = import_module(f"speculators.models.{kind}.config")
    core = import_module(f"speculators.models.{kind}.core")
    layers = Qwen3Config(**LAYERS, rope_theta=1e6)
    layers._attn_implementation = "eager"
    config = getattr(config_module, f"{classes[kind]}SpeculatorConfig")(
        transformer_layer_config=layers,
        draft_vocab_size=V,
        block_size=block_size,
        aux_hidden_state_layer_ids=[i + 1 for i in TAPS],
        mask_token_id=5,
        sample_from_anchor=shifted,
        **fields,
    )
    model = getattr(core, f"{classes[kind]}DraftModel")(config).eval()
    randomise(model, 2)
    data = inputs()
    model.embed_tokens.weight.copy_(data["embed"])
    model.lm_head.weight.copy_(data["head"])
    length = data["input_ids"].shape[1]
    loss_mask = torch.zeros(1, length)
    loss_mask[0, ANCHOR : ANCHOR + block_size] = 1
    positions = torch.arange(length)[None]
    # One anchor: the first token that counts for the loss.
    core_anchor = torch.zeros(1, length)
    core_anchor[0, ANCHOR] = 1
    hidden, logits, *_ = model._backbone_forward(
        data["states"],
        data["input_ids"],
        core_anchor,
        data["states"][..., :H],
        torch.zeros(1, length, dtype=torch.long),
        positions,
        max_anchors=1,
    )
    previous = data["input_ids"][:, ANCHOR : ANCHOR + block_size]
    if not shifted:
        previous = torch.cat([previous[:, :1], previous[:, :-1]], dim=1)
    expected = {"logits": logits}
    if kind == "dspark":
        bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden.view(1, block_size, -1))
        expected["corrected"] = logits + bias
        features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
        expected["confidence"] = model.confidence_head(features)
    if not shifted:
        expected = {name: tensor[:, 1:] for name, tensor in expected.items()}
    name = "-".join(["speculators", kind, "shifted" if shifted else "fill_in", *map(str, fields.values())])
    written = json.loads(config.to_json_string(use_diff=False))
    tensors = {k: v for k, v in model.state_dict().items() if not k.startswith(("verifier_", "t2d", "d2t"))}
    save(root / name, written, tensors, expected)


def write(root: Path) -> None:
    """All cases, and the versions they were made with."""
    from importlib.metadata import version

    write_dflash(root, "DFlash")
    write_dflash(root, "DFlash2")
    write_speculators(root, "dflash", shifted=False)
    write_speculators(root, "dflash", shifted=True)
    for kind in ("vanilla", "gated", "rnn"):
        write_speculators(root, "dspark", shifted=True, markov_rank=12, markov_head_type=kind)
    names = ("dflash", "speculators", "transformers", "torch")
    (root / "versions.json").write_text(json.dumps({name: version(name) for name in names}))


# In our own environment.


class TablesOnly:
    """The part of a target that drafting a block needs."""

    def __init__(self, data: dict):
        self.data = data

    def embed(self, ids):
        return self.data["embed"][ids]

    def logits(self, hidden_states, token_ids=None):
        return hidden_states @ self.data["head"].T


@torch.no_grad()
def compare(folder: Path) -> dict:
    """Largest differences of one case."""
    from safetensors.torch import load_file

    from hf_drelay import DRelayModel
    from hf_drelay.modeling.modeling_base import Pool
    from hf_drelay.modeling.modeling_heads import HeadInputs

    expected, data = load_file(folder / "expected.bin"), inputs()
    is_bilinear = "q" in expected
    model = DRelayModel.from_pretrained(str(folder), **({} if is_bilinear else {"pool_size": V}))
    drafter, adapter, K = model.drafter, TablesOnly(data), model.config.num_drafts
    cache = drafter.new_cache()
    drafter.extend(drafter.fuse(data["states"][:, :ANCHOR]), torch.arange(ANCHOR)[None], cache)
    anchor = data["input_ids"][:, ANCHOR]
    positions = torch.arange(ANCHOR, ANCHOR + model.config.block_size)[None]
    rows = drafter(drafter.block_embeds(anchor, adapter.embed), positions, cache).last_hidden_state
    hidden = rows[:, -K:]
    logits = drafter.logits(hidden, adapter)
    result = {"logits": difference(logits, expected["logits"])}
    pool = Pool.from_logits(logits, model.config.pool_size)
    none = torch.zeros(1, 1, H)
    head_inputs = HeadInputs(
        hidden, None, pool, anchor, none, none[..., 0].bool(), 0, None, adapter.embed, anchor[:, None][:, :0]
    )
    if "corrected" in expected:
        state = model.selector.read(head_inputs)
        path = data["input_ids"][:, ANCHOR : ANCHOR + K]
        scores = model.selector.score(state, path).log_softmax(dim=-1)
        wanted = expected["corrected"].log_softmax(dim=-1).gather(2, pool.ids)
        result["corrected_log_probs"] = difference(scores, wanted)
        result["confidence"] = difference(model.selector.confidence(state, path), expected["confidence"])
    if is_bilinear:
        state = model.selector.read(head_inputs)
        for name in ("path", "greedy"):
            path = torch.cat([anchor[:, None], expected[name][:, :-1]], dim=1)
            scores = model.selector.score(state, path)
            if name == "greedy":
                ids = pool.ids.gather(2, scores.argmax(-1, keepdim=True))[..., 0]
                result["greedy_tokens_that_differ"] = int((ids != expected["greedy"]).sum())
                continue
            places = (pool.ids[..., None, :] == expected["candidates"][..., None]).long().argmax(-1)
            result["q"] = difference(scores.softmax(dim=-1).gather(2, places), expected["q"])
    return result


def difference(own: torch.Tensor, expected: torch.Tensor) -> float:
    if own.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(own.shape)} and {tuple(expected.shape)}")
    return (own - expected).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--reference-python", help="Python of the environment of the references.")
    parser.add_argument("--write", type=Path, help="Write the cases there and stop; needs the references.")
    parser.add_argument("--output", type=Path, default=Path("docs/results/parity.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.write is not None:
        write(args.write)
        return
    if args.reference_python is None:
        parser.error("--reference-python is needed")
    from hf_drelay.evaluation.records import environment, write_json

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cases"
        subprocess.run([args.reference_python, __file__, "--write", root], check=True)
        cases = {case.name: compare(case) for case in sorted(root.iterdir()) if case.is_dir()}
        versions = json.loads((root / "versions.json").read_text())
    if not cases:
        raise SystemExit("no case was compared")
    worst = max(value for case in cases.values() for value in case.values())
    record = {"tolerance": TOLERANCE, "largest_difference": worst, "passed": worst <= TOLERANCE, "cases": cases}
    write_json(args.output, {"reference": versions, "environment": environment()} | record)
    print(json.dumps(record, indent=1))
    sys.exit(0 if record["passed"] else 1)


if __name__ == "__main__":
    main()
