"""Save and restore the state of every random generator that training draws from."""

import json
import random

import numpy as np
import torch

from vitkernels.runtime import Runtime
from vitkernels.runtime.generators import GENERATORS


def random_state(runtime: Runtime) -> torch.Tensor:
    """Return the states of Python's, NumPy's, PyTorch's and the device's generators: JSON as a tensor of bytes."""
    with GENERATORS:
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        python, cpu = random.getstate(), torch.get_rng_state()
    assert isinstance(keys, np.ndarray)
    device = {name: s.tolist() if isinstance(s, torch.Tensor) else s for name, s in runtime.rng_state().items()}
    state = {
        "python": python,
        "numpy": (kind, keys.tolist(), position, has_gauss, cached),
        "torch": cpu.tolist(),
        "device": device,
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def set_random_state(saved: torch.Tensor, runtime: Runtime) -> None:
    """Restore what `random_state` returned."""
    state = json.loads(saved.numpy().tobytes())
    version, internal, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    with GENERATORS:
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    device = {
        name: torch.tensor(s, dtype=torch.uint8) if isinstance(s, list) else s for name, s in state["device"].items()
    }
    runtime.set_rng_state(device)
