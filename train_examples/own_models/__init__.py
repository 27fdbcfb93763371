"""Plain torch models that know nothing of transformers, and how the monitor reads them (docs/architectures.md)."""
