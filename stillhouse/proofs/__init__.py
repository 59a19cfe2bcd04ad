"""Proofs: the results of layers and layouts are compared with the correct results.

`models/load_proof.py` has the comparison, the probe, and the proof of a single model, which `Decoder` runs.
"""
