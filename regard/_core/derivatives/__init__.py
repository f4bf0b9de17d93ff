"""Derivatives of attention: of eager calls (`autograd`), of torch's kernels twice (`double_backward`), under torch.func
and forward mode (`transforms`), and of any order by the reference (`blocked`)."""
