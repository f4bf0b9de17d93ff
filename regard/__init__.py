from regard import masks, normalizers, reference, statistics  # noqa
