"""The engine: the whole loss of a step, its gradient, and the optimizer."""
