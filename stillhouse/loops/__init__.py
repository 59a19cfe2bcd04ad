"""The loops of a run: off-policy, on-policy, and the evaluation of a student."""
