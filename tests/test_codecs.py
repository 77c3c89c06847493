"""Codecs: is packing exact, are errors bounded, is qsgd unbiased, is a block what its messages are?"""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.core import rng
from fedbraid.core.codec import Codec
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError
from fedbraid.links import _bitpacking as _bits
from fedbraid.links import _elias_fano as positions
from fedbraid.links import codecs
from fedbraid.links._kmeans1d import centroids

ODD = Layout.from_shapes([("a", (3, 5)), ("a.bias", (7,)), ("c", (4, 4, 2)), ("none", (0, 3)), ("scale", ())])


def network(*shapes: tuple[int, ...]) -> Layout:
    """Layers of these weights, each with a bias for each of its outputs."""
    rows = [row for i, s in enumerate(shapes) for row in ((f"{i}.weight", s), (f"{i}.bias", s[:1]))]
    return Layout.from_shapes(rows)


QAFEL = network((32, 3, 3, 3), (32, 32, 3, 3), (32, 32, 3, 3), (32, 32, 3, 3), (2, 288), (32,))
FEDSHIFT = network((32, 3, 5, 5), (64, 32, 5, 5), (512, 4096), (10, 512))
LENET = network((6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84))

EVERY: list[Codec] = [
    codecs.identity(),
    codecs.fp16(),
    codecs.fp16(biases="quantise"),
    codecs.int8(),
    codecs.int4(),
    codecs.int4(biases="quantise"),
    *(codecs.uniform(bits) for bits in range(1, 17)),
    *(codecs.kmeans(bits, biases="quantise") for bits in (1, 2, 3, 4)),
    codecs.kmeans(9),
    *(codecs.qsgd(bits) for bits in range(2, 17)),
    codecs.qsgd(3, biases="quantise"),
    codecs.qsgd(4, norm="l2"),
    codecs.qsgd(4, scope="vector"),
    codecs.qsgd(4, bucket=6),
    codecs.qsgd(5, norm="l2", scope="vector", bucket=7, contractive=True),
    codecs.qsgd(2, contractive=True, bucket=1000),
    codecs.qsgd(levels=8, norm="l2", scope="vector"),
    codecs.qsgd(levels=1, bucket=6),
    codecs.kmeans(3, iterations=2),
    codecs.kmeans(3, tolerance=1e-4),
    codecs.topk(0.02, rounding="down"),
    codecs.topk(0.1),
    codecs.topk(0.02, values="float16"),
    codecs.topk(0.7),
    codecs.topk(1.0),
    *(codecs.shared(bits, 4.0) for bits in (2, 5, 8, 12, 16)),
    codecs.shared(8, 4.0, rotate=True),
    codecs.of_weights(codecs.uniform(3)),
    codecs.mixed(codecs.int8(), share=0.5),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(codec: Codec, v: torch.Tensor, layout: Layout, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(v, layout, seed), layout)


def weight_layers(*vectors: torch.Tensor, layout: Layout = ODD) -> list[tuple[torch.Tensor, ...]]:
    """Each layer of two dimensions or more, of every vector."""
    return [tuple(v[s.offset : s.end] for v in vectors) for s in layout if len(s.shape) > 1 and s.size]


# bits


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 16), st.integers(0, 41), st.integers(1, 3))
def test_packing_is_exact_and_leaves_no_bit_unused(data, bits, count, rows):
    numbers = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    lists = data.draw(st.lists(numbers, min_size=rows, max_size=rows))
    codes = np.array(lists, _bits.code_type(bits)).reshape(rows, count)
    packed = _bits.pack(codes, bits)
    assert packed.shape == (rows, math.ceil(count * bits / 8))
    for row, line in zip(lists, packed):  # as the page says: most significant bit first, zeros at the end
        text = "".join(f"{c:0{bits}b}" for c in row)
        text += "0" * (-len(text) % 8)
        assert line.tobytes() == int(text or "0", 2).to_bytes(len(text) // 8, "big")
    assert np.array_equal(_bits.unpack(packed, bits, count), codes)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.one_of(st.integers(1, 300), st.integers(10**5, 10**7)))
