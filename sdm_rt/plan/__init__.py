"""Planners: pure functions from shapes, dtypes and a device model to launches."""
