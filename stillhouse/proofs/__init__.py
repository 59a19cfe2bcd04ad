"""Proofs: what layers and layouts compute is compared with what they must compute.

`models/load_proof.py` has the comparison, the probe, and the proof of a single model, which `Decoder` runs.
"""
