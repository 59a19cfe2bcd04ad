"""Proves layers and layouts: compares their results with the correct results.

`models/load_proof.py` has the comparison, the probe, and the proof of a single model, which `Decoder` runs.
"""
