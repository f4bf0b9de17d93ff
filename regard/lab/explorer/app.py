"""The marimo page of `regard explore`: controls at the top, their effect below."""

import marimo

app = marimo.App(width="medium", app_title="regard explore")


@app.cell
def _():
    import marimo as mo

    from regard.lab.explorer import views

    return mo, views


@app.cell
def _(mo):
    mo.Html("""
    <style>
    .numbers { display: grid; gap: .4rem 1rem; margin: 0; }
    .numbers { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
    .numbers dt { font-size: .85rem; color: #52606d; margin: 0; }
    .numbers dd { font-size: 1.25rem; margin: 0; font-variant-numeric: tabular-nums; }
    .views { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.2rem; }
    .views figure { margin: 0; min-width: 0; } .views figcaption { font-weight: 600; font-size: .95rem; }
    .figure { max-width: 100%; height: auto; background: white; }
    </style>
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    # Turn the knobs of attention
    256 random queries look at random keys. Every number comes from `regard`; those below the knobs are means over the
    queries, the figures against d_k medians, since a mean hides the rows that learn nothing.
    """)
    return


@app.cell
def _(mo, views):
    d_k = mo.ui.slider(steps=[1, 2, 4, 8, 16, 32, 64, 128, 256], value=64, label="d_k", show_value=True)
    keys = mo.ui.slider(2, 32, value=12, label="keys", show_value=True)
    temperature = mo.ui.slider(
        steps=[0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0], value=1.0, label="temperature", show_value=True
    )
    scale = mo.ui.dropdown(views.SCALES, value="1/√d_k", label="scale")
    normalizer = mo.ui.dropdown(views.normalizer_choices(), value="softmax", label="normaliser")
    mo.hstack([d_k, keys, temperature, scale, normalizer], wrap=True, justify="start", gap=1.5)
    return d_k, keys, normalizer, scale, temperature


@app.cell
def _(d_k, keys, normalizer, scale, temperature, views):
    setting = views.Setting(d_k.value, keys.value, scale.value, temperature.value, normalizer.value)
    return (setting,)


@app.cell
def _(mo):
    def figure_grid(*figures):
        """Return captioned figures in a grid that becomes one column on a phone."""
        cells = "".join(f"<figure><figcaption>{name}</figcaption>{f.img(270, 180)}</figure>" for name, f in figures)
        return mo.Html(f'<div class="views">{cells}</div>')

    return (figure_grid,)


@app.cell
def _(mo, setting, views):
    mo.Html(views.number_list(setting.numbers(), views.NUMBERS))
    return


@app.cell
def _(figure_grid, setting):
    figure_grid(
        ("Scores of all queries", setting.scores_figure()),
        ("Weights of the first query", setting.weights_figure()),
        ("Jacobian of the first row", setting.jacobian_figure()),
        ("Gradient gain against d_k", setting.gain_figure()),
        ("Gradient against d_k", setting.gradient_figure()),
    )
    return


@app.cell
def _(mo):
    mo.md("## Online softmax, block by block\nKeep (m, ℓ) only: the maximum and the sum so far.")
    return


@app.cell
def _(keys, mo):
    block = mo.ui.slider(1, 8, value=4, label="block size", show_value=True)
    seen = mo.ui.slider(1, keys.value, value=1, label="blocks seen", show_value=True)
    mo.hstack([block, seen], wrap=True, justify="start", gap=1.5)
    return block, seen


@app.cell
def _(block, figure_grid, mo, seen, setting, views):
    online = views.Online(setting, block.value, seen.value)
    mo.vstack(
        [mo.Html(views.number_list(online.numbers())), figure_grid(("Weights of the first row", online.figure()))]
    )
    return


@app.cell
def _(mo):
    mo.md("## Masks")
    return


@app.cell
def _(mo, views):
    mask = mo.ui.dropdown(views.MASKS, value="causal", label="mask")
    mo.hstack([mask], justify="start")
    return (mask,)


@app.cell
def _(figure_grid, mask, setting):
    figure_grid(("Weights under the mask", setting.masked_figure(mask.value)))
    return


@app.cell
def _(mo):
    mo.md("## Statistical mechanics\nScores are negative energies: F = U − T·S, C = Var(E)/T².")
    return


@app.cell
def _(figure_grid, mo, setting, views):
    mo.vstack(
        [
            mo.Html(views.number_list(setting.mechanics())),
            figure_grid(("Entropy and heat capacity", setting.mechanics_figure())),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
