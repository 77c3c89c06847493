"""Are adapters of low rank averaged as the sentence about them says?"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.algorithms.lora import how
from fedbraid.errors import ConfigError, DataError

WORK = fb.Work(lr=0.3, steps=3, batch=4)
LOOP = "in_process(backend='loop')"
IN, MID, OUT, RANK, SCALE = 5, 6, 3, 2, 1.5


class Adapted(nn.Module):
    """A Linear with an adapter over it, of the names and attributes that peft gives them."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base.out_features, bias=False)})
        self.scaling, self.use_dora = {"default": SCALE}, {"default": False}

    def forward(self, x):
        return self.base_layer(x) + SCALE * self.lora_B["default"](self.lora_A["default"](x))


def network():
    torch.manual_seed(3)
    return nn.Sequential(Adapted(nn.Linear(IN, MID)), nn.Tanh(), Adapted(nn.Linear(MID, OUT)))


def task_of(model, clients=4, **options):
    draw = np.random.default_rng(0)
    some = lambda n: (draw.normal(size=(n, IN)).astype(np.float32), draw.integers(0, OUT, n))  # noqa: E731
    return fb.Task.from_arrays(model, [some(6 + 4 * i) for i in range(clients)], some(20), **options)


def effective(module):
    """W + sBA of each adapted layer."""
    layers = [m for m in module.modules() if hasattr(m, "lora_A")]
    return [
        (m.base_layer.weight + m.scaling["default"] * m.lora_B["default"].weight @ m.lora_A["default"].weight)
        .detach()
        .numpy()
        .astype(np.float64)
        for m in layers
    ]


def alone(task, client, start):
    """A client's own effective weights after its visit, from a run in which it is the only one."""
    one = copy.copy(task)
    one.__dict__["start"] = start
    run = fb.simulate(
        one, fb.fedavg(), WORK, fb.rounds(1, clients=[[client]]), engine=LOOP, evaluate_every=None
    )
    return effective(run.model())


def test_the_effective_weight_is_the_mean_of_the_clients_own():
    task = task_of(fb.lora.move_base(network()))
    start = task.initial(0)
    for cohort in ([0, 1, 2, 3], [1, 3]):  # the second round begins where the first ended, W having moved
        run = fb.simulate(
            dict_with(task, start),
            fb.exact_lora(fb.fedavg()),
            WORK,
            fb.rounds(1, clients=[cohort]),
            engine=LOOP,
        )
        n = np.array([task.sizes[c] for c in cohort], np.float64)
        own = [alone(task, c, start) for c in cohort]
        before = start
        start = run.x
        for layer, now in enumerate(effective(run.model())):
            mean = sum(p * w[layer] for p, w in zip(n / n.sum(), own, strict=True))
            np.testing.assert_allclose(now, mean, rtol=0, atol=2e-6)
        plain = fb.simulate(
            dict_with(task, before), fb.fedavg(), WORK, fb.rounds(1, clients=[cohort]), engine=LOOP
        )
        gap = max(
            np.abs(a - b).max() for a, b in zip(effective(plain.model()), effective(run.model()), strict=True)
        )
        assert gap > 1e-4  # averaging A and B apart is something else


def dict_with(task, start):
    moved = copy.copy(task)
    moved.__dict__["start"] = start
    return moved


