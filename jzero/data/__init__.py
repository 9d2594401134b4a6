"""Data: text to tokens, Megatron's indexed files, GPT and BERT samples, batches. Start in `gpt.py`, see `loader.py`."""

from jzero.data.bert import BertDataset, BertTokens, bert_tokens
from jzero.data.blend import Blend, split_documents
from jzero.data.corpus import stdlib_corpus, stdlib_sentences, stdlib_tokenizer
from jzero.data.gpt import GPTDataset
from jzero.data.indexed import IndexedDataset
from jzero.data.loader import batches, build_datasets, config_tokenizer, open_datasets
from jzero.data.text import ByteTokenizer, FileTokenizer, Tokenizer, build, load_tokenizer
from jzero.data.tokenizer import train_tokenizer
from jzero.data.writer import IndexedWriter

__all__ = [
    "BertDataset",
    "BertTokens",
    "Blend",
    "ByteTokenizer",
    "FileTokenizer",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "Tokenizer",
    "batches",
    "bert_tokens",
    "build",
    "build_datasets",
    "config_tokenizer",
    "load_tokenizer",
    "open_datasets",
    "split_documents",
    "stdlib_corpus",
    "stdlib_sentences",
    "stdlib_tokenizer",
    "train_tokenizer",
]
