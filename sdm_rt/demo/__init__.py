"""The library behind ``sdm-rt demo``: a byte-level language model with SDM layers, trained on real text."""
