"""The models of speed.py's workloads in JAX, for FedJAX in benchmarks/peers.py: read off the PyTorch modules, with their weights.

Weights stay as PyTorch lays them out; images have their channels last, as is usual in JAX.
"""

import jax
import jax.numpy as jnp
from jax import lax
from speed import Transformer
from torch import nn

from fedbraid.models.chars import NextCharacter
from fedbraid.models.resnet import Block


def forward(module: nn.Module, weights: dict, x, key):
    """What a module answers in training; `weights` are its named parameters, `key` is for dropout."""

    def part(name: str, x, key=key):
        """What a part of the module answers."""
        mine = {n.removeprefix(f"{name}."): w for n, w in weights.items() if n.startswith(f"{name}.")}
        return forward(module.get_submodule(name), mine, x, key)

    match module:
        case nn.Sequential() | nn.TransformerEncoder(layers=nn.ModuleList()):
            prefix = "" if isinstance(module, nn.Sequential) else "layers."
            for i in range(len(getattr(module, "layers", module))):
                x = part(f"{prefix}{i}", x, jax.random.fold_in(key, i))
            return x
        case nn.Linear():
            return x @ weights["weight"].T + weights["bias"]
        case nn.Conv2d():
            pads = [(p, p) for p in module.padding]
            layout = ("NHWC", "OIHW", "NHWC")
            x = lax.conv_general_dilated(x, weights["weight"], module.stride, pads, dimension_numbers=layout)
            return x + weights["bias"] if "bias" in weights else x
        case nn.MaxPool2d(kernel_size=k):
            rows, high, wide, deep = len(x), x.shape[1] // k, x.shape[2] // k, x.shape[3]
            # the gradient of lax.reduce_window takes longer on CPUs, on W3 several times as long
            return x[:, : high * k, : wide * k].reshape(rows, high, k, wide, k, deep).max((2, 4))
        case nn.AdaptiveAvgPool2d():
            return x.mean((1, 2), keepdims=True)
        case nn.GroupNorm(num_groups=groups):
            grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
            return normed(grouped, (1, 3), module.eps).reshape(x.shape) * weights["weight"] + weights["bias"]
        case nn.LayerNorm():
            return normed(x, -1, module.eps) * weights["weight"] + weights["bias"]
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.Identity():
            return x
        case nn.Flatten():
            return x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        case nn.Dropout():
            return dropout(x, module.p, key)
        case nn.Embedding():
            return weights["weight"][x]
        case nn.GRU():
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            for layer in range(module.num_layers):
                x = gru(x, *(weights[f"{name}_l{layer}"] for name in names))
            return x
        case nn.MultiheadAttention():
            return attention(module, weights, x, key)
        case nn.TransformerEncoderLayer():
            keys = jax.random.split(key, 4)
            x = part("norm1", x + part("dropout1", part("self_attn", x, keys[0]), keys[1]))
            inside = part("dropout", jax.nn.relu(part("linear1", x)), keys[2])
            return part("norm2", x + part("dropout2", part("linear2", inside), keys[3]))
        case NextCharacter():
            return part("head", part("rnn", part("embed", x))[:, -1])
        case Block():
            return jax.nn.relu(part("body", x) + part("skip", x))
        case Transformer():
            return part("head", part("encoder", part("words", x) + weights["places"]).mean(1))
    raise NotImplementedError(f"no JAX for {type(module).__name__} here")


def normed(x, axes, eps: float):
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)


def dropout(x, p: float, key):
    return jnp.where(jax.random.bernoulli(key, 1 - p, x.shape), x / (1 - p), 0) if p else x


def gru(x, w_in, w_state, b_in, b_state):
    """One layer, with PyTorch's order of gates: reset, update, new."""

    def step(state, given):
        reset, update, new = jnp.split(given, 3, axis=-1)
        of_reset, of_update, of_new = jnp.split(state @ w_state.T + b_state, 3, axis=-1)
        update = jax.nn.sigmoid(update + of_update)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new)
        state = (1 - update) * new + update * state
        return state, state

    start = jnp.zeros((len(x), w_state.shape[1]))
    _, states = lax.scan(step, start, (x @ w_in.T + b_in).swapaxes(0, 1))
    return states.swapaxes(0, 1)


def attention(module: nn.MultiheadAttention, weights: dict, x, key):
    rows, length, width = x.shape
    joined = x @ weights["in_proj_weight"].T + weights["in_proj_bias"]
    q, k, v = (
        t.reshape(rows, length, module.num_heads, -1).swapaxes(1, 2) for t in jnp.split(joined, 3, axis=-1)
    )
    scores = jax.nn.softmax(q @ k.swapaxes(2, 3) * module.head_dim**-0.5)
    out = (dropout(scores, module.dropout, key) @ v).swapaxes(1, 2).reshape(rows, length, width)
    return out @ weights["out_proj.weight"].T + weights["out_proj.bias"]
