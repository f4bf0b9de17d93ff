"""The black box of a monitor, and `regard replay`."""

import math
import warnings
import zlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.cli import main
from regard.health import AttentionWarning
from regard.health.capture.call import Call
from regard.health.watching.black_box import MAGIC, SAMPLES, as_row, measure_worst_row, read_black_box

aten = torch.ops.aten


class Model(nn.Module):
    """A causal attention layer of two heads over tokens; head 1 has a logit for token 7 that grows with `gain`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.qkv, self.gain = nn.Embedding(20, 16), nn.Linear(16, 48, bias=False), 1.0

    def forward(self, ids):
        q, k, v = self.qkv(self.token(ids)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        k = torch.where((ids == 7)[:, None, :, None] & torch.tensor([False, True])[:, None, None], k * self.gain, k)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class WithoutWaits(TorchDispatchMode):
    """Fails at what makes the host wait on a GPU: a number read from a tensor, an index of bools, a copied number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (aten._local_scalar_dense, aten.nonzero, aten.lift_fresh), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor([0.5, 2.0])], ids=str)
def test_the_worst_row_is_found_without_a_wait(scale):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, 7, 4) for heads in (2, 1, 1))
    call = Call(nn.Identity(), q, k, v, lambda rows: v, "sdpa", causal=True, options=dict(scale=scale))
    with WithoutWaits():
        found = measure_worst_row(call)
    s = q[0] @ k[0].mT * (0.5 if scale is None else torch.as_tensor(scale).reshape(-1, 1, 1))
    s = s.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    head, query = divmod(int(s.amax(-1).argmax()), 7)
    row, logits = as_row(found, torch.float32), s[head, query].sort(descending=True)
    assert (row["head"], row["query"], row["visible"], row["width"]) == (head, query, query + 1, 4)
    assert row["scale"] == pytest.approx(0.5 if scale is None else torch.as_tensor(scale).expand(2)[head].item())
    assert row["keys"] == logits.indices[: query + 1].tolist()
    assert row["logits"] == pytest.approx(logits.values[: query + 1].tolist())
    assert row["q_norm"] == pytest.approx(q[0, head, query].norm().item())
    assert row["k_norms"] == pytest.approx(k[0, 0, row["keys"]].norm(dim=-1).tolist())


class Letters:
    def decode(self, ids):
        return "abcdefghijklmnopqrst"[ids[0]]


@pytest.mark.parametrize("text", [False, True])
def test_a_replay_names_the_tokens_the_time_and_the_remedies(tmp_path, capsys, text):
    model, path = Model(), tmp_path / "run.regard"
    ids = torch.arange(12)[None] + 1  # token 7 stands at position 6
    options = dict(text=True, tokenizer=Letters()) if text else {}
    with regard.Monitor(model, every=1, budget=1.0, black_box=path, **options) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(SAMPLES + 10):
            model.gain = 2000.0 if step >= SAMPLES else 1.0
            model(ids)
            monitor.step(loss=1.0)
    content = read_black_box(path)  # written when the incident opened
    assert content["incidents"][0]["cause"] == "scores too large" and len(content["samples"]) <= SAMPLES
    row = content["samples"][-1]["rows"][0]
    assert row["head"] == 1 and row["keys"][0] == 6 and row["key_tokens"][0] == 7 and row["query"] >= 6
    assert ("key_texts" in row) is text
    q, k = (model.qkv(model.token(ids)).unflatten(-1, (3, 2, 8))[0, :, at, 1] for at in (0, 1))
    assert row["logits"][0] == pytest.approx((q[row["query"]] @ k[6] * 2000 / math.sqrt(8)).item(), rel=1e-4)
    assert main(["replay", str(path)]) == 0
    printed = capsys.readouterr().out
    assert ("key 6 'h'" if text else "key 6 (token 7)") in printed and f"half as large at step {SAMPLES}" in printed
    for remedy in ("QK-norm", "clip at 100", "temperature 2"):
        assert remedy in printed


def test_a_file_that_is_no_black_box_is_refused(tmp_path, capsys):
    path = tmp_path / "run.regard"
    for content in (b"", b"{}", MAGIC, MAGIC + b"junk", MAGIC + zlib.compress(b'{"samples": 3}')):
        path.write_bytes(content)
        assert main(["replay", str(path)]) == 2
        assert "black box" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.regard")]) == 2


def test_a_black_box_is_written_on_request(tmp_path):
    model = Model()
    with regard.Monitor(model, every=1, budget=1.0) as monitor:
        model(torch.arange(12)[None])
        monitor.record(tmp_path / "now.regard")
    (sample,) = read_black_box(tmp_path / "now.regard")["samples"]
    assert sample["step"] == 1 and sample["rows"][0]["layer"] == ""
    with pytest.raises(ValueError, match="text=True needs tokenizer="):
        regard.Monitor(model, text=True)
