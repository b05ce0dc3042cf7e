"""The layer: arguments, module, decode state, statistics."""