def test_positions_are_exact_and_near_their_entropy(data, d):
    at = np.array(sorted(data.draw(st.sets(st.integers(0, d - 1), min_size=1, max_size=min(d, 60)))))
    packed = positions.pack(at, d)
    assert len(packed) == positions.size(len(at), d)
    assert np.array_equal(positions.unpack(packed, len(at), d), at)
    fewest = math.log2(math.comb(d, len(at)))
    assert 8 * len(packed) <= fewest + len(at) + 32


# sizes


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_size_is_the_length_of_the_message(codec):
    assert len(codec.encode(normal(ODD.size), ODD)) == codec.size(ODD)


def test_sizes_of_the_papers():
    assert (QAFEL.size, FEDSHIFT.size) == (29_282, 2_156_490)
    for make in (codecs.qsgd, codecs.uniform):
        assert [make(bits).size(QAFEL) <= most for bits, most in ((8, 29_924), (4, 15_380), (2, 8_108))] == [
            True
        ] * 3
    assert codecs.identity().size(QAFEL) - 117_128 <= 20
    weights = sum(s.size for s in FEDSHIFT if len(s.shape) > 1)
    side = codecs.kmeans(4).size(FEDSHIFT) - weights // 2 - 4 * (FEDSHIFT.size - weights)
    assert weights // 2 < 1053 * 1024
    assert side <= 6.19 * 1024


def test_one_percent_of_two_million_takes_nine_bits_a_position():
    k = codecs.topk(0.01).count(FEDSHIFT)
    assert 8 * positions.size(k, FEDSHIFT.size) / k < 8.7


@pytest.mark.parametrize(
    ("codec", "share"), [(codecs.fp16(), 0.505), (codecs.int8(), 0.255), (codecs.int4(), 0.13)]
)
def test_rows_take_their_share_of_float32(codec, share):
    assert codec.row_size(LENET) <= share * 4 * LENET.size


# values


@pytest.mark.parametrize("codec", EVERY, ids=repr)
@pytest.mark.parametrize("m", [1, 5])
def test_a_block_is_what_its_messages_decode_to(codec, m):
    block, seeds = normal(m, ODD.size), list(range(7, 7 + m))
    messages = [codec.encode(v, ODD, seed) for v, seed in zip(block, seeds)]
    values, sizes = codec.roundtrip(block, ODD, seeds)
    assert torch.equal(values, torch.stack([codec.decode(data, ODD) for data in messages]))
    assert sizes == [len(data) for data in messages]


@pytest.mark.parametrize(
    "codec", [codecs.qsgd(4, norm="l2"), codecs.uniform(5), codecs.int8(), codecs.topk(0.01)], ids=repr
)
def test_a_large_block_is_what_its_messages_decode_to(codec):
    block = normal(12, QAFEL.size)  # more numbers than are worked on at a time
    values, _ = codec.roundtrip(block, QAFEL, range(12))
    assert all(
        torch.equal(row, there_and_back(codec, v, QAFEL, i)) for i, (row, v) in enumerate(zip(values, block))
    )


def test_a_layer_larger_than_a_piece_is_one_layer():
    v = normal(FEDSHIFT.size) * 0.1
    for codec in (codecs.int8(), codecs.qsgd(8), codecs.qsgd(8, bucket=1000), codecs.uniform(8)):
        assert (there_and_back(codec, v, FEDSHIFT) - v).abs().max() < 0.02


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_the_input_is_left_alone_and_one_seed_gives_one_message(codec):
    v = normal(ODD.size)
    before = v.clone()
    assert codec.encode(v, ODD, 3) == codec.encode(v, ODD, 3)
    codec.roundtrip(v[None], ODD, [0])
    assert torch.equal(v, before)


@pytest.mark.parametrize(
    "codec",
    [c for c in EVERY if not any(word in repr(c) for word in ("topk", "quantise", "shared"))],
    ids=repr,
)
def test_one_dimensional_layers_travel_as_they_are(codec):
    v = normal(ODD.size)
    out = there_and_back(codec, v, ODD)
    assert torch.equal(out[15:22], v[15:22])
    assert out[-1] == v[-1]


