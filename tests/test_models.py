"""Are the models those of the papers, to the parameter, and can every engine take them apart?"""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from fedbraid import models
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError

IMAGE = (3, 32, 32)
COUNTS = [
    ("lenet5", {}, (1, 28, 28), 61_706),
    ("lenet5", {"classes": 26}, (1, 28, 28), 61_706 + 16 * 85),
    ("lenet5", {"channels": 3, "size": 32}, IMAGE, 456 + 2_416 + 69_240 + 10_164 + 850),
    ("fedgbo_cnn", {}, IMAGE, 1_250_852),
    ("fedgbo_cnn", {"classes": 62, "channels": 1, "size": 28}, (1, 28, 28), 870_334),
    ("fedshift_cnn", {}, IMAGE, 2_155_872),
    ("w3_cnn", {}, IMAGE, 1_204_682),
    ("small_cnn", {}, IMAGE, 19_626),
    ("qafel_cnn", {}, IMAGE, 29_282),
    ("qafel_cnn", {"dropout": 0.1}, IMAGE, 29_282),
    ("resnet18_gn", {}, IMAGE, 11_173_962),
    ("resnet18_gn", {"stem": "large"}, IMAGE, 11_181_642),
    ("logistic", {"features": 112}, (112,), 226),
    ("softmax_regression", {"features": 64}, (1, 8, 8), 650),
    ("mlp", {"features": 64, "hidden": 64}, (1, 8, 8), 4_810),
    ("gru_char", {}, (80,), 163_024),
    ("gru_char", {"layers": 1}, (80,), 163_024 - 99_072),
    ("lstm_char", {}, (80,), 819_920),
    ("bag_of_words", {"vocab": 5000}, (25,), 10_004),
]


def sample(name: str, shape: tuple[int, ...], n: int = 2) -> torch.Tensor:
    if name in ("gru_char", "lstm_char", "bag_of_words"):
        return torch.randint(1, 80, (n, *shape))
    return torch.randn(n, *shape)


@pytest.mark.parametrize(("name", "options", "shape", "count"), COUNTS)
def test_parameter_count_and_forward(name, options, shape, count):
    model = models.build(name, **options)
    assert Layout.of(model).size == count
    assert model(sample(name, shape)).shape[0] == 2
    assert pickle.loads(pickle.dumps(model))(sample(name, shape)).ndim == 2


@pytest.mark.parametrize(("name", "options", "shape", "count"), COUNTS)
def test_torch_fx_traces_every_model(name, options, shape, count):
    model = models.build(name, **options).eval()
    x = sample(name, shape)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))


def test_every_model_is_counted():
    assert {row[0] for row in COUNTS} == set(models.names())


def test_feed_forward_nets_are_chains_of_modules():
    for name in ("lenet5", "fedgbo_cnn", "fedshift_cnn", "w3_cnn", "small_cnn"):
        assert isinstance(models.build(name), nn.Sequential)


def test_bag_of_words_is_a_linear_layer_on_a_normalised_bag():
    model = models.bag_of_words(vocab=6, classes=2)
    ids = torch.tensor([[1, 3, 3, 0], [6, 0, 0, 0]])
    bag = torch.tensor([[1, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 3]]) / 3
    assert torch.allclose(model(ids), bag @ model.words.weight[1:] + model.bias)
    model(ids).sum().backward()
    assert not model.words.weight.grad[0].any()


def test_dropout_matters_in_training_only():
    model = models.qafel_cnn(dropout=0.5)
    x = torch.randn(1, *IMAGE)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_bad_names_and_options_are_sentences():
    with pytest.raises(ConfigError, match="unknown model 'lenet'; did you mean 'lenet5'"):
        models.build("lenet")
    with pytest.raises(ConfigError, match="unknown option of model lenet5 'class'; did you mean 'classes'"):
        models.build("lenet5", **{"class": 3})
    with pytest.raises(ConfigError, match="got 'huge'"):
        models.build("resnet18_gn", stem="huge")
    with pytest.raises(ConfigError, match="model logistic cannot be built"):
        models.build("logistic")
