"""FP8 by hand in NumPy: values of the 256 codes from the definition of the formats, rounding by comparing midpoints."""

import numpy as np

FORMATS = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}  # bits of exponent and mantissa


def decode(name):
    """Values of the codes 0 … 255, float64."""
    exponent_bits, mantissa_bits = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        value = 2.0 ** (exponent - bias) * (1 + mantissa / 2**mantissa_bits)
        if exponent == 0:
            value = 2.0 ** (1 - bias) * mantissa / 2**mantissa_bits
        if name == "float8_e5m2" and exponent == 31:
            value = np.inf if mantissa == 0 else np.nan
        if name == "float8_e4m3fn" and code & 0x7F == 0x7F:
            value = np.nan
        values.append(sign * value)
    return np.asarray(values)


def encode(x, name):
    """Codes of float32 values: nearest, ties to the even code, beyond the largest the largest; NaN -> NaN."""
    x = np.asarray(x, np.float64)
    positive = decode(name)[:128]
    finite = positive[np.isfinite(positive)]
    middles = (finite[1:] + finite[:-1]) / 2  # exact in float64, as are the inputs
    below = np.searchsorted(middles, np.abs(x), side="left")  # x > middle goes up, x == middle stays below
    above = np.searchsorted(middles, np.abs(x), side="right")
    code = np.where(below % 2 == 0, below, above).astype(np.uint8)
    code = np.where(np.isnan(x), np.uint8(0x7F), code)
    return code | (np.signbit(x).astype(np.uint8) << 7)


def scale(amax, previous, limit, margin=0, power_of_two=False):
    """The scale of one float32 amax."""
    amax = np.float32(amax)
    if not (np.isfinite(amax) and amax > 0):
        return np.float32(previous)
    with np.errstate(over="ignore"):
        result = min(np.float32(limit) / amax * np.float32(2.0**-margin), np.float32(2.0**126))
    return np.float32(2.0 ** np.floor(np.log2(np.float64(result)))) if power_of_two else np.float32(result)


def next_scales(first, amaxes, *, length=1024, algo="max", interval=1, **how):
    """Delayed scaling of one E4M3 tensor: its scale after each step, from the float32 amaxes of the steps."""
    seen, current, out = [], np.float32(first), []
    for n, amax in enumerate(amaxes):
        finite = np.isfinite(amax)
        seen = [*seen, np.float32(amax if finite else 0)][-length:]
        if finite and n % interval == 0:
            current = scale(max(seen) if algo == "max" else seen[-1], current, 448, **how)
        out.append(current)
    return out