def test_late_uploads_count_from_the_model_that_they_began_with():
    """The transcription: W + sBA moves by Σ p_i s(τ_i) of what each client moved its own by."""
    task = task_of(fb.lora.move_base(network()))
    layout, gather = task.layout, fb.exact_lora(fb.fedavg(weights="uniform")).gather
    torch.manual_seed(0)
    x, older = task.initial(0), task.initial(0) + 0.1 * torch.randn(layout.size)
    fixed = torch.zeros(layout.size)
    for s in layout:
        if s.buffer:
            older[s.offset : s.end] = x[s.offset : s.end]
        else:
            fixed[s.offset : s.end] = 1
    sent, delta = torch.stack([x, older]), 0.2 * torch.randn(2, layout.size) * fixed
    one = torch.ones(2, 1)
    declared = fb.fedavg().gathered
    up = fb.Uploads(
        np.arange(2), {"delta": delta}, one, one, one, 0 * one, one.double(), {"x": sent}, declared
    )
    state = gather.init(x, layout)
    acc = gather.add(gather.zero(x), up, state, x)
    ctx = fb.ServerContext(0, 2, 4, 4.0, 0.1, 1.0, 1.0, 0.0, layout, task.sizes)
    moved = x - gather.close(acc, state, ctx)[0]["delta"]
    of = lambda v: effective(layout.load(task.module(), v))  # noqa: E731
    for k, (now, was) in enumerate(zip(of(moved), of(x), strict=True)):
        wanted = sum(of(b - d)[k] - of(b)[k] for b, d in zip(sent, delta, strict=True)) / 2
        np.testing.assert_allclose(now - was, wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("engine", [LOOP, "in_process(backend='loop', block=4)", "pool(workers=2)"])
def test_bytes_bits_and_resuming(engine, tmp_path):
    task = task_of(fb.lora.move_base(network()))
    algorithm = fb.exact_lora(fb.fedprox(mu=0.1))
    run = fb.simulate(task, algorithm, WORK, fb.rounds(4, clients=2), engine=engine)
    factors = sum(s.size for s in task.layout if not s.buffer)
    below = IN * MID + MID * OUT + 2
    assert task.layout.size == factors + below
    record = run.history[0]
    assert 2 * 4 * factors < record["bytes_up"] <= 2 * (4 * factors + 60)
    assert 2 * 4 * (factors + below) < record["bytes_down"] <= 2 * (4 * (factors + below) + 60)
    assert torch.equal(run.x, fb.simulate(task, algorithm, WORK, fb.rounds(4, clients=2), engine=LOOP).x)

    class Stop(Exception):
        pass

    class Break:
        def step(self, record, run):
            if record["step"] == 2:
                raise Stop

    with pytest.raises(Stop):
        fb.simulate(
            task,
            algorithm,
            WORK,
            fb.rounds(4, clients=2),
            engine=engine,
            out=tmp_path / "r",
            callbacks=[Break()],
        )
    again = fb.resume(tmp_path / "r")
    assert torch.equal(again.x, run.x)
    assert "FedEx" in again.lora


def test_a_codec_sees_what_is_trained_alone():
    task = task_of(fb.lora.move_base(network()))
    quantized = fb.exact_lora(fb.fedpaq(fb.codecs.int8()))
    run = fb.simulate(task, quantized, WORK, fb.rounds(3), engine=LOOP)
    factors = sum(s.size for s in task.layout if not s.buffer)
    assert run.history[0]["bytes_up"] < 4 * (factors + 120)
    scale = next(s for s in task.layout if s.name.endswith("lora_scale"))
    assert float(run.x[scale.offset]) == SCALE


def test_what_runs_is_named(tmp_path):
    plain, frozen, moved = network(), fb.lora.freeze_a(network()), fb.lora.move_base(network())
    said = [how(task_of(m).layout, fb.fedavg()) for m in (plain, frozen, nn.Linear(IN, OUT))]
    assert ["apart" in said[0], "FFA-LoRA" in said[1], said[2]] == [True, True, None]
    run = fb.simulate(
        task_of(moved), fb.exact_lora(fb.fedavg()), WORK, fb.rounds(1), engine=LOOP, out=tmp_path / "r"
    )
    assert "FedEx-LoRA" in str(run)
    assert "FedEx-LoRA" in (tmp_path / "r/run.json").read_text()
    assert "FedEx-LoRA" in run._repr_html_()


def test_refusals():
    exact = fb.exact_lora(fb.fedavg())
    for model in (network(), fb.lora.freeze_a(fb.lora.move_base(network())), nn.Linear(IN, OUT)):
        with pytest.raises(ConfigError, match="prepare it with fb"):
            fb.simulate(task_of(model), exact, WORK, fb.rounds(1))
    for other in (fb.fedadam(), fb.fedavg(lr=0.5), fb.scaffold()):
        with pytest.raises(ConfigError, match=r"exact_lora over fedavg\(\)"):
            fb.exact_lora(other)
    with pytest.raises(ConfigError, match="needs one that averages"):
        fb.exact_lora(fb.fedvarp())
    with pytest.raises(ConfigError, match="reads single clients' updates"):
        fb.private(exact, noise=1.0)
    with pytest.raises(ConfigError, match="use its inner codec"):
        fb.exact_lora(fb.fedpaq(fb.codecs.of_weights(fb.codecs.int8())))
    with pytest.raises(DataError, match="no LoRA adapter"):
        fb.lora.move_base(nn.Linear(2, 2))
    odd = network()
    odd[0].base_layer = nn.Conv1d(2, 2, 1)
    with pytest.raises(DataError, match="over a Linear"):
        fb.lora.move_base(odd)


def test_peft_itself():
    peft = pytest.importorskip("peft", reason="the extra hf is not installed")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(IN, MID), nn.Tanh(), nn.Linear(MID, OUT))
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0"], modules_to_save=["2"])
    )
    keys = set(model.state_dict())
    fb.lora.move_base(model)
    assert set(model.state_dict()) - keys == {next(k for k in model.state_dict() if k.endswith("lora_scale"))}
    run = fb.simulate(task_of(model), fb.exact_lora(fb.fedavg()), WORK, fb.rounds(2), engine=LOOP)
    assert not torch.equal(run.model().state_dict()[_weight(keys)], model.state_dict()[_weight(keys)])


def _weight(keys):
    return next(k for k in keys if k.endswith("base_layer.weight"))
