"""Checks that every rank runs: models, whole, head-sharded or on shards, and corpora."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist

import regard


def examined(rank: int, world: int) -> None:
    """A corpus shared by the ranks gives the report of one process, to the bit."""
    from parallel_subject import subject

    alone, shared = (
        regard.examine(*subject(), what_if=["temperature=2"], checks=False, group=group) for group in (None, True)
    )
    one, many = alone.to_json(), shared.to_json()
    for told in (one, many):
        told.pop("how")
    assert one == many and len(shared.heads) == 8


def examined_in_part(rank: int, world: int) -> None:
    """A batch of the last round, which is not full, fails on one rank; or a rank after the last one that is."""
    from parallel_subject import subject

    model, batches = subject()
    whole = regard.examine(model, batches[:world]).to_json()["heads"]
    odd = torch.randn(2, 9, 31)  # of another width
    told = regard.examine(model, [*batches[:world], odd], group=True)
    assert f"rank 0, batch {world}: " in told.interrupted and told.to_json()["heads"] == whole

    for who in (0, world - 1):

        def full(done, who=who):
            if rank == who and done == world:
                raise OSError("no space left")

        told = regard.examine(model, batches[:world], group=True, progress=full)
        assert f"rank {who}, batch {world}: OSError: no space left" in told.interrupted
        assert told.how["batches"] == world and told.to_json()["heads"] == whole


def head_sharded(rank: int, world: int) -> None:
    """DTensors sharded over heads pass through regard.attention unchanged; so does a tensor-parallel model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4 * world, 7, 8, generator=g) for _ in range(3))
    sink, heat = torch.randn(4 * world, generator=g), torch.rand(1, 4 * world, 7, 1, generator=g) + 0.5
    q.requires_grad_()
    placed = [distribute_tensor(x.detach(), mesh, [Shard(1)]) for x in (q, k, v)]
    placed[0].requires_grad_()
    told = dict(is_causal=True, sink=sink, temperature=heat, return_stats=True, backend="reference")
    told["gate"] = torch.randn(2, 4 * world, 7, generator=g)  # whole on every rank, cut to its heads
    out, stats = regard.attention(*placed, **told)
    truth, known = regard.attention(q, k, v, **told)
    assert tuple(out.placements) == (Shard(1),) and out.to_local().shape[1] == 4
    assert torch.allclose(out.full_tensor(), truth, atol=1e-6)
    assert torch.allclose(stats.entropy.full_tensor(), known.entropy, atol=1e-6)
    (ours,) = torch.autograd.grad(out.full_tensor().square().sum(), placed[0])
    (want,) = torch.autograd.grad(truth.square().sum(), q)
    assert torch.allclose(ours.full_tensor(), want, atol=1e-5)
    with pytest.raises(ValueError, match="a sequence that is sharded goes to"):
        regard.attention(*(distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in (q, k, v)))
    for heads in ((4 * world, world + 1), (2 * world + 1,) * 2):
        uneven = [distribute_tensor(q[:, :h].detach(), mesh, [Shard(1)]) for h in (heads[0], heads[1], heads[1])]
        with pytest.raises(ValueError, match="does not divide over"):
            regard.attention(*uneven, enable_gqa=True)

    keys_on_every_rank(mesh, world)

    torch.manual_seed(0)
    model = Heads(16, 2 * world)
    x = torch.randn(2, 5, 16, generator=g)
    whole = model(x)
    plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"o": RowwiseParallel()}
    assert torch.allclose(parallelize_module(model, mesh, plan)(x), whole, atol=1e-5)


