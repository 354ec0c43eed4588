"""Clipping and the update rules, from their definitions."""

from __future__ import annotations

import torch

from tests.oracles.algorithm import Settings


class Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, algorithm 2), or SGD with momentum and L2.

    Matrices decay; biases and norms, the parameters of one dimension, do not.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], settings: Settings) -> None:
        self._parameters, self._settings, self._count = parameters, settings, 0
        self._first = [torch.zeros_like(parameter) for parameter in parameters]
        self._second = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> float:
        """Clip and apply the gradients; returns their norm before."""
        s = self._settings
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        scale = s.clip_grad / (norm + 1e-6) if 0 < s.clip_grad < norm else 1.0
        self._count += 1
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            decay = s.weight_decay if parameter.dim() > 1 else 0.0
            change = self._adam if s.optimizer == "adam" else self._sgd
            parameter.copy_(change(index, parameter, gradient * scale, decay))
            parameter.grad = None
        return norm

    def _adam(self, index: int, value: torch.Tensor, gradient: torch.Tensor, decay: float) -> torch.Tensor:
        s = self._settings
        first = self._first[index] = s.adam_beta1 * self._first[index] + (1 - s.adam_beta1) * gradient
        second = self._second[index] = s.adam_beta2 * self._second[index] + (1 - s.adam_beta2) * gradient**2
        mean, square = first / (1 - s.adam_beta1**self._count), second / (1 - s.adam_beta2**self._count)
        return value - s.lr * decay * value - s.lr * mean / (square.sqrt() + s.adam_eps)

    def _sgd(self, index: int, value: torch.Tensor, gradient: torch.Tensor, decay: float) -> torch.Tensor:
        s = self._settings
        gradient = gradient + decay * value
        momentum = gradient if self._count == 1 else s.sgd_momentum * self._first[index] + gradient
        self._first[index] = momentum
        return value - s.lr * momentum
