"""Transformers in Flax NNX, and the same as pure functions for a training step that writes its own backward pass.

Start in `gpt.py`; `parameters.py` says how a model describes its parameters, `functions.py` what a step knows of it.
"""

from jzero.models.bert import BERT, BertConfig
from jzero.models.dropout import Dropout
from jzero.models.functions import Functions, functions
from jzero.models.gpt import GPT, GPTConfig

__all__ = ["BERT", "GPT", "BertConfig", "Dropout", "Functions", "GPTConfig", "functions"]