def test_identity_is_exact():
    v = normal(ODD.size)
    assert torch.equal(there_and_back(codecs.identity(), v, ODD), v)


finite32 = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
)
vectors = st.lists(finite32, min_size=ODD.size, max_size=ODD.size).map(
    lambda v: torch.tensor(v, dtype=torch.float32)
)


@settings(max_examples=60, deadline=None)
@given(vectors, st.integers(1, 16))
def test_uniform_is_within_half_a_step(v, bits):
    out = there_and_back(codecs.uniform(bits), v, ODD)
    for w, q in weight_layers(v, out):
        span = float(w.max().double() - w.min().double())
        slack = 1e-6 * float(w.abs().max()) + 1e-6 * span + 1e-44
        assert (q - w).abs().max() <= span / (2**bits - 1) / 2 + slack


@settings(max_examples=60, deadline=None)
@given(vectors, st.sampled_from([codecs.int8(), codecs.int4()]))
def test_int_is_within_half_a_scale(v, codec):
    out = there_and_back(codec, v, ODD)
    for w, q in weight_layers(v, out):
        assert (q - w).abs().max() <= float(w.abs().max()) / codec._top / 2 * (1 + 1e-5) + 1e-43


@settings(max_examples=60, deadline=None)
@given(
    vectors,
    st.integers(2, 16),
    st.integers(0, 2**40),
    st.sampled_from([None, 4]),
    st.sampled_from(["layer", "vector"]),
)
def test_qsgd_is_within_a_level_and_keeps_zeros(v, bits, seed, bucket, scope):
    v[::3] = 0
    codec = codecs.qsgd(bits, bucket=bucket, scope=scope)
    out = there_and_back(codec, v, ODD, seed)
    assert (out[v == 0] == 0).all()
    assert ((out - v).abs() <= v.abs().max() / codec.s * (1 + 1e-4) + 1e-43).all()


def test_int8_and_int4_by_hand():
    layout = Layout.from_shapes([("w", (1, 4))])
    v = torch.tensor([-7.0, 0.4, 3.6, 7.0])
    assert there_and_back(codecs.int4(), v, layout).tolist() == [-7, 0, 4, 7]
    assert there_and_back(codecs.int8(), v * 127 / 7, layout).tolist()[0] == -127
    assert there_and_back(codecs.int8(), torch.zeros(4), layout).tolist() == [0] * 4


def test_uniform_of_equal_numbers_is_exact():
    layout = Layout.from_shapes([("w", (2, 2))])
    v = torch.full((4,), 0.1)
    assert torch.equal(there_and_back(codecs.uniform(1), v, layout), v)


# k-means


def least_error(x: np.ndarray, k: int) -> float:
    """The squared error of the best k clusters, by the plain dynamic programme over all borders."""
    x = np.sort(x.astype(np.float64)) - x.mean()
    n, s, q = (np.concatenate([[0], np.cumsum(p)]) for p in (np.ones_like(x), x, x * x))
    size = n - n[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(
            size > 0, q - q[:, None] - (s - s[:, None]) ** 2 / size, np.where(size == 0, 0, np.inf)
        )
    best = cost[0]
    for _ in range(k - 1):
        best = (best[:, None] + cost).min(0)
    return float(best[-1])


SAMPLES = {
    "normal": lambda r, n: r.normal(size=n),
    "heavy": lambda r, n: r.standard_t(2, n),
    "skewed": lambda r, n: r.lognormal(0, 2, n),
    "lumps": lambda r, n: 0.01 * r.normal(size=n) + r.choice([0, 1, 3, 3.5, 9, 20, 21], n),
    "whole": lambda r, n: r.integers(0, 300, n),
    "outlier": lambda r, n: np.append(r.normal(size=n - 1), 1e4),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(("n", "k"), [(300, 2), (600, 4), (600, 16), (400, 64), (400, 256)])
def test_kmeans_is_within_a_hundredth_of_the_optimum(name, n, k):
    x = SAMPLES[name](np.random.default_rng(n + k), n).astype(np.float32)
    c = centroids(x, k).astype(np.float64)
    error = ((x[:, None] - c) ** 2).min(1).sum()
    assert error <= 1.01 * least_error(x, k) + 1e-9 * (x.astype(np.float64) ** 2).sum() / n


@pytest.mark.parametrize("k", [16, 256])
def test_kmeans_of_many_numbers_agrees_with_sorting_them(k, monkeypatch):
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)

    def error(c):
        return float(np.sum((x - c[np.searchsorted((c[1:] + c[:-1]) / 2, x)]).astype(np.float64) ** 2))

    from_histogram = error(centroids(x, k))
    monkeypatch.setattr("fedbraid.links._kmeans1d._MANY", 1 << 62)
    assert from_histogram <= 1.002 * error(centroids(x, k))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_kmeans_with_an_outlier_among_many_numbers(scale):
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32) * np.float32(scale)
    x[7] = 1e6 * scale  # all others fall into one bin of a histogram
    c = centroids(x, 16).astype(np.float64)
    rest = np.delete(x, 7).astype(np.float64)
    assert (np.min((rest[:, None] - c) ** 2, 1)).mean() < 0.02 * scale**2