def keys_on_every_rank(mesh, world: int) -> None:
    """Fewer key heads than ranks, or as they come: k and v whole on every rank, queries sharded over heads."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    g = torch.Generator().manual_seed(3)
    for heads, groups in ((2 * world, 1), (3 * world, 3), (6 * world, 2 * world)):
        whole = [torch.randn(1, h, 5, 4, generator=g).requires_grad_() for h in (heads, groups, groups)]
        placed = [
            distribute_tensor(x.detach(), mesh, [how]).requires_grad_()
            for x, how in zip(whole, (Shard(1), Replicate(), Replicate()), strict=True)
        ]
        told = dict(is_causal=True, enable_gqa=True, backend="reference")
        truth, out = regard.attention(*whole, **told), regard.attention(*placed, **told)
        assert torch.allclose(out.full_tensor(), truth, atol=1e-6), (heads, groups)
        do = torch.randn(truth.shape, generator=g)
        want = torch.autograd.grad((truth * do).sum(), whole)
        ours = torch.autograd.grad((out * distribute_tensor(do, mesh, [Shard(1)])).sum(), placed)
        for x, y in zip(ours, want, strict=True):
            assert torch.allclose(x.full_tensor(), y, atol=1e-5), (heads, groups)
    with pytest.raises(ValueError, match="do not fit; pass enable_gqa=True"):
        regard.attention(*placed)
    with pytest.raises(ValueError, match="k and v must be placed alike"):
        regard.attention(*placed[:2], distribute_tensor(whole[2].detach(), mesh, [Shard(1)]), enable_gqa=True)


class Heads(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.size = 8
        for name in ("q", "k", "v"):
            setattr(self, name, torch.nn.Linear(width, heads * self.size, bias=False))
        self.o = torch.nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x):
        q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for name in "qkv")
        out = self.attend(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return regard.attention(q, k, v, is_causal=True, normalizer="entmax15", backend="reference")


class PlainHeads(Heads):
    def attend(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def clipped_shards(rank: int, world: int) -> None:
    """qk_clip shrinks weights that FSDP has cut over the ranks as it does whole ones, uneven pieces and stacks too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for kind in ("separate", "stacked"):
        torch.manual_seed(0)
        layer = PlainHeads(16, 4) if kind == "separate" else torch.nn.MultiheadAttention(20, 4, batch_first=True)
        weight = layer.q.weight if kind == "separate" else layer.in_proj_weight
        with torch.no_grad():
            weight[:5] *= 1e3
        whole = torch.nn.ModuleDict(dict(att=layer))
        cut = copy.deepcopy(whole)
        fully_shard(cut["att"], mesh=mesh)
        x = torch.randn(2, 6, 16 if kind == "separate" else 20, generator=torch.Generator().manual_seed(1))
        for model in (whole, cut):
            att = model["att"]
            regard.qk_clip(att, threshold=9.0)
            out = att(x) if kind == "separate" else att(x, x, x, need_weights=False)[0]
            out.square().mean().backward()
            assert [clip.head for clip in regard.qk_clip(att, threshold=9.0).heads] == [0]
            regard.qk_clip.stop(att)
        for (name, mine), other in zip(cut.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), other), name


