"""Megatron's indexed files and samples written down a second time, slowly and plainly, to compare the package with."""

import struct
from itertools import pairwise

NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


def write(prefix, code, documents, modes=None):
    """`documents`: for each document a list of sequences, each a list of numbers."""
    sequences = [sequence for document in documents for sequence in document]
    item = struct.calcsize("<" + FORMATS[code])
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{FORMATS[code]}", *sequence))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1))
        for sequence in sequences:
            file.write(struct.pack("<i", len(sequence)))
        at = 0
        for sequence in sequences:
            file.write(struct.pack("<q", at))
            at += item * len(sequence)
        count = 0
        file.write(struct.pack("<q", 0))
        for document in documents:
            count += len(document)
            file.write(struct.pack("<q", count))
        for mode in modes or []:
            file.write(struct.pack("<b", mode))


def read(prefix):
    """(dtype name, documents as above, modes or None)."""
    with open(f"{prefix}.idx", "rb") as file:
        index = file.read()
    with open(f"{prefix}.bin", "rb") as file:
        data = file.read()
    at = 0

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, index, at)
        at += struct.calcsize("<" + form)
        return list(values)

    assert take("9s") == [b"MMIDIDX\x00\x00"]
    assert take("Q") == [1]
    (code,) = take("B")
    (count,), (boundaries,) = take("Q"), take("Q")
    sizes, pointers, starts = take(f"{count}i"), take(f"{count}q"), take(f"{boundaries}q")
    modes = take(f"{count}b") if at < len(index) else None
    assert at == len(index)
    sequences = [
        list(struct.unpack_from(f"<{size}{FORMATS[code]}", data, pointer))
        for size, pointer in zip(sizes, pointers, strict=True)
    ]
    documents = [sequences[a:b] for a, b in pairwise(starts)]
    return NAMES[code], documents, modes


def masks(tokens, eod):
    """Loss mask, positions and segments of a sample, one token at a time."""
    loss_mask, positions, segments = [], [], []
    position, segment = 0, 1
    for token in tokens:
        loss_mask.append(0.0 if token == eod else 1.0)
        positions.append(position)
        segments.append(segment)
        position += 1
        if token == eod:
            position, segment = 0, segment + 1
    return loss_mask, positions, segments
