"""Train a tiny drafter for a tiny random target, from the target's own responses to a saved checkpoint.

    python examples/10_train_small.py

Needs: nothing but a CPU and about a minute.
Prints the replayed acceptance length before and after. `hf-drelay train` is the same for a real target.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay import DRelayConfig, DRelayModel
from hf_drelay.training.config import DRelayTrainingConfig
from hf_drelay.training.data import ResponseExample
from hf_drelay.training.trainer import DRelayTrainer


torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
target = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, initializer_range=0.3, **shape)).eval()
target.generation_config.eos_token_id = None

examples = []
for number in range(40):
    prompt = torch.randint(3, 64, (1, 4))
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=32)[0]
    examples.append(ResponseExample(input_ids=ids, prompt_length=4, prompt=str(number), mode="greedy"))

config = DRelayConfig.for_target(target.config, num_hidden_layers=1, block_size=4, selector_hidden_size=32)
drelay = DRelayModel(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = DRelayTrainingConfig(
        output_dir=folder,
        max_steps=60,
        learning_rate=3e-3,
        num_anchors=8,
        num_selector_anchors=8,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = DRelayTrainer(drelay, target, arguments, examples[:32], examples[32:])
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    drelay.save_pretrained(folder)
print({name: (before[name], after[name]) for name in before if isinstance(before[name], float)})