def test_kmeans_is_exact_where_values_are_few():
    layout = Layout.from_shapes([("w", (40, 40))])
    values = normal(16)
    v = values[torch.arange(1600) % 16]
    assert torch.equal(there_and_back(codecs.kmeans(4), v, layout), v)


def test_a_few_iterations_of_kmeans_are_worse_and_come_from_the_seed():
    layout, v = (
        Layout.from_shapes([("w", (100, 200))]),
        torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0)),
    )

    def error(codec, seed=1):
        return float((codec.roundtrip(v, layout, [seed])[0] - v).square().sum())

    best, four, one = (error(codecs.kmeans(4, iterations=i)) for i in (None, 4, 1))
    assert 1.5 * best < four < one
    assert error(codecs.kmeans(4, iterations=4), seed=2) != four
    theirs = codecs.kmeans(4, iterations=4)
    assert torch.equal(
        theirs.decode(theirs.encode(v[0], layout, 1), layout), theirs.roundtrip(v, layout, [1])[0][0]
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kmeans_to_a_tolerance_keeps_every_layers_mean(bits):
    layout = Layout.from_shapes([("w", (60, 100)), ("v", (50, 20))])
    v = 0.01 + 0.05 * torch.randn(3, layout.size, generator=torch.Generator().manual_seed(0))
    codec = codecs.kmeans(bits, tolerance=1e-4)
    out = codec.roundtrip(v, layout, [1, 2, 3])[0]
    for a, b in ((0, 6000), (6000, 7000)):
        assert torch.allclose(out[:, a:b].mean(1), v[:, a:b].mean(1), atol=2e-7)
        assert all(len(row.unique()) <= 2**bits for row in out[:, a:b])
    assert torch.equal(codec.decode(codec.encode(v[1], layout, 2), layout), out[1])
    lloyd = np.array(_authors_kmeans(v[0, :6000].numpy(), bits, 1, 6000))
    assert np.allclose(out[0, :6000].numpy(), lloyd, atol=1e-6)


def _authors_kmeans(w, bits, seed, n):
    """Lloyd's from weights drawn with repetition; labels of the last assignment, and their means."""
    table = rng.generator(seed, "kmeans", n).choice(w, 2**bits).astype(np.float64)
    for _ in range(100):
        label = np.abs(w[:, None].astype(np.float64) - table).argmin(1)
        means = np.array(
            [w[label == k].mean(dtype=np.float64) if (label == k).any() else 0 for k in range(2**bits)]
        )
        moved, table = ((means - table) ** 2).sum(), means
        if moved <= 1e-4:
            break
    return means[label]


def test_qsgd_by_levels_has_so_many_and_says_so_on_the_wire():
    layout, v = Layout.from_shapes([("w", (10, 20))]), torch.linspace(-1, 1, 200)
    codec = codecs.qsgd(levels=8, norm="l2", scope="vector")
    message = codec.encode(v, layout, 3)
    assert len(message) == codec.size(layout) == codecs.qsgd(5, norm="l2", scope="vector").size(layout) + 4
    out = codec.decode(message, layout)
    steps = out / v.norm() * 8
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    with pytest.raises(WireError):
        codecs.qsgd(levels=9, norm="l2", scope="vector").decode(message, layout)
    for wrong in ({}, {"bits": 3, "levels": 8}, {"levels": 0}):
        with pytest.raises(ConfigError, match="levels"):
            codecs.qsgd(**wrong)


def test_kmeans_sends_the_nearest_centroid():
    v = normal(LENET.size)
    out = there_and_back(codecs.kmeans(6), v, LENET)
    for w, q in weight_layers(v, out, layout=LENET):
        table = q.unique()
        assert len(table) == 64 or len(w) < 200
        assert torch.equal((w[:, None] - table).abs().min(1).values, (w - q).abs())


# the theory: unbiased, contractive


@pytest.mark.parametrize(
    "codec",
    [
        codecs.qsgd(2),
        codecs.qsgd(4),
        codecs.qsgd(3, norm="l2", scope="vector"),
        codecs.qsgd(8, bucket=5),
        codecs.shared(2, 8.0),
        codecs.shared(6, 8.0),
        codecs.shared(6, 8.0, rotate=True),
    ],
    ids=repr,
)
def test_stochastic_codecs_are_unbiased(codec):
    assert codec.unbiased
    v = normal(ODD.size)
    draws, _ = codec.roundtrip(v.expand(4000, -1), ODD, range(4000))
    error = (draws.double().mean(0) - v).abs()
    assert (error <= 5 * draws.double().std(0) / math.sqrt(4000) + 1e-6).all()


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 3, 5])
@pytest.mark.parametrize("bucket", [None, 40])
def test_contractive_qsgd_contracts(norm, bits, bucket):
    layout = Layout.from_shapes([("w", (10, 30))])
    codec = codecs.qsgd(bits, norm=norm, bucket=bucket, contractive=True)
    delta = 1 / (1 + codec.omega(300))
    for v in (
        normal(300),
        normal(300) ** 5,
        torch.eye(300)[3],
        torch.ones(300),
        torch.ones(300) + torch.eye(300)[0],
    ):
        draws, _ = codec.roundtrip(v.expand(300, -1), layout, range(300))
        lost = ((draws - v).double() ** 2).sum(1).mean() / (v.double() ** 2).sum()
        assert lost <= (1 - delta) * 1.02
    assert not codec.unbiased


