"""Data: text to tokens, Megatron's indexed files, GPT samples, batches. Start in `gpt.py`; see `loader.py`."""

from jzero.data.blend import Blend, split_documents
from jzero.data.corpus import stdlib_corpus
from jzero.data.gpt import GPTDataset
from jzero.data.indexed import IndexedDataset
from jzero.data.loader import batches, build_datasets, config_tokenizer, open_datasets
from jzero.data.text import ByteTokenizer, FileTokenizer, Tokenizer, build, load_tokenizer
from jzero.data.writer import IndexedWriter

__all__ = [
    "Blend",
    "ByteTokenizer",
    "FileTokenizer",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "Tokenizer",
    "batches",
    "build",
    "build_datasets",
    "config_tokenizer",
    "load_tokenizer",
    "open_datasets",
    "split_documents",
    "stdlib_corpus",
]