class Dropped(torch.nn.Module):
    """Runs the layers it is told to, in that order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: regard.nn.MultiheadAttention(8, 2) for name in "abc"})

    def forward(self, x, names):
        for name in names:
            x = self.layers[name](x)
        return x


def clipped_where_layers_are_dropped(rank: int, world: int) -> None:
    """Whichever layers each rank runs, in whatever order, qk_clip leaves all with the same weights, none too large."""
    torch.manual_seed(0)
    model = Dropped()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(rank))
    regard.qk_clip(model, 1.0)
    for first, others in (("a", "ba"), ("ab", "ba"), ("abc", "b"), ("ba", "a"), ("a", "ab")):
        with torch.no_grad():
            for name in "abc":
                model.layers[name].q_proj.weight.normal_(generator=torch.Generator().manual_seed(ord(name))).mul_(9)
        ran = others if rank else first
        with torch.no_grad():
            inputs = [model(x, ran[:at]) for at in range(len(ran))]
        model(x, ran).sum().backward()
        clipped = regard.qk_clip(model, 1.0)
        known = {name.removeprefix("layers.") for name in clipped.max_logit}
        assert known >= set("ab")
        every: list = [None] * world
        dist.all_gather_object(every, (clipped.max_logit, [p.detach() for p in model.parameters()]))
        for tops, weights in every:
            assert tops == every[0][0]
            assert all(map(torch.equal, weights, every[0][1]))
        for name, before in zip(ran, inputs, strict=True):
            if name in known:
                tops = model.layers[name](before, return_stats=("max_logit",))[1].max_logit.amax((0, 2))
                assert bool((tops < 1.001).all()), (name, tops)
    assert known == set("abc")  # c was met after the ranks had agreed, and is told of from the next call on
    regard.qk_clip.stop(model)


def clipped_where_all_layers_are_dropped(rank: int, world: int) -> None:
    """A rank that ran no attention raises no error of its own, unless no rank has ever run any."""
    torch.manual_seed(0)
    model = Dropped()
    x = torch.randn(2, 5, 8)
    regard.qk_clip(model, 1.0)
    for first, others in (("", "b"), ("b", ""), ("", "")):
        model(x, others if rank else first)
        regard.qk_clip(model, 1.0)
    model(x, "b")
    assert regard.qk_clip(model, 1.0).max_logit["layers.b"][0] > -math.inf
    regard.qk_clip.stop(model)
    regard.qk_clip(model, 1.0)
    model(x, "")
    with pytest.raises(ValueError, match="no attention call in them"):  # none knows of any layer
        regard.qk_clip(model, 1.0)
    regard.qk_clip.stop(model)


def clipped_after_a_change_of_layers(rank: int, world: int) -> None:
    """A layer that is taken out, and one whose heads are others than those the ranks had agreed on."""
    torch.manual_seed(0)
    model = Dropped()
    x = torch.randn(2, 5, 8)
    model(x, "abc")
    regard.qk_clip(model, 1.0)
    del model.layers["c"]
    model.layers["b"] = regard.nn.MultiheadAttention(8, 4)
    for _ in range(2):
        model(x, "ab")
        known = regard.qk_clip(model, 1.0).max_logit
    assert {name: len(tops) for name, tops in known.items()} == {"layers.a": 2, "layers.b": 4}
    regard.qk_clip.stop(model)


def in_a_model(rank: int, world: int) -> None:
    """Models of transformers, whole inputs in and whole outputs out, every rank on its piece."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    mesh = init_device_mesh("cpu", (world,))
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=50)
    ids = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **small)).eval()
    bert = BertModel(BertConfig(max_position_embeddings=64, **small), add_pooling_layer=False).eval()
    shown = torch.arange(13) < torch.tensor([[9], [13]])
    for model, given in ((llama, {}), (bert, {}), (bert, dict(attention_mask=shown.long()))):
        whole = model(input_ids=ids, **given)[0]
        with regard.using(model, context_parallel=mesh) as used:
            ours = model(input_ids=ids, **given)[0]
        assert used.calls == 2
        rows = shown if given else torch.ones_like(shown)
        assert torch.allclose(ours[rows], whole[rows], atol=1e-5), type(model).__name__
        with regard.using(model, normalizer="entmax15"):
            whole = model(input_ids=ids)[0]
        with regard.using(model, normalizer="entmax15", context_parallel=mesh):
            assert torch.allclose(model(input_ids=ids)[0], whole, atol=1e-5)
    with regard.using(llama, context_parallel=mesh), pytest.raises(ValueError, match="labels does not go with"):
        llama(input_ids=ids, labels=ids)
    refused_models(mesh, small, ids, llama)
    learned = list(llama.parameters())
    want = torch.autograd.grad(llama(input_ids=ids).logits.square().mean(), learned)
    with regard.using(llama, context_parallel=mesh):
        ours = torch.autograd.grad(llama(input_ids=ids).logits.square().mean(), learned)
    for x, y in zip(ours, want, strict=True):
        dist.all_reduce(x)  # each rank's positions' share, as in data parallel training
        assert torch.allclose(x, y, atol=1e-5)


