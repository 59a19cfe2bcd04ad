"""Proves that models compute in a layout what they compute alone (`models/load_proof.py` proves one model alone)."""
