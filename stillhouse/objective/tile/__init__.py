"""The chunked pass over the tiles of logits.

chunks            the loop over chunks of tokens, and the sums of a pass
logits_provider   a chunk's logits from hidden states and heads, and the gradient back to them
tile_plan         what the terms read from a tile, each quantity computed once
tile              one chunk: its logits, the statistics of its rows, its gradient
pointwise         the sweeps over a block of logits; `compiled` runs each as one kernel
statistics        normalizers, entropies and divergences from the sums of all ranks
"""
