"""The engine, which computes the whole loss of a step and its gradient, and runs the optimizer."""
