"""The hook of the example: prints progress during training, and a summary at the end."""

from collections import deque

from torch.nn.utils import get_total_norm

from hookline import Hook


class Report(Hook):
    """Print loss, gradient norm, learning rate and the module with the largest gradient."""

    def __init__(self, every=50, mean_of=20):
        self.every = every
        self.first = []
        self.last = deque(maxlen=mean_of)

    def on_train_start(self, model):
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"training {size:,} parameters")
        print(f"{'step':>5} {'loss':>7} {'grad norm':>10} {'lr':>9}  largest gradient")

    def on_after_backward(self, model, step):
        # Before clipping: in `on_step_end` the gradients are already clipped.
        self.due = step == 0 or (step + 1) % self.every == 0
        if self.due:
            self.norm, self.largest = gradient_norms(model)

    def on_step_end(self, step, loss, lr):
        if len(self.first) < self.last.maxlen:
            self.first.append(loss)  # not read yet, so this does not wait for the GPU
        self.last.append(loss)
        if self.due:
            print(f"{step:5} {loss:7.3f} {self.norm:10.3f} {lr:9.2e}  {self.largest}")

    def on_train_end(self, trainer, step, status):
        print(f"\n{status} after {step} steps")
        if self.first:
            print(
                f"loss {mean(self.first):.3f} -> {mean(self.last):.3f}"
                f" (means of the first and the last {len(self.last)} steps)"
            )
        print(f"\ncost of the hooks:\n{trainer.hooks.summary()}")


def gradient_norms(model):
    """Return the norm of all gradients, and the module with the largest gradient."""
    norms = {}
    for name, module in model.named_modules():
        grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if grads:
            norms[name] = get_total_norm(grads)
    largest = max(norms, key=norms.get)
    return get_total_norm(list(norms.values())).item(), f"{largest} ({norms[largest]:.3f})"


def mean(losses):
    return sum(losses) / len(losses)
