"""The commands that `regard` takes from this package: name → (module, help, extra)."""

COMMANDS = {
    "lab": ("regard_lab.command", "test the claims about attention", "lab"),
    "lab train": ("regard_lab.training.command", "train the models behind the claims that need training", "lab"),
    "explore": ("regard_lab.explorer.command", "explore attention interactively in the browser", "lab"),
}
