"""Llama 4: layers without rotary positions scale queries by position; the port leaves that out."""

from museum.unseen.parts import fit_lm, kept, lm_batches, tiny

LINK = "AI-Hypercomputer/maxtext#1611"
SYMPTOM = (
    "attn_temperature_tuning of the config is not applied in NoPE layers; long texts get worse, short ones do not."
)
NEEDS = (
    "temperature",
    "attn_scale",
    "floor_scale",
    "scale grows",
    "scale of a row",
    "scaled by position",
    "scale depends",
)


def llama4():
    return tiny(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=4,
        moe_layers=[],
        no_rope_layers=[1, 0],
        attention_chunk_size=128,
        floor_scale=8,
        attn_scale=1.0,
        attn_temperature_tuning=True,
        use_qk_norm=False,
        num_key_value_heads=2,
    )


@kept
def weights():
    return fit_lm(llama4(), 600, 3e-3).state_dict()


def sound():
    model = llama4()
    model.load_state_dict(weights())
    return model.eval(), lm_batches(length=64), {}


def make():
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    class PortedAttention(Llama4TextAttention):
        """The port's forward: that of the library, without the lines on temperature."""

        def forward(self, *args, **kwargs):
            self.attn_temperature_tuning, asked = False, self.attn_temperature_tuning
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.attn_temperature_tuning = asked

    model, batches, options = sound()
    for layer in model.model.layers:
        layer.self_attn.__class__ = PortedAttention
    return model, batches, options
