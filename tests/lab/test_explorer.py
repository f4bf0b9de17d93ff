"""The explorer's numbers are the library's, and its server answers to its own page only."""

import asyncio
import math
import signal
import subprocess
import sys

import pytest
import torch

import regard
from regard.lab.explorer.command import LoopbackOnly
from regard.lab.explorer.views import (
    FLOOR,
    MASKS,
    NUMBERS,
    SCALES,
    Online,
    Setting,
    against_d_k,
    normalizer_choices,
    number_list,
)


@pytest.mark.parametrize("normalizer", regard.normalizers.names())
def test_numbers_are_the_reference_s(normalizer):
    setting = Setting(d_k=16, keys=9, scale="none", temperature=2.0, normalizer=normalizer)
    q, k = setting.draw(16)
    *_, stats = regard.reference.attention(
        q, k, k, scale="none", temperature=2.0, normalizer=normalizer, return_stats=tuple(NUMBERS)
    )
    for name, value in setting.numbers().items():
        assert value == pytest.approx(float(stats[name].mean()), rel=1e-4, abs=1e-5), name
    weights = regard.reference.normalize(q[0, 0] @ k[0, 0].T, normalizer, temperature=2.0)
    torch.testing.assert_close(setting.weights.double(), weights, rtol=1e-4, atol=1e-5)


def test_no_two_normalisers_on_offer_are_the_same_map():
    numbers = {
        name: tuple(Setting(d_k=16, keys=9, normalizer=name).numbers().values()) for name in normalizer_choices()
    }
    unordered = [name for name in regard.normalizers.names() if not regard.normalizers.get(name).ordered]
    assert len(numbers) == len(set(numbers.values())) == len(unordered)


@pytest.mark.parametrize("scale", SCALES.values())
def test_every_figure_can_be_drawn_and_told(scale):
    setting = Setting(d_k=8, keys=5, scale=scale, normalizer="sparsemax")
    figures = [
        setting.scores_figure(),
        setting.weights_figure(),
        setting.jacobian_figure(),
        setting.gain_figure(),
        setting.gradient_figure(),
        setting.mechanics_figure(),
        *(setting.masked_figure(mask) for mask in MASKS),
        Online(setting, 2, 2).figure(),
    ]
    for figure in figures:
        assert len(figure.alt) > 20
        assert figure.spec()["layer"]
    assert "<title>" in figures[0].svg()


def test_gradients_against_d_k_are_the_reference_s():
    setting = Setting(keys=6, scale="none")
    figure = setting.gradient_figure()
    dims, _, middle, _ = figure.series["rows"]
    upstream = torch.randn(256, 6, generator=torch.Generator().manual_seed(3)).double()
    for d, shown in zip(dims, middle, strict=True):
        z = setting.scores_at(d).double().requires_grad_()
        (slope,) = torch.autograd.grad(torch.softmax(z, -1), z, upstream)
        assert shown == pytest.approx(float(slope.norm(dim=-1).quantile(0.5)), rel=1e-3)
    assert middle[-1] < middle[0] / 10


def test_what_is_zero_is_told_as_zero_and_drawn_at_a_labelled_floor():
    samples = [torch.full((20,), value) for value in (1.0, 1e-3, 1e-15, 0.0)]
    figure = against_d_k("gain", samples)
    assert "1 at 4, 0.001 at 16, 1e-15 at 64, 0 at 256" in figure.alt
    assert figure.series["rows"][2] == pytest.approx([1.0, 1e-3, FLOOR, FLOOR])
    assert list(figure.guides.values()) == [FLOOR]
    assert not against_d_k("gain", [torch.ones(20)] * 4).guides


def test_masks_hide():
    rows = torch.tensor(Setting(d_k=8).masked_figure("causal").rows)
    assert (rows.triu(1) == 0).all() and (rows.tril() > 0).any()
    assert (torch.tensor(Setting(d_k=8).masked_figure("padding").rows)[:, 8:] == 0).all()


def test_online_softmax_ends_at_the_whole_row():
    setting = Setting(d_k=32, keys=11, temperature=0.5)
    first, last = Online(setting, 4, 1), Online(setting, 4, 3)
    assert first.steps == 3
    assert first.numbers()["online_logsumexp"] < first.numbers()["whole_logsumexp"]
    assert last.numbers()["online_logsumexp"] == pytest.approx(last.numbers()["whole_logsumexp"], abs=1e-5)
    torch.testing.assert_close(*(torch.tensor(y) for _, y in last.figure().series.values()))


def test_free_energy_is_energy_minus_temperature_times_entropy():
    numbers = Setting(d_k=16, keys=7, temperature=2.0).mechanics()
    assert numbers["free_energy"] == pytest.approx(numbers["energy"] - 2.0 * numbers["boltzmann_entropy"])
    assert 0 < numbers["boltzmann_entropy"] < math.log(7)


def test_listed_numbers_carry_their_names():
    assert '<dd data-number="entropy">1.2346</dd>' in number_list({"entropy": 1.23456})


def asked(kind, **headers):
    """What the guard sends back, or "passed" if it lets the request through."""
    sent = []

    async def app(scope, receive, send):
        sent.append("passed")

    async def send(message):
        sent.append(message.get("status", message.get("code")))

    async def receive():
        return {"type": "websocket.connect"}

    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    asyncio.run(LoopbackOnly(app, 4000)(scope, receive, send))
    return sent[0]


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"host": "127.0.0.1:4000"}, True),
        ({"host": "localhost:4000", "origin": "http://localhost:4000"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "127.0.0.1:4001"}, False),
        ({"host": "127.0.0.1:4000", "origin": "http://evil.example"}, False),
        ({"host": "127.0.0.1:4000", "origin": "null"}, False),
        ({}, False),
    ],
)
def test_only_the_page_itself_is_answered(headers, passes):
    assert asked("http", **headers) == ("passed" if passes else 403)
    assert asked("websocket", **headers) == ("passed" if passes else 1008)


def test_one_ctrl_c_ends_it_though_a_page_is_connected():
    client = pytest.importorskip("websockets.sync.client")
    command = [sys.executable, "-m", "regard", "explore", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stderr.readline().split()[-1]
            socket = address.replace("http", "ws", 1).replace("/?", "/ws?session_id=s_000001&")
            with client.connect(socket) as page:
                page.recv(timeout=60)  # the cells have begun to run
                server.send_signal(signal.SIGINT)
                _, told = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode == 130
    assert told.endswith("interrupted\n") and "Traceback" not in told
