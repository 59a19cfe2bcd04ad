from stillhouse.engine.torch_engine import TorchEngine


class FrugalEngine(TorchEngine):
    """Leaves the weights as they are if the gradient's norm is below parallel.frugal.least."""

    def update(self, learning_rate, output=None):
        is_small = self.gradient_norm() < self.student.layout.options.get("least", 0.0)
        return super().update(0.0 if is_small else learning_rate, output)
