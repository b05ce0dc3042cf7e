"""Compile, cache and launch: sources, NVRTC through CuPy, prepared launches, DLPack."""
