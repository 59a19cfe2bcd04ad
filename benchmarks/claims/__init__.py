"""What the field says of distillation, tested small: `python -m benchmarks.claims`, and docs/claims.md."""
