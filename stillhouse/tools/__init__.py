"""Commands beside training: check, parity, verify, caches, exports and the demo."""
