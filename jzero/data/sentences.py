"""Text into sentences, by rules that need no model of a language."""

import re

# after ". ", "? " or "! ", where what follows begins as a sentence does
_BOUNDARY = re.compile(r"""(?<=[.!?])[ \t]+(?=["'(\[“‘]*[A-Z0-9À-ÖØ-Þ])|(?<=[。！？])""")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text. Every line ends one, so text that is wrapped into lines should be unwrapped before.

    Within a line a sentence ends after ".", "!" or "?" and a space, where a capital letter or a digit follows
    (quotation marks and brackets may stand before it), and after "。", "！" or "？". So "Dr. Who" are two sentences.

    Example:
        >>> split_sentences('He came. "Why?" she asked.\\n\\nVersion 3.12 is out! Good.')
        ['He came.', '"Why?" she asked.', 'Version 3.12 is out!', 'Good.']
    """
    parts = (part.strip() for line in text.splitlines() for part in _BOUNDARY.split(line))
    return [part for part in parts if part]
