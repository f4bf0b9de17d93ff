"""Derivatives of attention: of eager calls (`autograd`), under torch.func and forward mode (`transforms`), and of any
order by the reference (`blocked`)."""