def refused_models(mesh, small: dict, ids: torch.Tensor, llama) -> None:
    """A window told to the attention function; and what would come out wrong is an error."""
    import transformers as t

    mistral = t.MistralForCausalLM(t.MistralConfig(num_key_value_heads=2, sliding_window=4, **small)).eval()
    whole = mistral(input_ids=ids).logits
    with regard.using(mistral, context_parallel=mesh):
        assert torch.allclose(mistral(input_ids=ids).logits, whole, atol=1e-5)
    roberta = t.RobertaModel(t.RobertaConfig(max_position_embeddings=64, **small), add_pooling_layer=False).eval()
    codegen = t.CodeGenForCausalLM(
        t.CodeGenConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=50)
    ).eval()
    labels = t.BertForSequenceClassification(t.BertConfig(**small)).eval()
    for model, given, error in (
        (roberta, {}, "pass position_ids of the whole sequence"),
        (codegen, {}, "a bias between positions is made for the rank's shard alone"),
        (labels, {}, "does not have one row per position"),
        (t.BertModel(t.BertConfig(**small)).eval(), {}, "pooler_output is of this rank's shard alone"),
        (llama, dict(logits_to_keep=1), "logits_to_keep does not go with"),
        (llama, dict(return_dict=False), "use return_dict=True"),
        (llama, dict(past_key_values=t.DynamicCache()), "no generate"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=error), regard.using(model, context_parallel=mesh):
            model(input_ids=ids, **given)
    refused_inputs(mesh, small, ids, llama)
    checkpointed(mesh, ids, llama)
    llama.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        regard.using(llama, context_parallel=mesh)
    llama.config.is_encoder_decoder, llama.config.attention_chunk_size = False, 4
    with pytest.raises(ValueError, match="attention in chunks"):
        regard.using(llama, context_parallel=mesh)
    llama.config.attention_chunk_size = None


def refused_inputs(mesh, small: dict, ids: torch.Tensor, llama) -> None:
    """Packed sequences, lengths that a rotary embedding depends on, windows that only the mask knows, and the like."""
    import transformers as t

    kinds = dict(num_key_value_heads=2, max_position_embeddings=64)
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4, rope_type="longrope", rope_theta=1e4)
    long = {
        first: t.Phi3ForCausalLM(
            t.Phi3Config(
                original_max_position_embeddings=first,
                rope_parameters=dict(original_max_position_embeddings=first, **factors),
                pad_token_id=0, **kinds, **small,
            )
        ).eval()
        for first in (6, 12, 13)
    }  # fmt: skip
    dynamic = t.LlamaForCausalLM(
        t.LlamaConfig(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4), num_key_value_heads=2,
                      max_position_embeddings=8, **small)
    ).eval()  # fmt: skip
    phimoe = t.PhimoeForCausalLM(t.PhimoeConfig(sliding_window=4, num_local_experts=2, **kinds, **small)).eval()
    packed, line = torch.cat([torch.arange(7), torch.arange(6)])[None], torch.arange(13)[None]
    for model, given in (
        (long[6], {}),  # each rank's last position is beyond it
        (long[13], {}),
        (dynamic, dict(input_ids=ids[:, :7])),
        (phimoe, dict(input_ids=ids[:, :4])),
        (llama, dict(position_ids=packed, attention_mask=torch.ones_like(ids))),
        (llama, dict(position_ids=line + 5)),
    ):
        given = dict(input_ids=ids) | given
        whole = model(**given).logits
        with regard.using(model, context_parallel=mesh):
            assert torch.allclose(model(**given).logits, whole, atol=1e-5), (type(model).__name__, given.keys())
    for model, given, error in (
        (llama, dict(position_ids=packed), "are several sequences in one"),
        (llama, dict(position_ids=line[None].expand(3, 2, 13)), r"must be \(batch, 13\), got shape \(3, 2, 13\)"),
        (llama, dict(input_ids=ids[:, :1]), "1 tokens over 2 ranks leave a rank without any"),
        (llama, dict(attention_mask=torch.ones(2, 1, 13, 13)), r"attention_mask must be \(batch, length\)"),
        (llama, dict(cache_position=line[0]), "does not know how to shard cache_position"),
        (long[12], {}, "'longrope' depend on the length"),
        (dynamic, {}, "'dynamic' depend on the length"),
        (phimoe, {}, "leaves its sliding_window of 4 to the mask"),
    ):
        with pytest.raises(ValueError, match=error), regard.using(model, context_parallel=mesh):
            model(**dict(input_ids=ids) | given)
    inputs_that_differ(mesh, ids, llama)
    bart = t.BartConfig(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, vocab_size=50)
    mobile = t.MobileBertConfig(embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=1, **small)
    for model, error in (
        (t.BartForCausalLM(bart), "BartForCausalLM takes no position_ids"),
        (t.MobileBertModel(mobile, add_pooling_layer=False), "trigram_input makes a token depend on others"),
    ):
        with pytest.raises(ValueError, match=error):
            regard.using(model, context_parallel=mesh)


