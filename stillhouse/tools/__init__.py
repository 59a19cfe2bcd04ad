"""Commands other than training: check, parity, verify, caches, exports and the demo."""
