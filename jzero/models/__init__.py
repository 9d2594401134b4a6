"""Transformers in Flax NNX, and the same as pure functions for a training step that writes its own backward pass.

Start in `gpt.py`; `parameters.py` says how a model describes its parameters.
"""

from jzero.models.dropout import Dropout
from jzero.models.gpt import GPT, Functions, GPTConfig, functions

__all__ = ["GPT", "Dropout", "Functions", "GPTConfig", "functions"]
