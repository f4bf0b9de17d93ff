"""T5's decoder takes the encoder's buckets: half of its table stands for distances that a causal layer never has."""

from museum.parts import make_batches

LINK = "TransformerLensOrg/TransformerLens#1681"
SYMPTOM = "bidirectional=True is fixed: from 8 tokens on, the decoder's relative biases are other rows of the table."
NEEDS = ("bias", "bucket", "relative")


def make_t5(both):
    from regard.health.models.tiny_architectures import make_model

    model = make_model("t5", kind="ForConditionalGeneration")
    if both:
        attention = model.decoder.block[0].layer[0].SelfAttention
        bucket = attention._relative_position_bucket

        def take(relative_position, bidirectional=True, **more):
            return bucket(relative_position, bidirectional=True, **more)

        attention._relative_position_bucket = take
    return model, make_batches(model, length=40), {}


def make():
    return make_t5(True)


def sound():
    return make_t5(False)
