"""Weights from and to Hugging Face: GPT-2, Llama-style models and BERT, as safetensors in their own names.

`tables.py` says what each architecture's tensors are called and how they lie; `configs.py` does so for config.json.
"""

from jzero.models.hf.configs import from_hf, to_hf
from jzero.models.hf.files import is_hf_folder
from jzero.models.hf.weights import check, load, read_config, save

__all__ = ["check", "from_hf", "is_hf_folder", "load", "read_config", "save", "to_hf"]
