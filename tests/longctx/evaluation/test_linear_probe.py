"""The linear probe: its minimum against Newton's method in NumPy, and features with and without a signal."""

from __future__ import annotations

import numpy as np
import torch

from longctx.evaluation.linear_probe import fit_probe

CLASSES = 3


def random_features(count: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features with some signal, in different units, and classes."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    features = random.normal(size=(count, width)) + 0.7 * np.eye(CLASSES, width)[labels]
    return torch.from_numpy(features * 10.0 ** np.arange(width) + 5), torch.from_numpy(labels)


def newton(features: np.ndarray, labels: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """The weights and biases of the minimum."""
    count, width = features.shape
    x = np.concatenate([(features - features.mean(0)) / features.std(0), np.ones((count, 1))], 1)
    weights, wanted = np.zeros((CLASSES, width + 1)), np.eye(CLASSES)[labels]
    # The last column has the biases, without a penalty; the small number makes them unique.
    penalties = np.diag(np.tile([*[penalty] * width, 1e-12], CLASSES))
    for _ in range(30):
        scores = np.exp(x @ weights.T)
        p = scores / scores.sum(1, keepdims=True)
        gradient = ((p - wanted).T @ x / count).ravel() + penalties @ weights.ravel()
        blocks = np.zeros((CLASSES, width + 1, CLASSES, width + 1))
        for c in range(CLASSES):
            for d in range(CLASSES):
                factor = p[:, c] * ((c == d) - p[:, d])
                blocks[c, :, d] = (x * factor[:, None]).T @ x / count
        hessian = blocks.reshape(CLASSES * (width + 1), -1) + penalties
        weights -= np.linalg.solve(hessian, gradient).reshape(weights.shape)
    return weights[:, :-1], weights[:, -1]


def test_the_fit_is_the_minimum():
    features, labels = random_features(120, 4)
    probe = fit_probe(features, labels, CLASSES, penalty=0.02)
    weights, biases = newton(features.numpy(), labels.numpy(), 0.02)
    np.testing.assert_allclose(probe.weight_CM.numpy(), weights, atol=1e-5)
    np.testing.assert_allclose(probe.bias_C.numpy(), biases - biases.mean(), atol=1e-5)
    again = fit_probe(features, labels, CLASSES, penalty=0.02)
    assert torch.equal(again.weight_CM, probe.weight_CM)


def test_separable_classes_are_separated_and_others_are_not():
    labels = torch.arange(90) % CLASSES
    separable = torch.eye(CLASSES, 5)[labels] + 0.1 * torch.randn(90, 5, generator=torch.Generator().manual_seed(0))
    probe = fit_probe(separable, labels, CLASSES)
    assert probe.accuracy(separable, labels) == 1.0
    assert probe.accuracy(separable, (labels + 1) % CLASSES) == 0.0
    noise = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    assert fit_probe(noise, torch.arange(600) % CLASSES, CLASSES).accuracy(noise, torch.arange(600) % CLASSES) < 0.5


def test_rounding_of_a_constant_is_no_signal():
    labels = torch.arange(60) % 2
    features = torch.full((60, 1), 3.0, dtype=torch.float64) + 1e-8 * labels[:, None]
    assert fit_probe(features, labels, 2).accuracy(features, labels) == 0.5
    assert fit_probe(torch.zeros(60, 1), labels, 2).accuracy(torch.zeros(60, 1), labels) == 0.5
