"""Load a drafter that others published, in their format.

    python examples/11_public_checkpoint.py [z-lab/Qwen3-4B-DFlash-b16 Qwen/Qwen3-4B]

Needs: nothing without arguments, when a tiny random checkpoint in the format of DFlash stands in for a published one;
with arguments the network, and a machine that holds both models.
Prints what was loaded, and whether the text is the target's own.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_drelay import DRelayConfig, DRelayModel
from hf_drelay.hub.convert import convert


def stand_in(folder: Path):
    """A random target and the path of a random drafter for it, written as z-lab publishes them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = Qwen3ForCausalLM(Qwen3Config(vocab_size=96, head_dim=16, num_hidden_layers=4, **sizes))
    config = DRelayConfig.for_target(
        target.config,
        head="independent",
        layout="fill_in",
        num_hidden_layers=2,
        block_size=6,
        use_mask_embedding=False,
    )
    DRelayModel(config).save_pretrained(folder / "ours")
    convert(str(folder / "ours"), folder / "published", format="zlab")
    return target, str(folder / "published")


with tempfile.TemporaryDirectory() as scratch:
    if len(sys.argv) == 3:
        drafter, name = sys.argv[1:]
        target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        ids = AutoTokenizer.from_pretrained(name)("Speculative decoding is", return_tensors="pt").input_ids
    else:
        target, drafter = stand_in(Path(scratch))
        ids = torch.tensor([[5, 17, 42, 8, 23]])
    drelay = DRelayModel.from_pretrained(drafter)  # a folder or a Hub id, in our format or a public one

config = drelay.config
print(f"{config.head} head, {config.layout} layout, {config.num_drafts} drafts in a block")
options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 32}
output = target.generate(ids, assistant_model=drelay.with_options(loop_gate=-1.0), **options)
plain = target.generate(ids, **options)
print("same tokens as without the drafter:", output.tolist() == plain.tolist())