def test_contractive_divides_by_one_plus_omega():
    layout = Layout.from_shapes([("w", (10, 30))])
    v = normal(300)
    for norm, omega in (
        ("l2", min(300 / 49, math.sqrt(300) / 7)),
        ("max", min(300 / 196, math.sqrt(300) / 7)),
    ):
        plain = there_and_back(codecs.qsgd(4, norm=norm), v, layout)
        shrunk = there_and_back(codecs.qsgd(4, norm=norm, contractive=True), v, layout)
        assert torch.allclose(shrunk * (1 + omega), plain, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(vectors, st.floats(0.001, 1))
def test_topk_contracts_and_keeps_the_largest(v, fraction):
    codec = codecs.topk(fraction)
    out, k = there_and_back(codec, v, ODD), codec.count(ODD)
    lost = ((out - v).double() ** 2).sum()
    assert lost <= (1 - k / ODD.size) * (v.double() ** 2).sum() * (1 + 1e-9)
    assert torch.equal(out[out != 0], v[out != 0])
    assert sorted(out.abs().tolist())[-k:] == sorted(v.abs().tolist())[-k:]


def test_topk_of_equals_keeps_the_first_and_counts_like_a_person():
    layout = Layout.from_shapes([("w", (100,))])
    assert there_and_back(codecs.topk(0.07), torch.ones(100), layout).nonzero().flatten().tolist() == list(
        range(7)
    )
    assert codecs.topk(0.29).count(layout) == 29
    assert codecs.topk(0.291).count(layout) == 30
    down = [codecs.topk(f, rounding="down").count(layout) for f in (0.29, 0.291, 0.001, 1.0)]
    assert down == [29, 29, 1, 100]
    with pytest.raises(ConfigError, match="rounding"):
        codecs.topk(0.1, rounding="even")


# memory rows


@pytest.mark.parametrize("codec", [codecs.identity(), codecs.fp16(), codecs.int8(), codecs.int4()], ids=repr)
def test_rows_hold_what_a_message_with_quantised_biases_holds(codec):
    block = normal(4, ODD.size)
    rows = codec.to_rows(block, ODD)
    assert rows.dtype == torch.uint8
    assert rows.shape == (4, codec.row_size(ODD))
    full = codec if codec.lossless else type(codec)(biases="quantise")
    assert torch.equal(codec.from_rows(rows, ODD), full.roundtrip(block, ODD, [0] * 4)[0])
    assert torch.equal(codec.from_rows(rows[2:3], ODD)[0], codec.from_rows(rows, ODD)[2])


def test_what_cannot_be_kept_in_rows_says_so():
    for codec in (codecs.qsgd(4), codecs.topk(0.5), codecs.mixed(codecs.int4(), share=0.5)):
        with pytest.raises(ConfigError, match="use identity"):
            codec.row_size(ODD)


# wrappers


def quantises(codec, client):
    return bool(codec.quantized(np.array([client])))


def test_mixed_by_share_is_even_and_exact():
    for share, n in ((0.5, 100), (0.29, 100), (0.1, 1000), (0.7, 10), (1 / 3, 30), (0, 10), (1, 10)):
        chosen = [quantises(codecs.mixed(codecs.int4(), share=share), i) for i in range(n)]
        assert sum(chosen) == round(share * n)
    assert [quantises(codecs.mixed(codecs.int4(), share=0.5), i) for i in range(4)] == [
        False,
        True,
        False,
        True,
    ]


def test_mixed_by_name_and_either_frame_decodes():
    codec, v = codecs.mixed(codecs.int4(), clients=[3, 1]), normal(ODD.size)
    assert [quantises(codec, i) for i in range(4)] == [False, True, False, True]
    assert codec.for_client(1) == codecs.int4()
    assert codec.for_client(0) == codecs.identity()
    for client in (0, 1):
        mine = codec.for_client(client)
        assert torch.equal(codec.decode(mine.encode(v, ODD), ODD), there_and_back(mine, v, ODD))


def test_weights_and_mixed_nest_either_way():
    for codec in (
        codecs.of_weights(codecs.mixed(codecs.int4(), share=0.5)),
        codecs.mixed(codecs.of_weights(codecs.int4()), share=0.5),
    ):
        assert codec.encodes_weights
        assert [codec.for_client(i).encodes_weights for i in range(2)] == [True, True]
        assert [codec.for_client(i).lossless for i in range(2)] == [True, False]
        assert [quantises(codec, i) for i in range(2)] == [False, True]


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_codecs_print_compare_hash_and_pickle(codec):
    assert eval(repr(codec), vars(codecs)) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(pickle.loads(pickle.dumps(codec))) == hash(codec)


# refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: codecs.qsgd(1), r"qsgd\(bits=1\) has no level besides zero; use bits >= 2"),
        (lambda: codecs.qsgd(17), "use 2 to 16"),
        (lambda: codecs.uniform(0), "use 1 to 16"),
        (lambda: codecs.uniform(4.0), "an integer"),
        (lambda: codecs.kmeans(True), "an integer"),
        (lambda: codecs.int8(biases="none"), "must be 'float32' or 'quantise'"),
        (lambda: codecs.qsgd(4, norm="l1"), "must be 'max' or 'l2'"),
        (lambda: codecs.qsgd(4, scope="row"), "must be 'layer' or 'vector'"),
        (lambda: codecs.qsgd(4, bucket=0), "an integer >= 1"),
        (lambda: codecs.topk(0), r"fraction must be in \(0, 1\]"),
        (lambda: codecs.topk(float("nan")), r"fraction must be in \(0, 1\]"),
        (lambda: codecs.topk("0.1"), "not a number"),
        (lambda: codecs.topk(0.1, values="int8"), "must be 'float32' or 'float16'"),
        (lambda: codecs.mixed(codecs.int4()), "exactly one"),
        (lambda: codecs.mixed(codecs.int4(), share=0.5, clients=[1]), "exactly one"),
        (lambda: codecs.mixed(codecs.int4(), share=1.5), r"share must be in \[0, 1\]"),
        (lambda: codecs.mixed(codecs.int4(), share="half"), "got 'half', which is not a number"),
        (lambda: codecs.mixed(codecs.mixed(codecs.int4(), share=1), share=0.5), "mixes twice"),
        (lambda: codecs.of_weights(4), "wraps a codec"),
    ],
)
def test_settings_that_cannot_run_say_what_to_use(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("codec", EVERY, ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 16, ODD.size - 1])
def test_numbers_that_are_not_finite_are_not_sent(codec, bad, at):
    v = normal(ODD.size)
    v[at] = bad
    with pytest.raises(WireError, match="holds"):
        codec.encode(v, ODD)
    with pytest.raises(WireError, match="holds"):
        codec.roundtrip(v[None], ODD, [0])


