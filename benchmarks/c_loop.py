"""AdamW as a C programmer would write it: one loop over each array, compiled when the benchmark starts.

Each element of gradient, parameter and moments is read once and written once. `load` gives None, with a note, where the
system has no C compiler.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import numpy as np

SOURCE = r"""
#include <math.h>
void adamw(long n, const float *restrict g, float *restrict p, float *restrict m, float *restrict v,
           float lr, float b1, float b2, float eps, float decay, float c1, float c2) {
  const long block = 16384;  /* handed out one by one: other work may hold a core */
  #pragma omp parallel for schedule(dynamic)
  for (long start = 0; start < n; start += block) {
    const long end = start + block < n ? start + block : n;
    for (long i = start; i < end; i++) {
      float mi = b1 * m[i] + (1 - b1) * g[i], vi = b2 * v[i] + (1 - b2) * g[i] * g[i];
      m[i] = mi;
      v[i] = vi;
      p[i] -= lr * (mi * c1 / (sqrtf(vi * c2) + eps) + decay * p[i]);
    }
  }
}
"""
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
Step = Callable[[], None]


def load() -> tuple[Callable[..., None] | None, str]:
    """The compiled function, and how it was compiled or why it was not."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or idle threads spin while the other sides run
    compiler = shutil.which("cc")
    if compiler is None:
        return None, "no C loop: there is no `cc`"
    with tempfile.TemporaryDirectory() as folder:
        source, library = pathlib.Path(folder) / "adamw.c", pathlib.Path(folder) / "adamw.so"
        source.write_text(SOURCE)
        for flags, threads in ((["-fopenmp"], "OpenMP, a thread per core"), ([], "one thread: no OpenMP")):
            command = [compiler, *FLAGS, *flags, str(source), "-o", str(library), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                f = ctypes.CDLL(str(library)).adamw
                f.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 4, *[ctypes.c_float] * 7]
                f.restype = None
                return f, f"C loop: {compiler} {' '.join([*FLAGS, *flags])} ({threads})"
    return None, f"no C loop: {compiler} failed: {done.stderr.strip().splitlines()[0]}"


class Loop:
    """The optimizer's state in NumPy, and its step."""

    def __init__(self, adamw: Callable[..., None], params: dict, grads: dict, options: dict[str, float]):
        copy = lambda tree: {name: np.array(x, np.float32) for name, x in tree.items()}
        self.adamw, self.options, self.count = adamw, options, 0
        self.params, self.grads = copy(params), copy(grads)
        self.m, self.v = ({name: np.zeros_like(x) for name, x in self.params.items()} for _ in range(2))

    def step(self) -> None:
        """One update of every array, in place."""
        o = self.options
        self.count += 1
        corrections = (1 / (1 - o["b1"] ** self.count), 1 / (1 - o["b2"] ** self.count))
        for name, p in self.params.items():
            arrays = [x[name].ctypes.data for x in (self.grads, self.params, self.m, self.v)]
            numbers = (o["learning_rate"], o["b1"], o["b2"], o["eps"], o["weight_decay"], *corrections)
            self.adamw(p.size, *arrays, *numbers)
