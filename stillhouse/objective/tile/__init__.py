"""The chunked pass over tiles of logits: `chunks.py` has the loop over chunks, `tile.py` the work on one chunk."""