def test_numbers_a_codec_cannot_hold_are_not_sent():
    for codec, v in (
        (codecs.fp16(), torch.full((ODD.size,), 7e4)),
        (codecs.topk(0.5, values="float16"), torch.full((ODD.size,), 7e4)),
        (codecs.uniform(4), torch.linspace(-3e38, 3e38, ODD.size)),
        (codecs.qsgd(4, norm="l2"), torch.full((ODD.size,), 3e38)),
    ):
        with pytest.raises(WireError):
            codec.encode(v, ODD)


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="does not fit"):
        codecs.int8().encode(torch.zeros(3), ODD)


# one grid for all


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bits", [2, 7, 12, 16])
def test_codes_of_a_shared_grid_add_up(bits, rotate):
    """The sum of clients' codes is, decoded, the sum of what each sent; and the codes can be read off what was decoded."""
    codec = codecs.shared(bits, 3.0, rotate=rotate)
    v = normal(9, LENET.size)
    got, _ = codec.roundtrip(v, LENET, range(9))
    codes = codec.to_grid(v.numpy(), range(9))
    assert np.array_equal(codec.recover(got.numpy()), codes)
    total = codec.from_grid(codes.sum(0, keepdims=True))[0]
    assert np.abs(total - got.double().sum(0).numpy()).max() < 1e-5
    weights = np.arange(1, 10)
    weighted = codec.from_grid((weights[:, None] * codes).sum(0, keepdims=True) / 45)[0]
    mean = (torch.arange(1.0, 10)[:, None].double() * got).sum(0) / 45
    assert np.abs(weighted - mean.numpy()).max() < 1e-6


