"""Which tokens a head looks at: top keys per row, mass per key, kinds of heads."""
