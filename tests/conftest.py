"""What every test needs: one torch thread (unless told otherwise), and a Hub client that stays off the network."""

import os

import torch


# Before the Hub client is imported, which reads this once. Tests marked `hub` are run with HF_HUB_OFFLINE=0.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "OMP_NUM_THREADS" not in os.environ:
    # Tiny models gain nothing from threads and lose to their overhead.
    torch.set_num_threads(1)
