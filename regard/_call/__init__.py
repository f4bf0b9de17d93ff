"""The data of one call, below the backends: options, checks of arguments, masks, and the `Problem` they become."""