@settings(max_examples=100, deadline=None)
@given(vectors, st.integers(2, 16), st.integers(0, 2**40), st.sampled_from([0.1, 1.0, 300.0]))
def test_a_shared_grid_is_within_a_step_or_at_its_end(v, bits, seed, reach):
    codec = codecs.shared(bits, reach)
    out = there_and_back(codec, v, ODD, seed)
    inside = v.clamp(-codec.range, codec.range)
    assert ((out - inside).abs() <= codec.step * (1 + 1e-4)).all()
    assert (out.abs() <= codec.range * (1 + 1e-6)).all()
    codes = codec.to_grid(v[None].numpy(), [seed])
    assert codec.saturated(codes) >= int((v.abs() > codec.range).sum())


def test_rotation_keeps_lengths_and_spreads_what_stands_out():
    v = torch.zeros(LENET.size)
    v[7] = 50.0
    plain, turned = codecs.shared(12, 2.0), codecs.shared(12, 2.0, rotate=True)
    assert (there_and_back(plain, v, LENET) - v).norm() > 40  # saturated
    assert (there_and_back(turned, v, LENET) - v).norm() < 1
    assert turned.saturated(turned.to_grid(v[None].numpy(), [0])) == 0


@pytest.mark.parametrize(
    "wrong", [{"bits": 1}, {"bits": 17}, {"range": 0.0}, {"range": -1.0}, {"range": 1e300}]
)
def test_shared_refuses_grids_without_levels(wrong):
    with pytest.raises(ConfigError):
        codecs.shared(**wrong)
