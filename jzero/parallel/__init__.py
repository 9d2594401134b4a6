"""How a step is laid over the mesh: the scan over layers, and the mapping from logical to mesh axes."""
