"""Facts about tensors, dtypes and devices that every other module may ask for."""