def checkpointed(mesh, ids: torch.Tensor, llama) -> None:
    """Layers computed again in backward; and what a rank raises between calls of attention is written down for all."""
    learned = list(llama.parameters())
    want = torch.autograd.grad(llama(input_ids=ids).logits.square().mean(), learned)
    llama.train()
    llama.gradient_checkpointing_enable(dict(use_reentrant=True))
    with pytest.raises(ValueError, match="pass use_reentrant=False"), regard.using(llama, context_parallel=mesh):
        llama(input_ids=ids)
    llama.gradient_checkpointing_enable(dict(use_reentrant=False))
    with regard.using(llama, context_parallel=mesh):
        llama(input_ids=ids).logits.square().mean().backward()
    for x, y in zip(learned, want, strict=True):
        dist.all_reduce(x.grad)
        assert torch.allclose(x.grad, y, atol=1e-5)
        x.grad = None
    llama.gradient_checkpointing_disable()
    llama.eval()

    def full(*_):
        raise MemoryError("no room in a layer")

    hook = llama.model.layers[1].mlp.register_forward_hook(full)
    with pytest.raises(MemoryError), regard.using(llama, context_parallel=mesh):
        llama(input_ids=ids)
    hook.remove()


def inputs_that_differ(mesh, ids: torch.Tensor, llama) -> None:
    """Every rank passes the same whole, to the model itself; what one gets wrong is told to all at once."""
    last = int(dist.get_rank() == 1)
    embeds = llama.get_input_embeddings()(ids).detach()
    line = torch.arange(13)[None]
    wrong = (
        "must be \\(batch, length\\)" if last else "rank 1 cannot take part: ValueError: context_parallel: attention_m"
    )
    with regard.using(llama, context_parallel=mesh):
        for given, error in (
            (dict(input_ids=ids.roll(last, 1)), "rank 1 and rank 0 call the model with different input_ids"),
            (dict(input_ids=ids[:, : 13 - last]), "the model with input_ids of different shapes"),
            (dict(input_ids=ids, position_ids=line + last), "the model with different position_ids"),
            (dict(inputs_embeds=embeds.roll(last, 1)), "the model with different inputs_embeds"),
            (dict(input_ids=ids, attention_mask=ids[0, :2] if last else None), wrong),
        ):
            with pytest.raises(ValueError, match=error):
                llama(**given)
        with pytest.raises(ValueError, match="call the model itself"):
            llama.model(ids)
        one = llama(ids, torch.ones_like(ids)).logits
    assert torch.allclose(one, llama(ids).logits, atol=1e-5)
